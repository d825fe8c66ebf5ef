"""One rank of a run: from settings and a rendezvous to a finished training loop."""

import contextlib
import datetime
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its export list

from slipstream.config import Config
from slipstream.console import Console
from slipstream.data import Dataset
from slipstream.dataparallel.engine import build_engine
from slipstream.device import choose_device, settle
from slipstream.executor import Executor
from slipstream.microbatches import microbatch_loader
from slipstream.models.shapes import flops_per_token
from slipstream.pipeline.runtime import PipelineExecutor
from slipstream.pipeline.transport import connect
from slipstream.train.checkpoint import Checkpoint, open_checkpoint
from slipstream.train.progress import ConsoleReporter, Reporter, SilentReporter
from slipstream.train.rundir import RunDir
from slipstream.train.saving import CheckpointWriter, GatherRecords
from slipstream.train.single import SingleExecutor
from slipstream.train.trace import trace_events, write_trace
from slipstream.train.trackers import Trackers
from slipstream.train.trainer import StopFlag, TimedSource, Trainer, stop_signals
from slipstream.train.workload import OpenWorkload, Workload, of_dataset, open_tokens, timed, training_loader

UNLIMITED = datetime.timedelta(days=365)
"""For waits on the store: writing a checkpoint takes as long as the disk takes."""

Noter = Callable[[int, str], None]


def run_here(
    config: Config,
    dataset: Dataset,
    *,
    reporter: Reporter,
    checkpoint: Checkpoint | None,
    stop: StopFlag | None = None,
) -> dict[str, Any] | None:
    """Train with the executor `single` or `dataparallel`: this process, which may have workers, has all the state.

    Args:
        config: Resolved settings.
        dataset: Opened data.
        reporter: Is told of every event.
        checkpoint: Where to continue from.
        stop: Says when to stop; ``None``: signals do.

    Returns:
        The summary; ``None`` where the run was asked to stop and has saved.
    """
    device = choose_device(config)
    settle(config, device)
    with contextlib.ExitStack() as end:
        executor: Executor
        if config.executor == "dataparallel":
            source = TimedSource(microbatch_loader(config, dataset).batch)
            work = of_dataset(config, dataset, source)
            executor = end.enter_context(contextlib.closing(build_engine(config, source, device=device)))
        else:
            work = of_dataset(config, dataset, timed(training_loader(config, dataset, checkpoint)))
            executor = SingleExecutor(config, work.source, device=device)
        return _train_here(config, executor, work, reporter=reporter, device=device, checkpoint=checkpoint, stop=stop)


def run_single(
    config: Config, open_workload: OpenWorkload, *, reporter: Reporter, checkpoint: Checkpoint | None
) -> dict[str, Any] | None:
    """Train any model with the executor `single`; see :func:`run_here`."""
    device = choose_device(config)
    settle(config, device)
    work = open_workload(config, 0, checkpoint)
    executor = SingleExecutor(config, work.source, device=device, model=work.model)
    return _train_here(config, executor, work, reporter=reporter, device=device, checkpoint=checkpoint)


def _train_here(
    config: Config,
    executor: Executor,
    work: Workload,
    *,
    reporter: Reporter,
    device: torch.device,
    checkpoint: Checkpoint | None,
    stop: StopFlag | None = None,
) -> dict[str, Any] | None:
    if checkpoint is not None:
        executor.restore(checkpoint)
    writer = CheckpointWriter(
        RunDir(Path(config.run_dir)).checkpoints, keep_last=config.checkpoint.keep_last, resume_step=executor.step
    )
    return _trainer(
        config, executor, work, writer=writer, reporter=reporter, device=device, checkpoint=checkpoint, stop=stop
    ).run()


def run_pipeline_rank(
    config: Config,
    *,
    rank: int,
    local_rank: int,
    store: Store,
    checkpoint: Path | None,
    note: Noter = lambda rank, text: None,
    open_workload: OpenWorkload | None = None,
) -> dict[str, Any] | None:
    """Train as one rank of a pipeline.

    Args:
        config: Resolved settings.
        rank: This rank, of ``pipeline.num_stages``.
        local_rank: Its number on this machine; chooses the CUDA device.
        store: Rendezvous of all ranks.
        checkpoint: Where to continue from.
        note: Is told of each action before it runs.
        open_workload: Opens what to train; ``None``: tokens, with the decoder that the settings describe.

    Returns:
        The summary, on rank 0 of a run that reached its last step.
    """
    device = choose_device(config, local_rank=local_rank)
    settle(config, device)
    num_ranks = config.pipeline.num_stages
    transport = connect(store, rank=rank, num_ranks=num_ranks, device=device, timeout_s=config.pipeline.timeout_s)
    tell = partial(note, rank)
    with stop_signals() as stop:  # before the first note: whoever started the ranks passes a stop on from then on
        resumed = open_checkpoint(checkpoint, verify=False, note=tell) if checkpoint is not None else None
        tell("building the model")
        work = (open_workload or open_tokens)(config, rank, resumed)
        executor = PipelineExecutor(
            config,
            work.source,
            transport=transport,
            note=note,
            record_steps=config.log.trace_steps,
            model=work.model,
        )
        if resumed is not None:
            executor.restore(resumed)
        writer = CheckpointWriter(
            RunDir(Path(config.run_dir)).checkpoints,
            rank=rank,
            gather=gather_through(store, "checkpoint", rank=rank, num_ranks=num_ranks),
            keep_last=config.checkpoint.keep_last,
            resume_step=executor.step,
            note=tell,
        )
        is_first = rank == 0
        reporter = ConsoleReporter(Console(), every_steps=config.log.every_steps) if is_first else SilentReporter()
        trainer = _trainer(
            config,
            executor,
            work,
            writer=writer,
            reporter=reporter,
            device=device,
            checkpoint=resumed,
            rank=rank,
            stop=stop,
        )
        summary = trainer.run()
    if executor.step == config.train.num_steps:
        executor.close()
    note(rank, "waiting for the other ranks to end")
    if config.log.trace_steps:
        record = {"events": trace_events(executor.spans, rank=rank)}
        if records := gather_through(store, "trace", rank=rank, num_ranks=num_ranks)(0, record):
            write_trace(RunDir(Path(config.run_dir)).trace, [each["events"] for each in records])
    leave_together(store, rank=rank, num_ranks=num_ranks)
    return summary


def leave_together(store: Store, *, rank: int, num_ranks: int) -> None:
    """Wait until all ranks are here: what one has sent reaches another only while it lives.

    Through the store, without a time limit of its own: rank 0 may be busy saving, and who started the ranks sees one
    that died.
    """
    store.set(f"ended/{rank}", "")
    store.wait([f"ended/{each}" for each in range(num_ranks)], UNLIMITED)


def gather_through(store: Store, purpose: str, *, rank: int, num_ranks: int) -> GatherRecords:
    """Return a way for rank 0 to collect what each rank wrote.

    The others wait for one another too: one whose disk is faster would soon wait for a message of one that still
    saves, and only so long (``pipeline.timeout_s``).

    Args:
        store: Shared by the ranks.
        purpose: Begins the keys.
        rank: This rank.
        num_ranks: All of them.
    """

    def gather(step: int, record: dict[str, Any]) -> list[dict[str, Any]] | None:
        store.set(f"{purpose}/{step}/{rank}", json.dumps(record))
        keys = [f"{purpose}/{step}/{each}" for each in range(num_ranks)]
        store.wait(keys, UNLIMITED)
        if rank != 0:
            return None
        return [json.loads(store.get(key)) for key in keys]

    return gather


def _trainer(
    config: Config,
    executor: Executor,
    work: Workload,
    *,
    writer: CheckpointWriter,
    reporter: Reporter,
    device: torch.device,
    checkpoint: Checkpoint | None,
    rank: int = 0,
    stop: StopFlag | None = None,
) -> Trainer:
    has_trackers = rank == 0 and config.log.trackers
    return Trainer(
        config,
        executor,
        source=work.source,
        validation=work.validation,
        tokenizer=work.tokenizer,
        flops_per_token=flops_per_token(config.model, config.data.sequence_length) if work.model is None else None,
        data_sha256=work.data_sha256,
        run_dir=RunDir(Path(config.run_dir)),
        writer=writer,
        reporter=reporter,
        device=device,
        rank=rank,
        resumed=checkpoint,
        trackers=Trackers(config, note=reporter.note, resume_step=executor.step) if has_trackers else None,
        stop=stop,
    )
