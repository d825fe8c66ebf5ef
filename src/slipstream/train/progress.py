"""What a person sees while a run goes on: a progress bar on a terminal, plain lines anywhere else."""

from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream.train.metrics import log_line


class Reporter(Protocol):
    """Is told of every event of a run."""

    def note(self, text: str) -> None:
        """Say a sentence."""

    def start(self, *, step: int, num_steps: int) -> None:
        """Begin at a step."""

    def on_step(self, row: Mapping[str, Any], *, eta_s: float) -> None:
        """Take a row of ``metrics.jsonl``."""

    def close(self) -> None:
        """End."""


class SilentReporter:
    """Says nothing: for ranks other than 0, and for programs that call the trainer."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def start(self, *, step: int, num_steps: int) -> None:
        """Say nothing."""

    def on_step(self, row: Mapping[str, Any], *, eta_s: float) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Do nothing."""


class ConsoleReporter:
    """Writes to a console: a bar below the newest figures on a terminal, greppable lines elsewhere.

    Args:
        console: Where to.
        every_steps: Steps between lines.
    """

    def __init__(self, console: Console, *, every_steps: int) -> None:
        self._console = console
        self._every_steps = every_steps
        self._num_steps = 0
        self._progress: Progress | None = None

    def note(self, text: str) -> None:
        """Print a sentence, above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, *, step: int, num_steps: int) -> None:
        """Show the bar on a terminal."""
        self._num_steps = num_steps
        if self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self._console)
            self._progress.add_task("", total=num_steps, completed=step)
            self._progress.start()

    def on_step(self, row: Mapping[str, Any], *, eta_s: float) -> None:
        """Move the bar; print a line when one is due."""
        step = row["step"]
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, description=f"loss {row['loss']:.3f}")
        if step == 1 or step % self._every_steps == 0 or step == self._num_steps or row["skipped"]:
            self.note(log_line(row, num_steps=self._num_steps, eta_s=eta_s))

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
