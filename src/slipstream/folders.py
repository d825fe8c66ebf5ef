"""Folders that are written whole, or not at all."""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def real_target(folder: Path) -> Path:
    """Return the folder itself, where its name is a link to one or ``.``: neither can be replaced by a folder."""
    return Path(os.path.realpath(folder))


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a new folder beside ``target`` that takes its place at the end, or vanishes with any error.

    It vanishes as well when the process is told to end, by SIGTERM or SIGHUP: the context ends with ``SystemExit``
    then, unless the program handles those itself.

    Args:
        target: Must not exist, or be an empty folder.

    Raises:
        OSError: It cannot be made.
    """
    target = real_target(target)
    folder = target.parent / f".{target.name}.partial-{os.getpid()}"
    with _ended_by_signals():
        try:
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed process that had our number
            folder.mkdir(parents=True)
            yield folder
            os.replace(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Unwind at a signal that would end the process on the spot, without its ``finally``."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which alone may handle signals
        return
    numbers = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, _end)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)  # as shells have it
