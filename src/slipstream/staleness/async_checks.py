"""Settings of the gradient compensator and of the async-aware rate that make no sense where they are given."""

from slipstream.config import AgcConfig, Config
from slipstream.errors import ConfigError
from slipstream.staleness.aalr import AsyncAwareLr

COMPENSATORS = ("agc", "agc_damping")


def check_agc(config: Config, *, delay: int | None) -> list[str]:
    """Check the compensator's settings.

    Args:
        config: Resolved settings.
        delay: The largest that any batch has; ``None``: only the run will tell.

    Returns:
        A sentence for each setting that has no effect.

    Raises:
        ConfigError: Single elements' curvature, where nothing measures it.
    """
    staleness, agc = config.staleness, config.staleness.agc
    if staleness.correction not in COMPENSATORS:
        return [] if agc == AgcConfig() else ["the settings of staleness.agc have no effect without correction 'agc'."]
    if agc.curvature == "secant_diag":
        raise ConfigError(
            "staleness.agc.curvature is 'secant_diag', which needs two gradients of one batch at different weights; "
            f"the executor '{config.executor}' makes none. Use 'secant_group', 'fisher' or 'fisher_root'."
        )
    found = []
    begins = max(agc.min_pairs, config.optim.lr_warmup_steps)
    if delay != 0 and begins >= config.train.num_steps:
        found.append(
            f"staleness.correction '{staleness.correction}' has no effect in {config.train.num_steps} steps: it begins "
            f"after {agc.min_pairs} pairs of gradients (staleness.agc.min_pairs), about one a step, and the warm-up of "
            f"{config.optim.lr_warmup_steps}."
        )
    return found


def check_aalr(config: Config, *, delay: int | None) -> list[str]:
    """Return a sentence where the async-aware rate does nothing, or always the same.

    Args:
        config: Resolved settings.
        delay: The largest that any batch has; ``None``: only the run will tell.
    """
    staleness = config.staleness
    if staleness.lr_discount != "aalr":
        if staleness.aalr_threshold != "auto":
            return ["staleness.aalr_threshold has no effect without lr_discount 'aalr'."]
        return []
    num_in_flight, gradients_per_update = concurrency(config, delay=delay)
    aalr = AsyncAwareLr(
        staleness.aalr_threshold, num_in_flight=num_in_flight, gradients_per_update=gradients_per_update
    )
    if warning := aalr.warning(num_in_flight=num_in_flight, gradients_per_update=gradients_per_update):
        return [warning]
    if delay:
        return [
            f"staleness.lr_discount 'aalr' has no effect with the executor '{config.executor}': no mean staleness here "
            f"exceeds the delay of {delay}, and the threshold is {aalr.threshold:g}."
        ]
    return []


def concurrency(config: Config, *, delay: int | None) -> tuple[int, int]:
    """Return how many gradients are in flight at once, and how many of them make an update.

    Args:
        config: Resolved settings.
        delay: The largest that any batch has; ``None``: workers compute one gradient each, at their own speeds.
    """
    if delay is not None:
        return delay + 1, 1
    settings = config.dataparallel
    if settings.mode == "sync":
        return 1, 1
    num_workers = max(settings.num_workers, 1)
    return num_workers, settings.pushes_per_step or num_workers
