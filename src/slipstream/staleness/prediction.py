"""Weight prediction: publish where the optimizer's momentum will have taken the weights."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from slipstream.errors import ConfigError
from slipstream.staleness.publish import PublishMethod

Kind = Literal["spectrain", "xpipe"]

_RULES: dict[Kind, tuple[type[Optimizer], ...]] = {"spectrain": (SGD,), "xpipe": (Adam, AdamW, NAdam)}


class WeightPrediction(PublishMethod):
    r"""Publish :math:`x = y - s\,\eta\,d`, the weights s steps ahead if the momentum stays as it is.

    ``spectrain``: d is SGD's momentum buffer. ``xpipe``: d is Adam's
    :math:`\hat m / (\sqrt{\hat v} + \epsilon)`. The rate is that of the step just made.

    Args:
        kind: Which d.
        num_steps: s.
        optimizers: Whose momentum to read; every one must be of the kind's rules.

    Raises:
        ConfigError: An optimizer keeps no such momentum.

    Cost:
        One transient tensor per parameter.

    Source:
        Chen, Yang, Cheng 2018, arXiv 1809.02839 (SpecTrain); Guan et al. 2019, arXiv 1911.04610 (XPipe).
    """

    changes_weights = True

    def __init__(self, kind: Kind, *, num_steps: float, optimizers: Mapping[str, Optimizer]) -> None:
        allowed = _RULES[kind]
        for name, optimizer in optimizers.items():
            if not isinstance(optimizer, allowed) or (
                isinstance(optimizer, SGD) and not optimizer.defaults["momentum"]
            ):
                rules = ", ".join(f"torch.optim.{rule.__name__}" for rule in allowed)
                raise ConfigError(
                    f"staleness.prediction '{kind}' reads the momentum of {rules}, which '{name}' does not keep. "
                    "Use one of these (SGD with momentum), or staleness.error_feedback, which works with any rule."
                )
        self._num_steps = num_steps
        self._optimizers = optimizers

    def before_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor], *, update: int) -> None:
        """Do nothing."""

    @torch.no_grad()
    def after_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> None:
        """Write the predicted weights; a parameter without state is published as it is."""
        steps: dict[Tensor, Tensor] = {}
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if state := optimizer.state.get(param):
                        steps[param] = _momentum(state, group).mul_(group["lr"] * self._num_steps)
        for name, y in masters.items():
            published[name].copy_(y - steps[y] if y in steps else y)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the optimizers keep the history."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


def _momentum(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return a new tensor d such that the next step would be about lr d."""
    if "exp_avg" not in state:
        buffer: Tensor = state["momentum_buffer"]
        return buffer.clone()
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    mean: Tensor = state["exp_avg"] / (1 - beta1**step)
    mean_square: Tensor = state["exp_avg_sq"] / (1 - beta2**step)
    return mean.div_(mean_square.sqrt_().add_(group["eps"]))
