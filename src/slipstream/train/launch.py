"""From settings to a finished run: check everything, prepare the run directory, start the ranks."""

import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from slipstream.assembly import check_update_path
from slipstream.compiled import check_compile
from slipstream.config import (
    PIPELINE_TOO,
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
from slipstream.data import Dataset
from slipstream.dataparallel.checks import check_dataparallel
from slipstream.device import choose_device
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.partition import stages
from slipstream.models.shapes import check_model
from slipstream.pipeline.phases import verify_phases
from slipstream.pipeline.runtime import pipeline_spec
from slipstream.staleness.async_checks import COMPENSATORS
from slipstream.staleness.checks import check_staleness
from slipstream.staleness.groups import check_cuts
from slipstream.train.checkpoint import Checkpoint, newest_complete
from slipstream.train.delays import largest_delay
from slipstream.train.disk import write_whole, writing
from slipstream.train.handover import handover_note, handover_refusal
from slipstream.train.idle import idle_settings
from slipstream.train.initial import (
    adopted_model,
    check_no_origin,
    check_vocabulary,
    initial_checkpoint,
    open_origin,
    record_origin,
)
from slipstream.train.progress import Reporter
from slipstream.train.rank import run_here
from slipstream.train.ranks import run_ranks
from slipstream.train.rundir import RunDir
from slipstream.train.status import Claim
from slipstream.train.torchrun import run_under_torchrun
from slipstream.train.trackers import check_trackers
from slipstream.train.trial import try_optim
from slipstream.train.workload import open_run_data, training_loader, validation_batches


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
    given: Collection[str] = (),
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
        given: Dotted settings that were asked for although they may equal a default; with ``init_from`` they are
            compared with the model's.

    Returns:
        The summary; ``None`` where the run was asked to stop before its last step and has saved, and on ranks other
        than 0 under torchrun.

    Raises:
        SlipstreamError: Anything the user can mend; the run that a directory held is still there.
    """
    claim = Claim(RunDir(Path(config.run_dir)))

    def begin() -> Plan:
        return prepare_run(
            config,
            reporter=reporter,
            resume=resume,
            overwrite=overwrite,
            allow_change=allow_change,
            init_from=init_from,
            given=given,
            claim=claim,
        )

    with claim:
        summary = _launch(config, begin, reporter=reporter)
        claim.stopped = summary is None
    return summary


def _launch(config: Config, begin: Callable[[], Plan], *, reporter: Reporter) -> dict[str, Any] | None:
    """Begin and train, in the processes that the executor needs."""
    if config.executor == "pipeline" and "RANK" in os.environ and "WORLD_SIZE" in os.environ:

        def begin_elsewhere() -> tuple[Config, Path | None]:
            plan = begin()
            return plan.config, plan.checkpoint.folder if plan.checkpoint else None

        return run_under_torchrun(config.pipeline.num_stages, begin_elsewhere)
    plan = begin()
    if plan.config.executor == "pipeline":
        return run_ranks(plan.config, plan.checkpoint.folder if plan.checkpoint else None)
    if plan.config.executor == "dataparallel" and plan.config.engine == "ray":
        from slipstream.train.on_ray import run_on_ray  # for those who have the extra

        return run_on_ray(
            plan.config, reporter=reporter, checkpoint=plan.checkpoint.folder if plan.checkpoint else None
        )
    return run_here(plan.config, plan.dataset, reporter=reporter, checkpoint=plan.checkpoint)


def prepare_run(
    config: Config,
    *,
    reporter: Reporter,
    resume: bool,
    overwrite: bool,
    allow_change: Sequence[str],
    init_from: str = "",
    given: Collection[str] = (),
    claim: Claim | None = None,
) -> Plan:
    """Check all that can be checked before the first step, then make the run directory; see :func:`launch`."""
    run_dir = RunDir(Path(config.run_dir))
    run_dir.check(resume=resume, overwrite=overwrite)
    check_trackers(config.log.trackers)
    if resume and init_from:
        raise ConfigError("--resume goes on with a run's own weights: leave out the other model to begin with.")
    device = choose_device(config)
    dataset = open_run_data(config)
    origin, described = open_origin(init_from) if init_from else (None, "")
    if origin is not None:
        if warning := check_vocabulary(origin, dataset):
            reporter.note(f"warning: {warning}")
        config = dataclasses.replace(config, model=adopted_model(config.model, origin, given=given))
    if resume:
        config = keep_lr_total(config, run_dir)
    config = resolve(config, vocab_size=dataset.tokenizer.vocab_size, cuda=device.type == "cuda")
    check_model(config.model)
    check_compile(config, device=device)
    for warning in try_optim(config, device=device, trains_here=config.executor != "pipeline"):
        reporter.note(f"warning: {warning}")
    if config.executor == "pipeline":
        _check_pipeline(config)
    if config.executor == "dataparallel":
        if config.data.stream:
            raise ConfigError(
                "data.stream is read in order, but workers take microbatches in an order of their own. Pack the text "
                "with `slipstream data prepare`, or use another executor."
            )
        check_dataparallel(config)
        _check_cuts(config, config.dataparallel.num_stages)
    for warning in [*idle_settings(config), *check_staleness(config, delay=largest_delay(config))]:
        reporter.note(f"warning: {warning}")
    check_update_path(config)
    loader = training_loader(config, dataset)
    validation_batches(config, dataset)
    checkpoint = (
        checkpoint_to_resume(config, run_dir, reporter, data_sha256=dataset.digest(), allow_change=allow_change)
        if resume
        else None
    )
    run_dir.prepare(resume=resume, begin=claim.take if claim else None)
    if origin is not None:
        record_origin(run_dir, origin)  # first: without its step 0 the run must not go on from weights that are drawn
    write_whole(run_dir.config, to_toml(config))
    with writing(run_dir.tokenizer):
        run_dir.tokenizer.mkdir(exist_ok=True)
        dataset.tokenizer.save(run_dir.tokenizer)
    if origin is not None:
        checkpoint = initial_checkpoint(config, origin, dataset)
        reporter.note(f"beginning with {described}; sha256 {checkpoint.manifest['weights_sha256'][:12]}")
    reporter.note(
        f"{config.train.num_steps} steps of {config.batch_tokens * config.local_steps} tokens, "
        f"{loader.extent(config.train.num_steps * config.local_steps)}"
    )
    return Plan(config=config, dataset=dataset, checkpoint=checkpoint)


def check_schedule(config: Config) -> None:
    """Refuse what a pipeline cannot follow, and prove its schedule.

    Raises:
        ConfigError: Too few microbatches, or a setting of the executor `single`.
        ScheduleError: The schedule is wrong; a mistake of ours.
    """
    staleness, default = config.staleness, StalenessConfig()
    for name in SINGLE_ONLY:
        if name not in PIPELINE_TOO and getattr(staleness, name) != getattr(default, name):
            raise ConfigError(
                f"staleness.{name} is {getattr(staleness, name)!r}, but in a pipeline the schedule says what a batch "
                "reads. Leave it out, or use --executor single."
            )
    verify_phases(pipeline_spec(config), staleness, num_batches=config.train.num_steps)


def _check_pipeline(config: Config) -> None:
    """Prove the schedule and cut the model, before any process starts."""
    check_schedule(config)
    _check_cuts(config, pipeline_spec(config).num_stages)


def _check_cuts(config: Config, num_stages: int) -> None:
    """Cut the model, and make sure that whatever belongs together lies on one stage."""
    cuts = stages(config.model, num_stages, sequence_length=config.data.sequence_length)
    if config.staleness.correction in COMPENSATORS:
        check_cuts(config.staleness.agc, [cut.blocks.start for cut in cuts])


def keep_lr_total(config: Config, run_dir: RunDir) -> Config:
    """Where no total is given, a resumed run goes on with the learning-rate schedule it began with."""
    if config.optim.lr_total_steps is not None or not run_dir.config.exists():
        return config
    total = load_toml(run_dir.config).optim.lr_total_steps
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr_total_steps=total))


def checkpoint_to_resume(
    config: Config, run_dir: RunDir, reporter: Reporter, *, data_sha256: str, allow_change: Sequence[str]
) -> Checkpoint | None:
    """Find the newest complete checkpoint and make sure it belongs to this run.

    Args:
        config: Resolved settings.
        run_dir: Of the run.
        reporter: Is told what was passed over.
        data_sha256: Identifies the data.
        allow_change: Settings that may differ.

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
        check_no_origin(run_dir)
        reporter.note(f"nothing to resume in {run_dir.path}: beginning at step 0")
        return None
    # Read back through the config classes, so that a setting newer than the checkpoint has its default on both sides.
    saved = from_dict(checkpoint.manifest["config"], source=f"{checkpoint.folder}")
    changes = trajectory_changes(to_dict(saved), to_dict(config))
    if checkpoint.manifest["data_sha256"] != data_sha256:
        changes["data"] = (checkpoint.manifest["data_sha256"][:12], data_sha256[:12])
    refused = {key: pair for key, pair in changes.items() if key not in allow_change}
    impossible = handover_refusal(config, saved=saved, manifest=checkpoint.manifest, scalars=checkpoint.scalars)
    if refused:
        lines = "".join(f"\n  {key}: {old!r} -> {new!r}" for key, (old, new) in refused.items())
        remedy = impossible or f"Take the old values, or allow it with --allow-change {' '.join(refused)}"
        raise ConfigError(
            f"the run in {run_dir.path} was made with other settings that change what is trained:{lines}\n{remedy}"
        )
    if impossible:
        raise ConfigError(impossible)
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
