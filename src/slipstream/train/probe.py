"""How sharp is the loss of a run, in the metric of its own optimizer? Measured at a checkpoint, to be held beside the
limits of :mod:`slipstream.plan.stability`.

With the preconditioner P of an adaptive rule held as it is (``u = lr P^-1 m``), training near a point is the quadratic
of that module, one copy for each eigenvalue of ``P^-1 H``, which are those of the symmetric ``P^-1/2 H P^-1/2``. The
largest is the preconditioned sharpness; times the learning rate it is the number that the limits speak of.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.config import Config, from_dict
from slipstream.data import Batch, open_data
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.llama import cross_entropy_sum, whole_model
from slipstream.models.roles import role
from slipstream.models.shapes import parameter_names, tied_names
from slipstream.optim.build import build_optimizers
from slipstream.optim.lr import lr_factor
from slipstream.optim.muon import Muon, _lr_ratio
from slipstream.optim.state import import_state, join_tensors
from slipstream.plan.stability import StabilityConfig, max_stable_product
from slipstream.train.checkpoint import Checkpoint, newest_complete
from slipstream.train.rank import training_loader
from slipstream.train.rundir import RunDir

Loss = Callable[[], Tensor]
Vectors = dict[str, Tensor]

ADAM_FAMILY = (torch.optim.Adam, torch.optim.NAdam)  # AdamW is an Adam
"""Rules whose preconditioner is sqrt(v_hat) + eps, from their own state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """What is measured, and how closely."""

    run: str
    """Run directory."""
    num_batches: int = 4
    """Training batches that the loss is the mean of: the next ones that the run would read."""
    num_iterations: int = 50
    """Most Hessian-vector products a rule."""
    tolerance: float = 0.01
    """Relative error at which the iteration ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eigenvalue:
    """The largest eigenvalue of a symmetric operator, as far as it is known.

    Attributes:
        value: Never above the true one by more than rounding.
        error: Some eigenvalue lies within this distance of ``value``.
        num_products: Products with the operator that were needed.
    """

    value: float
    error: float
    num_products: int


def run_probe(config: ProbeConfig) -> dict[str, Any]:
    """Measure the sharpness at a run's newest checkpoint.

    The loss is that of the published weights x in float32, without dropout. Each rule is measured on the parameters it
    updates, the others held. A mean over few batches is sharper than the mean over all.

    Args:
        config: Run and effort.

    Returns:
        ``run``, ``step``, ``delay``, ``error_feedback``, ``num_tokens``, ``loss``, and ``rules``: for each rule
        ``rule``, ``num_parameters``, ``lr`` (at the checkpoint), ``peak_lr`` and what :func:`adaptive_sharpness` or
        :func:`spectral_sharpness` found, ``measured`` being a sentence that says what.

    Raises:
        CheckpointError: There is no complete checkpoint.
        ConfigError: A number is out of range, or the data are not those of the run.

    Cost:
        For each rule up to ``num_iterations`` times a forward, a backward and a backward of the backward of
        ``num_batches`` batches; memory for the graph of one microbatch and about eight copies of the parameters.
    """
    for name in ("num_batches", "num_iterations"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be 1 or more.")
    checkpoint = _newest(config.run)
    run = from_dict(dict(checkpoint.manifest["config"]), source=str(checkpoint.folder))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = _next_batches(run, checkpoint, num_batches=config.num_batches)
    weights = _published(run, checkpoint, device)
    losses, num_tokens = model_losses(run, weights, batches)
    optimizers = _optimizers(run, checkpoint, weights)
    factor = lr_factor(
        max(checkpoint.step, 1),
        warmup_steps=run.optim.lr_warmup_steps,
        total_steps=run.optim.lr_total_steps or run.train.num_steps,
        schedule=run.optim.lr_schedule,
        final_fraction=run.optim.lr_final_fraction,
    )
    with torch.no_grad():
        loss = sum(float(each()) for each in losses)
    found = [_measure(name, each, weights, losses, factor, run, config) for name, each in optimizers.items()]
    return {
        "run": config.run,
        "step": checkpoint.step,
        "delay": run.staleness.delay,
        "error_feedback": run.staleness.error_feedback,
        "num_tokens": num_tokens,
        "loss": loss,
        "rules": found,
    }


def _measure(
    name: str,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, nn.Parameter],
    losses: list[Loss],
    factor: float,
    run: Config,
    config: ProbeConfig,
) -> dict[str, Any]:
    """Measure one rule on the parameters it updates."""
    group = optimizer.param_groups[0]
    own = {each: weights[each] for part in optimizer.param_groups for each in part["param_names"]}
    lr = group["initial_lr"] * factor
    row = {
        "rule": name,
        "num_parameters": sum(parameter.numel() for parameter in own.values()),
        "lr": lr,
        "peak_lr": group["initial_lr"],
    }
    effort = {"num_iterations": config.num_iterations, "tolerance": config.tolerance}
    if isinstance(optimizer, Muon):
        scales = {each: _lr_ratio(*own[each].shape[-2:], group["adjust_lr_fn"]) for each in own}
        return row | spectral_sharpness(losses, own, scales=scales, lr=lr, **effort)
    if not isinstance(optimizer, (*ADAM_FAMILY, torch.optim.SGD)):
        return row | {
            "measured": f"nothing: the preconditioner of '{name}' is not known; known are Adam, AdamW, NAdam and SGD, "
            "and for Muon the sharpness in the spectral norm"
        }
    setting = momentum_of(optimizer)
    found = adaptive_sharpness(losses, own, root=root_preconditioner(optimizer), **effort)
    # SGD adds gradients up where the others average them: its rate is larger by the length of the sum.
    rate = lr
    if isinstance(optimizer, torch.optim.SGD):
        rate *= (1 - group["dampening"] if setting.momentum else 1) / (1 - setting.momentum)
    return row | {
        "measured": "the largest eigenvalue of P^-1/2 H P^-1/2 on a few training batches, P = "
        + ("1" if isinstance(optimizer, torch.optim.SGD) else "sqrt(v_hat) + eps of the checkpoint, held as it is"),
        "momentum": setting.momentum,
        "nesterov": setting.nesterov,
        "sharpness": found.value,
        "sharpness_error": found.error,
        "num_products": found.num_products,
        "lr_times_sharpness": rate * found.value,
        "peak_lr_times_sharpness": rate * found.value / factor if factor else math.nan,
        "limits": _limits(setting, run),
    }


def _limits(setting: StabilityConfig, run: Config) -> dict[str, float]:
    """Return the stable products for no delay, one step, one step with error feedback, and the run's own setting."""
    own = (run.staleness.delay or 0, run.staleness.error_feedback)
    limits = {}
    for delay, c in dict.fromkeys([(0, 0.0), (1, 0.0), (1, 1.0), own]):
        text = f"delay {delay}" + (f", error feedback {c:g}" if c else "")
        limits[text] = max_stable_product(dataclasses.replace(setting, delay=delay, error_feedback=c))
    return limits


def momentum_of(optimizer: torch.optim.Optimizer) -> StabilityConfig:
    """Return an optimizer's momentum as the stability tool takes it; delay and error feedback are left at 0.

    NAdam's growing momentum is taken at its end, and its look-ahead as Nesterov's.
    """
    group = optimizer.param_groups[0]
    momentum = group["betas"][0] if "betas" in group else group["momentum"]
    nesterov = bool(group.get("nesterov", isinstance(optimizer, torch.optim.NAdam)))
    return StabilityConfig(momentum=momentum, delay=0, nesterov=nesterov)


def root_preconditioner(optimizer: torch.optim.Optimizer) -> Vectors:
    """Return P^1/2 by parameter name: P = sqrt(v_hat) + eps for the Adam family, 1 for SGD.

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


def adaptive_sharpness(
    losses: list[Loss], parameters: Mapping[str, Tensor], *, root: Vectors, num_iterations: int, tolerance: float
) -> Eigenvalue:
    """Return the largest eigenvalue of P^-1/2 H P^-1/2.

    Args:
        losses: Functions whose values add up to the loss.
        parameters: Leaves that H is over.
        root: P^1/2, of the shape of each parameter.
        num_iterations: Most Hessian-vector products.
        tolerance: Relative error to end at.
    """
    scale = flat({name: root[name].detach() for name in parameters})

    def operator(vector: Tensor) -> Tensor:
        return hessian_vector(losses, parameters, vector / scale) / scale

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(scale.shape, generator=generator, dtype=scale.dtype).to(scale.device)
    return largest_eigenvalue(operator, start, num_iterations=num_iterations, tolerance=tolerance)


def spectral_sharpness(
    losses: list[Loss],
    parameters: Mapping[str, Tensor],
    *,
    scales: Mapping[str, float],
    lr: float,
    num_iterations: int,
    tolerance: float,
) -> dict[str, Any]:
    r"""Measure what one worst step of Muon does to the gradient.

    Muon has no preconditioner that stays: every step has the same length, in the spectral norm. So its sharpness is

    .. math:: \max \langle D, H D \rangle \quad\text{over}\quad \|D_i\|_2 \le s_i \text{ for every matrix } i,

    a lower bound of the constant L of ``docs/theory.md``, found by ``D <- s polar(H D)`` from the step that the
    gradient itself gives. A step of lr D changes the gradient by ``lr <D, H D>`` along D, of the ``sum s_i |G_i|_*``
    that it has.

    Args:
        losses: Functions whose values add up to the loss.
        parameters: Matrices, shape (..., m, n).
        scales: s of each matrix: Muon's factor for its shape.
        lr: Learning rate.
        num_iterations: Most Hessian-vector products.
        tolerance: Relative gain a step at which to end.

    Returns:
        ``sharpness``, ``gradient_dual_norm``, ``lr_times_sharpness`` and ``share_of_gradient``, their quotient; and
        ``measured``.
    """
    gradient = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for each in losses:
        for name, part in zip(parameters, torch.autograd.grad(each(), list(parameters.values()))):
            gradient[name] += part
    dual_norm = sum(scales[name] * float(torch.linalg.svdvals(part).sum()) for name, part in gradient.items())
    step = gradient
    best, products = -math.inf, 0
    for products in range(1, num_iterations + 1):
        step = {name: scales[name] * polar(part) for name, part in step.items()}
        changed = hessian_vector(losses, parameters, flat(step))
        value = float(flat(step) @ changed)
        gain, best = value - best, max(best, value)
        if gain <= tolerance * abs(value):
            break
        step = unflat(changed, parameters)
    return {
        "measured": "how much of the gradient one worst step of Muon's length turns around (H in the spectral norm); "
        "there is no linear limit to hold it against, since Muon's step does not grow with the gradient",
        "sharpness": best,
        "num_products": products,
        "gradient_dual_norm": dual_norm,
        "lr_times_sharpness": lr * best,
        "share_of_gradient": lr * best / dual_norm if dual_norm else math.nan,
    }


def polar(x: Tensor) -> Tensor:
    """Return the nearest matrix with singular values 1 to each matrix of x (..., m, n): U V^T of its SVD."""
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def hessian_vector(losses: list[Loss], parameters: Mapping[str, Tensor], vector: Tensor) -> Tensor:
    """Return H v by a backward pass through the backward pass.

    Args:
        losses: Functions whose values add up to the loss; each graph is freed before the next is built.
        parameters: Leaves that H is over.
        vector: All of them in one, shape (number of parameters,).

    Returns:
        The shape of ``vector``.
    """
    leaves = list(parameters.values())
    directions = list(unflat(vector, parameters).values())
    total = torch.zeros_like(vector)
    for each in losses:
        gradients = torch.autograd.grad(each(), leaves, create_graph=True)
        slope = sum((g * v).sum() for g, v in zip(gradients, directions))
        products = torch.autograd.grad(slope, leaves, materialize_grads=True)
        total += torch.cat([product.reshape(-1) for product in products])
    return total


def flat(vectors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors in one vector, in their order."""
    return torch.cat([vector.reshape(-1) for vector in vectors.values()])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> Vectors:
    """Undo :func:`flat`."""
    parts = vector.split([each.numel() for each in like.values()])
    return {name: part.view_as(each) for (name, each), part in zip(like.items(), parts)}


def largest_eigenvalue(
    operator: Callable[[Tensor], Tensor], start: Tensor, *, num_iterations: int, tolerance: float = 1e-3
) -> Eigenvalue:
    """Find the largest eigenvalue of a symmetric operator by Lanczos's iteration.

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


def model_losses(run: Config, weights: Mapping[str, nn.Parameter], batches: list[Batch]) -> tuple[list[Loss], int]:
    """Return the loss as functions of the weights, one a microbatch, that add up to the mean over all tokens.

    Args:
        run: Settings of the run.
        weights: Leaves by parameter name, a tied pair once.
        batches: What the loss is over.

    Returns:
        The functions, and the number of tokens.
    """
    # Recomputation would meet the backward of the backward; it changes no number.
    cfg = dataclasses.replace(run.model, activation_checkpointing=False)
    module = whole_model(cfg, device="meta")
    tied = tied_names(cfg)
    leaves = {leaf: weights[tied.get(leaf, leaf)] for leaf in parameter_names(cfg)}
    device = next(iter(weights.values())).device
    num_tokens = sum(batch.num_tokens for batch in batches)
    count = run.pipeline.num_microbatches

    def loss_of(part: Batch) -> Loss:
        inputs, targets = torch.from_numpy(part.inputs).to(device), torch.from_numpy(part.targets).to(device)

        def loss() -> Tensor:
            # The fused attention kernels have no second derivative.
            with sdpa_kernel(SDPBackend.MATH):
                return cross_entropy_sum(functional_call(module, leaves, (inputs,)), targets) / num_tokens

        return loss

    return [loss_of(batch.microbatch(j, count)) for batch in batches for j in range(count)], num_tokens


def _newest(run: str) -> Checkpoint:
    folder = RunDir(Path(run)).checkpoints
    checkpoint, passed_over = newest_complete(folder)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no complete checkpoint in {folder}. Give the directory of a run that has saved one."
            + "".join(f"\n  {sentence}" for sentence in passed_over)
        )
    return checkpoint


def _next_batches(run: Config, checkpoint: Checkpoint, *, num_batches: int) -> list[Batch]:
    dataset = open_data(run.data.path)
    if checkpoint.manifest["data_sha256"] != dataset.manifest.digest():
        raise ConfigError(
            f"the data at '{run.data.path or 'the built-in text'}' are not those that the run was trained on. Put "
            "back the run's own data."
        )
    loader = training_loader(run, dataset)
    return [loader.batch(checkpoint.step + index) for index in range(num_batches)]


def _published(run: Config, checkpoint: Checkpoint, device: torch.device) -> dict[str, nn.Parameter]:
    """Read the newest published weights, in float32, a tied pair once."""
    tied = tied_names(run.model)
    names = [name for name in parameter_names(run.model) if name not in tied]
    tensors = {name: checkpoint.tensor(f"x@{checkpoint.step}/{name}") for name in names}
    return {name: nn.Parameter(tensor.to(device, torch.float32)) for name, tensor in tensors.items()}


def _optimizers(
    run: Config, checkpoint: Checkpoint, weights: Mapping[str, nn.Parameter]
) -> dict[str, torch.optim.Optimizer]:
    """Build the run's optimizers over the weights, with their saved state."""
    optimizers = build_optimizers(weights, run.optim, role=role)

    def read(name: str) -> Callable[[str], Tensor]:
        return lambda path: checkpoint.tensor(f"optim/{name}/{path}")

    state = {name: join_tensors(tree, read(name)) for name, tree in checkpoint.scalars["optim"].items()}
    for optimizer in optimizers.values():
        import_state(optimizer, state)
    return optimizers
