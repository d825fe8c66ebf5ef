"""Settings that the run's executor does not look at. Imports no torch."""

import dataclasses
from collections.abc import Sequence

from slipstream.config import Config, DataConfig, DataParallelConfig, LogConfig, ModelConfig, PipelineConfig
from slipstream.data.files import hold_records

OF_PIPELINES = ("pipeline.num_stages", "pipeline.pipeline_schedule", "pipeline.num_extra_in_flight")
"""Nobody looks at these where there is no pipeline; of workers that are pipelines the first has another name."""


def idle_settings(config: Config) -> list[str]:
    """Return a sentence that names the settings which were given and have no effect.

    Args:
        config: Resolved settings; the files of a stream were found before.
    """
    found = [*_idle_data(config.data), *_idle_experts(config)]
    if config.checkpoint.keep_best and not config.evaluate.every_steps:
        never = "checkpoint.keep_best keeps the last step, the only one evaluated: give evaluate.every_steps as well."
        found.append(never)
    return [*found, *_idle_for_executor(config)]


def _idle_data(data: DataConfig) -> list[str]:
    """Name what says how to read text where none is read, or none that has fields."""
    if data.text_field == DataConfig().text_field:
        return []
    if not data.stream:
        return ["data.text_field has no effect without data.stream: the shards of data.path hold tokens."]
    if not hold_records(data.stream):
        return ["data.text_field has no effect on plain text: each file of data.stream is one document."]
    return []


def _idle_experts(config: Config) -> list[str]:
    """Name what says something of experts where there are none."""
    names = ("experts_per_token", "expert_ffn_dim", "router_renormalize", "router_aux_loss", "router_z_loss")
    default = ModelConfig()
    given = [f"model.{name}" for name in names if getattr(config.model, name) != getattr(default, name)]
    if config.model.num_experts or not given:
        return []
    verb = "has" if len(given) == 1 else "have"
    return [f"{', '.join(given)} {verb} no effect with a model.num_experts of 0: no layer has experts."]


def _idle_for_executor(config: Config) -> list[str]:
    if config.executor == "dataparallel":
        return _idle_with_workers(config)
    names = [f"dataparallel.{each.name}" for each in dataclasses.fields(DataParallelConfig)]
    if config.executor == "single":
        return _sentence(config, [*OF_PIPELINES, *names, "log.trace_steps"])
    return [*_sentence(config, names), *_idle_ahead(config)]


def _idle_ahead(config: Config) -> list[str]:
    """Name microbatches that are to be started ahead by a schedule that drains."""
    pipeline = config.pipeline
    if not pipeline.num_extra_in_flight or pipeline.pipeline_schedule == "two_bw":
        return []
    schedule = pipeline.pipeline_schedule
    return [f"pipeline.num_extra_in_flight has no effect with the schedule '{schedule}', only with two_bw."]


def _idle_with_workers(config: Config) -> list[str]:
    has_pipelines = config.dataparallel.num_stages > 1
    found = _sentence(config, [*(OF_PIPELINES[:1] if has_pipelines else OF_PIPELINES), "log.trace_steps"])
    if has_pipelines:
        found += _idle_ahead(config)
    bound = config.dataparallel.max_staleness
    if bound and config.dataparallel.num_workers == config.gradients_per_worker == 1:
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
