"""The async-aware learning rate: smaller steps where gradients are staler than their number in flight explains."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from slipstream.errors import ConfigError

AUTO_MARGIN = 1.5
"""The automatic threshold as a multiple of the mean staleness that the number of gradients in flight must give."""

MIN_FACTOR = 0.1
RISE = 1.02
"""Largest growth of the factor from one update to the next; it falls at once."""


class AsyncAwareLr:
    r"""Discount the rate by the mean staleness of the last gradients.

    .. math:: f = \min(1, \tau_{thresh} / \bar\tau)

    and exactly 1 while :math:`\bar\tau \le \tau_{thresh}`. Down at once, up by 2 % an update, never below 0.1.

    With C gradients in flight and k of them to an update, the mean staleness is (C - 1) / k whatever the speeds of the
    workers are. So a fixed threshold below that is not a guard but a constant cut of the rate; the threshold ``auto``
    is 1.5 (C - 1) / k, and follows workers that come and go.

    Args:
        threshold: ``"auto"``, or a mean staleness in updates.
        num_in_flight: C, gradients being computed or on their way.
        gradients_per_update: k.
        window: Gradients averaged over; where there are more than a quarter as many in flight, 4 C.

    Cost:
        Some numbers.

    Source:
        AsyncLM, ACL 2025, from a description.

    Differs:
        The source has a fixed threshold.

    Example:
        >>> aalr = AsyncAwareLr(2.0, num_in_flight=5, gradients_per_update=1)
        >>> aalr.factor(update=1, stalenesses=[2]), aalr.factor(update=2, stalenesses=[6])
        (1.0, 0.5)
    """

    def __init__(
        self,
        threshold: float | Literal["auto"] = "auto",
        *,
        num_in_flight: int,
        gradients_per_update: float = 1.0,
        window: int = 100,
    ) -> None:
        if threshold != "auto" and not 0 <= threshold < math.inf:
            raise ConfigError(
                f"staleness.aalr_threshold is {threshold}; give 'auto' or a mean staleness of 0 or more updates."
            )
        self._fixed = None if threshold == "auto" else float(threshold)
        self._window = window
        self._factor = 1.0
        # Each staleness with the threshold of its time: when workers leave, old ones are not held against the new C.
        self._seen: collections.deque[tuple[float, float]] = collections.deque()
        self.set_concurrency(num_in_flight=num_in_flight, gradients_per_update=gradients_per_update)

    def set_concurrency(self, *, num_in_flight: int, gradients_per_update: float = 1.0) -> None:
        """Say how many gradients are in flight from now on; to be called when a worker joins or leaves.

        Args:
            num_in_flight: C, of live workers.
            gradients_per_update: k.
        """
        assert num_in_flight >= 0
        assert gradients_per_update > 0
        self._num_in_flight = num_in_flight
        self._gradients_per_update = gradients_per_update

    @property
    def threshold(self) -> float:
        """Mean staleness above which the rate is cut, now."""
        if self._fixed is not None:
            return self._fixed
        return AUTO_MARGIN * expected_staleness(self._num_in_flight, self._gradients_per_update)

    def factor(self, *, update: int, stalenesses: Sequence[int]) -> float:
        """Take the staleness of an update's gradients and return the factor on the rate.

        Args:
            update: From 1; not looked at.
            stalenesses: Of each gradient.
        """
        self._seen.extend((float(staleness), self.threshold) for staleness in stalenesses)
        while len(self._seen) > max(self._window, 4 * self._num_in_flight):
            self._seen.popleft()
        aim = self._aim()
        self._factor = aim if aim <= self._factor else min(aim, self._factor * RISE)
        return self._factor

    def _means(self) -> tuple[float, float]:
        """Return the mean staleness of the window and the mean threshold."""
        count = max(len(self._seen), 1)
        mean = math.fsum(staleness for staleness, _ in self._seen) / count
        if self._fixed is not None:
            return mean, self._fixed
        return mean, math.fsum(threshold for _, threshold in self._seen) / count

    def _aim(self) -> float:
        mean, threshold = self._means()
        return 1.0 if mean <= threshold else max(threshold / mean, MIN_FACTOR)

    def metrics(self) -> dict[str, float]:
        """Return the factor, which is its own, and what it was made of."""
        mean, threshold = self._means()
        return {"aalr/factor": self._factor, "aalr/mean_staleness": mean, "aalr/threshold": threshold}

    def warning(self, *, num_in_flight: int, gradients_per_update: float = 1.0) -> str | None:
        """Return a sentence where a fixed threshold would always bite, with the factor it comes to.

        Args:
            num_in_flight: C.
            gradients_per_update: k.

        Example:
            >>> AsyncAwareLr(1.0, num_in_flight=5).warning(num_in_flight=5)  # doctest: +ELLIPSIS
            "staleness.aalr_threshold 1 is below the mean staleness of 4 that 5 gradients in flight ... by 0.25 ..."
            >>> AsyncAwareLr("auto", num_in_flight=5).warning(num_in_flight=5)
        """
        expected = expected_staleness(num_in_flight, gradients_per_update)
        if self._fixed is None or expected <= self._fixed:
            return None
        factor = max(self._fixed / expected, MIN_FACTOR)
        return (
            f"staleness.aalr_threshold {self._fixed:g} is below the mean staleness of {expected:g} that "
            f"{num_in_flight} gradients in flight at {gradients_per_update:g} an update always have: every rate would "
            f"be multiplied by {factor:.3g} for the whole run. Use 'auto', a threshold above {expected:g}, or say the "
            "rate that you want with optim.lr."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain JSON values."""
        return {
            "factor": self._factor,
            "seen": [list(pair) for pair in self._seen],
            "num_in_flight": self._num_in_flight,
            "gradients_per_update": self._gradients_per_update,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave, but for the number in flight: who resumes may have another."""
        self._factor = float(state["factor"])
        self._seen = collections.deque((float(staleness), float(threshold)) for staleness, threshold in state["seen"])

    def load_concurrency(self, state: Mapping[str, Any]) -> None:
        """Take back the number in flight as well, of workers that are all still at work."""
        self.set_concurrency(
            num_in_flight=int(state["num_in_flight"]), gradients_per_update=float(state["gradients_per_update"])
        )


def expected_staleness(num_in_flight: int, gradients_per_update: float) -> float:
    """Return the mean staleness of C gradients in flight and k an update, (C - 1) / k, whatever the workers' speeds."""
    return max(num_in_flight - 1, 0) / gradients_per_update
