"""One rank of `bench pipeline`: runs every schedule in turn and notes when each step ends."""

import dataclasses
import gc
import time
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from slipstream.bench.ours import OurSchedule, time_stage
from slipstream.bench.settings import OURS, BenchPipelineConfig, run_config
from slipstream.bench.torch_schedules import TorchSchedule
from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.device import settle
from slipstream.executor import BatchSource
from slipstream.pipeline.transport import Transport, connect
from slipstream.train.processes import RankContext

_NUM_BATCHES = 4
"""Different batches; they come again and again, so that reading data costs no schedule anything."""


class Steps(Protocol):
    """A rank's share of a run, ours or torch's."""

    def step(self) -> float:
        """Run up to the next optimizer step; return the gradient norm."""

    def close(self) -> None:
        """End after the last step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Which steps of a run are measured.

    A flushing schedule repeats itself from the first step on; the first one warms up. In two_bw the first step ends
    after the fill and the last one after the drain.

    Attributes:
        before: Steps before the first measured interval.
        after: Steps after the last one.
    """

    before: int
    after: int

    @staticmethod
    def of(name: str) -> "Window":
        """Return the window of a schedule."""
        return Window(before=1, after=1 if name == "two_bw" else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one schedule on one rank.

    Attributes:
        step_times_s: Intervals between the optimizer steps measured.
        cpu_times_s: This process's CPU time in each of them, all threads.
        grad_norms: Of all steps, measured or not.
    """

    step_times_s: list[float]
    cpu_times_s: list[float]
    grad_norms: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankResult:
    """What a rank measured.

    Attributes:
        runs: One a round, by schedule.
        alone_s: Seconds of its stage's forward and backward without the others, one pair a round.
    """

    runs: dict[str, list[Run]]
    alone_s: list[tuple[float, float]]


def bench_rank(context: RankContext, bench: BenchPipelineConfig, names: list[str]) -> RankResult:
    """Connect, then run every schedule once a round, forwards and backwards through the list in turn.

    Args:
        context: Rank and rendezvous.
        bench: What is timed.
        names: Schedules.
    """
    rank, num_ranks = context.rank, context.num_ranks
    cpu = torch.device("cpu")
    settle(run_config(bench, "one_f_one_b", num_steps=1), cpu)  # as training does, for torch's schedules as well
    transport = connect(context.store, rank=rank, num_ranks=num_ranks, device=cpu, timeout_s=bench.timeout_s)
    result = RankResult(runs={name: [] for name in names}, alone_s=[])
    for turn in range(bench.rounds):
        result.alone_s.append(_alone(context, bench, transport))
        for name in names if turn % 2 == 0 else reversed(names):
            window = Window.of(name)
            num_steps = window.before + bench.steps + window.after
            schedule = name if name in OURS else "one_f_one_b"
            config = run_config(bench, schedule, num_steps=num_steps)
            batches = synthetic_batches(config)
            context.note(rank, f"{name}, round {turn}")
            steps: Steps
            if name in OURS:
                steps = OurSchedule(bench, config, batches, transport=transport, note=context.note)
            else:
                steps = TorchSchedule(name, bench, config, batches, rank=rank)
            gc.collect()
            dist.barrier()
            result.runs[name].append(_run(steps, num_steps, window))
            context.note(rank, f"{name}, round {turn}, done")
            dist.barrier()
    return result


def _run(steps: Steps, num_steps: int, window: Window) -> Run:
    ends, cpu_ends, norms = [time.perf_counter()], [time.process_time()], []
    for _ in range(num_steps):
        norms.append(steps.step())
        ends.append(time.perf_counter())
        cpu_ends.append(time.process_time())
    steps.close()
    measured = slice(window.before, num_steps - window.after)
    return Run(
        step_times_s=np.diff(ends)[measured].tolist(),
        cpu_times_s=np.diff(cpu_ends)[measured].tolist(),
        grad_norms=norms,
    )


def _alone(context: RankContext, bench: BenchPipelineConfig, transport: Transport) -> tuple[float, float]:
    """Time each rank's stage while the other ranks wait."""
    config = run_config(bench, "one_f_one_b", num_steps=1)
    times = (0.0, 0.0)
    for rank in range(context.num_ranks):
        dist.barrier()
        if rank == context.rank:
            context.note(rank, "its stage alone")
            times = time_stage(bench, config, synthetic_batches(config), transport=transport, num_repeats=3)
    return times


def synthetic_batches(config: Config) -> BatchSource:
    """Return a source of random tokens; the same on every rank."""
    generator = np.random.default_rng(0)
    shape = (_NUM_BATCHES, config.batch_size, config.data.sequence_length + 1)
    tokens = generator.integers(0, config.model.vocab_size, shape)

    def batch(index: int) -> Batch:
        rows = tokens[index % _NUM_BATCHES]
        return Batch(index=index, inputs=rows[:, :-1], targets=rows[:, 1:])

    return batch
