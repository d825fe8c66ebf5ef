"""Output without a reader, as in ``slipstream train ... | head``, or without room, on a full disk. Imports no torch."""

import contextlib
import os
import sys
from typing import IO

import rich.console


def silence(stream: IO[str] | None = None) -> None:
    """Let a stream lead nowhere, so that neither a later line nor the end of the process finds it broken.

    Args:
        stream: By default standard output.
    """
    # What is no file, as in a test, cannot be led elsewhere.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, (stream or sys.stdout).fileno())
        os.close(nowhere)


def complain(text: str) -> None:
    """Say a line on standard error, or nothing where that takes none."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


class Console(rich.console.Console):
    """A console that falls silent when nobody reads it, or its disk is full; rich's own would end the process.

    A run goes on in either case: it was asked for, whoever looks on.

    Args:
        stderr: Write to standard error.
        is_result: What it shows is all that the command is for: a full disk is then an error.
        file: Write there.
    """

    def __init__(self, *, stderr: bool = False, is_result: bool = False, file: IO[str] | None = None) -> None:
        super().__init__(stderr=stderr, file=file)
        self._is_result = is_result

    def on_broken_pipe(self) -> None:
        """Say nothing from now on."""
        self.quiet = True
        silence(self.file)

    def _check_buffer(self) -> None:
        """Write what was printed."""
        try:
            super()._check_buffer()
        except OSError as error:
            if self._is_result:
                raise
            self.on_broken_pipe()
            complain(f"the output takes no more lines ({error.strerror or error}); going on without")
