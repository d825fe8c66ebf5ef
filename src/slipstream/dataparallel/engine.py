"""What an engine is: it lets workers compute, carries their gradients to the server, and answers the training loop.

An engine is one file with one class on :class:`Engine`, and a case in :func:`build_engine`.
"""

import abc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from slipstream.assembly import StageParts
from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.dataparallel.emulation import Emulation
from slipstream.dataparallel.local_steps import server_config
from slipstream.dataparallel.server import Server
from slipstream.dataparallel.shard import StepRecord
from slipstream.device import device_of
from slipstream.executor import BatchSource, Point, Snapshot, StateReader, StepReport
from slipstream.models.moe import RouterReport
from slipstream.models.partition import stages

VIRTUAL_MICROBATCH_S = 0.1
"""Of the virtual clock, where no other time is given."""


class Engine(abc.ABC):
    """An executor whose steps are made by a server and workers; what all engines share.

    Args:
        config: Resolved settings.
        device: Where the server's weights live.
        identity: Digest that workers must bring.

    Attributes:
        server: Holds the weights and the protocol.
        emulation: How long cycles take by the workers' nominal speeds.
    """

    def __init__(self, config: Config, *, device: torch.device, identity: str = "") -> None:
        self.config = config
        self.device = device
        of_server = server_config(config)
        self._peak_lr = of_server.optim.lr
        settings = config.dataparallel
        cuts = stages(config.model, settings.num_stages, sequence_length=config.data.sequence_length)
        parts = [StageParts(of_server, cut, num_versions=1, device=device) for cut in cuts]
        self.server = Server(config, parts, identity=identity)
        emulation = Emulation.of(settings)
        self.emulation = replace(emulation, microbatch_s=emulation.microbatch_s or VIRTUAL_MICROBATCH_S)

    @property
    def step(self) -> int:
        """Updates made so far."""
        return self.server.version

    @abc.abstractmethod
    def run_step(self, *, stop_requested: bool = False) -> StepReport:
        """Go on until the next update is made."""

    @property
    def has_two_points(self) -> bool:
        """Whether x can differ from y by more than a cast."""
        return self.server.has_two_points

    def evaluate(self, batches: Iterable[Batch], point: Point) -> float:
        """Return the summed loss in nats over batches; workers are not held up by it."""
        return self.server.evaluate(batches, point, device=self.device)

    @abc.abstractmethod
    def snapshot(self) -> Snapshot:
        """Return a copy of the state between two updates."""

    @abc.abstractmethod
    def restore(self, state: StateReader) -> None:
        """Continue from a saved state, of any engine and number of workers."""

    @abc.abstractmethod
    def throughput_share(self) -> float:
        """Return tokens per second over the sum of the workers' own speeds; 1: nobody waits."""

    def own_tokens_per_s(self, workers: Iterable[int]) -> float:
        """Return the sum of the nominal speeds of workers."""
        each = self.server.sequencer.ledger.microbatch_tokens / self.emulation.microbatch_s
        return sum(self.emulation.speed(worker) for worker in workers) * each

    def figures(self) -> dict[str, Any]:
        """Return what a run's summary holds beside an ordinary run's."""
        settings = self.config.dataparallel
        return {
            "engine": self.config.engine,
            "mode": settings.mode,
            "num_workers": settings.num_workers,
            "throughput_share": self.throughput_share(),
        } | self.server.figures()

    def method_metrics(self) -> Mapping[str, float]:
        """Return what the server's methods against staleness tell of themselves, by name."""
        return self.server.method_metrics()

    def report(self, record: StepRecord, *, step_s: float, stop: bool) -> StepReport:
        """Return what the training loop is told of a step.

        Args:
            record: Of the server.
            step_s: Seconds since the step before, by the engine's clock.
            stop: The loop was asked to stop.
        """
        update = record.update
        return StepReport(
            step=update.version,
            loss=record.loss,
            grad_norm=update.grad_norm,
            lr=self._peak_lr * update.lr_factor,
            staleness=max(record.stalenesses),
            staleness_mean=record.staleness_mean,
            num_tokens=sum(record.num_tokens),
            num_devices=num_devices(self.config, self.device),
            skipped=update.skipped,
            idle_s=None,  # workers of one process each wait for the server alone, which throughput_share tells
            stop=stop,
            step_s=step_s,
            router=tuple(RouterReport(*row) for row in self.server.router_tally.take()),
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Let the workers go; may be called twice."""


def num_devices(config: Config, device: torch.device) -> float:
    """Return how many GPUs the workers of a run share.

    Args:
        config: Resolved settings.
        device: Where the first computes.
    """
    settings = config.dataparallel
    match config.engine:
        case "inline":
            return 1
        case "process":
            return len({device_of(device, index) for index in range(settings.num_workers * settings.num_stages)})
        case "ray":
            return settings.num_workers * min(settings.ray_gpus or 1.0, 1.0)


def build_engine(config: Config, microbatches: BatchSource, *, device: torch.device) -> Engine:
    """Return the engine that the settings name.

    Args:
        config: Resolved settings.
        microbatches: Gives the microbatch of a number, as a batch; worker processes open the data themselves.
        device: Where to compute.

    Raises:
        ConfigError: The engine is not there.
    """
    match config.engine:
        case "inline" if config.dataparallel.mode == "sync":
            from slipstream.dataparallel.synchronous import SynchronousEngine

            return SynchronousEngine(config, microbatches, device=device)
        case "inline":
            from slipstream.dataparallel.inline import InlineEngine

            return InlineEngine(config, microbatches, device=device)
        case "process" if config.dataparallel.mode == "sync":
            from slipstream.dataparallel.process_synchronous import SynchronousProcessEngine

            return SynchronousProcessEngine(config, device=device)
        case "process" if config.dataparallel.num_stages > 1:
            from slipstream.dataparallel.hybrid_engine import HybridEngine

            return HybridEngine(config, device=device)
        case "process":
            from slipstream.dataparallel.process_engine import ProcessEngine

            return ProcessEngine(config, device=device)
        case "ray" if config.dataparallel.mode == "sync":
            from slipstream.dataparallel.ray_engine import SynchronousRayEngine

            return SynchronousRayEngine(config, device=device)
        case "ray":
            from slipstream.dataparallel.ray_engine import RayEngine

            return RayEngine(config, device=device)
