"""The protocol of asynchronous data parallelism, without tensors: who may push and pull what, and when. No torch.

One exchange a cycle::

    worker                       server
      | --- push of lease 7 ------> |   seen before? another life? another epoch? lease still open?
      |                             |   staleness = version now - version read; commit lease 7
      |                             |   enough tokens for a step: version + 1
      | <-- ack, version, lease 9 - |   or parked, while the staleness bound says so

It has no clock of its own: whoever calls says what time it is.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from slipstream.dataparallel.batching import EqualBatches
from slipstream.dataparallel.cycles import Cycle
from slipstream.dataparallel.ledger import Ledger
from slipstream.dataparallel.members import InFlight, Member
from slipstream.dataparallel.messages import Order, Push, Rejection, Reply, Verdict
from slipstream.dataparallel.tally import Tally
from slipstream.errors import ConfigError, NonFiniteError

MOST_PATIENCE = 64.0
"""Largest factor on the deadlines of a worker that keeps missing them."""


class Sequencer:
    """Orders, accepts or rejects whole pushes, counts versions, and hands out leases.

    A step takes ``step_microbatches`` worth of tokens, however many pushes they come in. What a push brings beyond that
    counts for the next step. No push is of more than a step's tokens, so n steps are made of n to n + 1 steps' tokens.

    A gradient that is not finite is a strike against its worker, until another worker fails on the same microbatches:
    then the data is to blame, the strike is taken back, and the microbatches are dropped.

    Args:
        policy: How many microbatches each worker gets.
        ledger: Which ones.
        max_staleness: A pull is parked while it could lead to a larger staleness; 0: no bound.
        max_strikes: Gradients in a row that are not finite before a worker is quarantined.
        max_dropped: Microbatches that may be dropped in the whole run.
        identity: Digest of model, tokenizer and settings; who joins must bring the same.

    Attributes:
        version: Optimizer steps made.
        epoch: Grows when the server is restored and work in flight is lost.
        members: Workers that ever joined, by number.
        staleness: Of all accepted pushes.
        rejected: Pushes not counted, by reason.
        in_flight: Orders whose gradients have not arrived.

    Cost:
        O(log workers) a call.
    """

    def __init__(
        self,
        policy: EqualBatches,
        ledger: Ledger,
        *,
        max_staleness: int = 0,
        max_strikes: int = 3,
        max_dropped: int = 0,
        identity: str = "",
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.version = 0
        self.epoch = 1
        self.members: dict[int, Member] = {}
        self.staleness = Tally()
        self.rejected: collections.Counter[Rejection] = collections.Counter()
        self.in_flight = InFlight()
        self.num_accepted = 0
        self.num_restarts = 0
        self._max_staleness = max_staleness
        self._max_strikes = max_strikes
        self._max_dropped = max_dropped
        self._identity = identity
        self._step_tokens = policy.step_microbatches * ledger.microbatch_tokens
        self._tokens = 0
        self._parked: dict[int, None] = {}  # a set in order

    @property
    def num_live(self) -> int:
        """Workers that count."""
        return len(self.policy.histories)

    @property
    def pushes_per_step(self) -> float:
        """Pushes that make a step, on average, while the workers stay as they are."""
        return self.num_live * self.policy.step_microbatches / max(self.policy.round_microbatches, 1)

    @property
    def next_deadline_s(self) -> float:
        """When :meth:`expire` is due next; infinite while nothing is out."""
        return self.ledger.next_deadline_s

    def join(self, worker: int, incarnation: int, *, identity: str = "", pace_s: float = 0.0) -> None:
        """Count on a worker from now on. What an earlier incarnation held is given to others.

        Args:
            worker: Who.
            incarnation: Larger than all before.
            identity: Digest of what it trains.
            pace_s: Its own guess of the seconds a microbatch, for the deadline of its first cycle.

        Raises:
            ConfigError: It trains something else, or this incarnation is over already.
        """
        if identity != self._identity:
            raise ConfigError(
                f"worker {worker} has model, data and settings of digest '{identity}', the server '{self._identity}'. "
                "Start the worker with the server's own config."
            )
        member = self.members.get(worker)
        if member is None:
            self.members[worker] = Member(incarnation=incarnation, epoch=self.epoch)
        elif incarnation <= member.incarnation:
            raise ConfigError(
                f"worker {worker} joins as incarnation {incarnation}, but {member.incarnation} was here. "
                "An incarnation must be larger than all before."
            )
        else:
            self._drop(worker, "lost")
            # After the server itself was restored everyone comes anew; that is no restart of a worker.
            self.num_restarts += member.epoch == self.epoch
            member.incarnation, member.epoch, member.state = incarnation, self.epoch, "live"
            member.last_sequence, member.strikes = 0, []
        self.policy.join(worker, pace_s=pace_s)

    def leave(self, worker: int) -> None:
        """Stop counting on a worker: it died or said goodbye. Its microbatches are given to others."""
        self._drop(worker, "lost")

    def expire(self, now_s: float) -> list[int]:
        """Stop counting on workers whose deadline has passed; return them."""
        late = list(dict.fromkeys(lease.worker for lease in self.ledger.expire(now_s)))
        for worker in late:
            self._drop(worker, "lost")
            self.members[worker].patience = min(2 * self.members[worker].patience, MOST_PATIENCE)
        return late

    def push(self, push: Push) -> Verdict:
        """Judge a gradient that has arrived, exactly once: the same push again is counted as rejected, and no more.

        The caller accumulates an accepted gradient, and makes a step if the verdict says so, before the next call.

        Raises:
            NonFiniteError: More microbatches would be dropped than may be.
        """
        rejection = self._objection(push)
        member = self.members.get(push.worker)
        if rejection is None and member is not None:
            member.last_sequence = push.sequence
            if not push.is_finite:
                rejection = "non_finite"
                self._strike(push, member)
        if rejection is not None or member is None:
            rejection = rejection or "unknown"
            self.rejected[rejection] += 1
            return Verdict(rejection=rejection)
        member.strikes, member.patience = [], 1.0
        num_microbatches = self.in_flight.settle(push.lease_id)
        self.ledger.commit(push.lease_id, num_tokens=push.num_tokens)
        staleness = self.version - push.read_version
        self.staleness.add(staleness)
        member.staleness.add(staleness)
        member.microbatches += num_microbatches
        self.num_accepted += 1
        cycle = Cycle(
            num_microbatches=num_microbatches,
            num_tokens=push.num_tokens,
            compute_s=push.compute_s,
            communication_s=push.communication_s,
        )
        self.policy.observe(push.worker, cycle)
        return Verdict(
            staleness=staleness, weight=push.num_tokens / self._step_tokens, makes_step=self._count(push.num_tokens)
        )

    def pull(self, worker: int, incarnation: int, *, now_s: float) -> Reply:
        """Ask for work. A request that must wait is parked; :meth:`admit` gives its order later.

        Nobody overtakes a parked request: what the newcomers have out would hold it up for ever.
        """
        member = self.members.get(worker)
        if member is None or member.incarnation != incarnation or member.state == "lost":
            return Reply(action="rejoin")
        if member.state == "quarantined":
            return Reply(action="stop")
        if not self._parked and self._is_admitted(worker):
            return Reply(action="work", order=self._order(worker, member, now_s=now_s))
        self._parked[worker] = None
        return Reply(action="wait")

    def decline(self, worker: int, incarnation: int, lease_id: int) -> None:
        """Take an order back, whose weights were overwritten before the worker had them."""
        order = self.in_flight.get(lease_id)
        if order is not None and (order.worker, order.incarnation) == (worker, incarnation):
            self.in_flight.settle(lease_id)
            self.ledger.give_back(lease_id)

    def admit(self, *, now_s: float) -> Iterator[Order]:
        """Yield the orders of parked requests that need not wait any more, first come, first served."""
        while self._parked and self._is_admitted(worker := next(iter(self._parked))):
            del self._parked[worker]
            yield self._order(worker, self.members[worker], now_s=now_s)

    def completes_step(self, num_tokens: int) -> bool:
        """Return whether a push of so many tokens makes a step, if it is accepted."""
        return self._tokens + num_tokens >= self._step_tokens

    def resync(self) -> None:
        """Begin a new epoch: the server was restored, and what was in flight is lost."""
        self.epoch += 1
        for worker in list(self.members):
            self._drop(worker, "lost")

    def _objection(self, push: Push) -> Rejection | None:
        member = self.members.get(push.worker)
        order = self.in_flight.get(push.lease_id)
        if member is None:
            return "unknown"
        if push.epoch != self.epoch:
            return "epoch"
        if push.incarnation != member.incarnation:
            return "incarnation"
        if push.sequence <= member.last_sequence:
            return "duplicate"
        if member.state == "quarantined":
            return "quarantined"
        if order is None or (order.worker, order.incarnation) != (push.worker, push.incarnation):
            return "lease"
        return "version" if order.version != push.read_version else None

    def _strike(self, push: Push, member: Member) -> None:
        self.in_flight.settle(push.lease_id)
        acquitted = self.ledger.fail(push.lease_id)
        if not acquitted:
            member.strikes.append(push.lease_id)
            if len(member.strikes) >= self._max_strikes:
                self._drop(push.worker, "quarantined")
            return
        for lease_id, worker in acquitted.items():
            other = self.members[worker]
            other.strikes = [each for each in other.strikes if each != lease_id]
        if self.ledger.num_dropped > self._max_dropped:
            ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in self.ledger.dropped)
            raise NonFiniteError(
                f"non-finite gradients of {self.ledger.num_dropped} microbatches, up to step {self.version}: two "
                f"attempts each, by different workers where there are several, failed on microbatches {ranges} in the "
                f"data's order. train.max_skipped_steps allows {self._max_dropped} microbatches, so many steps' worth. "
                "Lower optim.lr, mend the data or raise train.max_skipped_steps, then go on with --resume."
            )

    def _count(self, num_tokens: int) -> bool:
        """Add to the step under way; whether it is complete."""
        completes = self.completes_step(num_tokens)
        self._tokens += num_tokens
        if not completes:
            return False
        self.version += 1
        self._tokens -= self._step_tokens
        return True

    def _is_admitted(self, worker: int) -> bool:
        """Whether no gradient can become too stale if this worker reads the newest version now.

        All that is out, and this one, may arrive before the oldest reader, which itself is of one microbatch at least.
        """
        if not self._max_staleness or not self.in_flight:
            return True
        ahead = self.in_flight.num_microbatches + self.policy.num_microbatches(worker) - 1
        steps = (self._tokens + ahead * self.ledger.microbatch_tokens) // self._step_tokens
        return self.version + steps - self.in_flight.oldest_version <= self._max_staleness

    def _order(self, worker: int, member: Member, *, now_s: float) -> Order:
        count = self.policy.num_microbatches(worker)
        # A worker that asks before it is done begins with what it has.
        ahead = self.ledger.num_open(worker)
        deadline_s = now_s + self.policy.deadline_s(worker, ahead + count) * member.patience
        lease = self.ledger.issue(worker, member.incarnation, count, deadline_s=deadline_s, is_alone=self.num_live == 1)
        order = Order(
            worker=worker, incarnation=member.incarnation, epoch=self.epoch, version=self.version, lease=lease
        )
        self.in_flight.add(order)
        return order

    def _drop(self, worker: int, state: Literal["lost", "quarantined"]) -> None:
        member = self.members.get(worker)
        if member is None:
            return
        self.ledger.release(worker)
        self._parked.pop(worker, None)
        self.in_flight.drop(worker)
        self.policy.leave(worker)
        if member.state != "quarantined":
            member.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {
            "version": self.version,
            "epoch": self.epoch,
            "tokens": self._tokens,
            "num_accepted": self.num_accepted,
            "num_restarts": self.num_restarts,
            "rejected": dict(self.rejected),
            "staleness": self.staleness.items(),
            "members": [[worker, member.state_dict()] for worker, member in self.members.items()],
            "in_flight": self.in_flight.state_dict(),
            "parked": list(self._parked),
            "policy": self.policy.state_dict(),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; what was in flight is still out, see :meth:`resync`."""
        self.version, self.epoch, self._tokens = (int(state[name]) for name in ("version", "epoch", "tokens"))
        self.num_accepted, self.num_restarts = int(state["num_accepted"]), int(state["num_restarts"])
        self.rejected = collections.Counter(state["rejected"])
        self.staleness = Tally((staleness, count) for staleness, count in state["staleness"])
        self.members = {worker: Member.of_state(each) for worker, each in state["members"]}
        self.policy.load_state_dict(state["policy"])
        self.ledger.load_state_dict(state["ledger"])
        self.in_flight.clear()
        for lease_id, version in state["in_flight"]:
            lease = self.ledger.open_lease(lease_id)
            assert lease is not None
            self.in_flight.add(
                Order(
                    worker=lease.worker,
                    incarnation=lease.incarnation,
                    epoch=self.epoch,
                    version=version,
                    lease=lease,
                )
            )
        # An older version had [worker, time].
        self._parked = dict.fromkeys(each if isinstance(each, int) else each[0] for each in state["parked"])
