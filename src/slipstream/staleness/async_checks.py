"""Settings of the gradient compensator and of the async-aware rate that make no sense where they are given."""

import math

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
    _check_probes(config)
    found = []
    num_steps, a_step = config.train.num_steps, _most_pairs_a_step(config, delay=delay)
    if delay != 0 and (agc.min_pairs >= num_steps * a_step or config.optim.lr_warmup_steps >= num_steps):
        found.append(
            f"staleness.correction '{staleness.correction}' has no effect in {num_steps} steps: it begins after "
            f"{agc.min_pairs} pairs of gradients (staleness.agc.min_pairs), {a_step:g} a step at most, and the warm-up "
            f"of {config.optim.lr_warmup_steps}."
        )
    return found


def _check_probes(config: Config) -> None:
    """Refuse probes where nobody makes them, and what needs them where there are none."""
    agc = config.staleness.agc
    makes_probes = config.executor == "single" or (config.executor == "dataparallel" and config.engine == "inline")
    if agc.curvature == "secant_diag" and not agc.probe_every:
        raise ConfigError(
            "staleness.agc.curvature is 'secant_diag', which needs two gradients of one batch at different weights. "
            "Give staleness.agc.probe_every, such as 4, or use 'secant_group', 'fisher' or 'fisher_root'."
        )
    if agc.probe_every < 0:
        raise ConfigError(f"staleness.agc.probe_every is {agc.probe_every}; give 0 for no probes, or 1 or more.")
    if agc.probe_every and not makes_probes:
        where = f"'{config.executor}'" + (
            f" with the engine '{config.engine}'" if config.executor != "pipeline" else ""
        )
        raise ConfigError(
            f"staleness.agc.probe_every is {agc.probe_every}, but the executor {where} makes no probes: 'single' does, "
            "and 'dataparallel' with the engine 'inline'. Leave it at 0."
        )


def _most_pairs_a_step(config: Config, *, delay: int | None) -> float:
    """Return how many pairs of gradients a step can bring: one with each gradient, or with each that is probed."""
    gradients = 1 if delay is not None else math.ceil(concurrency(config, delay=None)[1])
    return gradients / (config.staleness.agc.probe_every or 1)


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


def check_bound(config: Config) -> list[str]:
    """Return a sentence where the bound on staleness makes workers wait for one another most of the time."""
    bound = config.dataparallel.max_staleness
    if config.executor != "dataparallel" or not bound:
        return []
    num_in_flight, pushes = concurrency(config, delay=None)
    num_workers = config.dataparallel.num_workers
    usual = 2 * (num_in_flight - 1) / pushes
    if bound >= usual:
        return []
    return [
        f"dataparallel.max_staleness {bound} is small for {num_workers} workers at {pushes:g} gradients a step, whose "
        f"mean staleness is {usual / 2:.3g} without a bound: they will wait for one another much of the time. From "
        f"about {math.ceil(usual)} they hardly do; mode 'sync' is the bound of none."
    ]


def concurrency(config: Config, *, delay: int | None) -> tuple[int, float]:
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
    num_in_flight = num_workers * config.gradients_per_worker
    pushes = settings.pushes_per_step or num_workers
    if settings.max_microbatches:
        return num_in_flight, max(pushes, config.pipeline.num_microbatches / settings.max_microbatches)
    return num_in_flight, pushes
