"""Workers as Ray actors, on any machine of a cluster: starts them, hears them, and notices that one is gone."""

import dataclasses
import time
from typing import Any

import torch

from slipstream.config import Config
from slipstream.dataparallel.crew import Crew, Heard, Seat
from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.ray_cluster import cpus_of_worker, import_ray
from slipstream.dataparallel.ray_worker import Turn, WorkerActor
from slipstream.dataparallel.transport import Line, Lines
from slipstream.dataparallel.worker_process import Calibrate, Command, Report, Result, WorkerMain
from slipstream.errors import StageError


@dataclasses.dataclass(eq=False, kw_only=True)
class RaySeat(Seat):
    """One actor.

    Attributes:
        actor: Handle.
        gradient: The line to it.
        process: Its number on its machine; 0: it has not come yet.
        machine: Ray's name of that.
        told_s: When it was given what it is at.
    """

    actor: Any
    gradient: Line
    process: int = 0
    machine: str = ""
    told_s: float = 0.0


class RayCrew(Crew):
    """Actors, without the protocol.

    A worker that is gone makes the call fail that it was to answer. Ray starts no actor again by itself: an incarnation
    is an actor of its own, and the engine says when there is another. One may wait for room for as long as it takes; it
    has to be ready in time once it has come.

    Args:
        config: Resolved settings.
        lines: What carries weights and gradients.
        device: Where workers compute.
        main: What a worker does.
    """

    def __init__(self, config: Config, *, lines: Lines, device: torch.device, main: WorkerMain) -> None:
        self._ray = import_ray()
        super().__init__(config)
        self._lines = lines
        self._device = torch.device(device.type)
        self._main = main
        self._calls: dict[Any, RaySeat] = {}
        self._seats: list[RaySeat] = []
        self._actors = self._ray.remote(WorkerActor).options(
            num_cpus=cpus_of_worker(config),
            num_gpus=config.dataparallel.ray_gpus if device.type == "cuda" else 0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )

    @property
    def seats(self) -> list[Seat]:
        """Living actors, and those that are about to come."""
        return list(self._seats)

    @property
    def has_more(self) -> bool:
        """Whether words are there that have not been heard."""
        return bool(self._words)

    def start(self, worker: int) -> RaySeat:
        """Let an actor come, wherever there is room. One that sits there already is ended: it would keep the room."""
        for seat in [seat for seat in self._seats if seat.worker == worker]:
            seat.is_retired = True
            self._end(seat)
        line = self._lines.open()
        actor = self._actors.remote(self._main, self._config, worker, line.far_end, self._device)
        seat = RaySeat(worker=worker, actor=actor, gradient=line)
        self._seats.append(seat)
        self._calls |= dict.fromkeys((actor.come.remote(), actor.begin.remote()), seat)
        return seat

    def hear(self, *, timeout_s: float | None) -> Heard | None:
        """Wait for the next word of anybody, or for the end of an actor."""
        while not self._words and self._listen(self._awaited.rest_s(timeout_s)):
            pass
        if not self._words:
            self._lose_late()
        return self._words.popleft() if self._words else None

    def _listen(self, timeout_s: float | None) -> bool:
        """Take the answers that are here, gradients and all: Ray brings them while others are waited for.

        Returns:
            Whether there was any.
        """
        calls = list(self._calls)
        if not calls:
            time.sleep(timeout_s or 0.0)
            return False
        # All that are ready have their turn before anybody has another: none can starve the rest.
        ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(calls, num_returns=1, timeout=timeout_s)
        for call in ready:
            if (seat := self._calls.pop(call, None)) is not None:  # and not another of one that has failed
                self._take(seat, call)
        return bool(ready)

    def _take(self, seat: RaySeat, call: Any) -> None:
        try:
            turn: Turn = self._ray.get(call)
            for report, parcel in turn.reports:
                if isinstance(report, Result):
                    seat.gradient.arrive(report.push.sequence, parcel)
        except (self._ray.exceptions.RayError, StageError) as error:
            self._lose(seat, str(error))
            return
        if not seat.process:  # it has come, and gets ready; before, it may have had to wait for room
            self._awaited.expect(seat, by=seat)
        seat.process, seat.machine = turn.process, turn.machine
        for report, _ in turn.reports:
            self._awaited.forget(seat)
            self._words.append(Heard(seat=seat, report=self._timed(seat, report)))
        if turn.has_ended:
            self._end(seat)
            self._words.append(Heard(seat=seat, report=None))

    def _timed(self, seat: RaySeat, report: Report) -> Report:
        """Count the way of a gradient, which a worker cannot see, among the seconds that were not for computing."""
        if not isinstance(report, Result):
            return report
        seconds = max(time.monotonic() - seat.told_s - report.push.compute_s, report.push.communication_s)
        return dataclasses.replace(report, push=dataclasses.replace(report.push, communication_s=seconds))

    def tell(self, seat: Seat, command: Command) -> None:
        """Send a command; the call of one that is gone will fail."""
        assert isinstance(seat, RaySeat)
        if seat not in self._seats:
            return
        seat.told_s = time.monotonic()
        if isinstance(command, Calibrate):
            self._awaited.expect(seat, by=seat)
        if isinstance(command, Order) and (note := seat.gradient.offer(command.version)) is not None:
            seat.actor.offer.remote(command.version, [note])
        self._calls[seat.actor.answer.remote(command)] = seat

    def close(self) -> None:
        """End all actors; may be called twice."""
        for seat in list(self._seats):
            self._end(seat)
        self._words.clear()

    def _end(self, seat: Seat) -> None:
        assert isinstance(seat, RaySeat)
        self._ray.kill(seat.actor)
        self._forget(seat)

    def _forget(self, seat: RaySeat) -> None:
        if seat in self._seats:
            self._seats.remove(seat)
        for call in [call for call, other in self._calls.items() if other is seat]:
            del self._calls[call]
        self._awaited.forget(seat)
        seat.gradient.close()
