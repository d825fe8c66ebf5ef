"""The learning rate over a run, as a fraction of its peak."""

import math
from collections.abc import Callable
from functools import partial

from slipstream.config import OptimConfig
from slipstream.errors import ConfigError, nearest

SCHEDULES = ("cosine", "linear", "constant", "wsd")
"""Shapes of what follows the warm-up."""


def rate_factor(cfg: OptimConfig, *, num_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak rate by update, from 1; see :func:`lr_factor`.

    Args:
        cfg: The settings.
        num_steps: Updates of the run, which are the schedule's total where the settings name none.
    """
    return partial(
        lr_factor,
        warmup_steps=cfg.lr_warmup_steps,
        total_steps=cfg.lr_total_steps or num_steps,
        schedule=cfg.lr_schedule,
        final_fraction=cfg.lr_final_fraction,
        decay_fraction=cfg.lr_decay_fraction,
    )


def lr_factor(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    schedule: str = "cosine",
    final_fraction: float = 0.1,
    decay_fraction: float = 0.2,
) -> float:
    """Return the learning rate of update ``step`` divided by the peak rate.

    It rises as ``step / warmup_steps`` to exactly 1 at ``step == warmup_steps`` (without warm-up the first update has
    the peak), falls along ``schedule`` to exactly ``final_fraction`` at ``total_steps``, and stays as it is there.
    With q the part of the decay that is over: cosine ``f + (1 - f) (1 + cos(pi q)) / 2``, linear
    ``f + (1 - f) (1 - q)``, wsd (warm-up, stable, decay) ``f + (1 - f) (1 - sqrt(q))``, whose decay begins only
    ``decay_fraction total_steps`` updates before the end.

    Args:
        step: Number of the update, from 1; a skipped one counts.
        warmup_steps: Updates of the rise, 0 to ``total_steps``.
        total_steps: Update that has the final rate, at least 1.
        schedule: ``cosine``, ``linear``, ``constant`` (which ignores ``final_fraction``) or ``wsd``.
        final_fraction: f, 0 to 1.
        decay_fraction: Share of all updates that the decay of ``wsd`` takes, above 0 to 1; the others ignore it.

    Returns:
        The factor, 0 to 1.

    Raises:
        ConfigError: A value is outside its range, or the schedule is unknown.

    Example:
        >>> [lr_factor(k, warmup_steps=2, total_steps=4, schedule="linear", final_fraction=0.0) for k in range(1, 6)]
        [0.5, 1.0, 0.5, 0.0, 0.0]
        >>> wsd = {"schedule": "wsd", "final_fraction": 0.0, "decay_fraction": 0.5}
        >>> [lr_factor(k, warmup_steps=2, total_steps=8, **wsd) for k in (1, 2, 4, 5, 8)]
        [0.5, 1.0, 1.0, 0.5, 0.0]

    Source:
        Loshchilov and Hutter, "SGDR" (2016, arXiv 1608.03983, eq. 5), one cycle. Warm-up, stable, decay: Hu et al.,
        "MiniCPM" (2024, arXiv 2404.06395); its form 1 - sqrt(q), and a fifth of all updates: Haegele et al.,
        "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024, arXiv 2405.18392, eq. 1),
        who end at 0.
    """
    if step < 1:
        raise ConfigError(f"updates are counted from 1, given step {step}.")
    check_schedule(
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        schedule=schedule,
        final_fraction=final_fraction,
        decay_fraction=decay_fraction,
    )
    step = min(step, total_steps)
    if step < warmup_steps:
        return step / warmup_steps
    peak_step = max(warmup_steps, 1)
    if schedule == "wsd":
        peak_step = max(peak_step, total_steps - decay_steps(total_steps, decay_fraction))
    if step <= peak_step or schedule == "constant":
        return 1.0
    progress = (step - peak_step) / (total_steps - peak_step)
    left = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "wsd": 1 - math.sqrt(progress),
    }[schedule]
    return final_fraction + (1 - final_fraction) * left


def decay_steps(total_steps: int, decay_fraction: float) -> int:
    """Return the updates over which ``wsd`` lets the rate fall, at least 1.

    Example:
        >>> decay_steps(1000, 0.2), decay_steps(3, 0.1)
        (200, 1)
    """
    return max(round(decay_fraction * total_steps), 1)


def check_schedule(
    *, warmup_steps: int, total_steps: int, schedule: str, final_fraction: float, decay_fraction: float = 0.2
) -> None:
    """Refuse a schedule that :func:`lr_factor` cannot follow.

    Args:
        warmup_steps: As for :func:`lr_factor`.
        total_steps: As for :func:`lr_factor`.
        schedule: As for :func:`lr_factor`.
        final_fraction: As for :func:`lr_factor`.
        decay_fraction: As for :func:`lr_factor`.

    Raises:
        ConfigError: With what was given, what is allowed and what to do.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"lr_schedule is {schedule!r}.{nearest(schedule, SCHEDULES)} Allowed: {', '.join(SCHEDULES)}."
        )
    if total_steps < 1:
        raise ConfigError(f"the learning-rate schedule needs at least 1 update in all, given {total_steps}.")
    if warmup_steps < 0:
        raise ConfigError(f"lr_warmup_steps must be at least 0, given {warmup_steps}.")
    if warmup_steps > total_steps:
        raise ConfigError(
            f"lr_warmup_steps {warmup_steps} is longer than the schedule's {total_steps} updates. Allowed: 0 to "
            f"{total_steps}. Shorten lr_warmup_steps, or raise lr_total_steps."
        )
    if not 0 <= final_fraction <= 1:
        raise ConfigError(f"lr_final_fraction must be from 0 to 1, given {final_fraction}.")
    if not 0 < decay_fraction <= 1:
        raise ConfigError(
            f"lr_decay_fraction must be above 0 and at most 1, given {decay_fraction}. 0.2 is usual; for no decay at "
            "all take lr_schedule 'constant'."
        )
    falling = decay_steps(total_steps, decay_fraction)
    if schedule == "wsd" and warmup_steps + falling > total_steps:
        raise ConfigError(
            f"the warm-up of {warmup_steps} updates and the decay of {falling} (lr_decay_fraction "
            f"{decay_fraction:g} of {total_steps}) overlap: together they may be at most {total_steps}. Shorten "
            "lr_warmup_steps or lr_decay_fraction, or raise lr_total_steps."
        )
