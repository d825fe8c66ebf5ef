"""NorMuon: Muon whose orthogonalised rows are brought to even lengths by a second moment a row."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.optim.muon import COEFFICIENTS, Muon


class NorMuon(Muon):
    """Muon with an adaptive step size for each neuron, that is each row of a matrix.

    With o the orthogonalised momentum of :class:`Muon`, (m, n), and v one number a row:
    ``v <- v + (1 - beta2) (mean over columns of o o - v)``, ``o' = o / (sqrt(v) + 1e-10)``. Then o' is scaled back to
    the Frobenius norm of o, which makes a bias correction of v pointless, and applied as Muon applies o.

    Args:
        params: As for Muon.
        lr: As for Muon.
        weight_decay: As for Muon.
        momentum: As for Muon.
        nesterov: As for Muon.
        ns_coefficients: As for Muon.
        eps: As for Muon.
        ns_steps: As for Muon.
        adjust_lr_fn: As for Muon. With ``"match_rms_adamw"`` the root mean square of a step is 0.2 ``lr`` exactly, as
            in the paper's algorithm 1; ``"original"`` is what the authors' code does.
        beta2: Weight of the past in the second moment, 0 to below 1.

    Raises:
        ValueError: As for Muon.

    Cost:
        Muon's, and one number a row: ``second_momentum_buffer``, of shape (..., m, 1).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 4))
        >>> optimizer = NorMuon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        >>> weight.grad = torch.arange(8.0).reshape(2, 4)
        >>> optimizer.step()
        >>> [round(float(row.square().mean().sqrt()), 3) for row in weight.detach()]
        [0.2, 0.2]

    Source:
        Li et al., "NorMuon: making Muon more efficient and scalable" (2025, arXiv 2510.05491), and the authors' code:
        Nesterov momentum and the preserved norm are in the code, not in algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        beta2: float = 0.95,
    ) -> None:
        if not 0 <= beta2 < 1:
            raise ValueError(f"NorMuon: beta2 must be from 0 to below 1, given {beta2!r}.")
        super().__init__(params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
        self.defaults["beta2"] = beta2
        for group in self.param_groups:
            group.setdefault("beta2", beta2)

    def _buffers(self, param: Tensor) -> tuple[Tensor, ...]:
        state = self.state[param]
        if "second_momentum_buffer" not in state:
            state["second_momentum_buffer"] = torch.zeros_like(param[..., :1])
        return (*super()._buffers(param), state["second_momentum_buffer"])

    def _finished(self, direction: Tensor, buffers: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
        second = buffers[1]
        direction = direction.to(second.dtype)
        if group["adjust_lr_fn"] == "match_rms_adamw":
            norm: float | Tensor = min(direction.shape[-2:]) ** 0.5  # that of an exactly orthogonal matrix
        else:
            norm = torch.linalg.vector_norm(direction, dim=(-2, -1), keepdim=True)
        second.lerp_(direction.square().mean(dim=-1, keepdim=True), 1 - group["beta2"])
        direction = direction / second.sqrt().add_(1e-10)
        new_norm: Tensor = torch.linalg.vector_norm(direction, dim=(-2, -1), keepdim=True)
        return direction * (norm / new_norm.add_(1e-10))
