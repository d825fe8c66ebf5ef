"""What a run that reached its last step leaves in ``summary.json``."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from slipstream.config import Config, config_hash
from slipstream.errors import CheckpointError
from slipstream.staleness.words import one_delay
from slipstream.train.disk import write_whole
from slipstream.train.metrics import Totals, read_json_lines
from slipstream.train.rundir import RunDir


def summarize(
    config: Config, run_dir: RunDir, *, step: int, best: Mapping[str, Any] | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return and write the figures of a whole run, its resumptions included.

    Args:
        config: Resolved settings.
        run_dir: Where the run's rows and evaluations lie.
        step: The last.
        best: Step and validation loss of the best evaluation; ``None``: it is not kept.
        more: Figures that are not in these files.

    Raises:
        CheckpointError: Rows have been lost, or nothing can be written.
    """
    rows, evaluations = read_json_lines(run_dir.metrics), read_json_lines(run_dir.evaluations)
    for path, found in ((run_dir.metrics, rows), (run_dir.evaluations, evaluations)):
        if not found or found[-1]["step"] != step:
            raise CheckpointError(
                f"{path} has no row of step {step}, the last, so that the run cannot be summed up. "
                "Restore the file, or train on: --resume with a larger --train.num-steps."
            )
    is_pipeline = config.executor == "pipeline"
    last = evaluations[-1]
    summary = {
        "num_steps": step,
        "executor": config.executor,
        "pipeline_schedule": config.pipeline.pipeline_schedule if is_pipeline else None,
        "num_stages": config.pipeline.num_stages if is_pipeline else 1,
        "num_microbatches": config.pipeline.num_microbatches,
        "optimizer": config.optim.name,
        "delay": one_delay(config),
        "error_feedback": config.staleness.error_feedback,
        "train_loss": rows[-1]["loss"],
        "val_loss_before": evaluations[0]["val_loss"],
        "val_loss": last["val_loss"],
        "val_loss_y": last["val_loss_y"],
        "val_bits_per_byte": last["val_bits_per_byte"],
        "num_skipped": sum(row["skipped"] for row in rows),
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
        "config_hash": config_hash(config),
    } | dataclasses.asdict(Totals.of(rows))
    if best is not None:
        summary |= {"best_step": best["step"], "best_val_loss": best["val_loss"]}
    summary |= more
    write_whole(run_dir.summary, json.dumps(summary, indent=1) + "\n")
    return summary
