"""A real browser without a window, driven through the pipe of its DevTools protocol; needs no other package."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page that has been loaded, and what happened meanwhile."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def take(self, event: dict) -> None:
        name, params = event.get("method"), event.get("params", {})
        if name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif name == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(params["args"]))
        elif name == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])

    def evaluate(self, expression: str):
        """Return the value of a JavaScript expression."""
        answer = self._browser.call(
            "Runtime.evaluate", {"expression": expression, "returnByValue": True}, session=self._session
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        size = self._browser.call("Page.getLayoutMetrics", {}, session=self._session)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip}
        shot = self._browser.call("Page.captureScreenshot", options, session=self._session)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._browser.pages.pop(self._session)
        self._browser.call("Page.close", {}, session=self._session)


class Browser:
    """One process for many pages."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="browser-")
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        ours = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (commands, answers)]
        options = (
            "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-extensions --disable-dev-shm-usage "
            "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars "
            "--force-color-profile=srgb --remote-debugging-pipe"
        )

        def place_pipes() -> None:
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        self._process = subprocess.Popen(
            [program, *options.split(), f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place_pipes,
            close_fds=False,
            start_new_session=True,
        )
        for fd in (commands, answers, *ours):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self.pages: dict[str, Page] = {}

    def call(self, method: str, params: dict, *, session: str | None = None) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            event = self._read()
            if event.get("id") == self._number:
                assert "error" not in event, (method, event["error"])
                return event["result"]

    def wait_for(self, method: str, session: str) -> None:
        while True:
            event = self._read()
            if event.get("method") == method and event.get("sessionId") == session:
                return

    def _read(self, timeout_s: float = 60.0) -> dict:
        end = time.monotonic() + timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(end - time.monotonic(), 0))
            part = os.read(self._from, 1 << 20) if ready else b""
            assert part, "the browser is silent or gone"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(line)
        page = self.pages.get(event.get("sessionId", ""))
        if page is not None:
            page.take(event)
        return event

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> Page:
        """Load a page of a width in a colour scheme."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable", {}, session=session)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", metrics, session=session)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]}, session=session)
        page = self.pages[session] = Page(self, session)
        self.call("Page.navigate", {"url": url}, session=session)
        self.wait_for("Page.loadEventFired", session)
        return page

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close", {})
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)
