"""What a person sees while text is prepared: a bar on a terminal, a line every few seconds anywhere else."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console

from slipstream.data.prepare import Progress

_EVERY_S = {True: 0.2, False: 5.0}
"""Seconds between two sights, on a terminal and elsewhere."""


class PrepareReporter:
    """Writes how far :func:`slipstream.data.prepare` is.

    Args:
        console: Where to.
        clock: Gives seconds.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._status = console.status("") if console.is_terminal else None
        self._phase = ""
        self._began = self._shown = clock()

    def __call__(self, progress: Progress) -> None:
        """Take note, and show it now and then."""
        now = self._clock()
        if progress.phase != self._phase:
            self._phase, self._began, self._shown = progress.phase, now, now
        elif now - self._shown >= _EVERY_S[self._console.is_terminal]:
            self._shown = now
            self._show(progress_line(progress, elapsed_s=now - self._began))

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def _show(self, line: str) -> None:
        if self._status is not None:
            self._status.update(line)
        else:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_line(progress: Progress, *, elapsed_s: float) -> str:
    """Return a line of figures.

    Example:
        >>> now = Progress(phase="write", num_bytes=30_000_000, total_bytes=120_000_000, num_tokens=7_500_000)
        >>> progress_line(now, elapsed_s=4.0)
        'write | 30.0 of 120.0 MB | 7.5M tokens | 7.5 MB/s | 12s left'
    """
    speed = progress.num_bytes / max(elapsed_s, 1e-9)
    total = f" of {progress.total_bytes / 1e6:,.1f}" if progress.total_bytes else ""
    parts = [progress.phase, f"{progress.num_bytes / 1e6:,.1f}{total} MB"]
    if progress.num_tokens:
        parts.append(f"{progress.num_tokens / 1e6:,.1f}M tokens")
    parts.append(f"{speed / 1e6:,.1f} MB/s")
    if progress.total_bytes and speed:
        parts.append(f"{_duration((progress.total_bytes - progress.num_bytes) / speed)} left")
    return " | ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"
