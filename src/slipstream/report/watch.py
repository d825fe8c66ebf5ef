"""A run under way, followed from another terminal: ``slipstream watch RUN``."""

import collections
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from slipstream.config import Config, load_toml
from slipstream.errors import ConfigError, counted
from slipstream.report.watch_screen import fitting, screen
from slipstream.report.workers import newest_figures
from slipstream.train.metrics import log_line, read_row
from slipstream.train.rundir import RunDir
from slipstream.train.status import standing

KEPT_ROWS = 2000
"""Newest rows kept in memory."""

LONGEST_S = 86_400
"""Between two looks."""

QUIET_S = 30.0
"""Seconds without a step, and ten times the usual, after which that is said."""


class Tail:
    """Reads what is added to a JSON-lines file that another process writes, also after it has been replaced.

    Args:
        path: The file; need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._num_lines = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new whole lines, and whether the file began anew and these are all of its lines.

        Raises:
            CheckpointError: One of them is damaged.
        """
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                file_id = (found.st_dev, found.st_ino)
                is_new = file_id != self._file_id or found.st_size < self._offset
                if is_new:
                    self._file_id, self._offset, self._num_lines = file_id, 0, 0
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return [], False
        self._offset += len(whole) + len(newline)
        first, lines = self._num_lines + 1, whole.splitlines()
        self._num_lines += len(lines)
        return [read_row(line, path=self._path, number=number) for number, line in enumerate(lines, first)], is_new


@dataclasses.dataclass
class View:
    """What is known of the run.

    Attributes:
        config: Its settings.
        rows: Newest steps.
        evaluations: All of them.
        state: ``running``, ``finished``, ``stopped``, ``failed``, or ``unknown`` where no process has left word.
        message: Why it failed.
        quiet_s: Seconds without a new step.
        seen_s_per_step: As measured here, where enough steps were seen.
    """

    name: str
    config: Config
    rows: collections.deque[Mapping[str, Any]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=KEPT_ROWS)
    )
    evaluations: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    state: str = "unknown"
    message: str = ""
    quiet_s: float = 0.0
    seen_s_per_step: float | None = None
    num_skipped: int = 0

    @property
    def step(self) -> int:
        """Updates made."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.state != "running"

    @property
    def eta_s(self) -> float:
        """Expected seconds to the end: as fast as was seen here, before that as fast as the run says."""
        each = self.seen_s_per_step
        if each is None:
            newest = [row["step_s"] for row in list(self.rows)[-50:]]
            each = statistics.fmean(newest) if newest else math.nan
        return each * (self.config.train.num_steps - self.step)

    @property
    def warnings(self) -> list[str]:
        """What deserves a look."""
        found = []
        if self.num_skipped:
            found.append(f"{counted(self.num_skipped, 'update')} skipped: the gradient was not finite")
        usual = statistics.median(row["step_s"] for row in self.rows) if self.rows else 0.0
        if not self.has_ended and self.quiet_s > max(QUIET_S, 10 * usual):
            found.append(f"no step for {self.quiet_s:.0f}s")
        workers = newest_figures(self.rows)
        if not workers.get("ledger_balanced", True):
            found.append("the ledger of the data does not balance")
        if workers.get("restarts"):
            found.append(f"{counted(workers['restarts'], 'restart')} of workers")
        return found


class Follower:
    """Keeps a view up to date.

    Args:
        run: Run directory.
        clock: Seconds that never fall.

    Raises:
        ConfigError: There is no run.
    """

    def __init__(self, run: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = RunDir(run)
        if not self._run_dir.config.is_file():
            raise ConfigError(f"{run} is no run directory: it has no config.toml. Give the --run-dir of a run.")
        self._clock = clock
        self._metrics = Tail(self._run_dir.metrics)
        self._evaluations = Tail(self._run_dir.evaluations)
        self._last_news = self._began = clock()
        self._first_step: int | None = None
        self.view = View(name=run.resolve().name, config=load_toml(self._run_dir.config))

    def update(self) -> list[Mapping[str, Any]]:
        """Take what is new and return the new steps."""
        view = self.view
        # The state first: what a run wrote before it ended is then read, too.
        self._read_state()
        rows, is_new = self._metrics.read()
        if is_new and view.rows:
            seen = view.step
            view.rows.clear()
            view.num_skipped = 0
            self._first_step = None
        else:
            seen = view.step
        view.rows.extend(rows)
        view.num_skipped += sum(bool(row["skipped"]) for row in rows)
        evaluations, is_new = self._evaluations.read()
        view.evaluations = [*([] if is_new else view.evaluations), *evaluations]
        self._time(bool(rows))
        return [row for row in rows if row["step"] > seen or not is_new]

    def _read_state(self) -> None:
        status = standing(self._run_dir.path)
        self.view.state = "unknown" if status is None else status.state
        self.view.message = "" if status is None else status.message

    def _time(self, has_news: bool) -> None:
        now, view = self._clock(), self.view
        if has_news:
            if self._first_step is None:
                self._first_step, self._began = view.step, now
            elif view.step - self._first_step >= 3:
                view.seen_s_per_step = (now - self._began) / (view.step - self._first_step)
            self._last_news = now
        view.quiet_s = now - self._last_news


def watch(
    run: str | Path, *, console: Console, interval_s: float = 1.0, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Follow a run until it ends.

    Args:
        run: Run directory.
        console: A terminal shows a screen that is redrawn, and keeps the last picture; anything else, and a terminal
            that cannot move its cursor, gets lines as ``train`` writes them.
        interval_s: Seconds between two looks.
        sleep: Waits.

    Returns:
        The exit code: 0 where the run has finished or was asked to stop, 1 where it failed or nothing is known of its
        end, 130 after Ctrl-C here, which does the run no harm.

    Raises:
        ConfigError: There is no run, or the interval is not above 0, or longer than a day.
    """
    if not 0 < interval_s <= LONGEST_S:
        raise ConfigError(f"the interval is {interval_s:g} seconds; give more than 0, and {LONGEST_S} (a day) at most.")
    follower = Follower(Path(run))
    show = _draw if console.is_terminal and not console.is_dumb_terminal else _print
    try:
        show(follower, console, interval_s, sleep)
    except KeyboardInterrupt:
        return 130
    view = follower.view
    _say(console, end_text(view, Path(run)))
    return 0 if view.state in ("finished", "stopped") else 1


def _draw(follower: Follower, console: Console, interval_s: float, sleep: Callable[[float], None]) -> None:
    """Draw on the terminal's other screen, where nothing is left of what was drawn at another size; leave the last."""
    follower.update()

    def picture() -> RenderableType:
        return fitting(follower.view, console)

    try:
        if not follower.view.has_ended:
            with Live(picture(), console=console, auto_refresh=False, screen=True) as live:
                while not follower.view.has_ended:
                    sleep(interval_s)
                    follower.update()
                    live.update(picture(), refresh=True)
    finally:
        console.print(screen(follower.view))


def _print(follower: Follower, console: Console, interval_s: float, sleep: Callable[[float], None]) -> None:
    """Write what is there as one line, then every step that ``train`` would write, and every evaluation."""
    view = follower.view
    rows: Sequence[Mapping[str, Any]] = follower.update()[-1:]
    newest = {row["step"] for row in rows}
    num_told, warned = max(len(view.evaluations) - 1, 0), set[str]()
    while True:
        events = [
            (row["step"], 0, _step_line(view, row)) for row in rows if _is_due(view, row) or row["step"] in newest
        ]
        events += [
            (row["step"], 1, f"evaluation at step {row['step']}: val_loss {row['val_loss']:.4f}")
            for row in view.evaluations[num_told:]
        ]
        for _, _, line in sorted(events):
            _say(console, line)
        num_told, newest = len(view.evaluations), set()
        for warning in view.warnings:
            if warning.partition(" for ")[0] not in warned:
                warned.add(warning.partition(" for ")[0])
                _say(console, f"warning: {warning}")
        if view.has_ended:
            return
        sleep(interval_s)
        rows = follower.update()


def _is_due(view: View, row: Mapping[str, Any]) -> bool:
    return row["step"] % view.config.log.every_steps == 0 or bool(row["skipped"])


def _step_line(view: View, row: Mapping[str, Any]) -> str:
    num_steps = view.config.train.num_steps
    each = view.eta_s / max(num_steps - view.step, 1)
    return log_line(row, num_steps=num_steps, eta_s=each * (num_steps - row["step"]))


def end_text(view: View, run: Path) -> str:
    """Return how a run ended."""
    progress = f"step {view.step} of {view.config.train.num_steps}"
    if view.state == "finished":
        losses = f", val_loss {view.evaluations[-1]['val_loss']:.4f}" if view.evaluations else ""
        return f"finished at {progress}{losses}"
    if view.state == "stopped":
        return f"stopped at {progress}, state saved; continue with: slipstream train --run-dir {run} --resume"
    if view.state == "failed":
        last = (view.message.strip().splitlines() or ["no reason is known"])[-1]
        return f"failed at {progress}: {last}"
    return f"at {progress}, not finished, and no process has left word that it trains here"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
