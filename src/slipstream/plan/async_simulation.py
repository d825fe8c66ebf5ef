"""Workers and a server under a virtual clock: protocol, batches and ledger of a real run.

Nothing is computed; workers, links and server only take time::

    server link out   |=fetch=|                              each queue is first come, first served;
    worker                    |-------- compute -------|     all shards are alike, so one of each stands for all
    server link in                                     |=push=|
    server                                                    |apply|  then the next order

A worker does one thing at a time: it neither fetches nor pushes while it computes, nor does any stage of a pipeline. A
pipeline that does not drain asks when its first stage begins with its last microbatch, and has up to two orders::

    first stage  |-- compute 0 --|-- compute 1 --|-- compute 2 --|
    last one done                     |push 0         |push 1         |push 2
"""

import collections
import dataclasses
import math
from collections.abc import Callable

from slipstream.dataparallel.batching import DynamicBatches, EqualBatches
from slipstream.dataparallel.events import EventQueue
from slipstream.dataparallel.ledger import Ledger
from slipstream.dataparallel.messages import Order, Push
from slipstream.dataparallel.sequencer import Sequencer
from slipstream.errors import ConfigError
from slipstream.pipeline.cycle_order import NUM_BUFFERS
from slipstream.plan.fleet import Fleet
from slipstream.plan.station import Station

WARM_UP_CYCLES = 5
"""At least: one to calibrate dynamic batches, the rest to get out of step."""


@dataclasses.dataclass
class Seat:
    """A worker.

    Attributes:
        incarnation: Of the one that sits here; who is not of it is gone.
        is_here: Whether it lives.
        sequence: Pushes made by this incarnation.
        cycles: Cycles begun, over all.
        num_orders: Given and not yet pushed.
        is_asking: It could take another order once one of these is pushed.
        free_s: When its first stage is done with all it has.
        done_s: When its last stage is.
    """

    incarnation: int = 0
    is_here: bool = False
    sequence: int = 0
    cycles: int = 0
    num_orders: int = 0
    is_asking: bool = False
    free_s: float = 0.0
    done_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """Everything that grows, at one moment."""

    now_s: float
    units: int
    """Committed."""
    capacity: float
    """Units that the workers that were there would have done alone."""
    staleness: collections.Counter[int]
    in_s: float
    """Busy seconds of a shard's link inwards."""
    out_s: float
    """And outwards."""
    apply_s: float
    """And of the shard itself."""
    version: int
    """Steps made."""


Event = Callable[[], None]


class AsyncSimulation:
    """Lets events happen between workers, links and the sequencer.

    Args:
        fleet: Who takes how long.
        num_cycles: Of each worker to measure, on average, after the warm-up.

    Cost:
        O(log workers) a cycle: about 0.2 ms, most of it for the statistics of each worker's last cycles.
    """

    def __init__(self, fleet: Fleet, *, num_cycles: int) -> None:
        config = fleet.config
        policy = DynamicBatches if config.dynamic_batches else EqualBatches
        share = config.microbatches_per_worker
        self.sequencer = Sequencer(
            policy(
                step_microbatches=fleet.pushes_per_step * share,
                pushes_per_step=config.pushes_per_step,
                min_microbatches=config.num_stages - 1 if config.asks_ahead else 1,
            ),
            # A unit counts as two tokens, so that half a unit can be left over for the next step.
            Ledger(microbatch_tokens=2),
            max_staleness=config.max_staleness,
        )
        self.num_failures = 0
        self._fleet = fleet
        self._num_cycles = num_cycles
        self._queue: EventQueue[Event] = EventQueue()
        self._seats = [Seat() for _ in range(fleet.num_workers)]
        self._out = Station(service_s=fleet.shard_transfer_s, least_s=fleet.transfer_s)
        self._in = Station(service_s=fleet.shard_transfer_s, least_s=fleet.transfer_s)
        self._apply = Station(service_s=fleet.apply_s)
        self._capacity = 0.0
        self._live_units_per_s = 0.0

    def run(self) -> tuple[Mark, Mark]:
        """Simulate; return the marks between which to measure, both at the completion of a step.

        Raises:
            ConfigError: Hardly anything gets done, such as where workers fail before their cycles end.
        """
        fleet, sequencer = self._fleet, self.sequencer
        steps_a_cycle = fleet.num_workers / fleet.pushes_per_step
        warm_up = math.ceil(max(WARM_UP_CYCLES, self._num_cycles // 4) * steps_a_cycle)
        last = warm_up + math.ceil(self._num_cycles * steps_a_cycle)
        for worker in range(fleet.num_workers):
            self._join(worker)
        for worker in range(fleet.num_workers):
            self._ask(worker)
        events_left = 20 * (last * fleet.pushes_per_step + 10 * fleet.num_workers)
        while sequencer.version < warm_up and events_left > 0:
            self._next()
            events_left -= 1
        begin = self._mark()
        while sequencer.version < last and events_left > 0:
            self._next()
            events_left -= 1
        if not events_left:
            raise ConfigError(
                f"after {self._queue.now_s:.0f} simulated seconds only {sequencer.version} of {last} steps are done: "
                f"{self.num_failures} failures, and {sum(sequencer.rejected.values())} pushes rejected from workers "
                "that took longer than their deadlines. Give shorter cycles (microbatches_per_worker, local_steps), "
                "faster links or fewer failures_per_hour, or leave deadlines out (--lease-deadlines false)."
            )
        return begin, self._mark()

    def _mark(self) -> Mark:
        now_s, ledger = self._queue.now_s, self.sequencer.ledger
        return Mark(
            now_s=now_s,
            units=ledger.tokens_committed // ledger.microbatch_tokens,
            capacity=self._capacity,
            staleness=collections.Counter(self.sequencer.staleness.counts),
            in_s=self._in.busy_s(now_s),
            out_s=self._out.busy_s(now_s),
            apply_s=self._apply.busy_s(now_s),
            version=self.sequencer.version,
        )

    def _next(self) -> None:
        """Let the next thing happen: an event, or the deadline of a lease before it."""
        deadline_s = self.sequencer.next_deadline_s if self._fleet.config.lease_deadlines else math.inf
        if deadline_s < self._queue.next_s:
            self._pass_time(deadline_s)
            self.sequencer.expire(deadline_s)
        else:
            self._pass_time(self._queue.next_s)
            self._queue.pop()()
        for order in self.sequencer.admit(now_s=self._queue.now_s):
            self._start(order)

    def _pass_time(self, to_s: float) -> None:
        self._capacity += (to_s - self._queue.now_s) * self._live_units_per_s
        self._queue.advance(to_s)

    def _join(self, worker: int) -> None:
        """Let a worker come, or come back."""
        seat = self._seats[worker]
        seat.incarnation += 1
        seat.sequence = seat.num_orders = 0
        seat.is_asking, seat.free_s, seat.done_s = False, self._queue.now_s, self._queue.now_s
        if not seat.is_here:
            seat.is_here = True
            self._live_units_per_s += self._fleet.own_units_per_s[worker]
            life_s = self._fleet.life_s(worker, seat.incarnation)
            if life_s < math.inf:
                self._queue.schedule(self._queue.now_s + life_s, lambda: self._fail(worker))
        self.sequencer.join(worker, seat.incarnation)

    def _fail(self, worker: int) -> None:
        seat = self._seats[worker]
        seat.is_here = False
        self.num_failures += 1
        self._live_units_per_s -= self._fleet.own_units_per_s[worker]
        self.sequencer.leave(worker)
        self._queue.schedule(self._queue.now_s + self._fleet.config.restart_s, lambda: self._return(worker))

    def _return(self, worker: int) -> None:
        self._join(worker)
        self._ask(worker)

    def _ask(self, worker: int) -> None:
        seat = self._seats[worker]
        reply = self.sequencer.pull(worker, seat.incarnation, now_s=self._queue.now_s)
        if reply.action == "rejoin":
            self._return(worker)
        elif reply.order is not None:
            self._start(reply.order)

    def _start(self, order: Order) -> None:
        """Take an order on; its weights are fetched once the first stage is free."""
        seat = self._seats[order.worker]
        seat.sequence += 1
        seat.cycles += 1
        seat.num_orders += 1
        sequence, cycle = seat.sequence, seat.cycles
        if seat.free_s > self._queue.now_s:
            self._queue.schedule(seat.free_s, lambda: self._compute(order, sequence, cycle))
        else:
            self._compute(order, sequence, cycle)

    def _compute(self, order: Order, sequence: int, cycle: int) -> None:
        """Fetch the weights and compute."""
        seat, now_s, count = self._seats[order.worker], self._queue.now_s, order.lease.num_microbatches
        if not seat.is_here or order.incarnation != seat.incarnation:
            return
        begin_s = self._out.serve(now_s)
        work_s = self._fleet.cycle_s(order.worker, cycle, count)
        unit_s = work_s / count
        fill_s = self._fleet.fill_units * unit_s
        fetch_s, push_s, since_s = begin_s - now_s, 0.0, now_s
        if seat.done_s > now_s:  # the gradient before is still under way, and written in the midst of this one
            push_s, since_s = self._fleet.transfer_s, seat.done_s
        # Through all stages in order: the first microbatch's backward ends no sooner than the last one's before.
        done_s = max(begin_s + fill_s, seat.done_s) + push_s + work_s
        compute_s = done_s - since_s - fetch_s - push_s
        seat.free_s, seat.done_s = done_s - fill_s, done_s
        self._queue.schedule(done_s, lambda: self._send(order, sequence, compute_s=compute_s, fetch_s=fetch_s))
        if self._fleet.config.asks_ahead:
            self._queue.schedule(max(seat.free_s - unit_s, begin_s), lambda: self._ask_ahead(order))

    def _ask_ahead(self, order: Order) -> None:
        """Ask for the next order while this one is computed, or once the one before it is pushed."""
        seat = self._seats[order.worker]
        if not seat.is_here or order.incarnation != seat.incarnation:
            return
        if seat.num_orders < NUM_BUFFERS:
            self._ask(order.worker)
        else:
            seat.is_asking = True

    def _send(self, order: Order, sequence: int, *, compute_s: float, fetch_s: float) -> None:
        """Push what was computed."""
        seat, now_s = self._seats[order.worker], self._queue.now_s
        if not seat.is_here or order.incarnation != seat.incarnation:
            return
        applied_s = self._apply.serve(self._in.serve(now_s))
        push = Push(
            worker=order.worker,
            incarnation=order.incarnation,
            sequence=sequence,
            epoch=order.epoch,
            lease_id=order.lease.id,
            read_version=order.version,
            num_tokens=order.lease.num_microbatches * self.sequencer.ledger.microbatch_tokens,
            compute_s=compute_s,
            communication_s=fetch_s + applied_s - now_s,
        )
        if applied_s > now_s:
            self._queue.schedule(applied_s, lambda: self._arrive(push))
        else:
            self._arrive(push)

    def _arrive(self, push: Push) -> None:
        seat = self._seats[push.worker]
        self.sequencer.push(push)
        if not seat.is_here or push.incarnation != seat.incarnation:
            return
        seat.num_orders -= 1
        if seat.is_asking or not self._fleet.config.asks_ahead:
            seat.is_asking = False
            self._ask(push.worker)
