"""A run's settings as TOML and tables, and the checks that need no file or device.

Precedence is command line > file > default. The settings themselves are in :mod:`slipstream.settings`, and are imported
from here.
"""

import dataclasses
import hashlib
import json
import math
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w

from slipstream.errors import ConfigError, nearest
from slipstream.settings import (
    SCHEDULE_DELAY,
    AgcConfig,
    CheckpointConfig,
    Coefficient,
    Config,
    DataConfig,
    DataParallelConfig,
    Engine,
    EvaluateConfig,
    Executor,
    LogConfig,
    LrSchedule,
    ModelConfig,
    Numbers,
    OptimConfig,
    PipelineConfig,
    PipelineSchedule,
    StalenessConfig,
    Switch,
    Table,
    TrainConfig,
)

__all__ = [
    "FREE_TO_CHANGE",
    "PIPELINE_TOO",
    "SCHEDULE_DELAY",
    "SINGLE_ONLY",
    "AgcConfig",
    "CheckpointConfig",
    "Coefficient",
    "Config",
    "DataConfig",
    "DataParallelConfig",
    "Engine",
    "EvaluateConfig",
    "Executor",
    "LogConfig",
    "LrSchedule",
    "ModelConfig",
    "Numbers",
    "OptimConfig",
    "PipelineConfig",
    "PipelineSchedule",
    "StalenessConfig",
    "Switch",
    "Table",
    "TrainConfig",
    "coefficient_text",
    "config_hash",
    "explicit_settings",
    "from_dict",
    "load_toml",
    "resolve",
    "to_dict",
    "to_toml",
    "trajectory_changes",
]


_MOST_THREADS = 1024
"""Of a process that computes; OpenMP ends it where the system gives no more."""


def load_toml(path: str | Path) -> Config:
    """Read a config file.

    Args:
        path: A TOML file with the tables of :class:`Config`; what it leaves out keeps its default.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or holds an unknown key or a value of a wrong type.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {path}: {error.strerror}. Give the path of a TOML file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}). Give a TOML file.") from error
    except ValueError as error:  # among them whole numbers of more digits than Python reads
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    return from_dict(table, source=str(path))


def explicit_settings(path: str | Path) -> set[str]:
    """Return the dotted names of the settings that a config file names.

    Raises:
        ConfigError: As :func:`load_toml`.
    """
    load_toml(path)
    return set(flattened(tomllib.loads(Path(path).read_text(encoding="utf-8"))))


def from_dict(table: Mapping[str, Any], *, source: str = "config") -> Config:
    """Build a :class:`Config` from nested tables, checking every key and type.

    Raises:
        ConfigError: An unknown key (with the nearest name) or a value of a wrong type.
    """
    return typing.cast(Config, _build(Config, table, source=source, prefix=""))


def to_dict(config: Config) -> dict[str, Any]:
    """Return the nested tables of a config, without the settings that are ``None`` (TOML has no null).

    Raises:
        ConfigError: The arguments of a rule hold what TOML has no word for.
    """
    _check_arguments(config)

    def prune(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: prune(item) for key, item in value.items() if item is not None}
        return list(value) if isinstance(value, tuple) else value

    return typing.cast(dict[str, Any], prune(dataclasses.asdict(config)))


def to_toml(config: Config) -> str:
    """Return the TOML text of a config; :func:`load_toml` reads it back to an equal one."""
    return tomli_w.dumps(to_dict(config))


def config_hash(config: Config) -> str:
    """Return 64 hex digits that identify all settings but the run directory."""
    table = to_dict(dataclasses.replace(config, run_dir=""))
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def coefficient_text(coefficient: Coefficient) -> str:
    """Return a coefficient of error feedback for people.

    Example:
        >>> coefficient_text(1.5), coefficient_text("auto")
        ('1.5', 'auto')
    """
    return coefficient if isinstance(coefficient, str) else f"{coefficient:g}"


def resolve(config: Config, *, vocab_size: int, cuda: bool) -> Config:
    """Replace every setting that means "what fits" by its value, and check settings against one another.

    Args:
        config: As read.
        vocab_size: Of the tokenizer the data was made with.
        cuda: Whether computing happens on CUDA.

    Raises:
        ConfigError: A value out of range, or two settings that contradict each other.
    """
    _check_ranges(config)
    if 0 < config.model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, the data's tokenizer has {vocab_size} tokens. "
            "Leave model.vocab_size at 0 to take the tokenizer's; a larger one adds rows that no token uses."
        )
    dtype = config.train.compute_dtype
    resolved_dtype: Literal["float32", "bfloat16"] = dtype if dtype != "auto" else ("bfloat16" if cuda else "float32")
    total, num_updates = config.optim.lr_total_steps, config.train.num_steps * config.local_steps
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=config.model.vocab_size or vocab_size),
        optim=dataclasses.replace(config.optim, lr_total_steps=num_updates if total is None else total),
        staleness=dataclasses.replace(config.staleness, delay=_resolved_delay(config)),
        train=dataclasses.replace(config.train, compute_dtype=resolved_dtype),
        dataparallel=dataclasses.replace(config.dataparallel, num_workers=_resolved_workers(config)),
    )


def _resolved_workers(config: Config) -> int:
    speeds, given = config.dataparallel.emulate_speeds, config.dataparallel.num_workers
    if config.executor != "dataparallel":
        return given
    if speeds and given and len(speeds) != given:
        raise ConfigError(
            f"dataparallel.num_workers is {given}, but dataparallel.emulate_speeds has {len(speeds)} speeds. Give a "
            "speed for each worker, or leave num_workers at 0."
        )
    return given or len(speeds) or 2


def _resolved_delay(config: Config) -> int:
    given = config.staleness.delay
    if config.executor == "single":
        return given or 0
    if config.executor == "dataparallel":
        if given:
            raise ConfigError(
                f"staleness.delay is {given}, but with the executor 'dataparallel' the workers' speeds say how stale a "
                "gradient is. Leave staleness.delay out, or use --executor single."
            )
        return 0
    schedule = config.pipeline.pipeline_schedule
    implied = SCHEDULE_DELAY[schedule]
    if given not in (None, implied):
        raise ConfigError(
            f"staleness.delay is {given}, but the pipeline schedule '{schedule}' gives a delay of {implied}. "
            "Leave staleness.delay out, choose another pipeline.pipeline_schedule, or use --executor single."
        )
    return implied


def _check_ranges(config: Config) -> None:
    """Refuse numbers that no run can use. Model and optimizer settings are checked where they are understood."""
    for name, value in flattened(dataclasses.asdict(config)).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{name} is {number}; give a finite number.")
    _check_arguments(config)
    at_least_one = {
        "data.sequence_length": config.data.sequence_length,
        "train.num_steps": config.train.num_steps,
        "train.microbatch_size": config.train.microbatch_size,
        "train.threads_per_rank": config.train.threads_per_rank,
        "pipeline.num_microbatches": config.pipeline.num_microbatches,
        "pipeline.num_stages": config.pipeline.num_stages,
        "evaluate.num_sequences": config.evaluate.num_sequences,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "log.every_steps": config.log.every_steps,
        "staleness.agc.blocks_per_group": config.staleness.agc.blocks_per_group,
        "dataparallel.num_stages": config.dataparallel.num_stages,
        "dataparallel.min_microbatches": config.dataparallel.min_microbatches,
        "dataparallel.local_steps": config.dataparallel.local_steps,
    }
    not_negative = {
        "staleness.delay": config.staleness.delay or 0,
        "staleness.agc.min_pairs": config.staleness.agc.min_pairs,
        "staleness.agc.ramp_steps": config.staleness.agc.ramp_steps,
        "staleness.agc.trust_radius": config.staleness.agc.trust_radius,
        "pipeline.num_extra_in_flight": config.pipeline.num_extra_in_flight,
        "evaluate.every_steps": config.evaluate.every_steps,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "log.trace_steps": config.log.trace_steps,
        "dataparallel.num_workers": config.dataparallel.num_workers,
        "dataparallel.pushes_per_step": config.dataparallel.pushes_per_step,
        "dataparallel.max_microbatches": config.dataparallel.max_microbatches,
        "dataparallel.max_staleness": config.dataparallel.max_staleness,
        "dataparallel.outer_lr": config.dataparallel.outer_lr,
        "dataparallel.outer_momentum_every": config.dataparallel.outer_momentum_every,
        "dataparallel.emulate_microbatch_ms": config.dataparallel.emulate_microbatch_ms,
        "dataparallel.emulate_jitter": config.dataparallel.emulate_jitter,
        "dataparallel.ray_gpus": config.dataparallel.ray_gpus,
        "train.max_skipped_steps": config.train.max_skipped_steps,
        "optim.max_grad_norm": config.optim.max_grad_norm,
    }
    for bound, values in ((1, at_least_one), (0, not_negative)):
        for name, value in values.items():
            if not value >= bound:
                raise ConfigError(f"{name} is {value}; it must be {bound} or more.")
    if config.train.threads_per_rank > _MOST_THREADS:
        raise ConfigError(
            f"train.threads_per_rank is {config.train.threads_per_rank}; it must be {_MOST_THREADS} or less, and of "
            "use are as many as there are cores."
        )
    if not 0 <= config.staleness.agc.decay < 1:
        raise ConfigError(
            f"staleness.agc.decay is {config.staleness.agc.decay:g}; allowed is 0 (only the newest) to below 1, and "
            "0.99 is usual."
        )
    if not config.pipeline.timeout_s > 0:
        raise ConfigError(f"pipeline.timeout_s is {config.pipeline.timeout_s}; it must be more than 0 seconds.")


def _check_arguments(config: Config) -> None:
    """Refuse what would be lost, or fail, when the settings are written and read again."""
    _check_argument(config.optim.args, "optim.args")
    _check_argument(config.optim.adamw_args, "optim.adamw_args")


def _check_argument(value: Any, name: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_argument(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_argument(item, f"{name}, item {i}")
    elif value is None:
        raise ConfigError(
            f"{name} is null, which no config file can say. Leave it out, or give a number, text or list."
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; give a finite number.")
    elif not isinstance(value, int | float | str):
        raise ConfigError(
            f"{name} is {value!r}; allowed are numbers, texts, true and false, and lists and tables of them."
        )


SINGLE_ONLY = (
    "delay_weights",
    "delay_replay",
    "delay_stages",
    "delay_roles",
    "delay_blocks",
    "backward_weights",
    "sync_until_step",
    "sync_from_step",
)
"""Settings of :class:`StalenessConfig` that only the executor `single` can follow, but for :data:`PIPELINE_TOO`."""

PIPELINE_TOO = ("sync_until_step", "sync_from_step")
"""Those that a pipeline can follow as well."""

FREE_TO_CHANGE = (
    "run_dir",
    "executor",
    "engine",
    "data.path",
    "data.stream",
    "model.activation_checkpointing",
    "pipeline.num_stages",
    "pipeline.pipeline_schedule",
    "pipeline.num_extra_in_flight",
    "pipeline.timeout_s",
    "dataparallel.num_workers",
    "dataparallel.num_stages",
    "dataparallel.emulate_",
    "dataparallel.ray_",
    "train.num_steps",
    "train.device",
    "train.threads_per_rank",
    "train.compile",
    "train.max_skipped_steps",
    "evaluate.",
    "checkpoint.",
    "log.",
)
"""Settings (or whole tables) that a resumed run may change without becoming another run. The data itself is compared
by its content, wherever it lies."""


def trajectory_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two runs and change what is trained.

    Args:
        old: Tables as :func:`to_dict` gives them.
        new: The same.

    Returns:
        ``(old, new)`` by dotted key.
    """
    before, after = flattened(old), flattened(new)
    keys = sorted(before.keys() | after.keys())
    return {
        key: (before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key) and not key.startswith(FREE_TO_CHANGE)
    }


def flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, by names with dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _build(cls: type, table: Any, *, source: str, prefix: str) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: '{prefix.rstrip('.')}' must be a table, given {table!r}.")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in table.items():
        if key not in hints:
            known = ", ".join(hints)
            raise ConfigError(f"{source}: unknown key '{prefix}{key}'.{nearest(key, hints)} Allowed here: {known}.")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(typing.cast(type, hint), value, source=source, prefix=f"{prefix}{key}.")
        else:
            values[key] = _checked(value, hint, where=f"{source}: '{prefix}{key}'")
    return cls(**values)


def _checked(value: Any, hint: Any, *, where: str, words: Sequence[str] = ()) -> Any:
    """Return ``value`` as the type ``hint``, or say what is allowed; ``words`` would have been as well."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(
                f"{where} is {value!r}.{nearest(str(value), choices)} Allowed: {', '.join(map(repr, choices))}."
            )
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in typing.get_args(hint):
            return None
        words = [word for arg in typing.get_args(hint) for word in typing.get_args(arg)]
        if value in words:
            return value
        (inner,) = (arg for arg in typing.get_args(hint) if isinstance(arg, type) and arg is not types.NoneType)
        return _checked(value, inner, where=where, words=words)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max:
            raise ConfigError(f"{where} is a whole number of more than 300 digits; give a smaller one.")
        return float(value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list, given {value!r}.")
        return tuple(
            _checked(item, typing.get_args(hint)[0], where=f"{where}, item {i}") for i, item in enumerate(value)
        )
    expected = origin or hint
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        allowed = " or ".join([_plain_name(expected), *map(repr, words)])
        raise ConfigError(f"{where} must be {allowed}, given {value!r}.")
    return dict(value) if expected is dict else value


def _plain_name(kind: type) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a table"}
    return names.get(kind, kind.__name__)
