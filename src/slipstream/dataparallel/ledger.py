"""Which microbatches were handed out, to whom, and what became of them. Imports no torch.

The data's order is endless and a pure function of its seed, so a microbatch is its number in that order::

    0                                          frontier
    |--committed--|open|--committed--|ret|open|  not yet issued ...

Everything below the frontier was issued, and is in exactly one of three states.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Range = tuple[int, int]
"""Microbatches from the first number to before the second."""


class RangeSet:
    """Whole numbers kept as disjoint ranges, touching ones merged.

    Example:
        >>> numbers = RangeSet([(0, 2), (5, 8)])
        >>> numbers.add(2, 5)
        >>> list(numbers), numbers.take(3), len(numbers)
        ([(0, 8)], [(0, 3)], 5)
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._size = 0
        for start, stop in ranges:
            self.add(start, stop)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Range]:
        return iter(zip(self._starts, self._stops))

    def add(self, start: int, stop: int) -> None:
        """Add a range of which no number is held yet.

        Raises:
            ValueError: Some are; whoever adds has lost count.
        """
        at = bisect.bisect_left(self._starts, start)
        left_stop = self._stops[at - 1] if at else -1
        right_start = self._starts[at] if at < len(self._starts) else None
        if stop <= start or left_stop > start or (right_start is not None and right_start < stop):
            raise ValueError(f"range {start} to {stop} is empty or held already")
        self._size += stop - start
        if left_stop == start and right_start == stop:
            self._starts.pop(at)
            self._stops.pop(at - 1)
        elif left_stop == start:
            self._stops[at - 1] = stop
        elif right_start == stop:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)

    def take(self, count: int) -> list[Range]:
        """Remove and return the ``count`` least numbers, or all where there are fewer."""
        taken: list[Range] = []
        while count > 0 and self._starts:
            start, stop = self._starts[0], min(self._stops[0], self._starts[0] + count)
            taken.append((start, stop))
            count -= stop - start
            self._size -= stop - start
            if stop == self._stops[0]:
                self._starts.pop(0)
                self._stops.pop(0)
            else:
                self._starts[0] = stop
        return taken


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
    is_exact: bool
    """Whether every microbatch below the frontier is in exactly one account, and the pushes' own token counts add up to
    what is committed."""

    @property
    def holds(self) -> bool:
        """Whether nothing was lost and nothing counted twice."""
        return self.is_exact and self.issued == self.committed + self.open + self.returned


class Ledger:
    """Issues leases over the data and keeps account of them.

    What comes back goes out again before anything new, the oldest first: while a microbatch waits, the frontier stands
    still, so :attr:`lag` is bounded by what is issued within the deadlines of the leases it is part of.

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
        self._open: dict[int, Lease] = {}
        self._of_worker: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def frontier(self) -> int:
        """The first microbatch that was never issued."""
        return self._frontier

    @property
    def lag(self) -> int:
        """Microbatches from the oldest that is not committed to the frontier."""
        first = next(iter(self._committed), (0, 0))
        return self._frontier - (first[1] if first[0] == 0 else 0)

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline of an open lease; infinite where there is none."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def open_lease(self, lease_id: int) -> Lease | None:
        """Return a lease that is neither committed nor returned."""
        return self._open.get(lease_id)

    def issue(self, worker: int, incarnation: int, num_microbatches: int, *, deadline_s: float) -> Lease:
        """Hand out microbatches: returned ones first, then new ones."""
        ranges = self._returned.take(num_microbatches)
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
        self.tokens_committed += num_tokens
        return True

    def give_back(self, lease_id: int) -> bool:
        """Return a lease's microbatches, to be issued again; whether it was open."""
        lease = self._close(lease_id)
        if lease is None:
            return False
        for start, stop in lease.ranges:
            self._returned.add(start, stop)
        return True

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
        for start, stop in sorted([*self._committed, *self._returned, *leased]):
            at = stop if start == at else -1
        tokens = self.microbatch_tokens
        return Balance(
            issued=self._frontier * tokens,
            committed=self.tokens_committed,
            open=sum(stop - start for start, stop in leased) * tokens,
            returned=len(self._returned) * tokens,
            is_exact=at == self._frontier and self.tokens_committed == len(self._committed) * tokens,
        )

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
            "open": [dataclasses.asdict(lease) for lease in self._open.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._frontier, self._next_id = int(state["frontier"]), int(state["next_id"])
        self.tokens_committed = int(state["tokens_committed"])
        self._committed, self._returned = RangeSet(state["committed"]), RangeSet(state["returned"])
        self._open, self._of_worker, self._deadlines = {}, {}, []
        for each in state["open"]:
            self._hold(Lease(**{**each, "ranges": tuple((start, stop) for start, stop in each["ranges"])}))
