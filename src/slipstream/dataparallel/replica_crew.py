"""Workers that are pipelines, as processes of this machine: one a stage, which come and go together."""

import atexit
import collections
import dataclasses
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from slipstream.config import Config
from slipstream.dataparallel.crew import LEAVE_S, ProcessCrew, ProcessSeat, Seat
from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.shared import HeldBoard, Layout
from slipstream.dataparallel.stage_process import Part, StagePlace
from slipstream.dataparallel.wire import PushSlots, build_wire
from slipstream.dataparallel.worker_process import Command, WorkerMain
from slipstream.device import device_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One stage process.

    Attributes:
        process: The process.
        pipe: To it.
        gradient: Where it pushes.
    """

    process: ForkServerProcess
    pipe: Connection
    gradient: PushSlots


@dataclasses.dataclass(eq=False, kw_only=True)
class ReplicaSeat(ProcessSeat):
    """One life of a worker that is a pipeline.

    Attributes:
        links: Its stages, in order; process, pipe and gradient of the seat are those of the first.
        orders: What it is at, the oldest first.
        parts: What stages have pushed of each lease.
        paces: What stages have said of their speed.
        is_asking: It wants an order, and has to finish one before.
    """

    links: tuple[Link, ...]
    orders: collections.deque[Order] = dataclasses.field(default_factory=collections.deque)
    parts: dict[int, dict[int, Part]] = dataclasses.field(default_factory=dict)
    paces: list[float] = dataclasses.field(default_factory=list)
    is_asking: bool = False


class ReplicaCrew(ProcessCrew):
    """Processes of pipelines. When one of a worker's stages ends, for whatever reason, its others are ended, too.

    Args:
        config: Resolved settings.
        boards: Where the server publishes, by stage.
        gradients: Layouts of a gradient's parts, by stage.
        device: Where the server computes; of several CUDA devices, stages take turns.
        main: What a stage does.
    """

    def __init__(
        self,
        config: Config,
        *,
        boards: Sequence[HeldBoard],
        gradients: Sequence[Layout],
        device: torch.device,
        main: WorkerMain,
    ) -> None:
        super().__init__(config, weights=boards[0], gradient=gradients[0], device=device, main=main)
        self._boards = boards
        self._gradients = gradients
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_started = 0

    @property
    def seats(self) -> list[Seat]:
        """Living workers."""
        return list(dict.fromkeys(self._seats.values()))

    def start(self, worker: int) -> ReplicaSeat:
        """Start a worker's processes. Those that sit there already are ended."""
        for seat in {seat for seat in self._seats.values() if seat.worker == worker}:
            self._end(seat)
        if not self._seats:
            atexit.register(self.close)
        self._num_started += 1
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="slipstream-", ignore_cleanup_errors=True)
        rendezvous = str(Path(self._folder.name) / str(self._num_started))
        links = tuple(self._start_stage(worker, stage, rendezvous) for stage in range(len(self._boards)))
        first = links[0]
        seat = ReplicaSeat(worker=worker, process=first.process, pipe=first.pipe, gradient=first.gradient, links=links)
        for link in links:
            self._listen_to(link.pipe, seat)
        return seat

    def _start_stage(self, worker: int, stage: int, rendezvous: str) -> Link:
        ours, theirs = self._context.Pipe()
        gradient = PushSlots(build_wire(self._config.dataparallel), self._gradients[stage])
        place = StagePlace(
            config=self._config,
            worker=worker,
            pipe=theirs,
            weights=self._boards[stage],
            gradient=gradient,
            device=device_of(self._device, worker * len(self._boards) + stage),
            stage=stage,
            rendezvous=rendezvous,
        )
        process = self._run(place, name=f"worker-{worker}-stage-{stage}")
        theirs.close()
        return Link(process=process, pipe=ours, gradient=gradient)

    def tell(self, seat: Seat, command: Command) -> None:
        """Send a command to all stages, which run the same cycles."""
        assert isinstance(seat, ReplicaSeat)
        for link in seat.links:
            self._send(link.pipe, seat, command)

    def close(self) -> None:
        """End all processes; may be called twice."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _kill(self, seat: ProcessSeat) -> None:
        assert isinstance(seat, ReplicaSeat)
        for link in seat.links:
            link.process.kill()

    def _forget(self, seat: ProcessSeat) -> None:
        """End what is left of a worker: without one of its stages the others only wait."""
        assert isinstance(seat, ReplicaSeat)
        self._kill(seat)
        for link in seat.links:
            self._hang_up(link.pipe)
            link.process.join(LEAVE_S)
