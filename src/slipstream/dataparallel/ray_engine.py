"""The engine `ray`: the server here, every worker an actor on some machine of a Ray cluster.

The engine `process` with another crew and another transport: what an order does, when work is given out and how a death
is dealt with is the same code.
"""

import torch

from slipstream.config import Config
from slipstream.dataparallel.crew import Crew
from slipstream.dataparallel.process_engine import ProcessEngine
from slipstream.dataparallel.process_synchronous import SynchronousProcessEngine
from slipstream.dataparallel.ray_cluster import check_capacity
from slipstream.dataparallel.ray_crew import RayCrew
from slipstream.dataparallel.ray_store import StoredWeights
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.transport import WeightsOffered
from slipstream.dataparallel.worker_process import WorkerMain, work


class RayEngine(ProcessEngine):
    """Workers as Ray actors; this process is connected to their cluster.

    Args:
        config: Resolved settings.
        device: Where server and workers compute.
        main: What a worker does.

    Raises:
        ConfigError: The cluster is too small.

    Cost:
        On the server one copy of the weights and one gradient for each worker; in the object stores two versions of the
        weights on every machine, and the gradients on their way. A step costs one copy of the weights and one of each
        gradient; a cycle of a worker one of the weights and one of its gradient, and what the network takes.
    """

    def __init__(self, config: Config, *, device: torch.device, main: WorkerMain = work) -> None:
        check_capacity(config)
        super().__init__(config, device=device, main=main)

    def _open(self, weights: Layout, gradient: Layout, main: WorkerMain) -> tuple[WeightsOffered, Crew]:
        board = StoredWeights(weights)
        crew = RayCrew(self.config, weights=board, layout=weights, gradient=gradient, device=self.device, main=main)
        return board, crew


class SynchronousRayEngine(RayEngine, SynchronousProcessEngine):
    """All-reduce at every step, in equal shares, through the server; the arguments are those of :class:`RayEngine`."""
