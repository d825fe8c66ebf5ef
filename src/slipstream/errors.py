"""Error classes, one by kind of fault.

Each message says what was given, what is allowed and what to do. The command line prints the message
alone and exits with code 2; a traceback is for our own mistakes.
"""

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Base of every error that a user can cause and mend."""

    exit_code = 2


class ConfigError(SlipstreamError):
    """A setting is unknown, malformed, or contradicts another."""


class DataError(SlipstreamError):
    """Text, shards or tokenizer cannot be used as given."""


class CheckpointError(SlipstreamError):
    """A checkpoint is missing, incomplete, corrupt, or belongs to another run."""


class ScheduleError(SlipstreamError):
    """A pipeline schedule cannot run: a dependency, a version or a message is missing."""


class StalenessError(SlipstreamError):
    """A weights version was asked for that is not held, or staleness left its bound."""


class NonFiniteError(SlipstreamError):
    """A loss or too many gradients in a row were not finite."""


class StageError(SlipstreamError):
    """A pipeline stage failed or its process died; the run has ended."""

    exit_code = 1


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return a `` Did you mean 'x'?`` suffix, or nothing when no allowed name is close.

    Args:
        given: The misspelt name.
        allowed: The names it could have been.

    Example:
        >>> nearest("num_step", ["num_steps", "seed"])
        " Did you mean 'num_steps'?"
        >>> nearest("zebra", ["num_steps"])
        ''
    """
    matches = difflib.get_close_matches(given, list(allowed), n=1)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def counted(number: int, what: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "spike"), counted(0, "spike")
        ('1 spike', '0 spikes')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"
