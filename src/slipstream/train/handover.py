"""What a run that goes on can take over from one with other settings. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from slipstream.config import Config
from slipstream.models.shapes import parameter_shapes, tied_names


def handover_refusal(
    config: Config, *, saved: Config, manifest: Mapping[str, Any], scalars: Mapping[str, Any]
) -> str | None:
    """Return a sentence where no checkpoint can be taken over, whatever the user allows to change.

    Weights, the optimizer's state or the count of microbatches would mean something else.

    Args:
        config: Resolved settings of the run that goes on.
        saved: Those of the checkpoint.
        manifest: Of the checkpoint.
        scalars: Of the checkpoint.
    """
    anew = f"Begin a new run with its weights: --init-from {config.run_dir}"
    if config.optim.name != saved.optim.name:
        return (
            f"optim.name is {config.optim.name!r} and was {saved.optim.name!r}: the state of one rule means nothing to "
            f"another. Leave it as it was. {anew}."
        )
    if parameter_shapes(config.model) != parameter_shapes(saved.model) or tied_names(config.model) != tied_names(
        saved.model
    ):
        return "the settings of the model give other parameters than the checkpoint holds. Leave them as they were."
    if _has_local_steps(config) != _has_local_steps(saved):
        return (
            "a run of pseudo-gradients (dataparallel.unit) has another optimizer on its server, and longer steps, than "
            f"any other run: neither can go on as the other. Leave executor and unit as they were. {anew}."
        )
    if config.executor != "dataparallel":
        return None
    of_workers = "dataparallel" in scalars
    changes_size = (config.train.microbatch_size, config.data.sequence_length) != (
        saved.train.microbatch_size,
        saved.data.sequence_length,
    )
    is_even = int(manifest["next_sequence"]) == int(manifest["step"]) * config.batch_size
    if (of_workers and changes_size) or (not of_workers and not is_even):
        return (
            "workers count microbatches from the beginning of the run, all of one size, but those of this run have not "
            "all had the size of now: data would be trained on again, or left out. Leave train.microbatch_size, "
            "pipeline.num_microbatches and data.sequence_length as they were from the first step on, or go on with "
            "the executor 'single' or 'pipeline'."
        )
    return None


def _has_local_steps(config: Config) -> bool:
    return config.executor == "dataparallel" and config.dataparallel.unit == "pseudo_gradient"


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
