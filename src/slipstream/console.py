"""Standard output that somebody may stop reading, as in ``slipstream train ... | head``. Imports no torch."""

import contextlib
import os
import sys

import rich.console


def silence() -> None:
    """Let standard output lead nowhere, so that neither a later line nor the end of the process finds it broken."""
    # Where standard output is no file, as in a test, there is nothing to lead elsewhere.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Console(rich.console.Console):
    """A console that falls silent when nobody reads it any more; rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        """Say nothing from now on. A run goes on: it was asked for, whoever looks on."""
        self.quiet = True
        silence()
