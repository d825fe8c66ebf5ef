"""The read seam in one process: which version of the weights does a batch read?"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from slipstream.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DelayLine:
    """Batch ``b`` reads version ``max(b - delay, 0)``, forward and backward.

    Computing on old weights that were kept and applying at once is the same sequence of updates as computing on the
    newest weights and holding the gradient back ``delay`` updates. A delay of 1 is the staleness of PipeDream-2BW at
    any number of stages: 0 for the first update, 1 for each later one.

    Args:
        delay: tau, in updates: of every batch, or the largest where ``draw`` or ``leaf_delays`` name others.
        draw: Delay of a batch, a pure function of its index, so that a resumed run draws the same.
        leaf_delays: Delays of single parameters; those left out have none. The delay of the batch is their upper
            bound, so a batch without delay has none anywhere.
        sync_until: Batches before this one have no delay (a synchronous start).
        sync_from: Batches from this one on have none (a synchronous cool-down).

    Example:
        >>> line = DelayLine(2)
        >>> [line.read_version(batch) for batch in range(5)]
        [0, 0, 0, 1, 2]
        >>> line.num_versions
        3
    """

    delay: int
    draw: Callable[[int], int] | None = None
    leaf_delays: Mapping[str, int] | None = None
    sync_until: int = 0
    sync_from: int | None = None

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise ConfigError(f"staleness.delay is {self.delay}; a delay is 0 or more updates.")

    @property
    def num_versions(self) -> int:
        """Versions that must be held at once."""
        return self.delay + 1

    def delay_of(self, batch: int) -> int:
        """Return the delay of a batch, in updates."""
        if batch < self.sync_until or (self.sync_from is not None and batch >= self.sync_from):
            return 0
        return self.delay if self.draw is None else self.draw(batch)

    def leaf_delay(self, leaf: str) -> int:
        """Return the configured delay of a leaf: the largest where it is drawn."""
        return self.delay if self.leaf_delays is None else min(self.leaf_delays.get(leaf, 0), self.delay)

    def read_version(self, batch: int) -> int:
        """Return the oldest version that batch ``batch`` (from 0) reads."""
        delay = self.delay_of(batch)
        if self.leaf_delays is not None:
            delay = min(delay, max(self.leaf_delays.values(), default=0))
        return max(batch - delay, 0)

    def read_versions(self, batch: int, leaves: Iterable[str]) -> dict[str, int]:
        """Return the version that a batch reads of each leaf."""
        delay = self.delay_of(batch)
        if self.leaf_delays is None:
            return dict.fromkeys(leaves, max(batch - delay, 0))
        return {leaf: max(batch - min(delay, self.leaf_delays.get(leaf, 0)), 0) for leaf in leaves}


def drawn_delays(weights: Sequence[float], *, seed: int) -> Callable[[int], int]:
    """Return delays drawn from a distribution, independently for each batch.

    Args:
        weights: Relative probability of a delay of 0, 1, 2, ...; need not sum to 1.
        seed: Of the draws.

    Raises:
        ConfigError: A weight is negative, or none is positive.

    Example:
        >>> draw = drawn_delays([0, 0, 1], seed=0)
        >>> draw(0), draw(7)
        (2, 2)
    """
    if not weights or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ConfigError(
            f"staleness.delay_weights is {list(weights)}; give the relative probabilities of a delay of 0, 1, 2, ..., "
            "none negative and one at least positive."
        )
    choices = range(len(weights))
    return lambda batch: random.Random(f"{seed}/{batch}").choices(choices, weights)[0]


def replayed_delays(recorded: Sequence[int]) -> Callable[[int], int]:
    """Return the delays of a recorded run, from its first update on, again from there when they end.

    Raises:
        ConfigError: Nothing was recorded.

    Example:
        >>> [replayed_delays([0, 1, 3])(batch) for batch in range(5)]
        [0, 1, 3, 0, 1]
    """
    if not recorded:
        raise ConfigError("staleness.delay_replay names a run without updates; record one first.")
    return lambda batch: recorded[batch % len(recorded)]
