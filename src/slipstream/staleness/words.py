"""What the gradients of a run lag behind, for people and for summaries."""

from slipstream.config import Config


def one_delay(config: Config) -> int | None:
    """Return how many updates behind every gradient is once a run has begun; ``None`` where no one number says it.

    Args:
        config: Resolved settings.
    """
    staleness = config.staleness
    is_own = bool(staleness.delay_stages or staleness.delay_weights or staleness.delay_replay)
    is_of_some = bool(staleness.delay and (staleness.delay_roles or staleness.delay_blocks))
    if is_own or is_of_some:
        return None
    return workers_delay(config) if config.executor == "dataparallel" else staleness.delay or 0


def workers_delay(config: Config) -> int | None:
    """Return the delay of every gradient of workers; ``None`` where their speeds say it.

    A lone worker waits for no other. Its gradient is of the newest weights, unless it is a pipeline that does not
    drain, which is one update behind, like such a pipeline without a server.
    """
    workers = config.dataparallel
    if workers.mode == "sync":
        return 0
    if workers.num_workers > 1:
        return None
    return 1 if workers.num_stages > 1 and config.pipeline.pipeline_schedule == "two_bw" else 0


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
    if config.executor == "dataparallel":
        delay = workers_delay(config)
        return "delay by the workers' speeds" if delay is None else f"delay {delay}"
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
