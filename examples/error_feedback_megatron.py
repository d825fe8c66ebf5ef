"""Error feedback in the shape of Megatron-Core: gradients accumulate into ``main_grad``, float32 copies are stepped.

Megatron-Core keeps one contiguous float32 buffer of gradients; each parameter's ``main_grad`` is a view of it, filled
by a hook, microbatch by microbatch. Its mixed-precision optimizer steps on float32 main parameters whose ``grad`` is
that view, then copies them to the bfloat16 model. The classes here have that outline, and need no Megatron. With the
real one the line goes after ``get_megatron_optimizer``:

    attach(optimizer, ErrorFeedback(c=1.0))

    python examples/error_feedback_megatron.py
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.optim.plugin import Delay, ErrorFeedback, attach, is_attached

STEPS, NUM_MICROBATCHES = 20, 2


class GradBuffer:
    """The contiguous buffer behind every ``main_grad``, reused for the whole run."""

    def __init__(self, model: nn.Module) -> None:
        params = list(model.parameters())
        self.data = torch.zeros(sum(param.numel() for param in params))
        for param, view in zip(params, self.data.split([param.numel() for param in params]), strict=True):
            param.main_grad = view.view(param.shape)
            param.register_post_accumulate_grad_hook(self.accumulate)

    @staticmethod
    def accumulate(param: nn.Parameter) -> None:
        param.main_grad.add_(param.grad)
        param.grad = None


class MixedPrecisionOptimizer:
    """Steps on float32 main parameters. It is no torch optimizer, and holds one as ``.optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for group in optimizer.param_groups:
            for index, model_param in enumerate(group["params"]):
                main_param = model_param.detach().clone().float()
                group["params"][index] = main_param
                self.pairs.append((model_param, main_param))

    def step(self) -> None:
        for model_param, main_param in self.pairs:
            main_param.grad = model_param.main_grad.float()  # no copy: it is float32 already
        self.optimizer.step()
        for model_param, main_param in self.pairs:
            model_param.data.copy_(main_param)

    def zero_grad(self) -> None:
        for _, main_param in self.pairs:
            main_param.grad = None

    def state_dict(self) -> dict[str, Any]:
        mains = [main_param.clone() for _, main_param in self.pairs]
        return {"optimizer": self.optimizer.state_dict(), "fp32_from_fp16_params": mains}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for (model_param, main_param), saved in zip(self.pairs, state["fp32_from_fp16_params"], strict=True):
            main_param.copy_(saved)
            model_param.data.copy_(main_param)


class Job:
    """A bfloat16 model with its buffer and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
        self.buffer = GradBuffer(self.model)
        self.optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.02))
        attach(self.optimizer, Delay(1), ErrorFeedback(c=1.0))

    def train(self, steps: range) -> None:
        for step in steps:
            self.buffer.data.zero_()
            self.optimizer.zero_grad()
            for microbatch in microbatches(step):
                loss_of(self.model, microbatch).backward()
            self.optimizer.step()


def microbatches(step: int) -> tuple[Tensor, ...]:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).bfloat16().chunk(NUM_MICROBATCHES)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :4]).square().mean() / NUM_MICROBATCHES


def without_a_buffer() -> list[Tensor]:
    """The same training with a new gradient tensor for every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    pairs = [(param, param.detach().clone().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW([main for _, main in pairs], lr=0.02)
    attach(optimizer, Delay(1), ErrorFeedback(c=1.0))
    for step in range(STEPS):
        for _, main in pairs:
            main.grad = torch.zeros_like(main)
        for microbatch in microbatches(step):
            loss_of(model, microbatch).backward()
            for param, main in pairs:
                main.grad += param.grad
                param.grad = None
        optimizer.step()
        for param, main in pairs:
            param.data.copy_(main)
    return [param.detach() for param in model.parameters()]


def main() -> None:
    job = Job()
    print(f"attached: {is_attached(job.optimizer)}")
    job.train(range(STEPS // 2))
    saved = copy.deepcopy(job.optimizer.state_dict())  # in place of a file
    resumed = Job()
    resumed.optimizer.load_state_dict(saved)
    job.train(range(STEPS // 2, STEPS))
    resumed.train(range(STEPS // 2, STEPS))
    weights = [param.detach() for param in job.model.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(weights, resumed.model.parameters(), strict=True))
    print(f"resumed == continuous, to the bit: {same}")
    same = all(torch.equal(a, b) for a, b in zip(weights, without_a_buffer(), strict=True))
    print(f"views of one buffer == separate gradients, to the bit: {same}")


if __name__ == "__main__":
    main()
