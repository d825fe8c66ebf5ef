"""Error feedback in the shape of DeepSpeed's ZeRO stage 1: flat bfloat16 weights, float32 partitions, group by group.

ZeRO-1 replaces the optimizer's parameters by this rank's slice of a flat float32 copy of each group, hands it gradients
only for the duration of a step, steps one group at a time, and gathers the slices into the bfloat16 weights. The class
here does that for all ranks in one process, and needs no DeepSpeed. With the real one the line is

    engine, optimizer, _, _ = deepspeed.initialize(...)
    attach(optimizer, ErrorFeedback(c=1.0))

after initialize, which may build the base optimizer anew (Adagrad) and would lose hooks that are there already.

    python examples/error_feedback_deepspeed_zero1.py
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.optim.plugin import Delay, ErrorFeedback, attach, is_attached

WORLD_SIZE, STEPS, ALIGNMENT = 2, 20, 4


class ZeroRank:
    """One rank's part of ZeRO-1. It holds the base optimizer as ``.optimizer``, as DeepSpeed's does."""

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self.optimizer, self.rank = optimizer, rank
        self.flat_groups = [flatten([param.data for param in group["params"]]) for group in optimizer.param_groups]
        self.partitions: list[Tensor] = []
        for group, flat in zip(optimizer.param_groups, self.flat_groups, strict=True):
            partition = flat.chunk(WORLD_SIZE)[rank].clone().float().requires_grad_()
            self.partitions.append(partition)
            group["params"] = [partition]

    def step(self, flat_gradients: list[Tensor]) -> None:
        groups = self.optimizer.param_groups
        for index, partition in enumerate(self.partitions):
            partition.grad = flat_gradients[index].chunk(WORLD_SIZE)[self.rank].to(partition.dtype)
            self.optimizer.param_groups = [groups[index]]
            self.optimizer.step()
            self.optimizer.param_groups = groups
            partition.grad = None

    def state_dict(self) -> dict[str, Any]:
        partitions = [partition.detach().clone() for partition in self.partitions]
        return {"base_optimizer_state": self.optimizer.state_dict(), "single_partition_of_fp32_groups": partitions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["base_optimizer_state"])
        for partition, saved in zip(self.partitions, state["single_partition_of_fp32_groups"], strict=True):
            partition.data.copy_(saved)


def flatten(tensors: list[Tensor]) -> Tensor:
    """Concatenate, padded so that the ranks' slices are even."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % (ALIGNMENT * WORLD_SIZE)))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]


class Job:
    """A bfloat16 model whose ranks all compute in this process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
        self.groups = [group["params"] for group in groups_of(self.model)]
        self.ranks = [ZeroRank(torch.optim.AdamW(groups_of(self.model), lr=0.02), rank) for rank in range(WORLD_SIZE)]
        for rank in self.ranks:
            attach(rank, Delay(1), ErrorFeedback(c=1.0))

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
            (self.model(x) - x[:, :4]).square().mean().backward()
            gradients = [flatten([param.grad for param in group]) for group in self.groups]
            for rank in self.ranks:
                rank.step(gradients)
            self.gather()
            self.model.zero_grad()

    def gather(self) -> None:
        """Every rank's slice into the bfloat16 weights."""
        for index, group in enumerate(self.groups):
            sizes = [param.numel() for param in group]
            flat = torch.cat([rank.partitions[index].detach() for rank in self.ranks])
            for param, values in zip(group, flat[: sum(sizes)].split(sizes), strict=True):
                param.data.copy_(values.view_as(param))


def unsharded() -> list[Tensor]:
    """The same training without ZeRO: an optimizer on whole float32 copies of the bfloat16 weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    groups = groups_of(model)
    pairs = [(param, param.detach().float().requires_grad_()) for group in groups for param in group["params"]]
    masters = dict(pairs)
    settings = [{**group, "params": [masters[param] for param in group["params"]]} for group in groups]
    optimizer = attach(torch.optim.AdamW(settings, lr=0.02), Delay(1), ErrorFeedback(c=1.0))
    for step in range(STEPS):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        (model(x) - x[:, :4]).square().mean().backward()
        for param, master in pairs:
            master.grad = param.grad.float()
        optimizer.step()
        for param, master in pairs:
            param.data.copy_(master)
        model.zero_grad()
    return [param.detach() for param in model.parameters()]


def main() -> None:
    job = Job()
    print(f"attached on every rank: {all(is_attached(rank) for rank in job.ranks)}")
    job.train(range(STEPS // 2))
    saved = copy.deepcopy([rank.state_dict() for rank in job.ranks])  # in place of a file
    resumed = Job()
    for rank, state in zip(resumed.ranks, saved, strict=True):
        rank.load_state_dict(state)
    resumed.gather()
    job.train(range(STEPS // 2, STEPS))
    resumed.train(range(STEPS // 2, STEPS))
    weights = [param.detach() for param in job.model.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(weights, resumed.model.parameters(), strict=True))
    print(f"resumed == continuous, to the bit: {same}")
    close = all(torch.allclose(a.float(), b.float(), atol=4e-3) for a, b in zip(weights, unsharded(), strict=True))
    print(f"sharded == unsharded, to bfloat16's precision: {close}")


if __name__ == "__main__":
    main()
