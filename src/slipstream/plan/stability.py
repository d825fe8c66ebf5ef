r"""How large a step may be under delay: linear stability of momentum, delay and error feedback on a quadratic.

The recurrence is the one that training runs, for one direction of curvature h:

    g_t     = h x_{t - tau}                      the gradient, at the weights that batch t reads
    m_t     = beta m_{t-1} + (1 - beta) g_t      average of gradients (EMA: the factor 1 - beta is there)
    d_t     = m_t, with Nesterov (1 - beta) g_t + beta m_t
    y_{t+1} = y_t - lr d_t                       the optimizer's weights
    x_{t+1} = y_{t+1} + c (y_{t+1} - y_t)        the published weights

It has the solutions z^t for the roots z of

    (z - 1) (z - beta) z^(tau + 1) + lr h (1 - beta) N(z) ((1 + c) z - c),

with N(z) = z, and (1 + beta) z - beta with Nesterov: Nesterov *is* error feedback with c = beta, once more. Training
is stable while all roots lie inside the unit circle. For a small lr h they do; the limit is the *first* lr h at which
one reaches the circle, since a run comes to a large curvature from below.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from slipstream.errors import ConfigError

MAX_DELAY = 200
"""Beyond it the roots of the polynomials lose their digits."""

MAX_ERROR_FEEDBACK = 1000.0
"""In size; no limit of use lies beyond, and squares of far larger ones are beyond all floats."""

MAX_SIMULATED_MOMENTUM = 0.9995
"""A simulation takes 100 of its time constants."""

MAX_STABLE = "max_stable_lr_times_curvature"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """Largest stable learning rate times curvature under delay, for a momentum and an error-feedback coefficient."""

    momentum: float = 0.9
    """Weight beta of the past in the average of gradients, from 0 to below 1 (AdamW's first beta, Muon's momentum)."""
    delay: int = 1
    """Updates between the weights a gradient reads and the newest."""
    error_feedback: float = 0.0
    """Coefficient c of update-level error feedback."""
    nesterov: bool = False
    """Whether the update looks ahead along the average, as Muon's does by default."""

    def check(self) -> None:
        """Refuse numbers outside their range.

        Raises:
            ConfigError: One is.
        """
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum}; it must be from 0 to below 1.")
        if not 0 <= self.delay <= MAX_DELAY:
            raise ConfigError(f"delay is {self.delay}; it must be a whole number from 0 to {MAX_DELAY}.")
        if not abs(self.error_feedback) <= MAX_ERROR_FEEDBACK:
            most = f"{MAX_ERROR_FEEDBACK:g}"
            raise ConfigError(f"error_feedback is {self.error_feedback}; give a number from -{most} to {most}.")


def run_stability(config: StabilityConfig) -> dict[str, Any]:
    """Return the limit, what confirms it, and the best coefficient.

    Args:
        config: What to examine.

    Returns:
        The settings; ``max_stable_lr_times_curvature``; ``closed_form`` (the same from a formula, or ``None``);
        ``growth_at_98_percent`` and ``growth_at_102_percent``, the factor by which a simulated quadratic grows a step
        just below the limit and just above (``None``: for a momentum above 0.9995 it would take too many steps to tell
        them apart); ``best_error_feedback`` and ``best_max_stable_lr_times_curvature``.

    Raises:
        ConfigError: A setting is out of its range.

    Example:
        >>> found = run_stability(StabilityConfig(momentum=0.9, delay=1, error_feedback=1.0))
        >>> round(found["max_stable_lr_times_curvature"], 3)
        2.702
    """
    limit = max_stable_product(config)
    best, best_limit = best_error_feedback(config)
    is_simulated = config.momentum <= MAX_SIMULATED_MOMENTUM
    return {
        **dataclasses.asdict(config),
        MAX_STABLE: limit,
        "closed_form": closed_form(config),
        "growth_at_98_percent": simulated_growth(config, 0.98 * limit) if is_simulated else None,
        "growth_at_102_percent": simulated_growth(config, 1.02 * limit) if is_simulated else None,
        "best_error_feedback": best,
        f"best_{MAX_STABLE}": best_limit,
    }


def max_stable_product(config: StabilityConfig) -> float:
    r"""Return the largest lr h up to which the recurrence is stable.

    With ``P = A + lr h B``, a root stands on the unit circle at :math:`e^{i\theta}` where :math:`-A/B` is real, and
    lr h is its value. The imaginary part of :math:`A \bar B` is a sine series in :math:`\theta`, and a sine series is
    :math:`\sin\theta` times the derivative of a Chebyshev series in :math:`\cos\theta`. So all crossings are roots of
    one polynomial (by the eigenvalues of its companion matrix), none of which a scan could step over, and
    :math:`\theta = \pi`; the limit is the least positive one.

    Args:
        config: Momentum, delay, coefficient.

    Raises:
        ConfigError: A setting is out of its range.

    Cost:
        The eigenvalues of one matrix with about ``delay`` rows.
    """
    config.check()
    a, b = characteristic(config)
    n = len(a) - 1
    products = np.convolve(a, b[::-1])  # at n + d: the coefficient of exp(i d theta) in A conj(B)
    sines = products[n + 1 :] - products[n - 1 :: -1]
    cosines = chebyshev.chebroots(chebyshev.chebder([0.0, *(sines / np.arange(1, n + 1))]))
    real = cosines.real[np.abs(cosines.imag) < 1e-7]
    angles = [*np.arccos(real[np.abs(real) <= 1]), math.pi]
    z = np.exp(1j * np.array(angles))
    a_z, b_z = np.polyval(a[::-1], z), np.polyval(b[::-1], z)
    crossing = np.abs(b_z) > 1e-12  # where B vanishes no finite lr h leads to a root
    limits = -(a_z[crossing] / b_z[crossing]).real
    return float(limits[limits > 0].min())  # there is one: A has the higher degree, so some root leaves for infinity


def characteristic(config: StabilityConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the polynomials A and B of P(z) = A(z) + lr h B(z).

    Returns:
        Two arrays of ``delay + 4`` coefficients, from the constant one up.
    """
    beta, c = config.momentum, config.error_feedback
    a = np.zeros(config.delay + 4)
    a[-3:] = (beta, -1 - beta, 1.0)
    b = np.zeros_like(a)
    momentum = (-beta, 1 + beta) if config.nesterov else (0.0, 1.0)
    b[:3] = (1 - beta) * np.convolve(momentum, (-c, 1 + c))
    return a, b


def spectral_radius(config: StabilityConfig, product: float) -> float:
    """Return the largest modulus of an eigenvalue of the recurrence's companion matrix.

    Args:
        config: Momentum, delay, coefficient.
        product: lr h.

    Example:
        >>> config = StabilityConfig(momentum=0.9, delay=1)
        >>> spectral_radius(config, 0.99) < 1 < spectral_radius(config, 1.01)
        True
    """
    a, b = characteristic(config)
    return float(np.abs(np.roots((a + product * b)[::-1])).max())


def closed_form(config: StabilityConfig) -> float | None:
    r"""Return the limit where a formula is known.

    * delay 0: :math:`2 (1 + \beta) / ((1 - \beta)(1 + 2c))`;
    * delay 1: :math:`k / (1 - \beta)` with k the smaller of the positive roots of
      :math:`c^2 k^2 + (1 - c\beta) k = 1 - \beta` and :math:`c^2 k^2 - (1 - c\beta) k = 1 + \beta` (Jury's criterion
      for the cubic), which is exactly 1 for every beta at c = 0;
    * any delay, neither momentum nor error feedback: :math:`2 \sin(\pi / (2 (2\tau + 1)))`.

    Nesterov alone counts as c = beta. Formulas are for c of at least 0.

    Example:
        >>> closed_form(StabilityConfig(momentum=0.95, delay=1))
        1.0
    """
    config.check()
    beta, c = config.momentum, config.error_feedback
    if config.nesterov and beta:
        if c:
            return None
        c = beta
    if c < 0:
        return None
    if config.delay == 0:
        return 2 * (1 + beta) / ((1 - beta) * (1 + 2 * c))
    if beta == 0 and c == 0:
        return 2 * math.sin(math.pi / (2 * (2 * config.delay + 1)))
    if config.delay > 1:
        return None
    if c == 0:
        return 1.0
    slope, square = 1 - c * beta, c * c
    complex_pair = 2 * (1 - beta) / (slope + math.sqrt(slope**2 + 4 * square * (1 - beta)))
    other = 2 * (1 + beta) / (-slope + math.sqrt(slope**2 + 4 * square * (1 + beta)))
    return min(complex_pair, other) / (1 - beta)


def simulated_growth(config: StabilityConfig, product: float, *, num_steps: int | None = None) -> float:
    """Run the recurrence as it is written and return by which factor a step its state grows in the long run.

    Args:
        config: Momentum, delay, coefficient.
        product: lr h.
        num_steps: Steps; none: 100 time constants of the momentum, and at least 5000.

    Returns:
        Below 1: stable. Near the limit it is exact to about 1 / num_steps.
    """
    beta, c = config.momentum, config.error_feedback
    steps = num_steps or max(5000, round(100 / (1 - beta)), 100 * config.delay)
    y, average = 1.0, 0.0
    x = deque([1.0] * (config.delay + 1), maxlen=config.delay + 1)
    scale = [0.0]  # logarithm of what the state has been divided by
    for _ in range(steps):
        gradient = product * x[0]
        average = beta * average + (1 - beta) * gradient
        update = (1 - beta) * gradient + beta * average if config.nesterov else average
        y, before = y - update, y
        x.append(y + c * (y - before))
        size = max(abs(y), abs(before), abs(average), *map(abs, x)) or 1.0
        y, average = y / size, average / size
        x = deque((each / size for each in x), maxlen=config.delay + 1)
        scale.append(scale[-1] + math.log(size))
    half = steps // 2
    return math.exp((scale[-1] - scale[half]) / (steps - half))


def best_error_feedback(config: StabilityConfig) -> tuple[float, float]:
    """Return the coefficient of at least 0 with the largest limit, and that limit.

    The optimum is flat, and where error feedback only hurts it is 0.

    Args:
        config: Momentum and delay; its own coefficient does not matter.

    Example:
        >>> best, limit = best_error_feedback(StabilityConfig(momentum=0.9, delay=1))
        >>> 1.4 < best < 1.6, 3.0 < limit < 3.1
        (True, True)
    """

    def limit(c: float) -> float:
        return max_stable_product(dataclasses.replace(config, error_feedback=c))

    coarse = np.linspace(0.0, 2.0 * config.delay + 2.0, 41)
    best = int(np.argmax([limit(c) for c in coarse]))
    low, high = coarse[max(best - 1, 0)], coarse[min(best + 1, len(coarse) - 1)]
    fine = np.linspace(low, high, 41)
    limits = [limit(c) for c in fine]
    best = int(np.argmax(limits))
    return round(float(fine[best]), 6), limits[best]


def stability_text(config: StabilityConfig) -> str:
    """Return the limit and those around it as a table: a row a delay, a column a coefficient.

    Args:
        config: What to examine.

    Raises:
        ConfigError: A setting is out of its range.
    """
    found = run_stability(config)
    below, above = found["growth_at_98_percent"], found["growth_at_102_percent"]
    named = f"momentum {config.momentum:g}{', Nesterov' if config.nesterov else ''}"
    simulated = "not simulated" if below is None else f"x {below:.5f} a step 2 % below, x {above:.5f} a step 2 % above"
    lines = [
        f"{named}, delay {config.delay}, error feedback {config.error_feedback:g}: stable up to "
        f"lr x curvature = {found[MAX_STABLE]:.4g}",
        f"simulated quadratic: {simulated}"
        + ("" if found["closed_form"] is None else f"; closed form {found['closed_form']:.4g}"),
        "",
        f"largest stable lr x curvature at {named}",
        *_table(config, sorted({0, 1, 2, 3, 4, config.delay}), sorted({0, 0.5, 1, 1.5, 2, config.error_feedback})),
        "[ ] as asked; best c: the coefficient with the largest limit. Curvature is the loss's, in the optimizer's "
        "own metric.",
    ]
    return "\n".join(lines)


def _table(config: StabilityConfig, delays: Sequence[int], coefficients: Sequence[float]) -> list[str]:
    head = ["delay", *(f"c = {c:g}" for c in coefficients), "best c", "there"]
    rows = [head]
    for delay in delays:
        row = [str(delay)]
        for c in coefficients:
            each = dataclasses.replace(config, delay=delay, error_feedback=c)
            text = f"{max_stable_product(each):.3g}"
            row.append(f"[{text}]" if each == config else f"{text} ")
        best, limit = best_error_feedback(dataclasses.replace(config, delay=delay))
        rows.append([*row, f"{best:.2f}", f"{limit:.3g}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths)) for row in rows]
