"""Checks many runs before the first of them starts, so that a mistake in the last one costs no hour of training."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.assembly import check_update_path
from slipstream.compiled import check_compile
from slipstream.config import CheckpointConfig, Config, LogConfig, config_hash, flattened, load_toml, resolve, to_dict
from slipstream.data import Dataset, open_data
from slipstream.dataparallel.checks import check_dataparallel
from slipstream.device import choose_device
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.models.shapes import check_model
from slipstream.staleness.checks import check_staleness
from slipstream.train.delays import largest_delay
from slipstream.train.rundir import RunDir
from slipstream.train.trackers import check_trackers
from slipstream.train.trial import try_optim
from slipstream.train.workload import training_loader, validation_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to train.

    Attributes:
        name: For people.
        config: Its settings, with a run directory of its own; for the executor `single`, or `dataparallel` with the
            engine `inline`, which are one process each.
        begins_anew: Remove the run that its directory holds.
    """

    name: str
    config: Config
    begins_anew: bool = False


def check_runs(runs: Sequence[PlannedRun], *, overwrite: bool = False, warn: Callable[[str], None]) -> list[PlannedRun]:
    """Resolve and check every run, and its directory.

    Args:
        runs: As planned.
        overwrite: Begin a run anew where its directory holds one with other settings.
        warn: Is told a sentence for each setting without effect, once for runs that differ by their seeds alone.

    Returns:
        The runs, resolved.

    Raises:
        SlipstreamError: Of the kind and with the message that training would end with, the run's name before it.
        ConfigError: A directory holds a run with other settings.
    """
    open_once: Callable[..., Dataset] = functools.cache(open_data)
    seen: set[str] = set()
    checked = []
    for run in runs:
        try:
            data = run.config.data
            dataset = open_once(data.path, stream=data.stream, text_field=data.text_field)
            device = choose_device(run.config)
            vocab_size = dataset.tokenizer.vocab_size
            config = resolve(run.config, vocab_size=vocab_size, cuda=device.type == "cuda")
            kind = config_hash(_with_seed(config, 0))
            if kind not in seen:
                seen.add(kind)
                for sentence in _check(config, dataset, device):
                    warn(f"{run.name}: {sentence}")
            begins_anew = overwrite and bool(_differences(config))
            if not overwrite:
                _check_directory(config)
        except SlipstreamError as error:
            raise type(error)(f"{run.name}: {error}") from error
        checked.append(PlannedRun(name=run.name, config=config, begins_anew=begins_anew))
    return checked


def _with_seed(config: Config, seed: int) -> Config:
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, seed=seed),
        model=dataclasses.replace(config.model, seed=seed),
    )


def _check(config: Config, dataset: Dataset, device: torch.device) -> list[str]:
    """Do what training does before its first step, on tiny weights; return warnings."""
    check_trackers(config.log.trackers)
    check_model(config.model)
    check_compile(config, device=device)
    if config.executor == "dataparallel":
        check_dataparallel(config)
    warnings = try_optim(config, device=device, trains_here=False)
    # What has no effect at a delay, a grid leaves out by itself, and its controls are meant.
    warnings += check_staleness(config, delay=largest_delay(config), controls=False)
    check_update_path(config)
    training_loader(config, dataset)
    validation_batches(config, dataset)
    return warnings


def _check_directory(config: Config) -> None:
    """Refuse a directory whose run was made with other settings.

    Raises:
        ConfigError: Names directory and settings.
    """
    if changes := _differences(config):
        shown = "".join(f"\n  {key}: {old!r} -> {new!r}" for key, (old, new) in changes.items())
        raise ConfigError(
            f"{config.run_dir} holds a run with other settings:{shown}\n"
            "Choose another run directory, or train such runs anew with --overwrite."
        )


def _differences(config: Config) -> Mapping[str, tuple[Any, Any]]:
    """Return the settings in which the run in the directory differs, ``(there, here)`` by dotted key.

    How often it logs and saves makes no other run.
    """
    own = RunDir(Path(config.run_dir)).config
    if not own.exists():
        return {}
    old, new = (flattened(to_dict(_essence(each))) for each in (load_toml(own), config))
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def _essence(config: Config) -> Config:
    return dataclasses.replace(config, run_dir="", log=LogConfig(), checkpoint=CheckpointConfig())
