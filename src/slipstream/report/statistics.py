"""The statistics of a comparison: means, paired differences, ratios of them, and loss spikes.

Runs of one seed share initial weights and data order in every arm, so differences are taken seed by seed: what the seed
does to both arms alike falls out. All intervals are 95 % confidence intervals by Student's t.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

LEVEL = 0.95
"""Confidence of every interval."""

SPIKE_WINDOW = 128
"""Steps before a loss that it is compared with."""

SPIKE_SIGMAS = 6.0
"""Standard deviations above their mean from which on a loss is a spike."""

SPIKE_TEXT = f"more than {SPIKE_SIGMAS:g} standard deviations above the mean of the {SPIKE_WINDOW} steps before it"
"""What a spike is, in words."""

SMOOTHING = 0.05
"""Span of the smoothing of curves, as a share of the run."""

BySeed = Mapping[int, float]
"""A figure of each seed's run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and how well it is known.

    Attributes:
        mean: The figure.
        low: Lower end of its interval; ``None`` where there is none: a lone seed, or a ratio whose denominator might
            be 0.
        high: Upper end.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> list[float] | None:
        """Both ends, or ``None``."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    @property
    def ends(self) -> list[float]:
        """The figure and the ends of its interval."""
        return [each for each in (self.mean, self.low, self.high) if each is not None]

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def t_quantile(degrees: int, *, level: float = LEVEL) -> float:
    r"""Return t such that Student's variable lies in ``[-t, t]`` with probability ``level``.

    Args:
        degrees: Degrees of freedom, from 1.
        level: Probability, in (0, 1).

    Cost:
        60 halvings of a sum of ``degrees / 2`` terms.

    Example:
        >>> [round(t_quantile(degrees), 3) for degrees in (1, 2, 4, 30)]
        [12.706, 4.303, 2.776, 2.042]

    Source:
        Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: the distribution is a finite sum for whole degrees of freedom.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_probability(angle, degrees) < level else (low, angle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _t_probability(angle: float, degrees: int) -> float:
    """Return the probability of ``|t| < sqrt(degrees) tan(angle)``."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if is_odd else 2, degrees - 1, 2):
        # Odd: cos, 2/3 cos^3, 2*4/(3*5) cos^5, ...; even: 1, 1/2 cos^2, 1*3/(2*4) cos^4, ...
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its t-interval; a lone value has none.

    Args:
        values: At least one.

    Example:
        >>> mean([1.0, 2.0, 3.0]).interval  # doctest: +ELLIPSIS
        [-0.484..., 4.484...]
    """
    center = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean=center)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=center, low=center - half, high=center + half)


def paired(first: BySeed, second: BySeed) -> dict[int, float]:
    """Return ``first - second`` of the seeds that both have.

    Example:
        >>> paired({0: 2.5, 1: 2.0}, {1: 1.5, 2: 9.0})
        {1: 0.5}
    """
    return {seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())}


def ratio(numerator: BySeed, denominator: BySeed) -> Estimate | None:
    r"""Return the ratio of two paired means with Fieller's interval.

    The interval holds every R for which ``mean(numerator - R denominator)`` does not differ from 0 by a t-test. It is
    exact for normal differences at any number of seeds, where resampling three or five seeds is not. Where the
    denominator itself might be 0, no interval is bounded and none is given.

    Args:
        numerator: By seed.
        denominator: By seed.

    Returns:
        ``None`` where no seed has both, or the mean denominator is 0.

    Source:
        Fieller 1954, "Some problems in interval estimation", J. R. Stat. Soc. B 16.
    """
    seeds = sorted(numerator.keys() & denominator.keys())
    a, b = [numerator[seed] for seed in seeds], [denominator[seed] for seed in seeds]
    if not seeds or statistics.fmean(b) == 0:
        return None
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    center = mean_a / mean_b
    if len(seeds) < 2:
        return Estimate(mean=center)
    # mean(a - R b)^2 <= scale (s_aa - 2 R s_ab + R^2 s_bb) is a quadratic in R.
    scale = t_quantile(len(seeds) - 1) ** 2 / len(seeds)
    quadratic = mean_b**2 - scale * statistics.variance(b)
    linear = mean_a * mean_b - scale * statistics.covariance(a, b)
    constant = mean_a**2 - scale * statistics.variance(a)
    if quadratic <= 0:
        return Estimate(mean=center)
    root = math.sqrt(max(linear**2 - quadratic * constant, 0.0))
    return Estimate(mean=center, low=(linear - root) / quadratic, high=(linear + root) / quadratic)


def share_closed(gap: BySeed, plain_gap: BySeed) -> Estimate | None:
    """Return ``1 - mean gap / mean plain gap`` with Fieller's interval; see :func:`ratio`.

    Args:
        gap: Of an arm with a remedy, by seed.
        plain_gap: Of the same delay without one.

    Example:
        >>> share_closed({0: 0.1, 1: 0.1}, {0: 0.4, 1: 0.4}).mean
        0.75
    """
    left = ratio(gap, plain_gap)
    if left is None:
        return None
    if left.low is None or left.high is None:
        return Estimate(mean=1 - left.mean)
    return Estimate(mean=1 - left.mean, low=1 - left.high, high=1 - left.low)


def spikes(losses: Sequence[float], *, window: int = SPIKE_WINDOW, sigmas: float = SPIKE_SIGMAS) -> list[int]:
    """Return the steps (from 1) at which the loss spikes.

    A loss is a spike when it exceeds the mean of the ``window`` losses before it by more than ``sigmas`` of their
    standard deviations. Spikes in steps that follow each other are one, the first.

    Args:
        losses: One a step.
        window: Steps looked back on; the first ``window`` steps are judged by none.
        sigmas: Standard deviations.

    Example:
        >>> spikes([1.0, 1.1, 1.0, 1.1, 5.0, 5.0, 1.0], window=4)
        [5]
    """
    curve = np.asarray(losses, dtype=np.float64)
    if len(curve) <= window:
        return []
    before = np.lib.stride_tricks.sliding_window_view(curve[:-1], window)
    is_spike = curve[window:] > before.mean(axis=1) + sigmas * before.std(axis=1, ddof=1)
    begins = is_spike & ~np.concatenate(([False], is_spike[:-1]))
    return [int(position) + window + 1 for position in np.flatnonzero(begins)]


def smoothed_run(values: np.ndarray) -> np.ndarray:
    """Return a run's curve as pictures smooth it."""
    return np.array(smoothed(values.tolist(), span=max(round(SMOOTHING * len(values)), 2)))


def smoothed(values: Sequence[float], *, span: int) -> list[float]:
    """Return the exponential moving average, without the bias of its beginning.

    Args:
        values: A curve.
        span: Steps whose weight is alike: the weight of a value falls by ``1 - 2 / (span + 1)`` a step.

    Example:
        >>> smoothed([2.0, 2.0, 2.0], span=5)
        [2.0, 2.0, 2.0]
    """
    decay, total, weight, curve = 1 - 2 / (span + 1), 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        curve.append(total / weight)
    return curve
