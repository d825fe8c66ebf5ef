"""A virtual clock: events in order of time, and of their scheduling where times are equal. Imports no torch."""

import heapq
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """What will happen when; time stands still while an event is handled.

    Args:
        now_s: Where the clock begins, in seconds.

    Example:
        >>> queue: EventQueue[str] = EventQueue()
        >>> queue.schedule(2.0, "late")
        >>> queue.schedule(1.0, "early")
        >>> queue.pop(), queue.now_s
        ('early', 1.0)
    """

    def __init__(self, *, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._heap: list[tuple[float, int, T]] = []
        self._num_scheduled = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """Time of the next event; infinite where there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def schedule(self, at_s: float, event: T) -> None:
        """Let an event happen at a time; one in the past happens next."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._num_scheduled, event))
        self._num_scheduled += 1

    def pop(self) -> T:
        """Go to the next event and return it."""
        self.now_s, _, event = heapq.heappop(self._heap)
        return event

    def advance(self, to_s: float) -> None:
        """Let time pass up to a moment before the next event."""
        assert to_s <= self.next_s
        self.now_s = max(self.now_s, to_s)

    def pending(self) -> list[tuple[float, T]]:
        """Return all events with their times, in the order in which they will happen."""
        return [(at_s, event) for at_s, _, event in sorted(self._heap, key=lambda entry: entry[:2])]

    def restore(self, now_s: float, pending: Iterable[tuple[float, T]]) -> None:
        """Hold what :meth:`pending` gave."""
        self.now_s = now_s
        self._heap = []
        for at_s, event in pending:
            self.schedule(at_s, event)
