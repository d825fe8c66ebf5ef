"""The engine `ray`: the server here, every worker an actor on some machine of a Ray cluster.

The engine `process` with another crew and another transport: what an order does, when work is given out and how a death
is dealt with is the same code.
"""

import torch

from slipstream.config import Config
from slipstream.dataparallel.crew import Crew
from slipstream.dataparallel.process_engine import ProcessEngine
from slipstream.dataparallel.process_synchronous import SynchronousProcessEngine
from slipstream.dataparallel.ray_cluster import check_capacity, import_ray
from slipstream.dataparallel.ray_crew import RayCrew
from slipstream.dataparallel.ray_store import StoreLines
from slipstream.dataparallel.sessions import Sessions
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.transport import Lines, WeightsOffered
from slipstream.dataparallel.wire import build_wire
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
        A step costs one copy of the weights; a cycle of a worker one of the weights and one of its gradient, and what
        the network takes. With the object store, on the server one copy of the weights and one gradient for each
        worker; in the stores two versions of the weights on every machine, and the gradients on their way; and a step
        one copy of each gradient. With sessions, see :class:`slipstream.dataparallel.sessions.Sessions`.
    """

    def __init__(self, config: Config, *, device: torch.device, main: WorkerMain = work) -> None:
        check_capacity(config)
        super().__init__(config, device=device, main=main)

    def _open(self, weights: Layout, gradient: Layout, main: WorkerMain) -> tuple[WeightsOffered, Crew]:
        lines = build_lines(self.config, weights, gradient)
        return lines, RayCrew(self.config, lines=lines, device=self.device, main=main)


def build_lines(config: Config, weights: Layout, gradient: Layout) -> Lines:
    """Return the transport that the settings name; this process is connected to a cluster.

    Args:
        config: Resolved settings.
        weights: Layout of published weights.
        gradient: Layout of a gradient.
    """
    wire = build_wire(config.dataparallel)
    if config.dataparallel.ray_transport == "object_store":
        return StoreLines(weights, gradient, wire=wire)
    host = import_ray().util.get_node_ip_address()
    return Sessions(weights, gradient, wire=wire, host=host, timeout_s=config.pipeline.timeout_s)


class SynchronousRayEngine(RayEngine, SynchronousProcessEngine):
    """All-reduce at every step, in equal shares, through the server; the arguments are those of :class:`RayEngine`."""
