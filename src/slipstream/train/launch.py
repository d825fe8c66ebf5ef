"""From settings to a finished run: check everything, prepare the run directory, start the ranks."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config import (
    SINGLE_ONLY,
    Config,
    StalenessConfig,
    from_dict,
    load_toml,
    resolve,
    to_dict,
    to_toml,
    trajectory_changes,
)
from slipstream.data import Dataset, open_data
from slipstream.dataparallel.checks import check_dataparallel
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.partition import stages
from slipstream.models.shapes import check_model
from slipstream.optim.build import check_optim
from slipstream.pipeline.runtime import pipeline_spec
from slipstream.pipeline.schedules import verify
from slipstream.staleness.async_checks import COMPENSATORS
from slipstream.staleness.checks import check_staleness
from slipstream.staleness.groups import check_cuts
from slipstream.train.checkpoint import Checkpoint, newest_complete
from slipstream.train.delays import largest_delay
from slipstream.train.handover import handover_note
from slipstream.train.idle import idle_settings
from slipstream.train.initial import adopted_model, check_vocabulary, initial_checkpoint, open_origin
from slipstream.train.progress import Reporter
from slipstream.train.rank import choose_device, run_here, training_loader, validation_batches
from slipstream.train.ranks import run_ranks
from slipstream.train.rundir import RunDir
from slipstream.train.torchrun import run_under_torchrun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that can begin: everything was checked and the run directory is ready.

    Attributes:
        config: Resolved settings.
        dataset: Opened data.
        checkpoint: Where to continue from.
    """

    config: Config
    dataset: Dataset
    checkpoint: Checkpoint | None


def launch(
    config: Config,
    *,
    reporter: Reporter,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
    init_from: str = "",
) -> dict[str, Any] | None:
    """Train.

    Args:
        config: As read; it is resolved here.
        reporter: Is told of every event.
        resume: Continue from the newest complete checkpoint of the run directory.
        overwrite: Remove the run that the directory holds.
        allow_change: Dotted settings that a resumed run may change although they change what is trained.
        init_from: A run directory or a model folder whose weights (of a run: y) the run begins with; its model
            settings are taken too.

    Returns:
        The summary; ``None`` where the run was asked to stop before its last step and has saved, and on ranks other
        than 0 under torchrun.

    Raises:
        SlipstreamError: Anything the user can mend; the run that a directory held is still there.
    """

    def begin() -> Plan:
        return prepare_run(
            config,
            reporter=reporter,
            resume=resume,
            overwrite=overwrite,
            allow_change=allow_change,
            init_from=init_from,
        )

    if config.executor == "pipeline" and "RANK" in os.environ and "WORLD_SIZE" in os.environ:

        def begin_elsewhere() -> tuple[Config, Path | None]:
            plan = begin()
            return plan.config, plan.checkpoint.folder if plan.checkpoint else None

        return run_under_torchrun(config.pipeline.num_stages, begin_elsewhere)
    plan = begin()
    if plan.config.executor == "pipeline":
        return run_ranks(plan.config, plan.checkpoint.folder if plan.checkpoint else None)
    return run_here(plan.config, plan.dataset, reporter=reporter, checkpoint=plan.checkpoint)


def prepare_run(
    config: Config,
    *,
    reporter: Reporter,
    resume: bool,
    overwrite: bool,
    allow_change: Sequence[str],
    init_from: str = "",
) -> Plan:
    """Check all that can be checked before the first step, then make the run directory; see :func:`launch`."""
    run_dir = RunDir(Path(config.run_dir))
    run_dir.check(resume=resume, overwrite=overwrite)
    if resume and init_from:
        raise ConfigError("--resume goes on with a run's own weights: leave out the other model to begin with.")
    device = choose_device(config)
    dataset = open_data(config.data.path)
    origin, described = open_origin(init_from) if init_from else (None, "")
    if origin is not None:
        if warning := check_vocabulary(origin, dataset):
            reporter.note(f"warning: {warning}")
        config = dataclasses.replace(config, model=adopted_model(config.model, origin))
    if resume:
        config = _keep_lr_total(config, run_dir)
    config = resolve(config, vocab_size=dataset.tokenizer.vocab_size, cuda=device.type == "cuda")
    check_model(config.model)
    for warning in check_optim(config.optim, num_steps=config.train.num_steps, device=device):
        reporter.note(f"warning: {warning}")
    if config.executor == "pipeline":
        _check_pipeline(config)
    if config.executor == "dataparallel":
        check_dataparallel(config)
    for warning in [*idle_settings(config), *check_staleness(config, delay=largest_delay(config))]:
        reporter.note(f"warning: {warning}")
    loader = training_loader(config, dataset)
    validation_batches(config, dataset)
    checkpoint = _checkpoint_to_resume(config, dataset, run_dir, reporter, allow_change) if resume else None
    run_dir.prepare(resume=resume)
    run_dir.config.write_text(to_toml(config))
    run_dir.tokenizer.mkdir(exist_ok=True)
    dataset.tokenizer.save(run_dir.tokenizer)
    if origin is not None:
        checkpoint = initial_checkpoint(config, origin, dataset)
        reporter.note(f"beginning with {described}; sha256 {checkpoint.manifest['weights_sha256'][:12]}")
    epochs = loader.epochs_for(config.train.num_steps * config.local_steps)
    reporter.note(
        f"{config.train.num_steps} steps of {config.batch_tokens * config.local_steps} tokens, {epochs:.2f} epochs of "
        f"{len(dataset.train)} training tokens"
    )
    return Plan(config=config, dataset=dataset, checkpoint=checkpoint)


def _check_pipeline(config: Config) -> None:
    """Prove the schedule and cut the model, before any process starts.

    Raises:
        ConfigError: Too few microbatches, more stages than layers.
        ScheduleError: The schedule is wrong; a mistake of ours.
    """
    staleness, default = config.staleness, StalenessConfig()
    for name in SINGLE_ONLY:
        if getattr(staleness, name) != getattr(default, name):
            raise ConfigError(
                f"staleness.{name} is {getattr(staleness, name)!r}, but in a pipeline the schedule says what a batch "
                "reads. Leave it out, or use --executor single."
            )
    spec = pipeline_spec(config)
    cuts = stages(config.model, spec.num_stages, sequence_length=config.data.sequence_length)
    if staleness.correction in COMPENSATORS:
        check_cuts(staleness.agc, [cut.blocks.start for cut in cuts])
    verify(spec, num_batches=min(config.train.num_steps, 4))


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
    # Read back through the config classes, so that a setting newer than the checkpoint has its default on both sides.
    saved = to_dict(from_dict(checkpoint.manifest["config"], source=f"{checkpoint.folder}"))
    changes = trajectory_changes(saved, to_dict(config))
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
    if left := handover_note(config, scalars=checkpoint.scalars, step=checkpoint.step):
        reporter.note(left)
    return checkpoint
