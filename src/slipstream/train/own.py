"""Trains a model of yours on batches of yours: any delay in one process, or a pipeline that never drains."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.assembly import check_update_path
from slipstream.compiled import check_compile
from slipstream.config import Config, DataConfig, ModelConfig, StalenessConfig, resolve, to_toml
from slipstream.data.loader import Batch
from slipstream.device import choose_device
from slipstream.digests import tensor_digest
from slipstream.errors import ConfigError
from slipstream.models.nested import map_tensors, tensors_of
from slipstream.models.own import OwnModel, OwnParts
from slipstream.models.partition import cut
from slipstream.pipeline.runtime import pipeline_spec
from slipstream.staleness.async_checks import COMPENSATORS
from slipstream.staleness.checks import check_staleness
from slipstream.train.checkpoint import Checkpoint
from slipstream.train.delays import largest_delay
from slipstream.train.disk import write_whole
from slipstream.train.idle import idle_settings
from slipstream.train.launch import check_schedule, checkpoint_to_resume, keep_lr_total
from slipstream.train.progress import Reporter, SilentReporter
from slipstream.train.rank import run_single
from slipstream.train.ranks import run_ranks
from slipstream.train.rundir import RunDir
from slipstream.train.status import Claim
from slipstream.train.trackers import check_trackers
from slipstream.train.trainer import TimedSource
from slipstream.train.trial import try_optim
from slipstream.train.workload import Workload

_BY_NAME = ("delay_stages", "delay_roles", "delay_blocks")
"""Settings of :class:`StalenessConfig` that go by the names of the decoder's parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnBatch(Batch):
    """Rows of one optimizer step, or of one microbatch to evaluate on.

    Example:
        >>> import torch
        >>> batch = OwnBatch(inputs=(torch.arange(4), torch.ones(4, 2)), targets=torch.zeros(4))
        >>> batch.num_tokens, batch.microbatch(1, 2).inputs[0]
        (4, tensor([2, 3]))
    """

    index: int = 0
    inputs: Any
    """What the embedding takes: a tensor or array, or tuples, lists and tables of them; each has the rows first."""
    targets: Any
    """What the loss takes, alike."""
    num_units: int | None = None
    """Units that the loss is a sum over; ``None``: rows. The loss of a batch is that sum over them."""

    @property
    def num_rows(self) -> int:
        """Rows."""
        return int(next(tensors_of(self.inputs)).shape[0])

    @property
    def num_tokens(self) -> int:
        """Units, which are tokens elsewhere."""
        return self.num_rows if self.num_units is None else self.num_units

    def microbatch(self, j: int, num_microbatches: int) -> "OwnBatch":
        """Return the j-th of equal parts, in order.

        Raises:
            ConfigError: The rows do not divide evenly.
        """
        size, rest = divmod(self.num_rows, num_microbatches)
        if rest:
            raise ConfigError(
                f"{self.num_rows} rows do not make {num_microbatches} equal microbatches. Give a batch that "
                "pipeline.num_microbatches divides."
            )
        part = slice(j * size, (j + 1) * size)
        inputs, targets = (map_tensors(each, lambda tensor: tensor[part]) for each in (self.inputs, self.targets))
        return OwnBatch(index=self.index, inputs=inputs, targets=targets)


class OwnData(Protocol):
    """Where batches come from. With more than one stage it is sent to other processes: keep it small, read lazily."""

    def batch(self, index: int) -> OwnBatch:
        """Return the batch of an index from 0 on, of microbatch_size x num_microbatches rows.

        The same one whenever it is asked for, in any process: then a resumed run goes on exactly.
        """

    def validation(self) -> Sequence[OwnBatch]:
        """Return the batches to evaluate on, of microbatch_size rows each."""


def fit(
    model: OwnModel,
    data: OwnData,
    config: Config,
    *,
    reporter: Reporter | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Train a model of yours.

    The run directory is that of `slipstream train`: config, metrics, evaluations, checkpoints, summary. Whatever the
    settings of executor `pipeline` and the number of stages, the weights are bitwise those of the executor `single` at
    the schedule's delay.

    Args:
        model: Its parts.
        data: Its batches.
        config: Settings; the tables `data` and `model` have no effect, but for `model.seed`.
        reporter: Is told of every event; ``None``: nobody.
        resume: Continue from the newest complete checkpoint of the run directory.
        overwrite: Remove the run that the directory holds.
        allow_change: Settings that a resumed run may change although they change what is trained.

    Returns:
        The summary; ``None`` where the run was asked to stop before its last step and has saved.

    Raises:
        SlipstreamError: Anything that can be mended.
    """
    reporter = reporter or SilentReporter()
    run_dir = RunDir(Path(config.run_dir))
    run_dir.check(resume=resume, overwrite=overwrite)
    check_trackers(config.log.trackers)
    if resume:
        config = keep_lr_total(config, run_dir)
    config = _checked(config, reporter)
    work = open_own(model, data, config, 0, None)
    if config.executor == "pipeline":
        assert isinstance(work.model, OwnParts)
        work.model.check_cuts(cut(work.model.costs(), pipeline_spec(config).num_stages))
    checkpoint = None
    if resume:
        checkpoint = checkpoint_to_resume(
            config, run_dir, reporter, data_sha256=work.data_sha256, allow_change=allow_change
        )
    with Claim(run_dir) as claim:
        run_dir.prepare(resume=resume, begin=claim.take)
        write_whole(run_dir.config, to_toml(config))
        summary = _run(model, data, config, reporter, checkpoint)
        claim.stopped = summary is None
    return summary


def _run(
    model: OwnModel, data: OwnData, config: Config, reporter: Reporter, checkpoint: Checkpoint | None
) -> dict[str, Any] | None:
    opened = functools.partial(open_own, model, data)
    if config.executor == "single":
        return run_single(config, opened, reporter=reporter, checkpoint=checkpoint)
    return run_ranks(
        config,
        checkpoint.folder if checkpoint else None,
        open_workload=opened,
        remedy="Continue from the last checkpoint with resume=True.",
    )


def open_own(model: OwnModel, data: OwnData, config: Config, rank: int, checkpoint: Checkpoint | None) -> Workload:
    """Build the model, and try it on the first microbatch.

    Raises:
        ConfigError: A batch has other rows than the settings say, or the model cannot be trained.
    """
    source = functools.partial(_batch, data, config.batch_size)
    first, validation = source(0), list(data.validation())
    for i, batch in enumerate(validation):
        _check_rows(f"validation batch {i}", batch, config.train.microbatch_size)
    part = first.microbatch(0, config.pipeline.num_microbatches)
    whole = hashlib.sha256()
    for tensor in tensors_of((first.inputs, first.targets)):
        whole.update(tensor_digest(tensor).encode())
    return Workload(
        source=TimedSource(source),
        validation=validation,
        data_sha256=whole.hexdigest(),
        tokenizer=None,
        model=OwnParts(
            model,
            part.inputs,
            part.targets,
            seed=config.model.seed,
            compile=config.train.compile,
            dtype=getattr(torch, config.train.compute_dtype),
        ),
    )


def _batch(data: OwnData, num_rows: int, index: int) -> OwnBatch:
    batch = dataclasses.replace(data.batch(index), index=index)
    _check_rows(f"batch {index}", batch, num_rows)  # each one: of data that run out, the last is short
    return batch


def _check_rows(what: str, batch: OwnBatch, size: int) -> None:
    rows = {int(tensor.shape[0]) for tensor in tensors_of((batch.inputs, batch.targets))}
    if rows != {size}:
        raise ConfigError(
            f"{what} has tensors of {', '.join(map(str, sorted(rows)))} rows, but a batch has train.microbatch_size x "
            f"pipeline.num_microbatches rows, and a validation batch train.microbatch_size: {size}."
        )
    if batch.num_tokens < 1:
        raise ConfigError(f"{what} has num_units {batch.num_tokens}; it must be 1 or more.")


def _checked(config: Config, reporter: Reporter) -> Config:
    if config.executor == "dataparallel":
        raise ConfigError(
            "the executor 'dataparallel' trains the decoder that the settings describe, not a model of your own. Use "
            "'single' or 'pipeline'."
        )
    staleness, default = config.staleness, StalenessConfig()
    for name in _BY_NAME:
        if getattr(staleness, name) != getattr(default, name):
            raise ConfigError(f"staleness.{name} goes by the names of the built-in decoder. Leave it out.")
    if staleness.correction in COMPENSATORS:
        raise ConfigError(
            f"staleness.correction '{staleness.correction}' groups the built-in decoder's parameters. Choose another."
        )
    device = choose_device(config)
    config = resolve(config, vocab_size=1, cuda=device.type == "cuda")
    check_compile(config, device=device)
    if config.executor == "pipeline":
        check_schedule(config)
    idle = _without_effect(config)
    warnings = try_optim(config, device=device, trains_here=config.executor == "single")
    looked_at = dataclasses.replace(config, data=DataConfig(), model=ModelConfig())  # of the others all is said already
    idle += idle_settings(looked_at)
    for warning in [*idle, *warnings, *check_staleness(config, delay=largest_delay(config))]:
        reporter.note(f"warning: {warning}")
    check_update_path(dataclasses.replace(config, model=ModelConfig(vocab_size=1)))  # its parameters are as good as any
    return config


def _without_effect(config: Config) -> list[str]:
    own = dataclasses.replace(ModelConfig(), seed=config.model.seed, vocab_size=config.model.vocab_size)
    pairs = (("model", config.model, own), ("data", config.data, DataConfig()))
    given = [
        f"{table}.{field.name}"
        for table, ours, theirs in pairs
        for field in dataclasses.fields(ours)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    return [f"{', '.join(given)}: no effect on a model of your own."] if given else []
