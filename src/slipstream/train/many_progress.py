"""What a person sees while many runs go on: bars on a terminal, a line for each run that ended anywhere else."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from slipstream.train.many_checks import PlannedRun
from slipstream.train.metrics import duration
from slipstream.train.outcome import Outcome


class ManyObserver(Protocol):
    """Is told of every event of many runs."""

    def note(self, text: str) -> None:
        """Say a sentence."""

    def start(self, runs: Sequence[PlannedRun], *, num_runs: int) -> None:
        """Begin.

        Args:
            runs: Those to train.
            num_runs: All of them, with those that have a result already.
        """

    def began(self, run: PlannedRun) -> None:
        """Take a run that has started."""

    def on_step(self, run: PlannedRun, news: Mapping[str, Any]) -> None:
        """Take ``step`` and ``loss`` of a run under way."""

    def ended(self, run: PlannedRun, outcome: Outcome, *, seconds: float) -> None:
        """Take a run that has ended."""

    def close(self) -> None:
        """End."""


class SilentObserver:
    """Says nothing: for programs."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def start(self, runs: Sequence[PlannedRun], *, num_runs: int) -> None:
        """Say nothing."""

    def began(self, run: PlannedRun) -> None:
        """Say nothing."""

    def on_step(self, run: PlannedRun, news: Mapping[str, Any]) -> None:
        """Say nothing."""

    def ended(self, run: PlannedRun, outcome: Outcome, *, seconds: float) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Do nothing."""


class TimeLeft:
    """Predicts the end from the steps made so far."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._began = time.monotonic()
        self._ended_steps = 0
        self._reached: dict[str, int] = {}
        self._first: dict[str, int] = {}

    def reached(self, name: str, step: int) -> None:
        """Take the step that a run has reached; one that was resumed did not make those before its first."""
        self._first.setdefault(name, step - 1)
        self._reached[name] = step

    def ended(self, name: str, num_steps: int) -> None:
        """Take a run that has ended: none of its steps are left, however few it made."""
        self._ended_steps += num_steps
        self._reached.pop(name, None)

    @property
    def done_steps(self) -> int:
        """Steps that are no longer to be made."""
        return self._ended_steps + sum(self._reached.values())

    def seconds(self) -> float | None:
        """Return the seconds left; ``None`` before the first step."""
        done = self.done_steps
        made = done - sum(self._first.values())
        if made <= 0:
            return None
        return (time.monotonic() - self._began) / made * (self._total - done)


class ConsoleObserver:
    """Writes to a console.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._time_left = TimeLeft(0)
        self._num_runs = self._num_ended = 0

    def note(self, text: str) -> None:
        """Print a sentence, above the bars."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, runs: Sequence[PlannedRun], *, num_runs: int) -> None:
        """Say what there is to do; show the bar on a terminal."""
        self._num_runs, self._num_ended = num_runs, num_runs - len(runs)
        already = f", {self._num_ended} of them have a result already" if self._num_ended else ""
        self.note(f"{num_runs} runs{already}")
        total = sum(run.config.train.num_steps for run in runs)
        self._time_left = TimeLeft(total)
        if self._console.is_terminal and runs:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
            self._progress = Progress(*columns, console=self._console)
            self._tasks["all"] = self._progress.add_task("all", total=total, text="")
            self._show()
            self._progress.start()

    def began(self, run: PlannedRun) -> None:
        """Add a bar."""
        if self._progress is not None:
            self._tasks[run.name] = self._progress.add_task(run.name, total=run.config.train.num_steps, text="")

    def on_step(self, run: PlannedRun, news: Mapping[str, Any]) -> None:
        """Move the bars."""
        self._time_left.reached(run.name, news["step"])
        if self._progress is not None:
            text = f"step {news['step']}/{run.config.train.num_steps}  loss {news['loss']:.3f}"
            self._progress.update(self._tasks[run.name], completed=news["step"], text=text)
            self._show()

    def ended(self, run: PlannedRun, outcome: Outcome, *, seconds: float) -> None:
        """Print a line."""
        self._num_ended += 1
        self._time_left.ended(run.name, run.config.train.num_steps)
        if self._progress is not None:
            self._progress.remove_task(self._tasks.pop(run.name))
            self._show()
        if outcome.kind == "finished":
            result = f"val_loss {outcome.summary['val_loss']:.4f}"
        else:
            result = f"{outcome.kind.upper()}: {outcome.message.strip().splitlines()[-1]}"
        self.note(f"[{self._num_ended}/{self._num_runs}] {run.name}: {result} in {duration(seconds)}{self._left(', ')}")

    def _show(self) -> None:
        if self._progress is not None:
            text = f"{self._num_ended}/{self._num_runs} runs{self._left('  ')}"
            self._progress.update(self._tasks["all"], completed=self._time_left.done_steps, text=text)

    def _left(self, before: str) -> str:
        left = self._time_left.seconds()
        return f"{before}{duration(left)} left" if left and self._num_ended < self._num_runs else ""

    def close(self) -> None:
        """Take the bars away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
