"""One worker as a Ray actor: what a worker process does, with calls in the place of a pipe."""

import dataclasses
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.config import Config
from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.ray_cluster import import_ray
from slipstream.dataparallel.transport import FarEnd
from slipstream.dataparallel.worker_process import Calibrate, Failed, Report, Result, WorkerMain, Workplace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What a worker has said between two commands.

    Attributes:
        reports: With what the transport sends along with each, if anything.
        has_ended: It will say nothing more.
        process: Its number on its machine.
        machine: Ray's name of that.
    """

    reports: list[tuple[Report, Any]]
    has_ended: bool
    process: int
    machine: str


class _Turns:
    """A pipe whose other end is calls: a command is answered by all that is said before the next is asked for."""

    def __init__(self, end: FarEnd) -> None:
        self._end = end
        self._machine = str(import_ray().get_runtime_context().get_node_id())
        self._commands: queue.SimpleQueue[Order | Calibrate | None] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._reports: list[tuple[Report, Any]] = []

    def send(self, report: Report, /) -> None:
        parcel = self._end.take(report.push.sequence) if isinstance(report, Result) else None
        self._reports.append((report, parcel))

    def recv(self) -> Any:
        self.end_turn(has_ended=False)
        return self._commands.get()

    def end_turn(self, *, has_ended: bool) -> None:
        reports, self._reports = self._reports, []
        self._turns.put(self.turn(reports, has_ended=has_ended))

    def turn(self, reports: Iterable[tuple[Report, Any]] = (), *, has_ended: bool) -> Turn:
        return Turn(reports=list(reports), has_ended=has_ended, process=os.getpid(), machine=self._machine)

    def tell(self, command: Order | Calibrate | None) -> None:
        self._commands.put(command)

    def hear(self) -> Turn:
        return self._turns.get()


class WorkerActor:
    """What Ray starts somewhere.

    Its calls are carried out one after another, in the order in which the server made them.

    Args:
        main: What a worker does.
        config: Resolved settings.
        worker: Its number.
        far_end: Opens this end of its line.
        device: Where to compute.
    """

    def __init__(
        self, main: WorkerMain, config: Config, worker: int, far_end: Callable[[], FarEnd], device: torch.device
    ) -> None:
        self._end = end = far_end()
        self._turns = _Turns(end)
        place = Workplace(config=config, worker=worker, pipe=self._turns, weights=end, gradient=end, device=device)
        threading.Thread(target=self._work, args=(main, place), daemon=True).start()

    def come(self) -> Turn:
        """Say that there was room, and where."""
        return self._turns.turn(has_ended=False)

    def _work(self, main: WorkerMain, place: Workplace) -> None:
        try:
            main(place)
        except BaseException:
            place.pipe.send(Failed(trace=traceback.format_exc()))
        self._turns.end_turn(has_ended=True)

    def begin(self) -> Turn:
        """Return what the worker says when it is ready."""
        return self._turns.hear()

    def offer(self, version: int, note: list[Any]) -> None:
        """Learn where a version lies that the next order reads.

        Args:
            version: Which.
            note: Alone in a list, so that Ray does not fetch it now, in a time that nobody measures.
        """
        self._end.offer(version, note[0])

    def answer(self, command: Order | Calibrate | None) -> Turn:
        """Carry out a command."""
        self._turns.tell(command)
        return self._turns.hear()
