"""Delayed Nesterov momentum: the outer optimizer of workers that take local steps and never wait for one another."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class DelayedNesterov(Optimizer):
    r"""Nesterov momentum that moves once in N gradients.

    When pseudo-gradients arrive one by one, a momentum that decays with each of them is no longer that of a whole
    round. Here it stands still for N gradients, the mean of which then goes into it; until then each gradient makes a
    plain step of its own. With the gradient :math:`g_t`, momentum :math:`m` and rate :math:`\epsilon`,

    .. math::
        m_{t+1} &= \begin{cases} \beta m_t + \frac{1}{N} \sum_{i=t-N+1}^{t} g_i & N \mid t + 1 \\ m_t & \text{else}
        \end{cases} \\
        \theta_{t+1} &= \theta_t - \epsilon \left(\frac{g_t}{N} + a_t \beta m_{t+1}\right), \qquad
        a_t = \begin{cases} 1 - c N + c & N \mid t + 1 \\ c & \text{else} \end{cases}

    so N gradients together move the weights by their mean and the momentum once, however it is spread. With N = 1 it
    is ``torch.optim.SGD`` with ``nesterov=True``; without momentum too, plain gradient descent.

    Args:
        params: As for any optimizer.
        lr: The rate, at least 0.
        momentum: beta, 0 to below 1.
        every: N, at least 1.
        spread: c, the share of the momentum that each of the steps between takes, 0 to 1 / N.

    Raises:
        ValueError: An argument is out of its range.

    Cost:
        Two copies of the parameters (one where N = 1): ``momentum_buffer`` and ``sum``, what has come since it moved.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = DelayedNesterov([weight], lr=1.0, momentum=0.5, every=2)
        >>> for _ in range(2):
        ...     weight.grad = torch.ones(1)
        ...     optimizer.step()
        >>> weight.detach()
        tensor([-1.5000])

    Source:
        Liu et al., "Asynchronous Local-SGD training for language modeling" (2024, arXiv 2401.09135), delayed Nesterov
        update, where c is called the momentum activation and is 0 unless said otherwise. The abstract was at hand, the
        algorithm as commonly restated; the authors' published example does not contain it.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, every: int = 1, spread: float = 0.0
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"DelayedNesterov: lr must be at least 0, given {lr!r}.")
        if not 0 <= momentum < 1:
            raise ValueError(f"DelayedNesterov: momentum must be from 0 to below 1, given {momentum!r}.")
        if not every >= 1:
            raise ValueError(f"DelayedNesterov: every must be at least 1, given {every!r}.")
        if not 0 <= spread <= 1 / every:
            raise ValueError(f"DelayedNesterov: spread must be from 0 to 1 / every, given {spread!r} with {every!r}.")
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every, "spread": spread})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a stale gradient cannot be evaluated again
        """Apply the gradients.

        Args:
            closure: None is taken.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, momentum, every, spread = group["lr"], group["momentum"], group["every"], group["spread"]
        if momentum:
            state = self.state[param]
            is_due = self._gather(state, gradient, momentum=momentum, every=every)
            share = 1 - spread * every + spread if is_due else spread
            if share and "momentum_buffer" in state:
                param.add_(state["momentum_buffer"], alpha=-lr * share * momentum)
        param.add_(gradient, alpha=-lr / every)

    def _gather(self, state: dict[str, Any], gradient: Tensor, *, momentum: float, every: int) -> bool:
        """Take a gradient towards the momentum, and move that if it is time; return whether it was."""
        state["count"] = state.get("count", 0) + 1
        if "sum" in state:
            state["sum"].add_(gradient)
        elif every > 1:
            state["sum"] = gradient.clone()
        if state["count"] < every:
            return False
        total = state.pop("sum", gradient)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        # Of as many as have come: they are more than `every` where a resumed run has fewer workers.
        state["momentum_buffer"].mul_(momentum).add_(total, alpha=1 / state["count"])
        state["count"] = 0
        return True
