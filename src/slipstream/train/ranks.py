"""Starts one process a pipeline stage on this machine and trains in them."""

from pathlib import Path
from typing import Any

from slipstream.config import Config
from slipstream.train.processes import RankContext, run_processes
from slipstream.train.rank import run_pipeline_rank
from slipstream.train.workload import OpenWorkload


def run_ranks(
    config: Config,
    checkpoint: Path | None,
    *,
    open_workload: OpenWorkload | None = None,
    remedy: str = "Continue from the last checkpoint with --resume.",
) -> dict[str, Any] | None:
    """Run a pipeline, one process a stage.

    Args:
        config: Resolved settings.
        checkpoint: Where to continue from.
        open_workload: See :func:`slipstream.train.rank.run_pipeline_rank`.
        remedy: What to do when a rank failed; ends the sentence.

    Returns:
        Rank 0's summary; ``None`` where the run was asked to stop and has saved.

    Raises:
        StageError: A rank failed or died; names rank, stage and last action. Every process has ended.
        SlipstreamError: What a rank found wrong that the user can mend.
    """
    summaries: list[dict[str, Any] | None] = run_processes(
        train_rank,
        config,
        checkpoint,
        open_workload,
        num_ranks=config.pipeline.num_stages,
        timeout_s=config.pipeline.timeout_s,
        remedy=remedy,
        finish_on_signal=True,
    )
    return summaries[0]


def train_rank(
    context: RankContext, config: Config, checkpoint: Path | None, open_workload: OpenWorkload | None
) -> dict[str, Any] | None:
    """Train as one rank of this machine; see :func:`slipstream.train.rank.run_pipeline_rank`."""
    return run_pipeline_rank(
        config,
        rank=context.rank,
        local_rank=context.rank,
        store=context.store,
        note=context.note,
        checkpoint=checkpoint,
        open_workload=open_workload,
    )
