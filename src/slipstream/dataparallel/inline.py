"""The engine `inline`: server and workers in this process, on a virtual clock; the same run every time, to the bit.

A gradient is computed at the moment its weights are read, and arrives when its worker would have been done::

    virtual time   0        1        2        3        4
    worker 0       |--n=2---|--n=2---|--n=2---|--n=2---|      arrivals in order of time, ties by who began first
    worker 1       |------n=2--------|------n=2--------|
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.config import Config
from slipstream.dataparallel.engine import Engine
from slipstream.dataparallel.events import EventQueue
from slipstream.dataparallel.faults import Fault
from slipstream.dataparallel.local_steps import build_worker
from slipstream.dataparallel.messages import Order, Push
from slipstream.dataparallel.probes import Prober
from slipstream.dataparallel.seats import Arrival, Event, Seat
from slipstream.dataparallel.shard import StepRecord
from slipstream.dataparallel.wire import build_wire
from slipstream.dataparallel.worker import Replica, restored_work, work_state, work_tensors
from slipstream.errors import StageError
from slipstream.executor import BatchSource, Snapshot, StateReader, StepReport


class InlineEngine(Engine):
    """Runs the protocol and all workers deterministically.

    Args:
        config: Resolved settings.
        microbatches: Gives the microbatch of a number.
        device: Where to compute.
        faults: What happens to workers, and when.
    """

    def __init__(
        self, config: Config, microbatches: BatchSource, *, device: torch.device, faults: Sequence[Fault] = ()
    ) -> None:
        super().__init__(config, device=device)
        self._worker = build_worker(config, Replica.of_server(self.server.parts[0]), microbatches, device=device)
        self._prober = Prober(config, self.server, self._worker)
        self._wire = build_wire(config.dataparallel)
        self._queue: EventQueue[Event] = EventQueue()
        self._faults = tuple(faults)
        self._seats: dict[int, Seat] = {}
        self._asking: collections.deque[int] = collections.deque()
        self._kept: dict[int, Arrival] = {}
        self._capacity_tokens = 0.0
        self._tokens_before = 0  # committed before this clock began: by another executor, or on another engine
        self._own_tokens_per_s = 0.0
        self._last_step_s = 0.0
        self._begin()

    def _begin(self) -> None:
        for worker in range(self.config.dataparallel.num_workers):
            self._join(worker)
        for fault in self._faults:
            if fault.at_s >= self._queue.now_s:
                self._queue.schedule(fault.at_s, fault)

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._queue.now_s

    def run_step(self, *, stop_requested: bool = False) -> StepReport:
        """Let events happen until one makes an update."""
        while True:
            self._answer()
            record = self._next()
            if record is not None:
                step_s, self._last_step_s = self.now_s - self._last_step_s, self.now_s
                return self.report(record, step_s=step_s, stop=stop_requested)

    def _answer(self) -> None:
        """Give work to whoever asks, and to those parked whose time has come."""
        while self._asking:
            worker = self._asking.popleft()
            seat = self._seats[worker]
            reply = self.server.pull(worker, seat.incarnation, now_s=self.now_s)
            if reply.action == "rejoin":
                self._join(worker)
            elif reply.order is not None:
                self._compute(reply.order)
        for order in self.server.admit(now_s=self.now_s):
            self._compute(order)

    def _next(self) -> StepRecord | None:
        """Let the next thing happen: an event, or a deadline before it."""
        deadline_s = self.server.sequencer.next_deadline_s
        if deadline_s < self._queue.next_s:
            self._pass_time(deadline_s)
            self.server.expire(deadline_s)
            return None
        if not len(self._queue):
            raise StageError(
                f"no worker is left at step {self.step}: all have gone, or were quarantined after gradients that were "
                "not finite. Nothing was saved since the last checkpoint; lower optim.lr or mend the workers, then go "
                "on with --resume."
            )
        self._pass_time(self._queue.next_s)
        event = self._queue.pop()
        if isinstance(event, Fault):
            self._strike(event)
            return None
        return self._arrive(event)

    def _pass_time(self, to_s: float) -> None:
        self._capacity_tokens += (to_s - self.now_s) * self._own_tokens_per_s
        self._queue.advance(to_s)

    def _compute(self, order: Order) -> None:
        """Compute on the weights as they are now; the gradient arrives when the worker is done."""
        seat = self._seats[order.worker]
        work = self._worker.compute(order.lease, version=order.version, worker=order.worker)
        tensors, sent = self._wire.carry(work.gradient.tensors, key=order.lease.ranges[0][0])
        work = dataclasses.replace(work, gradient=dataclasses.replace(work.gradient, tensors=tensors))
        if seat.num_nan:
            seat.num_nan -= 1
            work = dataclasses.replace(work, grad_norm=torch.full_like(work.grad_norm, float("nan")))
        seat.sequence += 1
        seat.cycles += 1
        cycle_s = self.emulation.cycle_s(order.worker, seat.cycles, order.lease.num_microbatches) * seat.slowness
        probes_s = cycle_s * seat.num_probes / order.lease.num_microbatches
        seat.num_probes = 0
        push = Push(
            worker=order.worker,
            incarnation=order.incarnation,
            sequence=seat.sequence,
            epoch=order.epoch,
            lease_id=order.lease.id,
            read_version=order.version,
            num_tokens=work.gradient.num_tokens,
            is_finite=work.is_finite,
            compute_s=cycle_s,
            router=work.router,
            wire_bytes=sent.num_bytes,
            wire_error=sent.relative_error,
        )
        self._queue.schedule(self.now_s + cycle_s + probes_s, Arrival(push=push, work=work))

    def _arrive(self, arrival: Arrival) -> StepRecord | None:
        push, work = arrival.push, arrival.work
        seat = self._seats[push.worker]
        order = self.server.sequencer.in_flight.get(push.lease_id)
        if order is not None and push.is_finite:
            seat.num_probes += self._prober.observe(order, sequence=push.sequence, grad_norm=float(work.grad_norm))
        _, record = self.server.push(push, [work.gradient], work.grad_norm, loss=work.loss)
        if arrival.is_copy or push.incarnation != seat.incarnation or not seat.is_here:
            return record
        copy = dataclasses.replace(arrival, is_copy=True)
        if push.worker in self._kept:
            self._queue.schedule(self.now_s, self._kept.pop(push.worker))
        if seat.duplicate:
            seat.duplicate = False
            self._queue.schedule(self.now_s, copy)
        if seat.late_copy:
            seat.late_copy = False
            self._kept[push.worker] = copy
        self._asking.append(push.worker)
        return record

    def _join(self, worker: int) -> None:
        """Let a worker come, or come back."""
        member = self.server.sequencer.members.get(worker)
        seat = self._seats.setdefault(worker, Seat(incarnation=0, is_here=False))
        seat.incarnation = 1 + max(seat.incarnation, member.incarnation if member else 0)
        seat.is_here, seat.sequence = True, 0
        self._add_up_speeds()
        pace_s = self.emulation.microbatch_s / self.emulation.speed(worker) * seat.slowness
        self.server.join(worker, seat.incarnation, pace_s=pace_s)
        self._asking.append(worker)

    def _add_up_speeds(self) -> None:
        """Of those that are here, by the settings of now: a resumed run may have others than were saved."""
        self._own_tokens_per_s = self.own_tokens_per_s(worker for worker, seat in self._seats.items() if seat.is_here)

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "join":
            self._join(fault.worker)
            return
        seat = self._seats.get(fault.worker)
        if seat is None or not seat.is_here:
            return
        match fault.kind:
            case "kill":
                seat.is_here = False
                self._add_up_speeds()
                self._drop_arrivals(fault.worker, seat)
                self.server.leave(fault.worker)
            case "hang":
                for at_s, arrival in self._drop_arrivals(fault.worker, seat):
                    self._queue.schedule(at_s + fault.seconds, arrival)
            case "slow":
                seat.slowness = fault.factor
            case "nan":
                seat.num_nan = fault.count
            case "duplicate":
                seat.duplicate = True
            case "late":
                seat.late_copy = True

    def _drop_arrivals(self, worker: int, seat: Seat) -> list[tuple[float, Event]]:
        """Take what a worker has under way out of the queue, and return it."""

        def is_own(event: Event) -> bool:
            return isinstance(event, Arrival) and event.push.worker == worker and not event.is_copy

        pending = self._queue.pending()
        self._queue.restore(self.now_s, [(at_s, event) for at_s, event in pending if not is_own(event)])
        if worker in self._asking and not seat.is_here:
            self._asking.remove(worker)
        return [(at_s, event) for at_s, event in pending if is_own(event)]

    def throughput_share(self) -> float:
        """Return tokens per second over the sum of the workers' own speeds."""
        done = self.server.sequencer.ledger.tokens_committed - self._tokens_before
        return done / self._capacity_tokens if self._capacity_tokens else 0.0

    def close(self) -> None:
        """Do nothing: workers are rows of a table here."""

    def snapshot(self) -> Snapshot:
        """Return a copy of the state, what is in flight included, so that a resumed run is the same run."""
        snapshot = self.server.snapshot()
        arrivals = [(at_s, event) for at_s, event in self._queue.pending() if isinstance(event, Arrival)]
        arrivals += [(-1.0, arrival) for arrival in self._kept.values()]
        tensors = self._worker.tensors()
        flights: list[dict[str, Any]] = []
        for number, (at_s, arrival) in enumerate(arrivals):
            tensors |= work_tensors(arrival.work, f"flight@{number}")
            flights.append(
                {
                    "at_s": at_s,
                    "is_copy": arrival.is_copy,
                    "push": dataclasses.asdict(arrival.push),
                    "work": work_state(arrival.work),
                }
            )
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        engine = {
            "kind": "inline",
            "num_workers": self.config.dataparallel.num_workers,
            "now_s": self.now_s,
            "last_step_s": self._last_step_s,
            "capacity_tokens": self._capacity_tokens,
            "tokens_before": self._tokens_before,
            "asking": list(self._asking),
            "seats": [[worker, dataclasses.asdict(seat)] for worker, seat in self._seats.items()],
            "flights": flights,
            "workers": self._worker.state_dict(),
        }
        return dataclasses.replace(
            snapshot, tensors={**snapshot.tensors, **copies}, scalars={**snapshot.scalars, "engine": engine}
        )

    def restore(self, state: StateReader) -> None:
        """Continue from a saved state. With as many workers on this engine it is the same run; else they begin anew."""
        self.server.restore(state)
        saved = state.scalars.get("engine", {})
        self._asking.clear()
        self._kept.clear()
        self._seats, self._own_tokens_per_s = {}, 0.0
        now_s = float(saved.get("now_s", 0.0))
        self._queue.restore(now_s, [])
        self._last_step_s = float(saved.get("last_step_s", now_s))
        is_own = saved.get("kind") == "inline"
        self._capacity_tokens = float(saved["capacity_tokens"]) if is_own else 0.0
        committed = self.server.sequencer.ledger.tokens_committed
        self._tokens_before = int(saved.get("tokens_before", 0)) if is_own else committed
        is_same = is_own and saved["num_workers"] == self.config.dataparallel.num_workers
        if not is_same or self.server.lacks_versions:
            self.server.resync()
            self._worker.restore((), state)
            self._begin()
            return
        self._worker.restore(saved.get("workers", ()), state)
        self._asking.extend(saved["asking"])
        self._seats = {worker: Seat(**fields) for worker, fields in saved["seats"]}
        self._add_up_speeds()
        for number, flight in enumerate(saved["flights"]):
            work = restored_work(flight["work"], state, f"flight@{number}", device=self.device)
            arrival = Arrival(push=Push(**flight["push"]), work=work, is_copy=flight["is_copy"])
            if flight["at_s"] < 0:
                self._kept[arrival.push.worker] = arrival
            else:
                self._queue.schedule(flight["at_s"], arrival)
        for fault in self._faults:
            if fault.at_s > now_s:
                self._queue.schedule(fault.at_s, fault)
