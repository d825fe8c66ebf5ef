"""From settings to a finished run: check everything, prepare the run directory, start the ranks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.config import Config, load_toml, resolve, to_dict, to_toml, trajectory_changes
from slipstream.data import Batch, Dataset, open_data
from slipstream.data.loader import Loader
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.shapes import check_model
from slipstream.optim.build import check_optim
from slipstream.train.checkpoint import Checkpoint, CheckpointWriter, newest_complete
from slipstream.train.progress import Reporter
from slipstream.train.rundir import RunDir
from slipstream.train.single import SingleExecutor
from slipstream.train.trainer import TimedSource, Trainer


def launch(
    config: Config,
    *,
    reporter: Reporter,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Train.

    Args:
        config: As read; it is resolved here.
        reporter: Is told of every event.
        resume: Continue from the newest complete checkpoint of the run directory.
        overwrite: Remove the run that the directory holds.
        allow_change: Dotted settings that a resumed run may change although they change what is trained.

    Returns:
        The summary; ``None`` where the run was asked to stop before its last step, and has saved.

    Raises:
        SlipstreamError: Anything the user can mend; the run that a directory held is still there.
    """
    run_dir = RunDir(Path(config.run_dir))
    run_dir.check(resume=resume, overwrite=overwrite)
    device = choose_device(config)
    dataset = open_data(config.data.path)
    if resume:
        config = _keep_lr_total(config, run_dir)
    config = resolve(config, vocab_size=dataset.tokenizer.vocab_size, cuda=device.type == "cuda")
    check_model(config.model)
    for warning in check_optim(config.optim, num_steps=config.train.num_steps, device=device):
        reporter.note(f"warning: {warning}")
    loader = training_loader(config, dataset)
    validation_batches(config, dataset)
    checkpoint = _checkpoint_to_resume(config, dataset, run_dir, reporter, allow_change) if resume else None
    run_dir.prepare(resume=resume)
    run_dir.config.write_text(to_toml(config))
    epochs = loader.epochs_for(config.train.num_steps)
    reporter.note(
        f"{config.train.num_steps} steps of {config.batch_tokens} tokens, {epochs:.2f} epochs of "
        f"{len(dataset.train)} training tokens"
    )
    return run_rank(config, dataset, reporter=reporter, device=device, checkpoint=checkpoint)


def run_rank(
    config: Config,
    dataset: Dataset,
    *,
    reporter: Reporter,
    device: torch.device,
    checkpoint: Checkpoint | None = None,
) -> dict[str, Any] | None:
    """Go through the training loop in this process.

    Args:
        config: Resolved settings.
        dataset: Opened data.
        reporter: Is told of every event.
        device: Where to compute.
        checkpoint: Where to continue from.
    """
    torch.set_num_threads(config.train.threads_per_rank)
    run_dir = RunDir(Path(config.run_dir))
    loader = training_loader(config, dataset)
    source = TimedSource(loader.batch)
    executor = SingleExecutor(config, source, device=device)
    if checkpoint is not None:
        executor.restore(checkpoint)
    trainer = Trainer(
        config,
        executor,
        source=source,
        validation=validation_batches(config, dataset),
        tokenizer=dataset.tokenizer,
        data_sha256=dataset.manifest.digest(),
        run_dir=run_dir,
        writer=CheckpointWriter(run_dir.checkpoints, keep_last=config.checkpoint.keep_last),
        reporter=reporter,
        device=device,
        resumed=checkpoint,
    )
    return trainer.run()


def choose_device(config: Config) -> torch.device:
    """Return the device to compute on.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.train.device == "cuda" and not available:
        raise ConfigError(
            "train.device is 'cuda', but this torch finds no CUDA device. Use --train.device cpu, or install a CUDA "
            "build of torch and check `slipstream doctor`."
        )
    return torch.device("cuda" if available and config.train.device != "cpu" else "cpu")


def training_loader(config: Config, dataset: Dataset) -> Loader:
    """Return the endless training batches.

    Raises:
        DataError: The split has less than one batch.
    """
    return Loader(
        dataset.train,
        sequence_length=config.data.sequence_length,
        batch_size=config.batch_size,
        seed=config.data.seed,
    )


def validation_batches(config: Config, dataset: Dataset) -> list[Batch]:
    """Return the batches to evaluate on: of a microbatch's size, the last one padded and masked.

    Raises:
        DataError: The split has less than one batch.
    """
    loader = Loader(
        dataset.validation,
        sequence_length=config.data.sequence_length,
        batch_size=config.train.microbatch_size,
        sequential=True,
        max_sequences=config.evaluate.num_sequences,
    )
    return [batch for batch, _ in loader]


def _keep_lr_total(config: Config, run_dir: RunDir) -> Config:
    """Where no total is given, a resumed run goes on with the learning-rate schedule it began with."""
    if config.optim.lr_total_steps is not None or not run_dir.config.exists():
        return config
    total = load_toml(run_dir.config).optim.lr_total_steps
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr_total_steps=total))


def _checkpoint_to_resume(
    config: Config, dataset: Dataset, run_dir: RunDir, reporter: Reporter, allow_change: Sequence[str]
) -> Checkpoint | None:
    """Find the newest complete checkpoint and make sure it belongs to this run.

    Raises:
        CheckpointError: There are checkpoints, none complete.
        ConfigError: Settings that change what is trained differ, or the run is longer already.
    """
    checkpoint, passed_over = newest_complete(run_dir.checkpoints)
    for sentence in passed_over:
        reporter.note(f"warning: {sentence} Falling back to an older one.")
    if checkpoint is None:
        if passed_over:
            raise CheckpointError(
                f"no checkpoint in {run_dir.checkpoints} is complete. Begin anew with --overwrite, or restore one."
            )
        reporter.note(f"nothing to resume in {run_dir.path}: beginning at step 0")
        return None
    changes = trajectory_changes(checkpoint.manifest["config"], to_dict(config))
    if checkpoint.manifest["data_sha256"] != dataset.manifest.digest():
        changes["data"] = (checkpoint.manifest["data_sha256"][:12], dataset.manifest.digest()[:12])
    refused = {key: pair for key, pair in changes.items() if key not in allow_change}
    if refused:
        lines = "".join(f"\n  {key}: {old!r} -> {new!r}" for key, (old, new) in refused.items())
        keys = " ".join(refused)
        raise ConfigError(
            f"the run in {run_dir.path} was made with other settings that change what is trained:{lines}\n"
            f"Take the old values, or allow it with --allow-change {keys}"
        )
    if checkpoint.step > config.train.num_steps:
        raise ConfigError(
            f"the run in {run_dir.path} has {checkpoint.step} steps already, train.num_steps is "
            f"{config.train.num_steps}. Give a larger --train.num-steps."
        )
    reporter.note(
        f"resuming at step {checkpoint.step} from {checkpoint.folder}, weights "
        f"{checkpoint.manifest['weights_sha256'][:12]}"
    )
    return checkpoint
