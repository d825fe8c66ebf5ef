"""Whether a process trains in a run directory, and how the last one ended.

``status.json`` is locked while its run is under way: the lock goes with the process, however that ends.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import time
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from slipstream.errors import ConfigError
from slipstream.train.disk import writing
from slipstream.train.outcome import read_outcome
from slipstream.train.rundir import RunDir

State = Literal["running", "finished", "stopped", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """What is known of a run's process.

    Attributes:
        state: ``stopped``: asked to, with its state saved.
        message: Why it failed.
        pid: Of the process that started the run.
        host: Where it ran.
    """

    state: State
    message: str = ""
    pid: int = 0
    host: str = ""


class Claim:
    """Marks a run directory as in use, and says at the end how the run ended.

    Args:
        run_dir: The run.

    Example:
        Take it when everything has been checked; the ``with`` goes around the whole run::

            with Claim(run_dir) as claim:
                ...
                claim.take()
                claim.stopped = train() is None
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._path = run_dir.status
        self._file: FileIO | None = None
        self.stopped = False

    def take(self) -> None:
        """Begin.

        Raises:
            ConfigError: Another process trains there.
            CheckpointError: Nothing can be written there.
        """
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        if not _lock(file, exclusive=True):
            other = read_status(self._path.parent)
            file.close()
            who = f"process {other.pid} on {other.host}" if other else "another process"
            raise ConfigError(
                f"{who} trains in the run directory {self._path.parent} right now. Wait for it, stop it, or choose "
                "another --run-dir."
            )
        self._file = file
        self._write("running")

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        if error is None:
            self._write("stopped" if self.stopped else "finished")
        else:
            self._write("failed", str(error) or type(error).__name__)
        self._file.close()
        self._file = None

    def _write(self, state: State, message: str = "") -> None:
        assert self._file is not None
        word = Status(state=state, message=message, pid=os.getpid(), host=socket.gethostname())
        text = (json.dumps(dataclasses.asdict(word)) + "\n").encode()
        with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
            # Over the last word, whose place on the disk is there; what is left of that one is cut off afterwards.
            self._file.seek(0)
            self._file.write(text)
            self._file.truncate(len(text))


def read_status(run_dir: Path) -> Status | None:
    """Return how things stand; ``None`` where no process has left word.

    A run whose process is gone without a word has failed.
    """
    path = RunDir(run_dir).status
    try:
        with path.open(encoding="utf-8") as file:
            status = Status(**_whole(file))
            is_gone = status.state == "running" and status.host == socket.gethostname() and _lock(file, exclusive=False)
    except (OSError, TypeError, ValueError):
        return None
    if is_gone:
        message = (
            f"its process {status.pid} on {status.host} is gone without a word; it was killed, or ran out of memory"
        )
        return dataclasses.replace(status, state="failed", message=message)
    return status


def standing(run_dir: Path) -> Status | None:
    """Return how a run stands by all that its directory tells; ``None`` where nothing does.

    The word of its last process comes first: a summary may be that of a shorter run, which has been resumed since.

    Raises:
        CheckpointError: A summary or failure file cannot be read.
    """
    status = read_status(run_dir)
    if status is not None and status.state != "finished":
        return status
    outcome = read_outcome(run_dir)
    if outcome is None:
        return status
    state: State = "finished" if outcome.kind == "finished" else "failed"
    return dataclasses.replace(status or Status(state=state), state=state, message=outcome.message)


def _whole(file: TextIO) -> dict[str, Any]:
    """Read what another process may be writing just now."""
    for _ in range(5):
        file.seek(0)
        with contextlib.suppress(ValueError):
            word: dict[str, Any] = json.loads(file.read())
            return word
        time.sleep(0.02)
    raise ValueError("no JSON")


def _lock(file: TextIO | FileIO, *, exclusive: bool) -> bool:
    """Lock a file without waiting; where the file system has no locks, as if it had succeeded for who trains."""
    for _ in range(10 if exclusive else 1):  # one who looks holds the lock for an instant
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return exclusive
    return False
