"""Which microbatches were handed out, to whom, and what became of them. Imports no torch.

The data's order is endless and a pure function of its seed, so a microbatch is its number in that order::

    0                                          frontier
    |--committed--|open|--committed--|ret|open|  not yet issued ...

Everything below the frontier was issued, and is in exactly one of four states; the fourth is rare: dropped, because two
workers got no finite gradient of it.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slipstream.dataparallel.ranges import Range, RangeSet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """Microbatches that one worker computes the gradient of, once.

    Attributes:
        id: Never used twice.
        worker: Whose.
        incarnation: Of that worker.
        ranges: The microbatches, in order.
        deadline_s: When they are given to another, by the server's clock.
    """

    id: int
    worker: int
    incarnation: int
    ranges: tuple[Range, ...]
    deadline_s: float

    @property
    def num_microbatches(self) -> int:
        """How many."""
        return sum(stop - start for start, stop in self.ranges)

    def microbatches(self) -> Iterator[int]:
        """Yield their numbers."""
        for start, stop in self.ranges:
            yield from range(start, stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance:
    """The ledger's accounts, in tokens."""

    issued: int
    committed: int
    open: int
    returned: int
    dropped: int
    is_exact: bool
    """Whether every microbatch below the frontier is in exactly one account, and the pushes' own token counts add up to
    what is committed."""

    @property
    def holds(self) -> bool:
        """Whether nothing was lost and nothing counted twice."""
        return self.is_exact and self.issued == self.committed + self.open + self.returned + self.dropped


class Ledger:
    """Issues leases over the data and keeps account of them.

    What comes back goes out again before anything new, the oldest first: while a microbatch waits, the frontier stands
    still, so :attr:`lag` is bounded by what is issued within the deadlines of the leases it is part of.

    Of what a gradient was not finite is tried once more, by another worker: it tells a broken worker from broken data.

    Args:
        microbatch_tokens: Valid tokens of each microbatch.

    Cost:
        Memory by the number of open leases, not by the length of the run. A lease costs O(log leases) time.

    Example:
        >>> ledger = Ledger(microbatch_tokens=8)
        >>> first, second = (ledger.issue(worker, 1, 2, deadline_s=9.0) for worker in (0, 1))
        >>> ledger.commit(second.id, num_tokens=16)
        True
        >>> ledger.release(0)
        [Lease(id=0, worker=0, incarnation=1, ranges=((0, 2),), deadline_s=9.0)]
        >>> ledger.issue(1, 1, 3, deadline_s=9.0).ranges
        ((0, 2), (4, 5))
        >>> ledger.balance().holds
        True
    """

    def __init__(self, *, microbatch_tokens: int) -> None:
        self.microbatch_tokens = microbatch_tokens
        self.tokens_committed = 0
        self._frontier = 0
        self._next_id = 0
        self._committed = RangeSet()
        self._returned = RangeSet()
        self._dropped = RangeSet()
        # Microbatches that failed once, with the worker and the lease; and which of them wait for somebody else.
        self._suspects: dict[int, tuple[int, int]] = {}
        self._waiting: set[int] = set()
        self._open: dict[int, Lease] = {}
        self._of_worker: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def frontier(self) -> int:
        """The first microbatch that was never issued."""
        return self._frontier

    @property
    def lag(self) -> int:
        """Microbatches from the oldest that is neither committed nor dropped to the frontier."""
        at = 0
        for start, stop in sorted([*self._committed, *self._dropped]):
            if start != at:
                break
            at = stop
        return self._frontier - at

    @property
    def num_dropped(self) -> int:
        """Microbatches that are not trained on."""
        return len(self._dropped)

    @property
    def dropped(self) -> tuple[Range, ...]:
        """Those microbatches."""
        return tuple(self._dropped)

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline of an open lease; infinite where there is none."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def open_lease(self, lease_id: int) -> Lease | None:
        """Return a lease that is neither committed nor returned."""
        return self._open.get(lease_id)

    def num_open(self, worker: int) -> int:
        """Return the microbatches that a worker holds."""
        return sum(self._open[lease_id].num_microbatches for lease_id in self._of_worker.get(worker, ()))

    def issue(
        self, worker: int, incarnation: int, num_microbatches: int, *, deadline_s: float, is_alone: bool = False
    ) -> Lease:
        """Hand out microbatches: returned ones first, then new ones.

        Args:
            worker: To whom.
            incarnation: Of that worker.
            num_microbatches: How many.
            deadline_s: When they are given to another.
            is_alone: There is no other, so it is given also what it failed on.
        """
        suspects = self._take_suspects(worker, num_microbatches, is_alone=is_alone)
        ranges = self._returned.take(num_microbatches - len(suspects))
        if suspects:
            ranges = list(RangeSet([*ranges, *suspects]))
        missing = num_microbatches - sum(stop - start for start, stop in ranges)
        if missing > 0:
            ranges.append((self._frontier, self._frontier + missing))
            self._frontier += missing
        lease = Lease(
            id=self._next_id, worker=worker, incarnation=incarnation, ranges=tuple(ranges), deadline_s=deadline_s
        )
        self._next_id += 1
        self._hold(lease)
        return lease

    def commit(self, lease_id: int, *, num_tokens: int) -> bool:
        """Count a lease's microbatches as trained on.

        Args:
            lease_id: Of the lease.
            num_tokens: Valid tokens that the worker counted.

        Returns:
            Whether it was open; if not, nothing is counted.
        """
        lease = self._close(lease_id)
        if lease is None:
            return False
        for start, stop in lease.ranges:
            self._committed.add(start, stop)
        if self._suspects:
            for number in lease.microbatches():
                self._suspects.pop(number, None)
        self.tokens_committed += num_tokens
        return True

    def give_back(self, lease_id: int) -> bool:
        """Return a lease's microbatches, to be issued again; whether it was open."""
        lease = self._close(lease_id)
        if lease is None:
            return False
        self._return(lease.ranges if not self._suspects else ((each, each + 1) for each in lease.microbatches()))
        return True

    def fail(self, lease_id: int) -> dict[int, int]:
        """Return a lease's microbatches, whose gradient is not finite; those that failed before are dropped.

        Returns:
            The leases in which the dropped ones had failed before, and their workers, who were not to blame. Empty:
            nothing was dropped.
        """
        lease = self._close(lease_id)
        acquitted: dict[int, int] = {}
        for number in lease.microbatches() if lease is not None else ():
            first = self._suspects.pop(number, None)
            if first is None:
                assert lease is not None
                self._suspects[number] = (lease.worker, lease_id)
                self._waiting.add(number)
            else:
                acquitted[first[1]] = first[0]
                self._dropped.add(number, number + 1)
        return acquitted

    def release(self, worker: int) -> list[Lease]:
        """Return all that a worker holds: it is gone."""
        leases = [self._open[lease_id] for lease_id in sorted(self._of_worker.get(worker, ()))]
        for lease in leases:
            self.give_back(lease.id)
        return leases

    def expire(self, now_s: float) -> list[Lease]:
        """Return the leases whose deadline has passed."""
        late = []
        while self.next_deadline_s <= now_s:
            lease = self._open[heapq.heappop(self._deadlines)[1]]
            self.give_back(lease.id)
            late.append(lease)
        return late

    def skip_to(self, frontier: int) -> None:
        """Count all microbatches before one as trained on, by a run that kept no ledger."""
        assert self._frontier == 0
        if frontier:
            self._committed.add(0, frontier)
        self._frontier = frontier
        self.tokens_committed = frontier * self.microbatch_tokens

    def balance(self) -> Balance:
        """Add everything up, range by range."""
        leased = [each for lease in self._open.values() for each in lease.ranges]
        at = 0
        waiting = [(number, number + 1) for number in self._waiting]
        for start, stop in sorted([*self._committed, *self._returned, *waiting, *self._dropped, *leased]):
            at = stop if start == at else -1
        tokens = self.microbatch_tokens
        return Balance(
            issued=self._frontier * tokens,
            committed=self.tokens_committed,
            open=sum(stop - start for start, stop in leased) * tokens,
            returned=(len(self._returned) + len(self._waiting)) * tokens,
            dropped=len(self._dropped) * tokens,
            is_exact=at == self._frontier and self.tokens_committed == len(self._committed) * tokens,
        )

    def _take_suspects(self, worker: int, count: int, *, is_alone: bool) -> list[Range]:
        """Remove and return up to so many single microbatches that another worker failed on, the oldest first."""
        if not self._waiting:
            return []
        found = sorted(number for number in self._waiting if is_alone or self._suspects[number][0] != worker)[:count]
        self._waiting.difference_update(found)
        return [(number, number + 1) for number in found]

    def _return(self, ranges: Iterable[Range]) -> None:
        """Take ranges back, each of suspects alone or of none."""
        for start, stop in ranges:
            if start in self._suspects:
                self._waiting.add(start)
            else:
                self._returned.add(start, stop)

    def _hold(self, lease: Lease) -> None:
        self._open[lease.id] = lease
        self._of_worker.setdefault(lease.worker, set()).add(lease.id)
        heapq.heappush(self._deadlines, (lease.deadline_s, lease.id))

    def _close(self, lease_id: int) -> Lease | None:
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            self._of_worker[lease.worker].discard(lease_id)
        return lease

    def state_dict(self) -> dict[str, Any]:
        """Return the accounts as plain JSON values."""
        return {
            "frontier": self._frontier,
            "next_id": self._next_id,
            "tokens_committed": self.tokens_committed,
            "committed": list(self._committed),
            "returned": list(self._returned),
            "dropped": list(self._dropped),
            "suspects": [[number, *first] for number, first in self._suspects.items()],
            "waiting": sorted(self._waiting),
            "open": [dataclasses.asdict(lease) for lease in self._open.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._frontier, self._next_id = int(state["frontier"]), int(state["next_id"])
        self.tokens_committed = int(state["tokens_committed"])
        self._committed, self._returned = RangeSet(state["committed"]), RangeSet(state["returned"])
        # The rest is absent in a checkpoint of an older version.
        self._dropped, self._waiting = RangeSet(state.get("dropped", ())), set(state.get("waiting", ()))
        self._suspects = {number: (worker, lease_id) for number, worker, lease_id in state.get("suspects", ())}
        self._open, self._of_worker, self._deadlines = {}, {}, []
        for each in state["open"]:
            self._hold(Lease(**{**each, "ranges": tuple((start, stop) for start, stop in each["ranges"])}))
