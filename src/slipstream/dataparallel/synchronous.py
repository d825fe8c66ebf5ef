"""Synchronous data parallelism on the same workers, in this process: everyone waits for the slowest at every step."""

import dataclasses

import torch

from slipstream.config import Config
from slipstream.dataparallel.engine import Engine
from slipstream.dataparallel.messages import Order, Push
from slipstream.dataparallel.shard import StepRecord
from slipstream.dataparallel.wire import Sent, build_wire
from slipstream.dataparallel.worker import Replica, Work, Worker
from slipstream.executor import BatchSource, Snapshot, StateReader, StepReport
from slipstream.staleness.gradient import Gradient


class SynchronousEngine(Engine):
    """All-reduce at every step, in equal shares, on the virtual clock.

    The gradients of all workers are added in the order of their numbers, then clipped once, and make one update: that
    of the whole batch, as in a single process but for the order of additions. Messages cost no time.

    Args:
        config: Resolved settings.
        microbatches: Gives the microbatch of a number.
        device: Where to compute.
    """

    def __init__(self, config: Config, microbatches: BatchSource, *, device: torch.device) -> None:
        super().__init__(config, device=device)
        self._worker = Worker(config, Replica.of_server(self.server.parts[0]), microbatches, device=device)
        self._wire = build_wire(config.dataparallel)
        self._clock_s = 0.0
        self._capacity = 0.0
        self._tokens_before = 0  # committed before this clock began
        self._num_workers = config.dataparallel.num_workers
        self._incarnation = 1
        self._join()

    def _join(self) -> None:
        for worker in range(self._num_workers):
            self.server.join(worker, self._incarnation)

    def run_step(self, *, stop_requested: bool = False) -> StepReport:
        """Let all workers compute their shares, and make an update of the sum."""
        orders = [self._order(worker) for worker in range(self._num_workers)]
        step_tokens = self.config.batch_tokens
        works, sent = zip(*(self._compute(order, mean_over=step_tokens) for order in orders))
        cycles_s = [
            self.emulation.cycle_s(order.worker, order.version + 1, order.lease.num_microbatches) for order in orders
        ]
        for order, work, cycle_s, each in zip(orders, works, cycles_s, sent):
            self.server.sequencer.push(self._push(order, work, cycle_s))
            self.server.wire_tally.add(each.num_bytes, each.relative_error)
            self.server.router_tally.add(work.router, weight=work.gradient.num_tokens)
        gradient = sum_gradients([work.gradient for work in works])
        updater = self.server.parts[0].updater
        update = updater.step(gradient, self._worker.norm(gradient))
        self._clock_s += max(cycles_s)
        self._capacity += max(cycles_s) * self.own_tokens_per_s(range(self._num_workers))
        record = StepRecord(
            update=update, losses=(sum(work.loss for work in works),), num_tokens=(step_tokens,), stalenesses=(0,)
        )
        return self.report(record, step_s=max(cycles_s), stop=stop_requested)

    def _compute(self, order: Order, *, mean_over: int) -> tuple[Work, Sent]:
        work = self._worker.compute(order.lease, version=order.version, worker=order.worker, mean_over=mean_over)
        tensors, sent = self._wire.carry(work.gradient.tensors, key=order.lease.ranges[0][0])
        return dataclasses.replace(work, gradient=dataclasses.replace(work.gradient, tensors=tensors)), sent

    def _order(self, worker: int) -> Order:
        order = self.server.sequencer.pull(worker, self._incarnation, now_s=self._clock_s).order
        assert order is not None
        return order

    def _push(self, order: Order, work: Work, cycle_s: float) -> Push:
        return Push(
            worker=order.worker,
            incarnation=order.incarnation,
            sequence=order.version + 1,
            epoch=order.epoch,
            lease_id=order.lease.id,
            read_version=order.version,
            num_tokens=work.gradient.num_tokens,
            compute_s=cycle_s,
        )

    def throughput_share(self) -> float:
        """Return tokens per second over the sum of the workers' own speeds."""
        done = self.server.sequencer.ledger.tokens_committed - self._tokens_before
        return done / self._capacity if self._capacity else 0.0

    def close(self) -> None:
        """Do nothing: workers are rows of a table here."""

    def snapshot(self) -> Snapshot:
        """Return a copy of the state."""
        snapshot = self.server.snapshot()
        engine = {"kind": "sync", "clock": [self._clock_s, self._capacity], "tokens_before": self._tokens_before}
        return dataclasses.replace(snapshot, scalars={**snapshot.scalars, "engine": engine})

    def restore(self, state: StateReader) -> None:
        """Continue from a saved state; nothing is in flight between steps."""
        self.server.restore(state)
        self.server.resync()
        self._incarnation = 1 + max((m.incarnation for m in self.server.sequencer.members.values()), default=0)
        self._join()
        saved = state.scalars.get("engine", {})
        is_own = saved.get("kind") == "sync"
        self._clock_s, self._capacity = saved["clock"] if is_own else (0.0, 0.0)
        committed = self.server.sequencer.ledger.tokens_committed
        self._tokens_before = int(saved.get("tokens_before", 0)) if is_own else committed


def sum_gradients(gradients: list[Gradient]) -> Gradient:
    """Add gradients that are all means over the same tokens, the first one's memory taking the sum."""
    first, *others = gradients
    tensors = dict(first.tensors)
    for other in others:
        for name, tensor in other.tensors.items():
            held = tensors[name]
            if held is None or tensor is None:
                tensors[name] = tensor if held is None else held
            else:
                held.add_(tensor)
    return Gradient(
        tensors=tensors,
        read_version=first.read_version,
        num_tokens=sum(gradient.num_tokens for gradient in gradients),
    )
