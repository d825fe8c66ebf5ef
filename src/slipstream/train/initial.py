"""A new run that begins with the weights of another model: the checkpoint of its step 0."""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.assembly import StageParts
from slipstream.config import Config, ModelConfig
from slipstream.data import Dataset
from slipstream.data.text_checks import same_ids
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.partition import whole
from slipstream.models.shapes import expert_width, head_dim
from slipstream.train.checkpoint import Checkpoint, open_checkpoint
from slipstream.train.disk import write_whole
from slipstream.train.export import check_logits
from slipstream.train.rundir import RunDir
from slipstream.train.saving import CheckpointWriter, run_manifest
from slipstream.train.trained import TrainedModel, open_trained

TRAINING_ONLY = ("dropout", "activation_checkpointing", "seed", "init_std", "router_aux_loss", "router_z_loss")
"""Settings of :class:`ModelConfig` that say nothing about the weights that are there; the new run's own hold."""

FOLLOWING: Mapping[str, Callable[[ModelConfig], int]] = {
    "head_dim": head_dim,
    "expert_ffn_dim": expert_width,
    "vocab_size": lambda cfg: cfg.vocab_size,
}
"""Settings in which 0 means what follows from others, and what that is."""


def open_origin(path: str | Path) -> tuple[TrainedModel, str]:
    """Read the model that a new run begins with, and compare a model folder with what transformers makes of it.

    Args:
        path: A run directory, of which y is taken, or a model folder.

    Returns:
        The model, and a sentence about what was compared.

    Raises:
        CheckpointError: transformers computes something else from the folder.
        SlipstreamError: As :func:`open_trained`.
    """
    if RunDir(Path(path)).holds_run:
        return open_trained(path, weights="y"), f"weights y of {path}"
    source = open_trained(path)
    return source, f"weights of {path}, {check_logits(source.path, source)}"


def record_origin(run_dir: RunDir, source: TrainedModel) -> None:
    """Note in a run's directory whose weights it begins with."""
    write_whole(run_dir.origin, json.dumps(_origin_of(source), indent=1) + "\n")


def check_no_origin(run_dir: RunDir) -> None:
    """Refuse to begin a run at random that was to begin with another model's weights.

    Raises:
        CheckpointError: It was, and the checkpoint that holds them is not there.
    """
    if not run_dir.origin.is_file():
        return
    try:
        path = str(json.loads(run_dir.origin.read_text(encoding="utf-8"))["path"])
    except (OSError, ValueError, LookupError, TypeError):
        path = "the model it was to begin with"
    raise CheckpointError(
        f"the run in {run_dir.path} begins with the weights of {path}, but the checkpoint of its step 0 was never "
        f"finished or is lost: there is nothing to resume. Begin anew: --overwrite, with --init-from or --init-from-hf "
        f"{path}."
    )


def _origin_of(source: TrainedModel) -> dict[str, Any]:
    return {"path": str(source.path), "step": source.step}


def adopted_model(cfg: ModelConfig, source: TrainedModel, *, given: Collection[str] = ()) -> ModelConfig:
    """Return the source's model with the settings of the new run that say nothing about its weights.

    Args:
        cfg: Settings of the new run. What is left at its default is taken from the source.
        source: Whose weights are taken.
        given: Dotted settings that were asked for, equal to their default or not.

    Raises:
        ConfigError: A setting was given that the source contradicts.
    """
    default = ModelConfig()
    changes = {}
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(cfg, field.name), getattr(source.cfg, field.name)
        if field.name in TRAINING_ONLY:
            changes[field.name] = ours
            continue
        is_left_open = ours == getattr(default, field.name) and f"model.{field.name}" not in given
        # 0 stands for what follows from other settings or from the tokenizer.
        is_left_open |= field.name in FOLLOWING and ours == 0
        known = FOLLOWING[field.name](source.cfg) if field.name in FOLLOWING else theirs
        if not is_left_open and ours not in (theirs, known):
            raise ConfigError(
                f"model.{field.name} is {ours!r}, but the model in {source.path} has {known!r}. Leave it out: the "
                "model's shape is taken from there."
            )
    return dataclasses.replace(source.cfg, **changes)


def check_vocabulary(source: TrainedModel, dataset: Dataset) -> str | None:
    """Make sure that the ids of the new data mean to the model what they have meant so far.

    Returns:
        A warning where that cannot be known.

    Raises:
        ConfigError: The model has fewer ids than the data's tokenizer, or they mean other text.
    """
    new = dataset.tokenizer
    remedy = f"Prepare the data with the model's tokenizer: slipstream data prepare ... --tokenizer-from {source.path}"
    if new.vocab_size > source.cfg.vocab_size:
        raise ConfigError(
            f"the model in {source.path} has {source.cfg.vocab_size} ids, the data's tokenizer '{new.name}' has "
            f"{new.vocab_size}. {remedy}"
        )
    if source.tokenizer is None:
        return f"{source.path} has no tokenizer.json, so that nothing says whether ids mean the same in the data"
    known = source.tokenizer
    if not same_ids(known, new):
        raise ConfigError(
            f"the data's tokenizer '{new.name}' gives a text other ids than that of the model in {source.path}. "
            f"{remedy}"
        )
    return None


def initial_checkpoint(config: Config, source: TrainedModel, dataset: Dataset) -> Checkpoint:
    """Save a run's step 0 with the source's weights and everything else as in a run that begins.

    Args:
        config: Resolved settings, the model as :func:`adopted_model` gives it.
        source: Whose weights are taken.
        dataset: What will be trained on.

    Raises:
        CheckpointError: It cannot be written.

    Cost: Memory for three copies of the weights.
    """
    parts = StageParts(config, whole(config.model), num_versions=1, device=torch.device("cpu"))
    masters = parts.updater.masters
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(source.weights[name])
    parts.updater.weights.restore({0: masters})
    folder = RunDir(Path(config.run_dir)).checkpoints
    writer = CheckpointWriter(folder, keep_last=config.checkpoint.keep_last)
    manifest = run_manifest(config, step=0, tokenizer=dataset.tokenizer.fingerprint(), data_sha256=dataset.digest())
    writer.save(0, parts.snapshot(), {**manifest, "initialised_from": _origin_of(source)})
    if writer.wait() is None:
        raise CheckpointError(f"cannot save a checkpoint in {folder}. Free space or choose another run directory.")
    return open_checkpoint(folder / f"step-{0:08d}")
