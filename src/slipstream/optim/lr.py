"""The learning rate over a run, as a fraction of its peak."""

import math

from slipstream.errors import ConfigError, nearest

SCHEDULES = ("cosine", "linear", "constant")
"""Shapes of the decay after the warm-up."""


def lr_factor(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    schedule: str = "cosine",
    final_fraction: float = 0.1,
) -> float:
    """Return the learning rate of update ``step`` divided by the peak rate.

    It rises as ``step / warmup_steps`` to exactly 1 at ``step == warmup_steps`` (without warm-up the first update has
    the peak), falls along ``schedule`` to exactly ``final_fraction`` at ``total_steps``, and stays as it is there.
    With q the part of the decay that is over: cosine ``f + (1 - f) (1 + cos(pi q)) / 2``, linear
    ``f + (1 - f) (1 - q)``.

    Args:
        step: Number of the update, from 1. A skipped update does not count.
        warmup_steps: Updates of the rise, 0 to ``total_steps``.
        total_steps: Update that has the final rate, at least 1.
        schedule: ``cosine``, ``linear`` or ``constant`` (which ignores ``final_fraction``).
        final_fraction: f, 0 to 1.

    Returns:
        The factor, 0 to 1.

    Raises:
        ConfigError: A value is outside its range, or the schedule is unknown.

    Example:
        >>> [lr_factor(k, warmup_steps=2, total_steps=4, schedule="linear", final_fraction=0.0) for k in range(1, 6)]
        [0.5, 1.0, 0.5, 0.0, 0.0]

    Source:
        Loshchilov and Hutter, "SGDR" (2016, arXiv 1608.03983, eq. 5), one cycle.
    """
    if step < 1:
        raise ConfigError(f"updates are counted from 1, given step {step}.")
    check_schedule(warmup_steps=warmup_steps, total_steps=total_steps, schedule=schedule, final_fraction=final_fraction)
    step = min(step, total_steps)
    if step < warmup_steps:
        return step / warmup_steps
    peak_step = max(warmup_steps, 1)
    if step == peak_step or schedule == "constant":
        return 1.0
    progress = (step - peak_step) / (total_steps - peak_step)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return final_fraction + (1 - final_fraction) * left


def check_schedule(*, warmup_steps: int, total_steps: int, schedule: str, final_fraction: float) -> None:
    """Refuse a schedule that :func:`lr_factor` cannot follow.

    Args:
        warmup_steps: As for :func:`lr_factor`.
        total_steps: As for :func:`lr_factor`.
        schedule: As for :func:`lr_factor`.
        final_fraction: As for :func:`lr_factor`.

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
