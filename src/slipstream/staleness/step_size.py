"""The step-size seam: how big a step at this staleness?"""

from typing import Protocol

from slipstream.config import StalenessConfig


class StepSize(Protocol):
    """A factor beside the learning-rate schedule's; exactly 1 without staleness."""

    def factor(self, *, update: int, staleness: int) -> float:
        """Return the factor of an update.

        Args:
            update: From 1.
            staleness: Of its gradient.
        """


class FullStep:
    """No discount."""

    def factor(self, *, update: int, staleness: int) -> float:
        """Return 1."""
        return 1.0


class InverseStaleness:
    """Divide the rate by the staleness.

    Source:
        Zhang, Gupta, Lian, Liu 2016, arXiv 1511.05950.
    """

    def factor(self, *, update: int, staleness: int) -> float:
        """Return 1 / max(staleness, 1)."""
        return 1.0 / max(staleness, 1)


class PipeMareDiscount:
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

    def factor(self, *, update: int, staleness: int) -> float:
        """Return the factor."""
        lifted = min(update / self.num_steps, 1.0) if self.num_steps > 0 else 1.0
        return float(max(staleness, 1) ** -(1.0 - lifted))


def build_step_size(config: StalenessConfig) -> StepSize:
    """Return the discount that the settings name."""
    match config.lr_discount:
        case "inverse_staleness":
            return InverseStaleness()
        case "pipemare":
            return PipeMareDiscount(config.lr_discount_steps)
        case "none":
            return FullStep()
