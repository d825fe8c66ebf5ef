"""Curvature of a loss without its matrix: Hessian-vector products, and the sharpness in two geometries.

A loss is given as functions whose values add up to it, one a microbatch, so that one microbatch's graph is held at a
time.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, NonFiniteError

Losses = Sequence[Callable[[], Tensor]]
"""Scalar functions of leaves; their values add up to the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eigenvalue:
    """The largest eigenvalue of a symmetric operator, as far as it is known.

    Attributes:
        value: Never above the true one, but for rounding.
        error: Some eigenvalue lies within this distance of ``value``.
        num_products: Products with the operator that were needed.
    """

    value: float
    error: float
    num_products: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpectralSharpness:
    """What :func:`spectral_sharpness` found.

    Attributes:
        value: Largest <D, H D> found; a lower bound of the true one.
        gradient_dual_norm: sum s_i |G_i|_* of the loss's gradient G.
        num_products: Hessian-vector products that were needed.
    """

    value: float
    gradient_dual_norm: float
    num_products: int


def hessian_vector(losses: Losses, parameters: Mapping[str, Tensor], vector: Tensor) -> Tensor:
    """Return H v by a backward pass through the backward pass.

    Args:
        losses: Add up to the loss.
        parameters: Leaves that H is over.
        vector: All of them in one, shape (number of parameters,).

    Returns:
        The shape of ``vector``.

    Cost:
        About three times a gradient; memory for one function's graph.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> hessian_vector([lambda: (w**3).sum()], {"w": w}, torch.tensor([1.0, 0.0]))
        tensor([6., 0.])
    """
    leaves = list(parameters.values())
    directions = list(unflat(vector, parameters).values())
    total = torch.zeros_like(vector)
    for loss in losses:
        gradients = torch.autograd.grad(loss(), leaves, create_graph=True, materialize_grads=True)
        slope = torch.stack([(g * v).sum() for g, v in zip(gradients, directions)]).sum()
        products = torch.autograd.grad(slope, leaves, materialize_grads=True)
        total += torch.cat([product.reshape(-1) for product in products])
    return total


def flat(vectors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors as one vector, in their order."""
    return torch.cat([vector.reshape(-1) for vector in vectors.values()])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo :func:`flat`."""
    parts = torch.split(vector, [each.numel() for each in like.values()])
    return {name: part.view_as(each) for (name, each), part in zip(like.items(), parts)}


def largest_eigenvalue(
    operator: Callable[[Tensor], Tensor], start: Tensor, *, num_iterations: int, tolerance: float = 1e-3
) -> Eigenvalue:
    """Find the largest eigenvalue (not the largest in modulus) of a symmetric operator by Lanczos's iteration.

    Only three vectors are kept. Without re-orthogonalisation eigenvalues that were found appear again, which leaves
    the largest one what it is (Paige, 1976).

    Args:
        operator: Takes and returns a vector of the shape of ``start``.
        start: Not orthogonal to the eigenvector; a random one will do.
        num_iterations: Most products.
        tolerance: Relative error to end at.

    Example:
        >>> found = largest_eigenvalue(lambda v: v * torch.tensor([1.0, -7.0, 3.0]), torch.ones(3), num_iterations=9)
        >>> round(found.value, 4), found.num_products
        (3.0, 3)
    """
    vector, before = start / start.norm(), torch.zeros_like(start)
    diagonal: list[float] = []
    beside: list[float] = []
    value, error = math.nan, math.inf
    for _ in range(num_iterations):
        image = operator(vector)
        diagonal.append(float(vector @ image))
        image = image - diagonal[-1] * vector - (beside[-1] if beside else 0.0) * before
        length = float(image.norm())
        if not math.isfinite(diagonal[-1] + length):
            raise NonFiniteError("the curvature is not a finite number: the weights of the run have diverged.")
        small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        for k, entry in enumerate(beside):
            small[k, k + 1] = small[k + 1, k] = entry
        values, vectors = torch.linalg.eigh(small)
        value, error = float(values[-1]), length * abs(float(vectors[-1, -1]))
        if error <= tolerance * abs(value):
            break
        beside.append(length)
        vector, before = image / length, vector
    return Eigenvalue(value=value, error=error, num_products=len(diagonal))


def adaptive_sharpness(
    losses: Losses,
    parameters: Mapping[str, Tensor],
    *,
    root: Mapping[str, Tensor],
    num_iterations: int,
    tolerance: float,
) -> Eigenvalue:
    """Return the largest eigenvalue of P^-1/2 H P^-1/2, which is that of P^-1 H.

    Args:
        losses: Add up to the loss.
        parameters: Leaves that H is over.
        root: P^1/2, diagonal, in the shape of each parameter.
        num_iterations: Most Hessian-vector products.
        tolerance: Relative error to end at.
    """
    scale = flat({name: root[name].detach() for name in parameters})
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(scale.shape, generator=generator, dtype=scale.dtype).to(scale.device)
    return largest_eigenvalue(
        lambda vector: hessian_vector(losses, parameters, vector / scale) / scale,
        start,
        num_iterations=num_iterations,
        tolerance=tolerance,
    )


def root_preconditioner(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return P^1/2 by parameter name: P = sqrt(v_hat) + eps for the Adam family, 1 for SGD.

    Args:
        optimizer: With its state, its parameters given with names.

    Raises:
        CheckpointError: A parameter has no second moment yet.
    """
    roots = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if isinstance(optimizer, torch.optim.SGD):
                roots[name] = torch.ones_like(parameter)
                continue
            state = optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state:
                raise CheckpointError(
                    f"the checkpoint has no second moment of {name}: it never had a finite gradient. Probe a later "
                    "checkpoint."
                )
            moment = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
            unbiased = moment / (1 - group["betas"][1] ** float(state["step"]))
            roots[name] = (unbiased.sqrt() + group["eps"]).sqrt()
    return roots


def spectral_sharpness(
    losses: Losses,
    parameters: Mapping[str, Tensor],
    *,
    scales: Mapping[str, float],
    num_iterations: int,
    tolerance: float,
) -> SpectralSharpness:
    r"""Search the largest curvature that a step of given spectral norms can meet.

    .. math:: \max \langle D, H D \rangle \quad\text{over}\quad \|D_i\|_2 \le s_i \text{ for every matrix } i,

    by ``D <- s polar(H D)`` from the step that the gradient itself gives. Each iteration climbs where H has no
    negative curvature along it; the best value is kept in any case.

    Args:
        losses: Add up to the loss.
        parameters: Matrices, shape (..., m, n), that H is over.
        scales: s of each matrix.
        num_iterations: Most Hessian-vector products.
        tolerance: Relative gain at which to end.
    """
    direction = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for loss in losses:
        parts = torch.autograd.grad(loss(), list(parameters.values()), materialize_grads=True)
        for total, part in zip(direction.values(), parts):
            total += part
    dual_norm = sum(scales[name] * float(torch.linalg.svdvals(part).sum()) for name, part in direction.items())
    best, num_products = -math.inf, 0
    while num_products < num_iterations:
        step = flat({name: scales[name] * polar(part) for name, part in direction.items()})
        changed = hessian_vector(losses, parameters, step)
        num_products += 1
        value = float(step @ changed)
        gain, best = value - best, max(best, value)
        if gain <= tolerance * abs(value):
            break
        direction = unflat(changed, parameters)
    return SpectralSharpness(value=best, gradient_dual_norm=dual_norm, num_products=num_products)


def polar(x: Tensor) -> Tensor:
    """Return U V^T of the SVD of each matrix: what maximises <x, D> among all D of spectral norm 1.

    Args:
        x: Shape (..., m, n).
    """
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    product: Tensor = u @ vh
    return product
