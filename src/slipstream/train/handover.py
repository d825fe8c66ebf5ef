"""What another executor than the one that saved makes of the data's order. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from slipstream.config import Config


def handover_note(config: Config, *, scalars: Mapping[str, Any], step: int) -> str | None:
    """Return a sentence where a resumed run leaves microbatches out, or trains on some again.

    Workers take microbatches as they come, so some are ahead of their step and others in flight; any other executor
    makes step k of the k-th batch.

    Args:
        config: Resolved settings of the run that goes on.
        scalars: Of the checkpoint.
        step: Of the checkpoint.
    """
    own = scalars.get("dataparallel")
    if own is None or config.executor == "dataparallel":
        return None
    begin = step * config.pipeline.num_microbatches
    committed = own["sequencer"]["ledger"]["committed"]
    before = sum(min(stop, begin) - min(start, begin) for start, stop in committed)
    repeated = sum(stop - start for start, stop in committed) - before
    lost = begin - before
    if not lost and not repeated:
        return None
    return (
        f"the executor '{config.executor}' goes on at microbatch {begin}, which is not where the workers were: {lost} "
        f"microbatches before it are left out, {repeated} after it are trained on again"
    )
