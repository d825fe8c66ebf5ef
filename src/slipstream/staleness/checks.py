"""Settings against staleness that have no effect, or make no sense together, each by its name."""

from slipstream.config import Config, StalenessConfig, coefficient_text
from slipstream.errors import ConfigError
from slipstream.staleness.async_checks import check_aalr, check_agc, check_bound

WITH_STRENGTH = ("dc_asgd", "dc_asgd_adaptive", "gradient_feedback")
"""Corrections that `correction_strength` is a factor of."""

WHOLE_UP_TO_ONE = ("inverse_staleness", "pipemare")
"""Discounts that are 1 at a staleness of 1 as well."""


def check_staleness(config: Config, *, delay: int | None, controls: bool = True) -> list[str]:
    """Check the settings of staleness against one another.

    Args:
        config: Resolved settings.
        delay: The largest that any batch has; ``None``: not known before the run.
        controls: Also say what is a control: what acts though nothing is stale.

    Returns:
        A sentence for each setting that has no effect at this delay, and one for a control.

    Raises:
        ConfigError: A number is out of its range, or settings make no sense together.
    """
    _check_ranges(config.staleness)
    check_pairs(config)
    idle_at_delay = [] if delay is None else _idle_at(config.staleness, delay, controls=controls)
    found = [*_idle(config.staleness), *idle_at_delay]
    return [*found, *check_agc(config, delay=delay), *check_aalr(config, delay=delay), *check_bound(config)]


def _check_ranges(staleness: StalenessConfig) -> None:
    for name in ("delay_stages", "sync_until_step", "sync_from_step", "lr_discount_steps", "prediction_steps"):
        value = getattr(staleness, name)
        if value < 0:
            raise ConfigError(f"staleness.{name} is {value}; it must be 0 or more.")


def check_pairs(config: Config) -> None:
    """Refuse settings that make no sense together.

    Raises:
        ConfigError: Names two of them.
    """
    staleness = config.staleness
    if staleness.error_feedback and staleness.prediction != "none":
        raise ConfigError(
            f"staleness.prediction is '{staleness.prediction}' and staleness.error_feedback is "
            f"{coefficient_text(staleness.error_feedback)}; both say what is published. Leave one out."
        )
    if staleness.error_feedback == "auto":
        if config.executor == "dataparallel":
            raise ConfigError(
                "staleness.error_feedback is 'auto' and the executor 'dataparallel', whose gradients have delays of "
                "their own; auto foretells one. Give a number for error_feedback, or take another executor."
            )
        for name in ("delay_weights", "delay_replay", "delay_stages", "delay_roles", "delay_blocks"):
            if getattr(staleness, name):
                raise ConfigError(
                    f"staleness.error_feedback is 'auto' and staleness.{name} is given; auto foretells one delay, the "
                    "same for all batches and parameters. Give staleness.delay alone, or a number for error_feedback."
                )
    if staleness.backward_weights != "read" and config.model.activation_checkpointing:
        raise ConfigError(
            f"staleness.backward_weights is '{staleness.backward_weights}' and model.activation_checkpointing is on; a "
            "backward on other weights needs the activations of the forward. Turn one of them off."
        )
    if 0 < staleness.sync_from_step <= staleness.sync_until_step + 1:
        raise ConfigError(
            f"staleness.sync_until_step is {staleness.sync_until_step} and staleness.sync_from_step is "
            f"{staleness.sync_from_step}; no update between them is delayed. Raise the second, or set staleness.delay "
            "to 0."
        )


def _idle(staleness: StalenessConfig) -> list[str]:
    """Return what has no effect at any delay."""
    found = []
    strength, correction = staleness.correction_strength, staleness.correction
    if correction not in WITH_STRENGTH and strength:
        found.append(
            f"staleness.correction_strength {strength:g} has no effect with correction '{correction}', which has none."
        )
    if correction in WITH_STRENGTH and not strength:
        found.append(f"staleness.correction '{correction}' has no effect with a correction_strength of 0.")
    if staleness.lr_discount == "pipemare" and not staleness.lr_discount_steps:
        found.append("staleness.lr_discount 'pipemare' has no effect with lr_discount_steps of 0.")
    if staleness.lr_discount != "pipemare" and staleness.lr_discount_steps:
        found.append(
            f"staleness.lr_discount_steps {staleness.lr_discount_steps} has no effect with lr_discount "
            f"'{staleness.lr_discount}'."
        )
    if staleness.prediction == "none" and staleness.prediction_steps:
        found.append(f"staleness.prediction_steps {staleness.prediction_steps:g} has no effect without a prediction.")
    return found


def _idle_at(staleness: StalenessConfig, delay: int, *, controls: bool) -> list[str]:
    """Return what has no effect at the delay, and, if wanted, what is a control there."""
    found = []
    is_whole = delay == 0 or (delay == 1 and staleness.lr_discount in WHOLE_UP_TO_ONE)
    if staleness.lr_discount != "none" and is_whole:
        found.append(
            f"staleness.lr_discount '{staleness.lr_discount}' has no effect at a delay of {delay}: the rate is whole."
        )
    if delay:
        return found
    default = StalenessConfig()
    idle = ["correction", "delay_roles", "delay_blocks", "backward_weights"]
    looks_ahead = bool(staleness.error_feedback and staleness.error_feedback != "auto")
    if staleness.error_feedback == "auto":
        idle.append("error_feedback")
    if staleness.prediction_steps:
        looks_ahead |= staleness.prediction != "none"
    else:
        idle.append("prediction")
    if not looks_ahead:
        idle += ["sync_until_step", "sync_from_step"]
    for name in idle:
        value = getattr(staleness, name)
        if value != getattr(default, name):
            shown = list(value) if isinstance(value, tuple) else value
            found.append(f"staleness.{name} {shown!r} has no effect at a delay of 0.")
    if looks_ahead and controls:
        name = "error_feedback" if staleness.error_feedback else "prediction"
        found.append(
            f"staleness.{name} at a delay of 0 is a control: it looks ahead though nothing is stale, which "
            "changes training and cures no delay."
        )
    return found
