"""From settings to the delay line of the executor `single`."""

import typing
from pathlib import Path

from slipstream.config import Config
from slipstream.errors import CheckpointError, ConfigError, nearest
from slipstream.models.llama import build_stage
from slipstream.models.partition import stages
from slipstream.models.roles import Role, role
from slipstream.models.shapes import parameter_names
from slipstream.staleness.delay import DelayLine, drawn_delays, replayed_delays
from slipstream.staleness.words import workers_delay
from slipstream.train.metrics import read_json_lines


def delay_line(config: Config) -> DelayLine:
    """Return the delay line of the executor `single`.

    Raises:
        ConfigError: Settings that exclude each other, or a recording that cannot be read.
    """
    staleness = config.staleness
    draw, delay = None, staleness.delay or 0
    kinds = {
        "delay_weights": bool(staleness.delay_weights),
        "delay_replay": bool(staleness.delay_replay),
        "delay_stages": bool(staleness.delay_stages),
    }
    if sum(kinds.values()) > 1:
        given = " and ".join(f"staleness.{name}" for name, is_given in kinds.items() if is_given)
        raise ConfigError(f"{given} are both given; each says what the delay is. Leave one out.")
    if staleness.delay_weights:
        draw, delay = drawn_delays(staleness.delay_weights, seed=config.data.seed), len(staleness.delay_weights) - 1
    elif staleness.delay_replay:
        recorded = read_staleness(Path(staleness.delay_replay))
        draw, delay = replayed_delays(recorded), max(recorded, default=0)
    elif staleness.delay_stages:
        delay = staleness.delay_stages - 1
    return DelayLine(
        delay,
        draw=draw,
        leaf_delays=_leaf_delays(config, delay),
        sync_until=staleness.sync_until_step,
        # Update k is made of batch k - 1.
        sync_from=staleness.sync_from_step - 1 if staleness.sync_from_step else None,
    )


def largest_delay(config: Config) -> int | None:
    """Return the largest delay that any batch of a run has; ``None`` where only the run will tell.

    Args:
        config: Resolved settings.

    Raises:
        ConfigError: As :func:`delay_line`.
    """
    if config.executor == "dataparallel":
        return workers_delay(config)
    if config.executor == "pipeline":
        return config.staleness.delay or 0
    line = delay_line(config)
    return line.delay if line.leaf_delays is None else min(line.delay, max(line.leaf_delays.values(), default=0))


def _leaf_delays(config: Config, delay: int) -> dict[str, int] | None:
    """Return the delay of each leaf where the settings tell them apart."""
    staleness = config.staleness
    if not (staleness.delay_stages or staleness.delay_roles or staleness.delay_blocks):
        return None
    delays = dict.fromkeys(parameter_names(config.model), delay)
    if staleness.delay_stages:
        cuts = stages(config.model, staleness.delay_stages, sequence_length=config.data.sequence_length)
        for stage, spec in enumerate(cuts):
            for leaf, _ in build_stage(
                config.model, spec.blocks, embed=spec.embed, head=spec.head, device="meta"
            ).named_parameters():
                delays[leaf] = staleness.delay_stages - 1 - stage
    if staleness.delay_roles:
        is_inverted = staleness.delay_roles[0] == "not"
        roles = set(staleness.delay_roles[1:] if is_inverted else staleness.delay_roles)
        if unknown := sorted(roles - set(typing.get_args(Role))):
            raise ConfigError(
                f"staleness.delay_roles names {unknown[0]!r}.{nearest(unknown[0], typing.get_args(Role))} "
                f"Allowed: {', '.join(typing.get_args(Role))}, with 'not' first to delay all others."
            )
        delays = {name: 0 if (role(name) in roles) == is_inverted else tau for name, tau in delays.items()}
    if staleness.delay_blocks:
        if len(staleness.delay_blocks) != 2:
            raise ConfigError(
                f"staleness.delay_blocks is {list(staleness.delay_blocks)}; give two numbers, first and end."
            )
        blocks = range(*staleness.delay_blocks)
        delays = {name: tau if _block(name) in blocks else 0 for name, tau in delays.items()}
    return delays


def _block(name: str) -> int:
    """Return the block of a parameter; -1 for those outside the blocks."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else -1


def read_staleness(path: Path) -> list[int]:
    """Return the staleness of each update of a recorded run.

    Raises:
        ConfigError: The file cannot be read, or is no metrics.jsonl.
    """
    try:
        delays = [row["staleness_max"] for row in read_json_lines(path)]
    except (CheckpointError, KeyError) as error:
        raise ConfigError(
            f"staleness.delay_replay: {path} is no metrics.jsonl of a run ({type(error).__name__}). Name one."
        ) from error
    if unfit := [delay for delay in delays if type(delay) is not int or delay < 0]:
        raise ConfigError(
            f"staleness.delay_replay: {path} has a staleness_max of {unfit[0]!r}; it must be a whole number from 0 on. "
            "Name the metrics.jsonl of a run."
        )
    return delays
