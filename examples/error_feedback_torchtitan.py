"""Error feedback in the shape of torchtitan: a container of optimizers, saved flattened by parameter name.

torchtitan wraps one optimizer per model part in an ``OptimizersContainer`` that is itself a ``torch.optim.Optimizer``,
and saves and loads through torch.distributed.checkpoint. The container here has that outline, and needs no torchtitan.
``attach(container, ...)`` finds the optimizers inside; the same line goes after ``build_optimizers`` in the real one.

    python examples/error_feedback_torchtitan.py
"""

import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from slipstream.optim.plugin import Delay, ErrorFeedback, attach, is_attached

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizersContainer(torch.optim.Optimizer, Stateful):
    """Several optimizers, one per model part, that look like one."""

    def __init__(self, model_parts: list[nn.Module], **settings: Any) -> None:
        self.model_parts = model_parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), **settings) for part in model_parts]
        # As in torchtitan: the container gets hooks of its own, for others to register.
        super().__init__([param for part in model_parts for param in part.parameters()], settings)

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            merged |= get_optimizer_state_dict(part, optimizer, options=FLAT)
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=FLAT)


class Job:
    """A model in two pipeline parts, as a trainer holds it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        first, second = nn.Module(), nn.Module()
        first.embed = nn.Linear(8, 16)
        second.head = nn.Linear(16, 4)
        self.parts = [first, second]
        self.optimizers = OptimizersContainer(self.parts, lr=0.02, weight_decay=0.1)
        attach(self.optimizers, Delay(1), ErrorFeedback(c=1.0))

    def train(self, steps: range) -> None:
        first, second = self.parts
        for step in steps:
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            loss = (second.head(torch.tanh(first.embed(x))) - x[:, :4]).square().mean()
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()

    def state(self) -> dict[str, Any]:
        weights = {name: weight for part in self.parts for name, weight in part.state_dict().items()}
        return {"model": weights, "optimizer": self.optimizers.state_dict()}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        for part in self.parts:
            part.load_state_dict({name: state["model"][name] for name in part.state_dict()})
        self.optimizers.load_state_dict(state["optimizer"])


def main() -> None:
    job = Job()
    print(f"attached to every part: {is_attached(job.optimizers)}")
    with tempfile.TemporaryDirectory() as folder:
        job.train(range(10))
        dcp.save(job.state(), checkpoint_id=folder, no_dist=True)
        job.train(range(10, 20))
        resumed = Job()
        resumed.load(folder)
    resumed.train(range(10, 20))
    pairs = [(a, b) for x, y in zip(job.parts, resumed.parts) for a, b in zip(x.parameters(), y.parameters())]
    print(f"resumed == continuous, to the bit: {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    main()
