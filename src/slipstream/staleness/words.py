"""What the gradients of a run lag behind, for people and for summaries."""

from slipstream.config import Config


def has_one_delay(config: Config) -> bool:
    """Return whether one number, ``staleness.delay``, says how stale every gradient is once a run has begun."""
    staleness = config.staleness
    is_own = bool(staleness.delay_stages or staleness.delay_weights or staleness.delay_replay)
    is_of_some = bool(staleness.delay and (staleness.delay_roles or staleness.delay_blocks))
    return not (is_own or is_of_some or _is_asynchronous(config))


def delay_words(config: Config) -> str:
    """Return what the gradients of a run lag behind, in a few words.

    Args:
        config: Resolved settings.

    Example:
        >>> from slipstream.config import StalenessConfig
        >>> delay_words(Config(staleness=StalenessConfig(delay=2, delay_roles=("embedding",))))
        'delay 2 of some parameters'
    """
    staleness = config.staleness
    if _is_asynchronous(config):
        return "delay by the workers' speeds"
    if staleness.delay_stages:
        text = f"delay by stage, {staleness.delay_stages - 1} to 0"
    elif staleness.delay_weights:
        text = "drawn delay"
    elif staleness.delay_replay:
        text = "replayed delay"
    elif not staleness.delay:
        return "delay 0"
    else:
        text = f"delay {staleness.delay}"
    return f"{text} of some parameters" if staleness.delay_roles or staleness.delay_blocks else text


def _is_asynchronous(config: Config) -> bool:
    return config.executor == "dataparallel" and config.dataparallel.mode == "async"
