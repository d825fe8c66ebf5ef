"""The engine `process`: the server in this process, every worker in one of its own on the same machine.

Weights and gradients lie in memory that both sides map; what passes through pipes is a few hundred bytes::

    worker   | copy x | forward, backward ... | copy g |           | copy x | forward ...
                 ^                                 | result          ^
                 | order                           v                 | order
    server   ----+------ takes others' results ----+-- judge --------+-- add, others' results
                                                       (where the step is complete: add, step, publish first)

The server never waits for a worker, and a worker for nothing but its own answer.
"""

import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from slipstream.config import Config, config_hash
from slipstream.data.loader import Batch
from slipstream.dataparallel.crew import Crew, Heard, ProcessCrew, Seat
from slipstream.dataparallel.engine import Engine
from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.shard import StepRecord
from slipstream.dataparallel.shared import Layout, WeightBoard
from slipstream.dataparallel.transport import WeightsOffered
from slipstream.dataparallel.worker_process import (
    Calibrate,
    Calibrated,
    Failed,
    Hello,
    Overtaken,
    Result,
    WorkerMain,
    work,
)
from slipstream.errors import StageError
from slipstream.executor import Point, Snapshot, StateReader, StepReport
from slipstream.staleness.gradient import Gradient

MAX_DEATHS = 3
"""In a row, without a gradient in between, before a worker is not started again."""

CALIBRATION_MICROBATCHES = 2


class ProcessEngine(Engine):
    """Workers as processes; see above.

    Args:
        config: Resolved settings.
        device: Where server and workers compute.
        main: What a worker process does.

    Cost:
        On the server three copies of the weights in the compute dtype, and two gradients for each worker. A step costs
        one copy of the weights; a cycle of a worker one of the weights and one of its gradient.
    """

    def __init__(self, config: Config, *, device: torch.device, main: WorkerMain = work) -> None:
        self._identity = config_hash(config)
        super().__init__(config, device=device, identity=self._identity)
        updater = self.server.parts[0].updater
        self._weights, self._crew = self._open(Layout.of(updater.weights.read(0)), Layout.of(updater.masters), main)
        self._publish()
        self._start = time.monotonic()
        self._has_begun = False
        self._seen_s = 0.0
        self._last_step_s = 0.0
        self._capacity_tokens = 0.0
        self._tokens_before = 0
        self._own_s: dict[int, float] = {}
        self._seats: dict[int, Seat] = {}
        self._live_tokens_per_s = 0.0
        self._deaths: collections.Counter[int] = collections.Counter()
        self._trace = ""
        self._held: Heard | None = None
        self.start_workers(range(config.dataparallel.num_workers))

    def _open(self, weights: Layout, gradient: Layout, main: WorkerMain) -> tuple[WeightsOffered, Crew]:
        """Return where weights are published, and who reads them there; an engine elsewhere has others."""
        board = WeightBoard(weights)
        return board, ProcessCrew(self.config, weights=board, gradient=gradient, device=self.device, main=main)

    def start_workers(self, workers: Iterable[int]) -> None:
        """Let workers come, or come back; they join when they are ready, and nobody waits for them.

        Args:
            workers: Their numbers.
        """
        for worker in workers:
            self._seats[worker] = self._crew.start(worker)
        self._add_up_speeds()

    @property
    def _calibration_microbatches(self) -> int:
        """Microbatches that tell how fast a worker is alone."""
        return CALIBRATION_MICROBATCHES

    @property
    def now_s(self) -> float:
        """Seconds since the engine was made."""
        return time.monotonic() - self._start

    def run_step(self, *, stop_requested: bool = False) -> StepReport:
        """Take gradients until one completes a step. Workers go on computing when this has returned."""
        if not self._has_begun:
            self._begin()
        while (record := self._next()) is None:
            pass
        step_s, self._last_step_s = self._seen_s - self._last_step_s, self._seen_s
        return self.report(record, step_s=step_s, stop=stop_requested)

    def _begin(self) -> None:
        """Give out the first work when all are here: one that is alone would be given a whole step's."""
        while self._crew.has_more or any(not seat.incarnation for seat in self._crew.seats):
            self._attend()
        if not self.config.dataparallel.emulate_microbatch_ms:
            for seat in self._crew.seats:
                self._calibrate(seat)
        self._has_begun = True
        self._seen_s = self._last_step_s = self.now_s
        for seat in self._crew.seats:
            if seat.incarnation:  # one may have died since, and is about to come back
                self._ask(seat)

    def _calibrate(self, seat: Seat) -> None:
        """Measure how fast a worker is while nobody else computes."""
        self._crew.tell(seat, Calibrate(num_microbatches=self._calibration_microbatches))
        while seat.worker not in self._own_s and seat in self._crew.seats:
            self._attend()

    def _attend(self) -> None:
        """Wait for a word and act on it; nothing is out that has a deadline."""
        heard = self._crew.hear(timeout_s=None)
        if heard is not None:
            self._handle(heard)

    def _next(self) -> StepRecord | None:
        """Let the next thing happen: a word of a worker, or a deadline."""
        deadline_s = self.server.sequencer.next_deadline_s
        timeout_s = None if deadline_s == float("inf") else max(0.0, deadline_s - self.now_s)
        heard, self._held = self._held or self._crew.hear(timeout_s=timeout_s), None
        self._pass_time()
        record = self._handle(heard) if heard is not None else None
        if not self._crew.has_more and self.server.sequencer.next_deadline_s <= self.now_s:
            # Not before everything that has arrived was heard: this process may have been busy with an evaluation.
            self._held = self._crew.hear(timeout_s=0.0)
            if self._held is None:
                self._expire()
        return record

    def evaluate(self, batches: Iterable[Batch], point: Point) -> float:
        """Return the summed loss in nats over batches; workers have new work meanwhile, until the next step is due."""
        return super().evaluate(self._attending(batches), point)

    def _attending(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if self._has_begun:
                self._serve()
            yield batch

    def _serve(self) -> None:
        """Hear whoever has something to say, up to the gradient that would change the weights."""
        while (heard := self._held or self._crew.hear(timeout_s=0.0)) is not None:
            if self._may_make_step(heard):
                self._held = heard
                return
            self._held = None
            self._pass_time()
            self._handle(heard)

    def _may_make_step(self, heard: Heard) -> bool:
        """Whether the weights may be others once this was handled."""
        report = heard.report
        return isinstance(report, Result) and self.server.sequencer.completes_step(report.push.num_tokens)

    def _pass_time(self) -> None:
        seen_s, self._seen_s = self._seen_s, self.now_s
        self._capacity_tokens += (self._seen_s - seen_s) * self._live_tokens_per_s

    def _add_up_speeds(self) -> None:
        """Of those that have joined; whenever one comes, goes or was timed, and not at every word of thousands."""
        self._live_tokens_per_s = self.own_tokens_per_s(seat.worker for seat in self._crew.seats if seat.incarnation)

    def _handle(self, heard: Heard) -> StepRecord | None:
        seat, report = heard.seat, heard.report
        match report:
            case None:
                self._on_gone(seat)
            case Failed():
                self._trace = report.trace  # the process is about to be gone
            case Hello():
                self._join(seat, report)
            case Calibrated():
                self._time(seat.worker, report.microbatch_s)
            case Overtaken():
                seat.order = None
                self.server.sequencer.decline(seat.worker, seat.incarnation, report.lease_id)
                self._ask(seat)
                self._admit()  # what was declined may be all that the others were parked for
            case Result():
                return self._judge(seat, report)
        return None

    def _time(self, worker: int, microbatch_s: float) -> None:
        self._own_s[worker] = microbatch_s
        self._add_up_speeds()

    def _judge(self, seat: Seat, result: Result) -> StepRecord | None:
        """Hand a gradient to the server, and give its worker new work.

        Where no step is made of it, the work comes first: the weights are the same before and after it is added up.
        """
        is_answer = seat.order is not None and result.push.lease_id == seat.order.lease.id
        verdict = self.server.judge(result.push)
        if is_answer:  # and not a copy of an earlier message, which its worker does not wait for
            seat.order = None
            if not verdict.makes_step:
                self._ask(seat)
        record = None
        if verdict.is_accepted:
            self._deaths.pop(seat.worker, None)
            record = self.server.add(
                result.push,
                verdict,
                [self._gradient(seat, result)],
                torch.tensor(result.grad_norm, dtype=torch.float32, device=self.device),
                loss=result.loss,
                is_borrowed=self.device.type == "cpu" and seat.gradient.is_reference,
            )
        if record is not None:
            self._publish()
            self._ask(seat)
        self._admit()
        return record

    def _gradient(self, seat: Seat, result: Result) -> Gradient:
        tensors = seat.gradient.read(result.push.sequence, result.idle)
        return Gradient(
            tensors={name: None if each is None else each.to(self.device) for name, each in tensors.items()},
            read_version=result.push.read_version,
            num_tokens=result.push.num_tokens,
            worker=result.push.worker,
        )

    def _publish(self) -> None:
        weights = self.server.parts[0].updater.weights
        self._weights.publish(weights.latest, weights.read(weights.latest))

    def _ask(self, seat: Seat) -> None:
        """Ask for work on a worker's behalf. If it has to wait, its order comes with :meth:`_admit`."""
        reply = self.server.pull(seat.worker, seat.incarnation, now_s=self.now_s)
        if reply.order is not None:
            self._send(seat, reply.order)
        elif reply.action != "wait":
            self._crew.tell(seat, None)

    def _admit(self) -> None:
        for order in self.server.admit(now_s=self.now_s):
            self._send(self._seats[order.worker], order)

    def _send(self, seat: Seat, order: Order) -> None:
        seat.order = order
        self._crew.tell(seat, order)

    def _join(self, seat: Seat, hello: Hello) -> None:
        member = self.server.sequencer.members.get(seat.worker)
        seat.incarnation = member.incarnation + 1 if member else 1
        self.server.join(seat.worker, seat.incarnation, identity=hello.identity, pace_s=hello.pace_s)
        self._add_up_speeds()
        if self._has_begun:
            self._ask(seat)

    def _on_gone(self, seat: Seat) -> None:
        """A process has ended; start another in its place, unless it was sent away or would only die again."""
        if seat.is_retired:
            return
        worker = seat.worker
        member = self.server.sequencer.members.get(worker)
        if seat.incarnation:
            self.server.leave(worker)
        if member is None or member.state != "quarantined":
            self._deaths[worker] += 1
            if self._deaths[worker] < MAX_DEATHS:
                self.start_workers([worker])
            else:
                self._on_given_up(worker)
        self._add_up_speeds()
        if not self._crew.seats:
            raise StageError(self._nobody_left())
        self._admit()

    def _on_given_up(self, worker: int) -> None:
        """Do nothing: the others go on without it."""

    def _nobody_left(self) -> str:
        why = "all were quarantined after gradients that were not finite. Lower optim.lr."
        if self._deaths:
            why = f"each died {MAX_DEATHS} times in a row before it had pushed a gradient"
            why += ", as above." if self._trace else ", killed from outside. Is there enough memory?"
        return (
            f"{self._trace}\nno worker is left at step {self.step}: {why} Nothing was saved since the last checkpoint; "
            "go on with --resume."
        ).lstrip()

    def _expire(self) -> None:
        """Give up workers that hang; other processes take their places, and what they still send comes too late."""
        self.start_workers(self.server.expire(self.now_s))
        self._admit()

    def own_tokens_per_s(self, workers: Iterable[int]) -> float:
        """Return the sum of the workers' own speeds: nominal, or as each was measured alone."""
        if not self._own_s:
            return super().own_tokens_per_s(workers)
        mean_s = sum(self._own_s.values()) / len(self._own_s)  # of one that came later, for those at work are not alone
        tokens = self.server.sequencer.ledger.microbatch_tokens
        return sum(tokens / self._own_s.get(worker, mean_s) for worker in workers)

    def throughput_share(self) -> float:
        """Return tokens per second of the clock on the wall over the sum of the workers' own speeds."""
        done = self.server.sequencer.ledger.tokens_committed - self._tokens_before
        return done / self._capacity_tokens if self._capacity_tokens else 0.0

    def snapshot(self) -> Snapshot:
        """Return a copy of the state; workers go on meanwhile. What they are at is computed again after a restore."""
        snapshot = self.server.snapshot()
        counted = self.server.sequencer.ledger.tokens_committed - self._tokens_before
        engine: dict[str, Any] = {
            "kind": self.config.engine,
            "capacity_tokens": self._capacity_tokens,
            "tokens": counted,
        }
        return dataclasses.replace(snapshot, scalars={**snapshot.scalars, "engine": engine})

    def restore(self, state: StateReader) -> None:
        """Continue from a saved state, of any engine and number of workers; all workers come anew."""
        self.server.restore(state)
        self.server.resync()
        self._publish()
        saved = state.scalars.get("engine", {})
        is_own = saved.get("kind") in ("process", "ray")  # both count by the clock on the wall
        self._capacity_tokens = float(saved["capacity_tokens"]) if is_own else 0.0
        counted = int(saved["tokens"]) if is_own else 0
        self._tokens_before = self.server.sequencer.ledger.tokens_committed - counted
        if self._has_begun:
            self._has_begun, self._held = False, None
            self._crew.close()
            self.start_workers(range(self.config.dataparallel.num_workers))

    def close(self) -> None:
        """End all worker processes."""
        self._crew.close()
