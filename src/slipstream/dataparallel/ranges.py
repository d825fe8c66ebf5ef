"""Sets of whole numbers that are mostly contiguous. Imports no torch."""

import bisect
from collections.abc import Iterable, Iterator

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
