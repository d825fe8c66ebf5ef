"""The workers of an engine: starts them, hears them, notices that one is gone, and lets them go."""

import abc
import atexit
import collections
import contextlib
import dataclasses
import multiprocessing
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import torch

from slipstream.config import Config
from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.transport import PushReader, WeightsFetched
from slipstream.dataparallel.wire import PushSlots, build_wire
from slipstream.dataparallel.worker_process import Command, Report, WorkerMain, Workplace, process_main
from slipstream.device import device_of

LEAVE_S = 5.0
"""How long a process may take to be gone after it was killed."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Seat:
    """One life of a worker; a worker that comes back has another seat.

    Attributes:
        worker: Number of the worker.
        gradient: Where it pushes.
        incarnation: What the server knows it by; 0: it has not joined.
        order: What it is at.
        is_retired: Another has taken its place, and this one is not waited for.
    """

    worker: int
    gradient: PushReader
    incarnation: int = 0
    order: Order | None = None
    is_retired: bool = False


@dataclasses.dataclass(eq=False, kw_only=True)
class ProcessSeat(Seat):
    """One worker process.

    Attributes:
        process: The process.
        pipe: To it.
    """

    process: ForkServerProcess
    pipe: Connection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heard:
    """Something came from a worker.

    Attributes:
        seat: Which.
        report: What it said; ``None``: it is gone.
    """

    seat: Seat
    report: Report | None


class Crew(abc.ABC):
    """Workers somewhere, without the protocol."""

    @property
    @abc.abstractmethod
    def seats(self) -> list[Seat]:
        """Living workers that nobody has taken the place of."""

    @property
    @abc.abstractmethod
    def has_more(self) -> bool:
        """Whether words are there that have not been heard."""

    @abc.abstractmethod
    def start(self, worker: int) -> Seat:
        """Let a worker come. One that sits there already is retired."""

    @abc.abstractmethod
    def hear(self, *, timeout_s: float | None) -> Heard | None:
        """Wait for the next word of anybody.

        Args:
            timeout_s: ``None``: as long as it takes.

        Returns:
            ``None``: nobody said anything.
        """

    @abc.abstractmethod
    def tell(self, seat: Seat, command: Command) -> None:
        """Send a command; one that is gone will be noticed by its silence."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all workers; may be called twice."""


class ProcessCrew(Crew):
    """Worker processes on this machine.

    A process counts as alive while its end of the pipe is open: the system closes it, however the process ends.

    Args:
        config: Resolved settings.
        weights: Where the server publishes.
        gradient: Layout of a gradient.
        device: Where the server computes; of several CUDA devices, workers take turns.
        main: What a worker does.
    """

    def __init__(
        self, config: Config, *, weights: WeightsFetched, gradient: Layout, device: torch.device, main: WorkerMain
    ) -> None:
        self._config = config
        self._weights = weights
        self._gradient = gradient
        self._device = device
        self._main = main
        self._ready: collections.deque[Connection] = collections.deque()
        self._seats: dict[Connection, ProcessSeat] = {}
        # torch takes seconds to import: one process does it, the workers are forked from that one.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([process_main.__module__, main.__module__])

    @property
    def seats(self) -> list[Seat]:
        """Living processes that nobody has taken the place of."""
        return [seat for seat in self._seats.values() if not seat.is_retired]

    def start(self, worker: int) -> ProcessSeat:
        """Start a process for a worker. One that sits there already is retired: what it still says is heard.

        Of those retired, which are kept to be told that they are late, a worker has one at most.
        """
        for seat in [seat for seat in self._seats.values() if seat.worker == worker]:
            if seat.is_retired:
                self._end(seat)
            seat.is_retired = True
        if not self._seats:
            # Before multiprocessing's own clean-up, which would ask them to end and wait.
            atexit.register(self.close)
        ours, theirs = self._context.Pipe()
        gradient = PushSlots(build_wire(self._config.dataparallel), self._gradient)
        place = Workplace(
            config=self._config,
            worker=worker,
            pipe=theirs,
            weights=self._weights,
            gradient=gradient,
            device=device_of(self._device, worker),
        )
        process = self._run(place, name=f"worker-{worker}")
        theirs.close()
        seat = ProcessSeat(worker=worker, process=process, pipe=ours, gradient=gradient)
        self._seats[ours] = seat
        return seat

    def _run(self, place: Workplace, *, name: str) -> ForkServerProcess:
        process = self._context.Process(target=process_main, args=(self._main, place), name=name, daemon=True)
        process.start()
        return process

    @property
    def has_more(self) -> bool:
        """Whether words are there that have not been heard."""
        return bool(self._ready)

    def hear(self, *, timeout_s: float | None) -> Heard | None:
        """Wait for the next word of anybody, or for the end of a process."""
        if not self._ready:
            # All that are ready have their turn before anybody has another: none can starve the rest.
            self._ready.extend(pipe for pipe in wait(list(self._seats), timeout_s) if isinstance(pipe, Connection))
        while self._ready:
            pipe = self._ready.popleft()
            seat = self._seats.get(pipe)
            if seat is None:
                continue
            try:
                return Heard(seat=seat, report=pipe.recv())
            except (EOFError, ConnectionError):
                self._forget(seat)
                return Heard(seat=seat, report=None)
        return None

    def tell(self, seat: Seat, command: Command) -> None:
        """Send a command; the pipe of one that is gone will say so."""
        assert isinstance(seat, ProcessSeat)
        with contextlib.suppress(OSError):
            seat.pipe.send(command)

    def close(self) -> None:
        """End all processes; may be called twice."""
        atexit.unregister(self.close)
        for seat in list(self._seats.values()):
            self._kill(seat)
        for seat in list(self._seats.values()):
            self._forget(seat)

    def _end(self, seat: ProcessSeat) -> None:
        self._kill(seat)
        self._forget(seat)

    def _kill(self, seat: ProcessSeat) -> None:
        seat.process.kill()

    def _forget(self, seat: ProcessSeat) -> None:
        self._seats.pop(seat.pipe, None)
        seat.pipe.close()
        seat.process.join(LEAVE_S)
