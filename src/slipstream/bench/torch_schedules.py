"""A training step on torch.distributed.pipelining: what a user of torch's schedules has to write."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from slipstream.bench.emulated import EmulatedStage, message_shape, sleeps_s
from slipstream.bench.settings import TORCH, BenchPipelineConfig
from slipstream.config import Config
from slipstream.executor import BatchSource
from slipstream.models.llama import build_stage, cross_entropy_sum
from slipstream.models.partition import stages
from slipstream.models.roles import role
from slipstream.optim.build import build_optimizers


class TorchSchedule:
    """One rank of a pipeline that torch's schedule runs, with our model, optimizer and clipping.

    Args:
        name: Which schedule, see :data:`slipstream.bench.settings.TORCH`.
        bench: What is timed.
        config: The run, as :func:`slipstream.bench.settings.run_config` describes it.
        batches: Gives the batch of an index.
        rank: This rank; all ranks are torch's default group.
    """

    def __init__(
        self, name: str, bench: BenchPipelineConfig, config: Config, batches: BatchSource, *, rank: int
    ) -> None:
        self._config = config
        self._batches = batches
        self._bench = bench
        self._index = 0
        self._num_tokens = 1
        p = config.pipeline.num_stages
        indices = held_stages(name, rank=rank, num_ranks=p)
        num_stages = len(indices) * p
        modules = _sleeping(bench, indices, num_stages) if bench.emulated else _computing(config, indices, num_stages)
        self._is_first, self._is_last = 0 in indices, num_stages - 1 in indices
        self._params = {
            f"{i}.{name}" if bench.emulated else name: param
            for i, module in zip(indices, modules)
            for name, param in module.named_parameters()
        }
        roles = (lambda name: "norm") if bench.emulated else role
        self._optimizers = build_optimizers(self._params, config.optim, role=roles).values()
        device = torch.device("cpu")
        held = [pipelining.PipelineStage(each, i, num_stages, device) for i, each in zip(indices, modules)]
        schedule: Callable[..., Any] = getattr(pipelining, TORCH[name])
        self._schedule = schedule(
            held if len(held) > 1 else held[0],
            n_microbatches=config.pipeline.num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def step(self) -> float:
        """Train on the next batch; return the gradient norm."""
        inputs, targets = self._tensors()
        self._schedule.step(
            *([inputs] if self._is_first else []), target=targets if self._is_last else None, return_outputs=False
        )
        params = self._params.values()
        gradients = [param.grad for param in params if param.grad is not None]
        squared = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
        nn.utils.clip_grads_with_norm_(params, self._config.optim.max_grad_norm, norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._index += 1
        return float(norm)

    def close(self) -> None:
        """Do nothing: a flushing schedule leaves nothing under way."""

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if self._bench.emulated:
            whole = torch.zeros(self._config.batch_size, *message_shape(self._config)[1:])
            return whole, whole
        batch = self._batches(self._index)
        self._num_tokens = batch.num_tokens
        return torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        if self._bench.emulated:
            return output.sum()
        return cross_entropy_sum(output, targets) / self._num_tokens


def held_stages(name: str, *, rank: int, num_ranks: int) -> list[int]:
    """Return the stages that torch's schedule wants on a rank.

    Example:
        >>> [held_stages("torch_zbv", rank=rank, num_ranks=2) for rank in range(2)]
        [[0, 3], [1, 2]]
    """
    if name in ("torch_gpipe", "torch_1f1b"):
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank if name == "torch_zbv" else rank + num_ranks]


def _computing(config: Config, indices: list[int], num_stages: int) -> list[nn.Module]:
    cuts = stages(config.model, num_stages, sequence_length=config.data.sequence_length)
    return [build_stage(config.model, cuts[i].blocks, embed=cuts[i].embed, head=cuts[i].head) for i in indices]


def _sleeping(bench: BenchPipelineConfig, indices: list[int], num_stages: int) -> list[nn.Module]:
    forward_s, backward_s = sleeps_s(bench, num_virtual_stages=len(indices))
    return [EmulatedStage(forward_s=forward_s, backward_s=backward_s, is_last=i == num_stages - 1) for i in indices]
