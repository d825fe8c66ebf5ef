"""Settings that the run's executor does not look at. Imports no torch."""

import dataclasses
from collections.abc import Sequence

from slipstream.config import Config, DataParallelConfig, LogConfig, PipelineConfig


def idle_settings(config: Config) -> list[str]:
    """Return a sentence that names the settings which were given and have no effect.

    Args:
        config: Resolved settings.
    """
    if config.executor == "dataparallel":
        return _idle_with_workers(config)
    names = [f"dataparallel.{each.name}" for each in dataclasses.fields(DataParallelConfig)]
    if config.executor == "single":
        names.append("log.trace_steps")
    return _sentence(config, names)


def _idle_with_workers(config: Config) -> list[str]:
    found = _sentence(config, ["pipeline.num_stages", "pipeline.pipeline_schedule", "log.trace_steps"])
    bound = config.dataparallel.max_staleness
    if bound and config.dataparallel.num_workers == 1:
        found.append(
            f"dataparallel.max_staleness {bound} has no effect with one worker, whose gradients are never stale."
        )
    return found


_DEFAULTS = {
    "dataparallel": DataParallelConfig(),
    "pipeline": PipelineConfig(),
    "log": LogConfig(),
}


def _sentence(config: Config, names: Sequence[str]) -> list[str]:
    given = []
    for name in names:
        table, setting = name.split(".")
        if getattr(getattr(config, table), setting) != getattr(_DEFAULTS[table], setting):
            given.append(name)
    if not given:
        return []
    verb = "has" if len(given) == 1 else "have"
    return [f"{', '.join(given)} {verb} no effect with the executor '{config.executor}'."]
