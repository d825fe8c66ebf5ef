"""The step-size seam: how big a step at this staleness?"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream.config import StalenessConfig
from slipstream.staleness.aalr import AsyncAwareLr


class StepSize(Protocol):
    """A factor beside the learning-rate schedule's; exactly 1 without staleness."""

    def factor(self, *, update: int, stalenesses: Sequence[int]) -> float:
        """Return the factor of an update.

        Args:
            update: From 1.
            stalenesses: Of each gradient that it is made of, in the order of their arrival.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""


class _Stateless:
    """A discount that remembers nothing from one update to the next."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


class FullStep(_Stateless):
    """No discount."""

    def factor(self, *, update: int, stalenesses: Sequence[int]) -> float:
        """Return 1."""
        return 1.0


class InverseStaleness(_Stateless):
    """Divide the rate by the staleness.

    Source:
        Zhang, Gupta, Lian, Liu 2016, arXiv 1511.05950.
    """

    def factor(self, *, update: int, stalenesses: Sequence[int]) -> float:
        """Return 1 / max(staleness, 1); of several gradients the mean of each one's, in whatever order they came."""
        return statistics.fmean(1.0 / max(each, 1) for each in stalenesses)


class PipeMareDiscount(_Stateless):
    r"""PipeMare's T1: a discount by the staleness that is lifted over the first steps.

    .. math:: \tau^{-(1 - \min(k / K, 1))}

    Args:
        num_steps: K, updates until the whole rate is used.

    Source:
        Yang et al. 2020, arXiv 1910.05124, technique 1.

    Differs:
        At a staleness of 0 and 1 the factor is 1, so with a delay of one step it does nothing.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def factor(self, *, update: int, stalenesses: Sequence[int]) -> float:
        """Return the factor; of several gradients the mean of each one's, in whatever order they came."""
        lifted = min(update / self.num_steps, 1.0) if self.num_steps > 0 else 1.0
        return statistics.fmean(max(each, 1) ** -(1.0 - lifted) for each in stalenesses)


def build_step_size(config: StalenessConfig, *, num_in_flight: int | None = None) -> StepSize:
    """Return the discount that the settings name.

    Args:
        config: The settings.
        num_in_flight: Gradients being computed at once; ``None``: one more than the delay.
    """
    match config.lr_discount:
        case "inverse_staleness":
            return InverseStaleness()
        case "pipemare":
            return PipeMareDiscount(config.lr_discount_steps)
        case "aalr":
            in_flight = (config.delay or 0) + 1 if num_in_flight is None else num_in_flight
            return AsyncAwareLr(config.aalr_threshold, num_in_flight=in_flight)
        case "none":
            return FullStep()
