"""Our schedules on a rank, and one stage computing alone."""

import time

import torch

from slipstream.bench.emulated import emulated_builder, message_shape, sleeps_s
from slipstream.bench.settings import BenchPipelineConfig
from slipstream.config import Config
from slipstream.executor import BatchSource
from slipstream.pipeline.runtime import Noter, PipelineExecutor, build_programs, pipeline_spec
from slipstream.pipeline.transport import Transport


class OurSchedule:
    """One rank of a pipeline that our runtime runs.

    Args:
        bench: What is timed.
        config: The run, with its schedule and length.
        batches: Gives the batch of an index.
        transport: Connected to the other ranks.
        note: Is told of each action before it runs.
    """

    def __init__(
        self,
        bench: BenchPipelineConfig,
        config: Config,
        batches: BatchSource,
        *,
        transport: Transport,
        note: Noter,
    ) -> None:
        build = emulated_builder(bench) if bench.emulated else build_programs
        self._executor = PipelineExecutor(config, batches, transport=transport, note=note, build=build)

    def step(self) -> float:
        """Run up to the next optimizer step; return the gradient norm."""
        return self._executor.run_step().grad_norm

    def close(self) -> None:
        """Wait until what was sent has left."""
        self._executor.close()


def time_stage(
    bench: BenchPipelineConfig, config: Config, batches: BatchSource, *, transport: Transport, num_repeats: int
) -> tuple[float, float]:
    """Time one rank's stage without any neighbour.

    Args:
        bench: What is timed.
        config: A run with one stage a rank.
        batches: Gives the batch of an index.
        transport: Says which rank this is; nothing is sent.
        num_repeats: Microbatches measured, after one that warms up.

    Returns:
        Median seconds of a forward and of a backward of one microbatch.
    """
    if bench.emulated:
        return sleeps_s(bench, num_virtual_stages=1)
    (program,) = build_programs(config, batches, pipeline_spec(config), transport).values()
    spec, shape = program.parts.spec, message_shape(config)
    forwards, backwards = [], []
    for microbatch in range(num_repeats + 1):
        received = None if spec.embed else torch.randn(shape)
        gradient = None if spec.head else torch.randn(shape)
        begin = time.perf_counter()
        program.forward(microbatch, 0, received)
        between = time.perf_counter()
        program.backward(microbatch, gradient)
        forwards.append(between - begin)
        backwards.append(time.perf_counter() - between)
    return torch.tensor(forwards[1:]).median().item(), torch.tensor(backwards[1:]).median().item()
