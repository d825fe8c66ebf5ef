"""What our rules for matrices share: groups checked as they are added, a step parameter by parameter."""

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class MatrixRule(Optimizer, abc.ABC):
    """Base of rules that update one matrix, or one stack of them, at a time."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own.

        Args:
            param_group: ``params`` and any of the constructor's settings.

        Raises:
            ValueError: As the constructor; the group is then not added.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # not overloaded
        """Update every parameter that has a gradient.

        Args:
            closure: Evaluates the loss and sets the gradients first, if given.

        Returns:
            What the closure returned.

        Raises:
            ValueError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    @abc.abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError on a parameter or a setting that cannot be used."""

    @abc.abstractmethod
    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, which has a gradient."""


def check_matrices(rule: str, group: dict[str, Any]) -> None:
    """Refuse parameters that are no floating-point matrices.

    Args:
        rule: Name for the message.
        group: A parameter group.

    Raises:
        ValueError: Names the first one.
    """
    names = group.get("param_names") or [f"number {i} of its group" for i in range(len(group["params"]))]
    for name, param in zip(names, group["params"], strict=True):
        if param.ndim < 2 or not param.is_floating_point():
            raise ValueError(
                f"{rule} takes floating-point matrices of shape (..., m, n); parameter {name} has shape "
                f"{tuple(param.shape)} and type {param.dtype}. Give vectors and the like to another optimizer."
            )


def check_settings(rule: str, group: dict[str, Any], allowed: dict[str, tuple[str, bool]]) -> None:
    """Refuse a setting that breaks its rule.

    Args:
        rule: Name of the optimizer, for the message.
        group: A parameter group.
        allowed: By setting: what is allowed, and whether it holds.

    Raises:
        ValueError: Names the first one.
    """
    for key, (what, holds) in allowed.items():
        if not holds:
            raise ValueError(f"{rule}: {key} must be {what}, given {group[key]!r}.")
