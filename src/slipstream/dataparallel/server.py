"""The parameter server: the protocol's sequencer and the shards, joined; it knows no engine."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.assembly import StageParts
from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.dataparallel.batching import DynamicBatches, EqualBatches
from slipstream.dataparallel.ledger import Ledger
from slipstream.dataparallel.messages import Order, Push, Reply, Verdict
from slipstream.dataparallel.router_tally import RouterTally
from slipstream.dataparallel.sequencer import Sequencer
from slipstream.dataparallel.shard import Shard, StepRecord
from slipstream.dataparallel.wire import WireTally
from slipstream.executor import Point, Snapshot, StateReader, merged
from slipstream.microbatches import to_device
from slipstream.models.llama import cross_entropy_sum
from slipstream.staleness.aalr import AsyncAwareLr
from slipstream.staleness.gradient import Gradient


def build_sequencer(config: Config, *, identity: str = "") -> Sequencer:
    """Return the protocol of a run, before anyone has joined.

    Args:
        config: Resolved settings.
        identity: Digest that workers must bring.
    """
    settings = config.dataparallel
    kind = DynamicBatches if settings.dynamic_batches and settings.mode == "async" else EqualBatches
    policy = kind(
        step_microbatches=config.pipeline.num_microbatches * config.local_steps,
        pushes_per_step=settings.pushes_per_step,
        min_microbatches=settings.min_microbatches * config.local_steps,
        max_microbatches=settings.max_microbatches * config.local_steps,
    )
    ledger = Ledger(microbatch_tokens=config.train.microbatch_size * config.data.sequence_length)
    return Sequencer(
        policy,
        ledger,
        max_staleness=settings.max_staleness,
        max_dropped=config.train.max_skipped_steps * policy.step_microbatches,
        identity=identity,
    )


class Server:
    """Takes pushes, makes steps, answers pulls.

    Args:
        config: Resolved settings.
        parts: The model, whole or cut into stages; each is a shard.
        identity: Digest that workers must bring.
    """

    def __init__(self, config: Config, parts: Sequence[StageParts], *, identity: str = "") -> None:
        self._config = config
        self.parts = tuple(parts)
        self.shards = tuple(Shard(each.updater) for each in self.parts)
        self.sequencer = build_sequencer(config, identity=identity)
        self.wire_tally = WireTally()
        self.router_tally = RouterTally()
        self._arrived: list[tuple[float, int, int]] = []

    @property
    def version(self) -> int:
        """Optimizer steps made."""
        return self.sequencer.version

    def join(self, worker: int, incarnation: int, *, identity: str = "", pace_s: float = 0.0) -> None:
        """Count on a worker; see :meth:`Sequencer.join`."""
        self.sequencer.join(worker, incarnation, identity=identity, pace_s=pace_s)
        self._on_members()

    def leave(self, worker: int) -> None:
        """Stop counting on a worker."""
        self.sequencer.leave(worker)
        self._on_members()

    def expire(self, now_s: float) -> list[int]:
        """Stop counting on workers whose deadline has passed; return them."""
        if now_s < self.sequencer.next_deadline_s:
            return []
        late = self.sequencer.expire(now_s)
        self._on_members()
        return late

    def push(
        self,
        push: Push,
        gradients: Sequence[Gradient],
        grad_norm: Tensor,
        *,
        loss: float,
        is_borrowed: bool = False,
    ) -> tuple[Verdict, StepRecord | None]:
        """Judge a gradient; if it is accepted, accumulate it and make the step that it completes.

        Args:
            push: All but the tensors.
            gradients: The part of each shard.
            grad_norm: Scalar global norm of all parts together.
            loss: Mean loss over its tokens.
            is_borrowed: The tensors' memory is about to be used again by somebody else.
        """
        verdict = self.judge(push)
        if not verdict.is_accepted:
            return verdict, None
        return verdict, self.add(push, verdict, gradients, grad_norm, loss=loss, is_borrowed=is_borrowed)

    def judge(self, push: Push) -> Verdict:
        """Do the first half of :meth:`push`: say whether a gradient counts."""
        num_live = self.sequencer.num_live
        verdict = self.sequencer.push(push)
        if self.sequencer.num_live != num_live:
            self._on_members()
        return verdict

    def add(
        self,
        push: Push,
        verdict: Verdict,
        gradients: Sequence[Gradient],
        grad_norm: Tensor,
        *,
        loss: float,
        is_borrowed: bool = False,
    ) -> StepRecord | None:
        """Do the second half of :meth:`push`, for a gradient that counts.

        Where it makes no step, requests may be answered in between: the weights are the same.
        """
        self._arrived.append((loss, push.num_tokens, verdict.staleness))
        self.wire_tally.add(push.wire_bytes, push.wire_error)
        self.router_tally.add(push.router, weight=push.num_tokens)
        for shard, gradient in zip(self.shards, gradients):
            shard.accumulate(gradient, grad_norm, weight=verdict.weight, is_borrowed=is_borrowed)
            shard.retain(self.sequencer.in_flight.readers.keys())
        return self._step() if verdict.makes_step else None

    def _step(self) -> StepRecord:
        updates = [shard.apply() for shard in self.shards]
        losses, num_tokens, stalenesses = zip(*self._arrived)
        self._arrived = []
        assert updates[0].version == self.sequencer.version
        return StepRecord(update=updates[0], losses=losses, num_tokens=num_tokens, stalenesses=stalenesses)

    def pull(self, worker: int, incarnation: int, *, now_s: float) -> Reply:
        """Answer a request for work."""
        reply = self.sequencer.pull(worker, incarnation, now_s=now_s)
        if reply.order is not None:
            self._hold(reply.order)
        return reply

    def admit(self, *, now_s: float) -> Iterator[Order]:
        """Yield the orders of requests that need not wait any more."""
        for order in self.sequencer.admit(now_s=now_s):
            self._hold(order)
            yield order

    def _hold(self, order: Order) -> None:
        for shard in self.shards:
            shard.hold(order.version)

    def _on_members(self) -> None:
        """Tell what depends on the number of workers."""
        sequencer = self.sequencer
        for parts in self.parts:
            if isinstance(parts.step_size, AsyncAwareLr) and sequencer.num_live:
                parts.step_size.set_concurrency(
                    num_in_flight=sequencer.num_live * self._config.gradients_per_worker,
                    gradients_per_update=sequencer.pushes_per_step,
                )

    @property
    def has_two_points(self) -> bool:
        """Whether x can differ from y by more than a cast."""
        return self.parts[0].updater.publish.changes_weights

    def method_metrics(self) -> dict[str, float]:
        """Return what the shards' corrections and discounts tell of themselves, by name."""
        return {name: value for parts in self.parts for name, value in parts.method_metrics().items()}

    def evaluate(self, batches: Iterable[Batch], point: Point, *, device: torch.device) -> float:
        """Return the summed loss in nats over batches."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in batches:
            x = to_device(batch.inputs, device)
            for parts in self.parts:
                x = parts.forward_at(point, x)
            total += cross_entropy_sum(x, to_device(batch.targets, device))
        return float(total)

    def snapshot(self) -> Snapshot:
        """Return a copy of the state: a consistent cut, for a push is taken whole or not at all."""
        whole = merged([parts.snapshot() for parts in self.parts])
        tensors = {name: tensor for shard in self.shards for name, tensor in shard.tensors().items()}
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        own = {
            "sequencer": self.sequencer.state_dict(),
            "shard": self.shards[0].state_dict(),
            "arrived": list(self._arrived),
            "wire": self.wire_tally.state_dict(),
            "router": self.router_tally.state_dict(),
        }
        return dataclasses.replace(
            whole, tensors={**whole.tensors, **copies}, scalars={**whole.scalars, "dataparallel": own}
        )

    def restore(self, state: StateReader) -> None:
        """Continue from a saved state, also of another executor; what was in flight is still out then."""
        for parts in self.parts:
            parts.restore(state)
        own: dict[str, Any] | None = state.scalars.get("dataparallel")
        if own is None:
            self.sequencer.version = state.step
            self.sequencer.ledger.skip_to(state.step * self._config.pipeline.num_microbatches)
            return
        self.sequencer.load_state_dict(own["sequencer"])
        for parts in self.parts:
            if isinstance(parts.step_size, AsyncAwareLr) and state.scalars.get("step_size"):
                parts.step_size.load_concurrency(state.scalars["step_size"])
        for shard in self.shards:
            shard.restore(own["shard"], state)
        self._arrived = [(loss, count, staleness) for loss, count, staleness in own["arrived"]]
        self.wire_tally.load_state_dict(own.get("wire", ()))  # absent in a checkpoint of an older version
        self.router_tally.load_state_dict(own.get("router", ()))

    @property
    def lacks_versions(self) -> bool:
        """Whether somebody computes on weights that a correction will look at and that were not saved.

        So it is where the run was resumed with a correction that it had not before.
        """
        return any(shard.lacks(version) for shard in self.shards for version in self.sequencer.in_flight.readers)

    def resync(self) -> None:
        """Begin a new epoch: what was in flight is lost, and goes out again."""
        self.sequencer.resync()
        for shard in self.shards:
            shard.retain(())

    def figures(self) -> dict[str, Any]:
        """Return the figures of a run's summary that the protocol knows."""
        sequencer = self.sequencer
        members = sequencer.members
        return {
            "staleness_mean": sequencer.staleness.mean,
            "staleness_max": sequencer.staleness.largest,
            "staleness_histogram": _texts(sequencer.staleness.items()),
            "staleness_histogram_by_worker": {
                str(worker): _texts(member.staleness.items()) for worker, member in members.items()
            },
            "microbatches_by_worker": {str(worker): member.microbatches for worker, member in members.items()},
            "pushes_accepted": sequencer.num_accepted,
            "pushes_rejected": sequencer.rejected.total(),
            "pushes_rejected_by_reason": dict(sequencer.rejected),
            "tokens_committed": sequencer.ledger.tokens_committed,
            "tokens_dropped": sequencer.ledger.num_dropped * sequencer.ledger.microbatch_tokens,
            "ledger_lag": sequencer.ledger.lag,
            "ledger_balanced": sequencer.ledger.balance().holds,
            "restarts": sequencer.num_restarts,
        } | self.wire_tally.figures()


def _texts(items: Iterable[tuple[int, int]]) -> dict[str, int]:
    return {str(staleness): count for staleness, count in items}
