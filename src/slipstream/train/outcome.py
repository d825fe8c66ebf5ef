"""How a run ended, as its directory tells: finished, diverged, or crashed.

A run that reached its last step has a ``summary.json``. Whoever starts runs on behalf of others leaves a
``failure.json`` where one did not.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import CheckpointError
from slipstream.train.disk import AGAIN, write_whole, writing
from slipstream.train.rundir import RunDir

FAILURE = "failure.json"

Kind = Literal["finished", "diverged", "crashed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        kind: ``diverged`` is a result: a loss or too many gradients in a row were not finite. ``crashed`` is none.
        message: What went wrong; empty where nothing did.
        summary: Contents of ``summary.json``; empty where there is none.
    """

    kind: Kind
    message: str = ""
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_failure(run_dir: Path, outcome: Outcome) -> None:
    """Leave word of a run that did not finish."""
    with writing(run_dir, then=AGAIN):
        run_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": outcome.kind, "message": outcome.message}, indent=1)
    write_whole(run_dir / FAILURE, text + "\n", then=AGAIN)


def clear_failure(run_dir: Path) -> None:
    """Forget an earlier failure: the run is about to be tried again."""
    with writing(run_dir / FAILURE, then=AGAIN):
        (run_dir / FAILURE).unlink(missing_ok=True)


def read_outcome(run_dir: Path) -> Outcome | None:
    """Return how a run ended; ``None`` where it has not, or not even begun.

    Raises:
        CheckpointError: A file is there and not readable.
    """
    summary, failure = RunDir(run_dir).summary, run_dir / FAILURE
    try:
        if summary.exists():
            found = json.loads(summary.read_text(encoding="utf-8"))
            if math.isfinite(found["val_loss"]):
                return Outcome(kind="finished", summary=found)
            return Outcome(kind="diverged", message=f"the validation loss is {found['val_loss']}", summary=found)
        if failure.exists():
            word = json.loads(failure.read_text(encoding="utf-8"))
            return Outcome(kind=word["kind"], message=word["message"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"the run directory {run_dir} holds a summary or failure file that cannot be read ({error}). Remove it."
        ) from error
    return None
