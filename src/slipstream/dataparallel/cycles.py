"""How long workers took, and what that says of the next cycle. Imports no torch."""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

DEADLINE_FLOOR_S = 10.0
"""No lease expires earlier: a machine that is merely busy is not dead."""

FIRST_DEADLINE_S = 60.0
"""Where nothing was measured yet; or so many times what the worker expects itself, if that is more:"""

FIRST_DEADLINE_PACES = 6.0

OUTLIER_MADS = 5.0
DEADLINE_MADS = 6.0
NUM_FOR_A_SPREAD = 20
FEW_CYCLES_FACTOR = 3.0
"""So many cycles tell how far a worker strays; with fewer, three times the median is allowed at least."""

LEAST_MAD = 0.02
"""As a share of the median, so that clockwork workers do not make outliers of their rounding."""

NUM_FOR_A_NEW_PACE = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycle:
    """One lease, from its beginning to the arrival of its gradient.

    Attributes:
        num_microbatches: In the lease.
        num_tokens: Valid tokens.
        compute_s: Seconds of forward and backward.
        communication_s: Seconds to fetch weights and to push the gradient; without time spent parked.
    """

    num_microbatches: int
    num_tokens: int
    compute_s: float
    communication_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return self.compute_s + self.communication_s

    @property
    def pace_s(self) -> float:
        """Seconds a microbatch."""
        return self.total_s / self.num_microbatches


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a cycle of n microbatches: ``fixed_s + each_s * n``."""

    fixed_s: float
    each_s: float

    def of(self, num_microbatches: int) -> float:
        """Return the seconds of a cycle."""
        return self.fixed_s + self.each_s * num_microbatches


class CycleHistory:
    """The last cycles of one worker.

    Args:
        length: Cycles kept.
        expected_pace_s: Seconds a microbatch, as the worker guessed before its first cycle.
    """

    def __init__(self, *, length: int = 100, expected_pace_s: float = 0.0) -> None:
        self._expected_pace_s = expected_pace_s
        self._cycles: collections.deque[Cycle] = collections.deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._cycles)

    def observe(self, cycle: Cycle) -> None:
        """Add a cycle.

        Three outliers in a row on one side are no outliers but a new pace: what was before is dropped.
        """
        self._cycles.append(cycle)
        count = NUM_FOR_A_NEW_PACE
        if len(self._cycles) < 2 * count:
            return
        paces = [each.pace_s for each in self._cycles]
        middle, spread = median_and_mad(paces[:-count])
        recent = paces[-count:]
        if min(recent) > middle + OUTLIER_MADS * spread or max(recent) < middle - OUTLIER_MADS * spread:
            kept = list(self._cycles)[-count:]
            self._cycles.clear()
            self._cycles.extend(kept)

    def cost(self) -> Cost:
        """Fit the seconds of a cycle by the number of its microbatches.

        With one size of cycle alone, or where the fit is no sensible clock, there is no fixed part and the rest is the
        ratio of sums. The fixed part is at most half of a mean cycle, so that noise cannot promise free microbatches.
        """
        kept = self._ordinary()
        counts, times = [cycle.num_microbatches for cycle in kept], [cycle.total_s for cycle in kept]
        mean_n, mean_s = statistics.fmean(counts), statistics.fmean(times)
        variance = sum((n - mean_n) ** 2 for n in counts)
        if variance == 0:
            return Cost(0.0, mean_s / mean_n)
        slope = sum((n - mean_n) * (s - mean_s) for n, s in zip(counts, times)) / variance
        fixed = min(max(mean_s - slope * mean_n, 0.0), mean_s / 2)
        return Cost(fixed, (mean_s - fixed) / mean_n)

    def deadline_s(self, num_microbatches: int) -> float:
        """Return after how many seconds a cycle is given up: median + 6 MAD of the pace, at least 10 s."""
        if not self._cycles:
            return max(FIRST_DEADLINE_S, FIRST_DEADLINE_PACES * num_microbatches * self._expected_pace_s)
        middle, spread = median_and_mad([cycle.pace_s for cycle in self._cycles])
        allowed = middle + DEADLINE_MADS * spread
        if len(self._cycles) < NUM_FOR_A_SPREAD:
            allowed = max(allowed, FEW_CYCLES_FACTOR * middle)
        return max(DEADLINE_FLOOR_S, num_microbatches * allowed)

    def _ordinary(self) -> list[Cycle]:
        middle, spread = median_and_mad([cycle.pace_s for cycle in self._cycles])
        return [cycle for cycle in self._cycles if cycle.pace_s <= middle + OUTLIER_MADS * spread]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the cycles as plain JSON values."""
        return [dataclasses.asdict(cycle) for cycle in self._cycles]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._cycles.clear()
        self._cycles.extend(Cycle(**each) for each in state)


def median_and_mad(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the median absolute deviation from it, at least 2 % of the median.

    Example:
        >>> median_and_mad([1.0, 2.0, 9.0])
        (2.0, 1.0)
    """
    if not values:
        return 0.0, 0.0
    middle = statistics.median(values)
    return middle, max(statistics.median(abs(value - middle) for value in values), LEAST_MAD * middle)
