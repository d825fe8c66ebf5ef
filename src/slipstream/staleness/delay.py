"""The read seam in one process: which version of the weights does a batch read?"""

import dataclasses

from slipstream.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DelayLine:
    """A constant delay: batch ``b`` reads version ``max(b - delay, 0)``.

    Computing on old weights that were kept and applying at once is the same sequence of updates as computing on the
    newest weights and holding the gradient back ``delay`` updates. A delay of 1 is the staleness of PipeDream-2BW at
    any number of stages: 0 for the first update, 1 for each later one.

    Args:
        delay: tau, in updates.

    Example:
        >>> line = DelayLine(2)
        >>> [line.read_version(batch) for batch in range(5)]
        [0, 0, 0, 1, 2]
        >>> line.num_versions
        3
    """

    delay: int

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise ConfigError(f"staleness.delay is {self.delay}; a delay is 0 or more updates.")

    @property
    def num_versions(self) -> int:
        """Versions that must be held at once."""
        return self.delay + 1

    def read_version(self, batch: int) -> int:
        """Return the version that batch ``batch`` (from 0) reads."""
        return max(batch - self.delay, 0)
