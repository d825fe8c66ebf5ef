"""Basis rotation: Adam in the eigenbasis of the averaged gradient covariances of a matrix."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.optim.matrix_rule import MatrixRule, check_matrices, check_settings

SIDES = ("both", "rows", "columns", "shorter")
"""Which sides of a matrix are rotated; ``shorter`` is the cheaper one, rows where both are as long."""


class BasisRotation(MatrixRule):
    """Adam in a slowly turning orthogonal basis in which the curvature of a matrix is nearly diagonal.

    With g the gradient (m, n), U and V the bases of its rows and columns::

        r <- U^T g V
        a <- a + (1 - beta1) (r - a)          v <- v + (1 - beta2) (r r - v)
        w <- (1 - lr weight_decay) w - lr U [a' / (sqrt(v') + eps)] V^T
        L <- L + (1 - basis_beta) (g g^T - L)   R <- R + (1 - basis_beta) (g^T g - R)

    where a', v' have Adam's bias correction. Every ``frequency`` updates one orthogonal iteration follows: columns of U
    in the order of falling ``diag(U^T L U)``, v along with them, ``U <- qr(L U)``, V likewise, and the momentum is
    turned with them, ``a <- U_new^T U a V^T V_new``. A parameter's first gradient sets the bases, by eigenvectors, and
    moves nothing: in the basis of itself a gradient is diagonal, and Adam would blow up the rounding errors beside it.

    Why under delay: Adam's step sizes are per coordinate. Where eigenvectors of the curvature are oblique to the
    coordinates, steep directions are shared by many coordinates, the iterate oscillates along them, and a step delayed
    by one update points the wrong way. In its own basis each steep direction gets its own, small, step.

    Args:
        params: Parameters, named parameters or groups. Each of shape (..., m, n): a packed tensor holds many matrices
            (experts, say), and each steps as if it were a parameter of its own (on a CPU to the last bit).
        lr: Learning rate, at least 0; that of AdamW is a good start.
        betas: Weights of the past in both moments, 0 to below 1.
        basis_beta: Weight of the past in L and R; none: the second of ``betas``.
        eps: Added to the root of the second moment; above 0.
        weight_decay: Decoupled weight decay, at least 0.
        frequency: Updates between two turns of the bases, at least 1.
        sides: One of ``both``, ``rows`` (V = 1), ``columns`` (U = 1), ``shorter``.

    Raises:
        ValueError: A parameter is not a floating-point matrix, or a setting is outside its range.

    Cost:
        2 m n + 2 m^2 + 2 n^2 numbers a matrix, in float32 or higher; an update 6 (m^2 n + m n^2) floating-point
        operations, and two QR decompositions every ``frequency`` updates. One-sided, the terms of that side.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = BasisRotation([weight], lr=0.1, weight_decay=0.0)
        >>> for grad in (torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[2.0, 0.0], [4.0, 3.0]])):
        ...     weight.grad = grad
        ...     optimizer.step()
        >>> basis = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5  # the first gradient's eigenvectors
        >>> (basis.T @ weight.detach() @ basis).abs()  # the first step in them has the size of Adam's: lr each
        tensor([[0.1000, 0.1000],
                [0.1000, 0.1000]])

    Source:
        Jung, Shin and Lee, "Mitigating staleness in asynchronous pipeline parallelism via basis rotation" (2026, arXiv
        2602.03515), as summarised elsewhere: its own text was not at hand. The refresh of the basis is that of Vyas et
        al., "SOAP" (2024, arXiv 2409.11321, algorithms 3 and 4).

    Differs:
        With ``sides="both"`` this is SOAP, up to where eps and weight decay stand. SOAP as packaged elsewhere takes
        no packed tensors and orthogonalises in float32 whatever the type.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        basis_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        frequency: int = 10,
        sides: str = "both",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "basis_beta": basis_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "frequency": frequency,
            "sides": sides,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_matrices("BasisRotation", group)
        betas, basis_beta, frequency = group["betas"], group["basis_beta"], group["frequency"]
        allowed = {
            "lr": ("at least 0", 0 <= float(group["lr"]) < math.inf),
            "betas": ("two numbers from 0 to below 1", len(betas) == 2 and all(0 <= beta < 1 for beta in betas)),
            "basis_beta": ("none, or from 0 to below 1", basis_beta is None or 0 <= basis_beta < 1),
            "eps": ("above 0", 0 < group["eps"] < math.inf),
            "weight_decay": ("at least 0", 0 <= group["weight_decay"] < math.inf),
            "frequency": ("a whole number of at least 1", isinstance(frequency, int) and frequency >= 1),
            "sides": (f"one of {', '.join(SIDES)}", group["sides"] in SIDES),
        }
        check_settings("BasisRotation", group, allowed)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        if param.grad is None or param.grad.is_sparse:
            raise ValueError("BasisRotation takes dense gradients only. Use a layer that makes dense ones.")
        state = self.state[param]
        begins = "step" not in state
        if begins:
            state["step"] = 0
            state |= _zeros(param, sides=group["sides"])
        else:
            state["step"] += 1
        held = {key: tensor for key, tensor in state.items() if key != "step"}
        for index in itertools.product(*(range(size) for size in param.shape[:-2])):
            matrix = {key: tensor[index] for key, tensor in held.items()}
            grad = param.grad[index].to(matrix["exp_avg"].dtype)
            if not begins:
                weight, lr = param[index], float(group["lr"])
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(_direction(grad, matrix, step=state["step"], group=group), alpha=-lr)
            _average_covariances(grad, matrix, group=group)
            if begins:
                _set_bases(matrix)
            elif state["step"] % group["frequency"] == 0:
                _turn_bases(matrix)


def _zeros(param: Tensor, *, sides: str) -> dict[str, Tensor]:
    """Return the state of a parameter before its first gradient."""
    (num_rows, num_columns), dtype = param.shape[-2:], torch.promote_types(param.dtype, torch.float32)
    new: dict[str, Tensor] = {key: torch.zeros_like(param, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
    shorter = "rows" if num_rows <= num_columns else "columns"
    for side, length in {"rows": num_rows, "columns": num_columns}.items():
        if sides in ("both", side) or (sides == "shorter" and side == shorter):
            for key in ("covariance", "basis"):
                new[f"{side}_{key}"] = param.new_zeros(*param.shape[:-2], length, length, dtype=dtype)
    return new


def _direction(grad: Tensor, matrix: dict[str, Tensor], *, step: int, group: dict[str, Any]) -> Tensor:
    """Take a gradient into the moments and return Adam's direction in the parameter's own coordinates."""
    (beta1, beta2), rows, columns = group["betas"], matrix.get("rows_basis"), matrix.get("columns_basis")
    rotated = _rotate(grad, rows, columns)
    matrix["exp_avg"].lerp_(rotated, 1 - beta1)
    matrix["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
    root = matrix["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    return _rotate(matrix["exp_avg"] / root.mul_(1 - beta1**step), _transposed(rows), _transposed(columns))


def _average_covariances(grad: Tensor, matrix: dict[str, Tensor], *, group: dict[str, Any]) -> None:
    weight = 1 - (group["betas"][1] if group["basis_beta"] is None else group["basis_beta"])
    for side, covariance in (("rows", grad @ grad.mT), ("columns", grad.mT @ grad)):
        if f"{side}_covariance" in matrix:
            matrix[f"{side}_covariance"].lerp_(covariance, weight)


def _set_bases(matrix: dict[str, Tensor]) -> None:
    """Make the bases those of the eigenvectors, by falling eigenvalue; the moments are still zero."""
    for side in ("rows", "columns"):
        if f"{side}_basis" in matrix:
            matrix[f"{side}_basis"].copy_(torch.linalg.eigh(matrix[f"{side}_covariance"])[1].flip(-1))


def _turn_bases(matrix: dict[str, Tensor]) -> None:
    """Bring the bases one orthogonal iteration nearer to the eigenvectors, and the moments along."""
    turns: dict[str, Tensor] = {}
    for side, axis in (("rows", 0), ("columns", 1)):
        basis = matrix.get(f"{side}_basis")
        if basis is None:
            continue
        product = matrix[f"{side}_covariance"] @ basis
        order = (basis * product).sum(0).argsort(descending=True, stable=True)
        turned = torch.linalg.qr(product[:, order])[0]
        turns[side] = basis.mT @ turned
        basis.copy_(turned)
        matrix["exp_avg_sq"].copy_(matrix["exp_avg_sq"].index_select(axis, order))
    matrix["exp_avg"].copy_(_rotate(matrix["exp_avg"], turns.get("rows"), turns.get("columns")))


def _rotate(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return rows^T x columns; none stands for the identity."""
    if rows is not None:
        x = rows.mT @ x
    return x if columns is None else x @ columns


def _transposed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.mT
