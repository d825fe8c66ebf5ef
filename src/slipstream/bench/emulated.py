"""Stages that sleep instead of computing, so that more ranks can be timed than there are cores.

Messages, norms, optimizer steps and everything around them stay real.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.assembly import StageParts
from slipstream.bench.settings import BenchPipelineConfig
from slipstream.config import Config
from slipstream.executor import BatchSource
from slipstream.models.partition import stages
from slipstream.pipeline.runtime import ProgramBuilder
from slipstream.pipeline.schedules import ScheduleSpec
from slipstream.pipeline.stage import Read, StageProgram
from slipstream.pipeline.transport import Transport


class EmulatedProgram(StageProgram[StageParts]):
    """A stage of ours that sleeps; its weights are a tiny model's, their gradients 1.

    Args:
        parts: Weights and update path of the stage.
        batches: Never asked.
        spec: The schedule.
        shape: Of the messages.
        forward_s: Sleep of a forward.
        backward_s: Sleep of a backward.
    """

    def __init__(
        self,
        parts: StageParts,
        batches: BatchSource,
        *,
        spec: ScheduleSpec,
        shape: tuple[int, ...],
        forward_s: float,
        backward_s: float,
    ) -> None:
        device, loss_sum = torch.device("cpu"), parts.model.loss_sum
        super().__init__(parts, batches, num_microbatches=spec.num_microbatches, device=device, loss_sum=loss_sum)
        self._message = torch.zeros(shape)
        self._forward_s = forward_s
        self._backward_s = backward_s

    def forward(self, microbatch: int, version: int, received: Tensor | None) -> Tensor | None:
        """Sleep; the version has to be there all the same."""
        self.parts.module(version)
        self._reads[microbatch // self._num_microbatches] = Read(version, 1)
        time.sleep(self._forward_s)
        return None if self.parts.spec.head else self._message

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Sleep."""
        time.sleep(self._backward_s)
        return None if self.parts.spec.embed else self._message

    def take_gradients(self) -> dict[str, Tensor]:
        """Return ones."""
        return {name: torch.ones_like(leaf) for name, leaf in self.parts.leaves[0].items()}

    def take_loss(self, batch: int) -> Tensor | None:
        """Return 0 on the last stage."""
        return torch.zeros(()) if self.parts.spec.head else None


def emulated_builder(bench: BenchPipelineConfig) -> ProgramBuilder:
    """Return what builds a rank's sleeping stages; the stages of one rank share its times."""

    def build(
        config: Config, batches: BatchSource, spec: ScheduleSpec, transport: Transport
    ) -> dict[int, StageProgram[StageParts]]:
        """Build this rank's sleeping stages."""
        cuts = stages(config.model, spec.num_stages)
        forward_s, backward_s = sleeps_s(bench, num_virtual_stages=spec.num_virtual_stages)
        return {
            stage: EmulatedProgram(
                StageParts(config, cuts[stage], num_versions=spec.staleness + 1, device=transport.device),
                batches,
                spec=spec,
                shape=message_shape(config),
                forward_s=forward_s,
                backward_s=backward_s,
            )
            for stage in spec.stages(transport.rank)
        }

    return build


def sleeps_s(bench: BenchPipelineConfig, *, num_virtual_stages: int) -> tuple[float, float]:
    """Return seconds of one stage's forward and backward."""
    assert bench.emulate_forward_ms is not None
    assert bench.emulate_backward_ms is not None
    return bench.emulate_forward_ms / 1e3 / num_virtual_stages, bench.emulate_backward_ms / 1e3 / num_virtual_stages


def message_shape(config: Config) -> tuple[int, int, int]:
    """Return the shape of what stages exchange."""
    return config.train.microbatch_size, config.data.sequence_length, config.model.dim


class EmulatedStage(nn.Module):
    """A sleeping stage for torch's schedules.

    Args:
        forward_s: Sleep of a forward.
        backward_s: Sleep of a backward.
        is_last: Give one number, for a loss, instead of a message.
    """

    def __init__(self, *, forward_s: float, backward_s: float, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._sleeps_s = forward_s, backward_s
        self._is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        output: Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]  # torch leaves it so
            x, self.weight, self._is_last, *self._sleeps_s
        )
        return output


class _Sleep(torch.autograd.Function):
    """Sleeps in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, is_last: bool, forward_s: float, backward_s: float) -> Tensor:
        """Sleep, and give one number or a message."""
        ctx.backward_s = backward_s
        ctx.shape = x.shape
        time.sleep(forward_s)
        return weight.new_zeros(1) if is_last else weight.new_zeros(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Sleep, and give a message and a gradient of 1."""
        time.sleep(ctx.backward_s)
        gradient = gradients[0]
        message = gradient.new_zeros(ctx.shape) if ctx.needs_input_grad[0] else None
        return message, gradient.new_ones(1), None, None, None
