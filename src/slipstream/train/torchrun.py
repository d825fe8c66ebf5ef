"""A pipeline whose ranks somebody else started: torchrun, on one machine or several."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.rendezvous import rendezvous

from slipstream.config import Config, from_dict, to_dict
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.train.rank import run_pipeline_rank


def run_under_torchrun(num_stages: int, begin: Callable[[], tuple[Config, Path | None]]) -> dict[str, Any] | None:
    """Be one rank of a pipeline whose size and addresses the environment gives.

    Args:
        num_stages: Stages that the settings ask for.
        begin: Checks everything and prepares the run directory; called on rank 0 alone. The folder it writes must be
            one that all machines share.

    Returns:
        The summary, on rank 0.

    Raises:
        ConfigError: The world has another size than the pipeline, or rank 0 found something wrong.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != num_stages:
        raise ConfigError(
            f"torchrun started {world_size} ranks, pipeline.num_stages is {num_stages}. Give both the same number."
        )
    store, _, _ = next(iter(rendezvous("env://")))
    if rank == 0:
        try:
            config, checkpoint = begin()
        except SlipstreamError:
            store.set("plan", json.dumps(None))
            raise
        store.set("plan", json.dumps({"config": to_dict(config), "checkpoint": checkpoint and str(checkpoint)}))
    else:
        plan = json.loads(store.get("plan"))
        if plan is None:
            raise ConfigError("rank 0 refused the run; see its message.")
        config = from_dict(plan["config"])
        checkpoint = Path(plan["checkpoint"]) if plan["checkpoint"] else None
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return run_pipeline_rank(config, rank=rank, local_rank=local_rank, store=store, checkpoint=checkpoint)
