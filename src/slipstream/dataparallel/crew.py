"""The workers of an engine: starts them, hears them, notices that one is gone, and lets them go."""

import abc
import atexit
import collections
import contextlib
import dataclasses
import multiprocessing
import selectors
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import torch

from slipstream.config import Config
from slipstream.dataparallel.awaited import Awaited
from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.transport import PushReader, WeightsFetched
from slipstream.dataparallel.wire import PushSlots, build_wire
from slipstream.dataparallel.worker_process import (
    Calibrate,
    Command,
    Failed,
    Report,
    WorkerMain,
    Workplace,
    process_main,
)
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
    """Workers somewhere, without the protocol.

    Args:
        config: Resolved settings. Who is not ready, or timed, within ``pipeline.timeout_s`` is ended.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._awaited: Awaited[Seat] = Awaited(config.pipeline.timeout_s)
        self._words: collections.deque[Heard] = collections.deque()

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
            ``None``: nobody has said anything; it may come early.
        """

    @abc.abstractmethod
    def tell(self, seat: Seat, command: Command) -> None:
        """Send a command; one that is gone will be noticed by its silence."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all workers; may be called twice."""

    @abc.abstractmethod
    def _end(self, seat: Seat) -> None:
        """End a worker at once."""

    def _lose(self, seat: Seat, why: str) -> None:
        """End a worker from which nothing will come, and let that be heard."""
        self._end(seat)
        self._words += Heard(seat=seat, report=Failed(trace=why)), Heard(seat=seat, report=None)

    def _lose_late(self) -> None:
        """End those whose time is over. Before, everything has to be heard: this process may have been busy."""
        for seat in self._awaited.late():
            self._lose(
                seat,
                f"worker {seat.worker} was ended: for {self._awaited.timeout_s:g} s it did not say that it is ready, "
                "or how fast it is. Raise pipeline.timeout_s if its first microbatches may take so long.",
            )


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
        super().__init__(config)
        self._weights = weights
        self._gradient = gradient
        self._device = device
        self._main = main
        self._ready: collections.deque[Connection] = collections.deque()
        self._seats: dict[Connection, ProcessSeat] = {}
        self._selector = selectors.DefaultSelector()
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
        self._listen_to(ours, seat)
        return seat

    def _listen_to(self, pipe: Connection, seat: ProcessSeat) -> None:
        self._seats[pipe] = seat
        self._selector.register(pipe, selectors.EVENT_READ, data=pipe)
        self._awaited.expect(seat, by=pipe)

    def _run(self, place: Workplace, *, name: str) -> ForkServerProcess:
        process = self._context.Process(target=process_main, args=(self._main, place), name=name, daemon=True)
        process.start()
        return process

    @property
    def has_more(self) -> bool:
        """Whether words are there that have not been heard."""
        return bool(self._ready or self._words)

    def hear(self, *, timeout_s: float | None) -> Heard | None:
        """Wait for the next word of anybody, or for the end of a process."""
        if not self.has_more:
            # All that are ready have their turn before anybody has another: none can starve the rest.
            ready = self._selector.select(self._awaited.rest_s(timeout_s))
            self._ready.extend(key.data for key, _ in ready)
            if not ready:
                self._lose_late()
        while self._ready:
            pipe = self._ready.popleft()
            seat = self._seats.get(pipe)
            if seat is None:
                continue
            try:
                report = pipe.recv()
            except (EOFError, OSError):  # it may be gone in the midst of a message
                self._forget(seat)
                return Heard(seat=seat, report=None)
            self._awaited.forget(pipe)
            return Heard(seat=seat, report=report)
        return self._words.popleft() if self._words else None

    def tell(self, seat: Seat, command: Command) -> None:
        """Send a command; the pipe of one that is gone will say so."""
        assert isinstance(seat, ProcessSeat)
        self._send(seat.pipe, seat, command)

    def _send(self, pipe: Connection, seat: ProcessSeat, command: Command) -> None:
        if isinstance(command, Calibrate):
            self._awaited.expect(seat, by=pipe)
        with contextlib.suppress(OSError):
            pipe.send(command)

    def close(self) -> None:
        """End all processes; may be called twice."""
        atexit.unregister(self.close)
        for seat in list(self._seats.values()):
            self._kill(seat)
        for seat in list(self._seats.values()):
            self._forget(seat)
        self._words.clear()

    def _end(self, seat: Seat) -> None:
        assert isinstance(seat, ProcessSeat)
        self._kill(seat)
        self._forget(seat)

    def _kill(self, seat: ProcessSeat) -> None:
        seat.process.kill()

    def _forget(self, seat: ProcessSeat) -> None:
        self._hang_up(seat.pipe)
        seat.process.join(LEAVE_S)

    def _hang_up(self, pipe: Connection) -> None:
        if self._seats.pop(pipe, None) is not None:
            self._selector.unregister(pipe)
        self._awaited.forget(pipe)
        pipe.close()
