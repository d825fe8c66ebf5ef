"""One small training run, in this process or on the ranks of a pool, with everything that has to be equal."""

import dataclasses
import functools
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.distributed.pool import CPU, Rank

from slipstream.config import Config, from_dict, resolve
from slipstream.data.loader import Batch
from slipstream.digests import combined_digest
from slipstream.executor import Executor, StepReport
from slipstream.pipeline.runtime import PipelineExecutor
from slipstream.train.single import SingleExecutor

VOCAB_SIZE = 13

BASE: dict[str, dict[str, Any]] = {
    "data": {"sequence_length": 7},
    # A large init_std, so that attention is far from uniform and every term moves the loss.
    "model": {"num_layers": 4, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "init_std": 0.3},
    # A bound on the gradient norm that most batches pass and a few do not reach.
    "optim": {"lr": 0.02, "max_grad_norm": 5.0, "lr_warmup_steps": 2, "lr_total_steps": 9},
    "pipeline": {"num_microbatches": 3},
    "train": {"microbatch_size": 2, "num_steps": 5, "compute_dtype": "float32"},
}


def settings(**changes: dict[str, Any]) -> Config:
    """Return resolved settings: the base with some tables changed; ``executor`` comes with :func:`as_pipeline`."""
    tables = {name: BASE.get(name, {}) | changes.get(name, {}) for name in BASE.keys() | changes.keys()}
    return resolve(from_dict(tables), vocab_size=VOCAB_SIZE, cuda=False)


def as_pipeline(config: Config, num_stages: int, schedule: str = "two_bw", *, extra: int = 0) -> Config:
    """Return the same training on a pipeline."""
    pipeline = dataclasses.replace(
        config.pipeline, num_stages=num_stages, pipeline_schedule=schedule, num_extra_in_flight=extra
    )
    staleness = dataclasses.replace(config.staleness, delay=None)
    changed = dataclasses.replace(config, executor="pipeline", pipeline=pipeline, staleness=staleness)
    return resolve(changed, vocab_size=VOCAB_SIZE, cuda=False)


def run_config(run_dir: Path, **changes: Any) -> Config:
    """Return settings, not yet resolved, of a run on the built-in text that takes a moment."""
    tables: dict[str, Any] = {
        "data": {"sequence_length": 16},
        "model": {"num_layers": 4, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "dropout": 0.1},
        "optim": {"name": "muon", "lr": 0.01, "adamw_lr": 0.003, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": 3, "timeout_s": 30.0},
        "train": {"num_steps": 6, "microbatch_size": 2},
        "evaluate": {"num_sequences": 5, "every_steps": 2},
        "checkpoint": {"keep_last": 100},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    return from_dict(tables | {"run_dir": str(run_dir)})


def batch_of(config: Config, index: int, *, sequences: int | None = None) -> Batch:
    """Return a batch that depends on its index alone; about a third of its targets do not count, unevenly so."""
    rng = np.random.default_rng(index)
    shape = (sequences or config.batch_size, config.data.sequence_length)
    inputs, targets = rng.integers(VOCAB_SIZE, size=(2, *shape))
    targets[rng.random(shape) < rng.random((shape[0], 1)) * 0.7] = -100
    return Batch(index=index, inputs=inputs, targets=targets)


def validation_of(config: Config) -> list[Batch]:
    """Return three batches of a microbatch's size."""
    return [batch_of(config, 1000 + i, sequences=config.train.microbatch_size) for i in range(3)]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run was like. Equality means bitwise equality: floats are compared as they are."""

    steps: tuple[tuple[Any, ...], ...]
    """(step, loss, grad_norm, lr, staleness, num_tokens, skipped, router) of each update."""
    losses: tuple[tuple[int, float, float], ...]
    """(step, summed validation loss on x, on y) of each evaluation."""
    weights: str
    """Digest of all master weights."""


def evaluate(executor: Executor, config: Config) -> tuple[int, float, float]:
    """Return the step and the summed loss on both points."""
    batches = validation_of(config)
    return executor.step, executor.evaluate(batches, "x"), executor.evaluate(batches, "y")


def run_executor(executor: Executor, config: Config, *, evaluate_at: tuple[int, ...]) -> Run:
    """Train to the last step, evaluating after some of them (0: before the first)."""
    steps, losses = [], []
    if executor.step in evaluate_at:
        losses.append(evaluate(executor, config))
    while executor.step < config.train.num_steps:
        steps.append(facts(executor.run_step()))
        if executor.step in evaluate_at:
            losses.append(evaluate(executor, config))
    return Run(tuple(steps), tuple(losses), combined_digest(executor.snapshot().digests))


FACTS = ("step", "loss", "grad_norm", "lr", "staleness", "num_tokens", "skipped", "router")


def facts(report: StepReport) -> tuple[Any, ...]:
    """Return what must not depend on the executor."""
    return tuple(getattr(report, name) for name in FACTS)


@functools.cache
def _single(text: str, evaluate_at: tuple[int, ...]) -> Run:
    config = from_dict(json.loads(text))
    executor = SingleExecutor(config, functools.partial(batch_of, config), device=CPU)
    return run_executor(executor, config, evaluate_at=evaluate_at)


def single(config: Config, *, evaluate_at: tuple[int, ...] = (0, 2, 5)) -> Run:
    """Train in this process; the same settings are run once."""
    torch.set_num_threads(1)
    return _single(json.dumps(dataclasses.asdict(config)), evaluate_at)


def pipeline_executor(rank: Rank, config: Config, *, record_steps: int = 0, jitter_s: float = 0.0) -> PipelineExecutor:
    """Build one rank's executor; with jitter every action begins late by a time of its own."""
    source = functools.partial(batch_of, config)
    rng = random.Random(rank.rank)

    def note(number: int, text: str) -> None:
        rank.board.note(number, text)
        if jitter_s:
            time.sleep(rng.choice((0.0, 0.0, jitter_s)))

    return PipelineExecutor(config, source, transport=rank.transport, note=note, record_steps=record_steps)


def on_rank(
    rank: Rank, config: Config, evaluate_at: tuple[int, ...] = (0, 2, 5), jitter_s: float = 0.0
) -> tuple[Run, dict[str, str]]:
    """Train as one rank of a pool; give the digests of this rank's weights as well."""
    executor = pipeline_executor(rank, config, jitter_s=jitter_s)
    run = run_executor(executor, config, evaluate_at=evaluate_at)
    executor.close()
    return run, dict(executor.snapshot().digests)


def whole(parts: list[tuple[Run, dict[str, str]]]) -> Run:
    """Return the run that all ranks tell of alike, with the digest of all their weights."""
    first = parts[0][0]
    for run, _ in parts[1:]:
        assert (run.steps, run.losses) == (first.steps, first.losses), "ranks disagree"
    held = [name for _, digests in parts for name in digests]
    assert len(held) == len(set(held)), "a parameter is answered for twice"
    digests = {name: digest for _, part in parts for name, digest in part.items()}
    return dataclasses.replace(first, weights=combined_digest(digests))
