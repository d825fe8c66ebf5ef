"""Counts of gradients or steps by their staleness."""

from collections.abc import Mapping

MAX_BARS = 24
"""Values of staleness with a bar of their own in a picture; larger ones share the last."""

Histogram = Mapping[int, int]
"""How often each staleness occurred."""


def from_json(found: Mapping[str, int]) -> dict[int, int]:
    """Return a histogram as a summary holds it, whose keys are texts there."""
    return {int(value): int(count) for value, count in found.items()}


def mean(histogram: Histogram) -> float | None:
    """Return the mean staleness; ``None`` of no counts."""
    total = sum(histogram.values())
    return sum(value * count for value, count in histogram.items()) / total if total else None


def capped(histogram: Histogram, last: int) -> list[int]:
    """Return the counts from 0 to the last bar, which holds what is staler, too.

    Example:
        >>> capped({0: 5, 2: 1, 9: 2}, 2)
        [5, 0, 3]
    """
    counts = [0] * (last + 1)
    for value, count in histogram.items():
        counts[min(value, last)] += count
    return counts


def bar_names(largest: int) -> list[str]:
    """Return what the bars are called, up to the largest staleness of all.

    Example:
        >>> bar_names(2), bar_names(1000)[-2:]
        (['0', '1', '2'], ['23', '24+'])
    """
    names = [str(value) for value in range(min(largest, MAX_BARS) + 1)]
    if largest > MAX_BARS:
        names[-1] += "+"
    return names
