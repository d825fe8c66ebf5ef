"""Muon: momentum, orthogonalised by a Newton-Schulz iteration, as the step of a matrix."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.optim.matrix_rule import MatrixRule, check_matrices, check_settings

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""a, b, c of the quintic whose slope at zero is steepest (Jordan, 2024)."""

LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")
"""What `adjust_lr_fn` may be; none means `original`."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which matrices like ``x`` are orthogonalised.

    float64 stays float64; everything else is float32 on a CPU, where bfloat16 products without hardware for them are
    tens of times slower, and bfloat16 on CUDA, where they are faster and precise enough.

    Args:
        x: Any floating-point tensor.

    Example:
        >>> compute_dtype(torch.zeros(2, 3, dtype=torch.bfloat16))
        torch.float32
    """
    if x.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if x.device.type == "cuda" else torch.float32


@torch.no_grad()
def newton_schulz(
    x: Tensor,
    *,
    coefficients: Sequence[float] = COEFFICIENTS,
    num_steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Bring every singular value of each matrix near 1 and keep its singular vectors.

    ``X_0 = x / max(|x|_F, eps)``, then ``X <- a X + (b A + c A A) X`` with ``A = X X^T``, taken on the shorter side.
    With the default coefficients five steps end with singular values of about 0.7 to 1.2, not exactly 1: that is
    cheaper and trains as well. A zero matrix stays zero.

    Args:
        x: Shape (..., m, n), floating point. Each matrix is treated by itself, and it is never written to.
        coefficients: a, b, c.
        num_steps: Iterations.
        eps: Smallest Frobenius norm divided by; a smaller matrix yields a smaller result.
        dtype: Type to iterate in; none: :func:`compute_dtype`. The norm is taken in float32 or higher.

    Returns:
        A new tensor of the shape of ``x``, in ``dtype``.

    Raises:
        ValueError: ``x`` has fewer than two dimensions.

    Cost:
        ``num_steps (4 k k l + 2 k k k)`` floating-point operations for a matrix with sides k <= l, and room for two
        matrices k x l and two k x k. On a CPU with bfloat16 units, ``torch.set_float32_matmul_precision("medium")``
        lets these products use them, at bfloat16's precision.

    Example:
        >>> y = newton_schulz(torch.diag(torch.tensor([3.0, 1.0, 0.2])))
        >>> bool(((torch.linalg.svdvals(y) > 0.6) & (torch.linalg.svdvals(y) < 1.3)).all())
        True

    Source:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the iteration is that of
        Bernstein and Newhouse, "Old optimizer, new norm" (2024, arXiv 2409.20325).
    """
    if x.ndim < 2:
        raise ValueError(f"newton_schulz takes matrices of shape (..., m, n), given shape {tuple(x.shape)}.")
    dtype = dtype or compute_dtype(x)
    if x.ndim == 2 or x.device.type != "cpu":
        batch = x if x.ndim == 2 else x.reshape(-1, *x.shape[-2:])
        normalised = _normalised(batch, eps=eps, dtype=dtype)
        return _iterate(normalised, coefficients=coefficients, num_steps=num_steps).view(x.shape)
    # One matrix at a time: a batched product may round differently from a single one, and a packed tensor must give
    # the bits of its matrices.
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    for index in _matrix_indices(x.shape):
        normalised = _normalised(x[index], eps=eps, dtype=dtype)
        result[index] = _iterate(normalised, coefficients=coefficients, num_steps=num_steps)
    return result


class Muon(MatrixRule):
    """Steps of orthogonalised momentum for the matrices of a network's blocks.

    ``m <- m + (1 - momentum) (g - m)``, ``d = g + momentum (m - g)`` with Nesterov, else ``m``, then
    ``w <- (1 - lr weight_decay) w - lr s newton_schulz(d)``, where s depends on the shape of the matrix alone.

    Args:
        params: Parameters, named parameters or groups. Each of shape (..., m, n): a packed tensor holds many matrices
            (experts, say), and each steps as if it were a parameter of its own (on a CPU to the last bit).
        lr: Learning rate, at least 0.
        weight_decay: Decoupled weight decay, at least 0; multiplies ``lr`` itself, not ``lr s``.
        momentum: Weight of the past in the average of gradients, 0 (none) to below 1.
        nesterov: Look one step ahead along the average.
        ns_coefficients: a, b, c of :func:`newton_schulz`.
        eps: Smallest norm divided by; above 0.
        ns_steps: Iterations of :func:`newton_schulz`, below 100.
        adjust_lr_fn: ``"original"`` or none: s = sqrt(max(1, m / n)). ``"match_rms_adamw"``:
            s = 0.2 sqrt(max(m, n)), which makes the root mean square of a step that of AdamW's at the same rate.

    Raises:
        ValueError: A parameter is not a floating-point matrix, or a setting is outside its range.

    Cost:
        One buffer a parameter, ``momentum_buffer``, in the parameter's type; :func:`newton_schulz` a matrix and step.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4, 4))
        >>> optimizer = Muon([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.eye(4)
        >>> optimizer.step()
        >>> bool((weight.diagonal() < -0.05).all())
        True

    Source:
        Jordan et al., "Muon" (2024); "match_rms_adamw": Liu et al., "Muon is scalable for LLM training" (2025,
        arXiv 2502.16982).

    Differs:
        Constructor, groups and state are those of ``torch.optim.Muon``, so either loads the other's state_dict. That
        one takes single matrices only and always iterates in bfloat16, normalised in bfloat16; this one follows
        :func:`compute_dtype` and normalises first.
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
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_matrices("Muon", group)
        if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
            raise ValueError(f"Muon: lr must be one number, given a tensor of shape {tuple(group['lr'].shape)}.")
        coefficients, ns_steps = group["ns_coefficients"], group["ns_steps"]
        allowed = {
            "lr": ("at least 0", 0 <= group["lr"] < math.inf),
            "weight_decay": ("at least 0", 0 <= group["weight_decay"] < math.inf),
            "momentum": ("from 0 to below 1", 0 <= group["momentum"] < 1),
            "eps": ("above 0", 0 < group["eps"] < math.inf),
            "ns_steps": ("a whole number from 0 to 99", isinstance(ns_steps, int) and 0 <= ns_steps < 100),
            "ns_coefficients": (
                "three numbers",
                len(coefficients) == 3 and all(math.isfinite(c) for c in coefficients),
            ),
            "adjust_lr_fn": ("one of none, 'original', 'match_rms_adamw'", group["adjust_lr_fn"] in LR_ADJUSTMENTS),
        }
        check_settings("Muon", group, allowed)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        if param.grad is None or param.grad.is_sparse:
            raise ValueError("Muon takes dense gradients only. Use a layer that makes dense ones (sparse=False).")
        lr, momentum = float(group["lr"]), group["momentum"]
        step_size = lr * _lr_ratio(param.shape[-2], param.shape[-1], group["adjust_lr_fn"])
        for weight, grad, *buffers in _matrices(param, param.grad, *self._buffers(param)):
            average = buffers[0].lerp_(grad, 1 - momentum)
            direction = grad.lerp(average, momentum) if group["nesterov"] else average
            direction = newton_schulz(
                direction,
                coefficients=group["ns_coefficients"],
                num_steps=group["ns_steps"],
                eps=group["eps"],
            )
            weight.mul_(1 - lr * group["weight_decay"])
            weight.add_(self._finished(direction, buffers, group), alpha=-step_size)

    def _buffers(self, param: Tensor) -> tuple[Tensor, ...]:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return (state["momentum_buffer"],)

    def _finished(self, direction: Tensor, buffers: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
        """Return the step of a matrix from its orthogonalised direction; for variants of the rule."""
        return direction


def _normalised(x: Tensor, *, eps: float, dtype: torch.dtype) -> Tensor:
    """Return x (m, n) or (batch, m, n) with Frobenius norms of 1 as a new tensor of type ``dtype``."""
    # In bfloat16 a norm has two to three digits, and half precision can overflow: divide first, then cast.
    precise = torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=precise).clamp_(min=eps)
    return (x.to(precise) / norm).to(dtype)


def _iterate(x: Tensor, *, coefficients: Sequence[float], num_steps: int) -> Tensor:
    """Run the iteration on normalised x (m, n) or (batch, m, n), which becomes workspace."""
    a, b, c = coefficients
    multiply, multiply_add = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    wide = x.shape[-2] <= x.shape[-1]
    side = min(x.shape[-2:])
    gram = x.new_empty(*x.shape[:-2], side, side)
    polynomial = torch.empty_like(gram)
    spare = torch.empty_like(x)
    for _ in range(num_steps):
        # A tall matrix is multiplied from its other side, which is the wide iteration on its transpose, uncopied.
        if wide:
            multiply(x, x.mT, out=gram)
        else:
            multiply(x.mT, x, out=gram)
        multiply_add(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        left, right = (polynomial, x) if wide else (x, polynomial)
        multiply_add(x, left, right, beta=a, out=spare)
        x, spare = spare, x
    return x


def _matrix_indices(shape: torch.Size) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size) for size in shape[:-2]))


def _matrices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of what is updated together: each matrix on a CPU, else the whole tensors.

    On a CPU even an element-wise operation may round the last few elements of a tensor by other instructions than
    the rest, so that a matrix inside a packed tensor would differ from the same matrix alone.
    """
    first = tensors[0]
    if first.ndim == 2 or first.device.type != "cpu":
        yield tensors
        return
    for index in _matrix_indices(first.shape):
        yield tuple(tensor[index] for tensor in tensors)


def _lr_ratio(num_rows: int, num_columns: int, adjust_lr_fn: str | None) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(num_rows, num_columns))
    return math.sqrt(max(1.0, num_rows / max(num_columns, 1)))
