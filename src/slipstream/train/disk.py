"""Writing where the disk may be full or the folder somebody else's: a refusal is a sentence, old files stay whole."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import CheckpointError

RESUME = "go on with --resume"
AGAIN = "give the same command again"


@contextlib.contextmanager
def writing(path: Path, *, then: str = RESUME) -> Iterator[None]:
    """Turn the system's refusal to write into an error that a user can act on.

    Args:
        path: What is written, where the system does not say.
        then: What to do when there is room.

    Raises:
        CheckpointError: The system refused.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {error.filename or path}: {error.strerror or error}. Free space, or make the folder "
            f"writable, and {then}; or choose another run directory."
        ) from error


def write_whole(path: Path, text: str, *, then: str = RESUME) -> None:
    """Write a file beside its place and put it there when it is whole: a full disk costs no file that was there.

    Args:
        path: The file.
        text: Its contents.
        then: What to do when there is room.

    Raises:
        CheckpointError: The system refused.
    """
    staged = path.with_name(f"{path.name}.tmp")
    with writing(path, then=then):
        try:
            staged.write_text(text, encoding="utf-8")
            staged.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)
            raise
