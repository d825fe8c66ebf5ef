"""Counts of staleness. Imports no torch."""

from collections.abc import Iterable


class Tally:
    """How often each staleness occurred.

    Example:
        >>> tally = Tally()
        >>> for staleness in (0, 2, 2):
        ...     tally.add(staleness)
        >>> tally.mean, tally.largest, tally.counts
        (1.3333333333333333, 2, {0: 1, 2: 2})
    """

    def __init__(self, counts: Iterable[tuple[int, int]] = ()) -> None:
        self.counts: dict[int, int] = dict(counts)

    def add(self, staleness: int) -> None:
        """Count one."""
        self.counts[staleness] = self.counts.get(staleness, 0) + 1

    @property
    def total(self) -> int:
        """How many were counted."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """The mean; 0 where nothing was counted."""
        return sum(staleness * count for staleness, count in self.counts.items()) / max(self.total, 1)

    @property
    def largest(self) -> int:
        """The maximum; 0 where nothing was counted."""
        return max(self.counts, default=0)

    def items(self) -> list[tuple[int, int]]:
        """Return the counts in order of staleness."""
        return sorted(self.counts.items())
