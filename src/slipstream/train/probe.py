"""How sharp is the loss of a run, in the metric of its own optimizer?

Measured at a checkpoint, to be held beside the limits of :mod:`slipstream.plan.stability`. While the preconditioner P
of an adaptive rule is held as it is (``u = lr P^-1 m``), training near a point is the recurrence of that module, once
for each eigenvalue of ``P^-1 H``, and those are the eigenvalues of the symmetric ``P^-1/2 H P^-1/2``. The largest is
the preconditioned sharpness; times the learning rate it is the number that the limits speak of.
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

from slipstream.assembly import llama_parts
from slipstream.config import Config, coefficient_text, from_dict
from slipstream.data import Batch
from slipstream.errors import CheckpointError, ConfigError, NonFiniteError
from slipstream.models.llama import cross_entropy_sum, whole_model
from slipstream.models.parts import master_names
from slipstream.models.roles import role
from slipstream.models.shapes import parameter_names, tied_names
from slipstream.optim.build import build_optimizers
from slipstream.optim.lr import rate_factor
from slipstream.optim.muon import Muon, _lr_ratio
from slipstream.optim.state import import_state, join_tensors
from slipstream.plan.stability import StabilityConfig, max_stable_product
from slipstream.staleness.words import delay_words, one_delay
from slipstream.train.checkpoint import Checkpoint, newest_complete
from slipstream.train.curvature import Losses, adaptive_sharpness, root_preconditioner, spectral_sharpness
from slipstream.train.rundir import RunDir
from slipstream.train.workload import open_run_data, training_loader

ADAM_FAMILY = (torch.optim.Adam, torch.optim.NAdam)
"""Rules whose preconditioner is sqrt(v_hat) + eps of their own state. AdamW is an Adam by class."""

Weights = Mapping[str, nn.Parameter]


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
    """Relative error at which to end."""


def run_probe(config: ProbeConfig) -> dict[str, Any]:
    """Measure the sharpness at a run's newest checkpoint.

    The loss is that of the published weights x, in float32 and without dropout. Each rule is measured on the
    parameters it updates, all others held. A mean over few batches is sharper than the mean over all.

    Args:
        config: Run and effort.

    Returns:
        ``run``, ``step``, ``delay`` (``None``: gradients differ), ``gradients`` (the same in words),
        ``error_feedback``, ``num_tokens``, ``loss``, and ``rules``: for each its ``rule``, ``num_parameters``, ``lr``
        (at the checkpoint), ``peak_lr``, ``measured`` (a sentence that says what was), ``sharpness``,
        ``num_products``, ``lr_times_sharpness``; for adaptive rules also ``sharpness_error``, ``momentum``,
        ``nesterov``, ``limits`` (largest stable ``lr_times_sharpness`` by setting) and ``lr_limits`` (the rates at
        which this sharpness meets them; ``None``: none does); for Muon ``gradient_dual_norm`` and
        ``share_of_gradient`` (``None``: there is no gradient).

    Raises:
        CheckpointError: There is no complete checkpoint, or none that holds what is needed.
        ConfigError: A number is out of range, or the data are not the run's.
        NonFiniteError: The run has diverged.

    Cost:
        For each rule up to ``num_iterations`` Hessian-vector products of ``num_batches`` batches; memory for the graph
        of one microbatch and about ten copies of the parameters.
    """
    for name in ("num_batches", "num_iterations"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be 1 or more.")
    checkpoint = _newest(config.run)
    if not checkpoint.manifest["tokenizer"]:
        raise ConfigError(
            f"the run in {config.run} trained a module of your own, which only your program can build. Give a run of "
            "`slipstream train`."
        )
    run = from_dict(dict(checkpoint.manifest["config"]), source=str(checkpoint.folder))
    batches = _next_batches(run, checkpoint, num_batches=config.num_batches)
    weights = _published(run, checkpoint, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    losses = model_losses(run, weights, batches)
    optimizers = _optimizers(run, checkpoint, weights)
    with torch.no_grad():
        loss = sum(float(each()) for each in losses)
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss of {config.run} at step {checkpoint.step} is {loss}: there is no curvature to measure. Probe a "
            "run that has not diverged."
        )
    return {
        "run": config.run,
        "step": checkpoint.step,
        "delay": one_delay(run),
        "gradients": delay_words(run),
        "error_feedback": run.staleness.error_feedback,
        "num_tokens": sum(batch.num_tokens for batch in batches),
        "loss": loss,
        "rules": [
            _measure(name, optimizer, losses, weights, run=run, step=checkpoint.step, config=config)
            for name, optimizer in optimizers.items()
        ],
    }


def model_losses(run: Config, weights: Weights, batches: list[Batch]) -> Losses:
    """Return the mean loss over all tokens as functions of the weights, one a microbatch, that add up to it.

    Args:
        run: Settings of the run.
        weights: Leaves by parameter name, a tied pair once.
        batches: What the loss is over.
    """
    # Recomputation would meet the backward of the backward; it changes no number.
    cfg = dataclasses.replace(run.model, activation_checkpointing=False)
    module, tied = whole_model(cfg, device="meta"), tied_names(cfg)
    leaves: dict[str, Tensor] = {leaf: weights[tied.get(leaf, leaf)] for leaf in parameter_names(cfg)}
    device = next(iter(weights.values())).device
    num_tokens = sum(batch.num_tokens for batch in batches)

    def loss_of(part: Batch) -> Callable[[], Tensor]:
        inputs, targets = torch.from_numpy(part.inputs).to(device), torch.from_numpy(part.targets).to(device)

        def loss() -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivative
                return cross_entropy_sum(functional_call(module, leaves, (inputs,)), targets) / num_tokens

        return loss

    count = run.pipeline.num_microbatches
    return [loss_of(batch.microbatch(j, count)) for batch in batches for j in range(count)]


def probe_text(found: Mapping[str, Any]) -> str:
    """Return what :func:`run_probe` found as lines."""
    coefficient = coefficient_text(found["error_feedback"])
    lines = [
        f"{found['run']}: step {found['step']}, {found['gradients']}, error feedback {coefficient}, "
        f"loss {found['loss']:.4f} on {found['num_tokens']} training tokens"
    ]
    for row in found["rules"]:
        lines += [
            "",
            f"{row['rule']}, {row['num_parameters']} parameters, lr {row['lr']:.3g} (peak {row['peak_lr']:.3g})",
        ]
        lines.append(f"  measured: {row['measured']}.")
        if "limits" in row:
            named = f"momentum {row['momentum']:g}{', Nesterov' if row['nesterov'] else ''}"
            lines.append(
                f"  sharpness {row['sharpness']:.4g} (+- {row['sharpness_error']:.2g}); "
                f"lr x sharpness = {row['lr_times_sharpness']:.3g}. Stable on a quadratic at {named}:"
            )
            for setting, limit in row["limits"].items():
                verdict = "above the limit" if row["lr_times_sharpness"] > limit else "below it"
                rate = row["lr_limits"][setting]
                known = "any lr" if rate is None else f"lr up to {rate:.3g}"
                lines.append(f"    {setting:<28} up to {limit:<7.3g} {verdict}; {known}")
        elif "share_of_gradient" in row:
            share = row["share_of_gradient"]
            part = "beside" if share is None else f"{share:.2g} of"
            lines.append(
                f"  sharpness {row['sharpness']:.4g}; lr x sharpness = {row['lr_times_sharpness']:.3g}, {part} the "
                f"gradient's dual norm {row['gradient_dual_norm']:.3g}"
            )
    return "\n".join(lines)


def momentum_of(optimizer: torch.optim.Optimizer) -> StabilityConfig:
    """Return an optimizer's momentum as the stability tool takes it, without delay and error feedback.

    NAdam's growing momentum is taken at its end, and its look-ahead as Nesterov's.
    """
    group = optimizer.param_groups[0]
    momentum = group["betas"][0] if "betas" in group else group["momentum"]
    nesterov = bool(group.get("nesterov", isinstance(optimizer, torch.optim.NAdam)))
    return StabilityConfig(momentum=momentum, delay=0, nesterov=nesterov)


def _measure(
    name: str,
    optimizer: torch.optim.Optimizer,
    losses: Losses,
    weights: Weights,
    *,
    run: Config,
    step: int,
    config: ProbeConfig,
) -> dict[str, Any]:
    """Measure one rule on the parameters it updates."""
    own = {each: weights[each] for group in optimizer.param_groups for each in group["param_names"]}
    peak_lr = optimizer.param_groups[0]["initial_lr"]
    row = {
        "rule": name,
        "num_parameters": sum(parameter.numel() for parameter in own.values()),
        "lr": peak_lr * rate_factor(run.optim, num_steps=run.train.num_steps)(max(step, 1)),
        "peak_lr": peak_lr,
    }
    if isinstance(optimizer, Muon):
        return row | _measure_muon(optimizer, losses, own, lr=row["lr"], config=config)
    if isinstance(optimizer, (*ADAM_FAMILY, torch.optim.SGD)):
        return row | _measure_adaptive(optimizer, losses, own, run=run, lr=row["lr"], config=config)
    return row | {
        "measured": f"nothing: the preconditioner of '{name}' is not known here. Known are Adam, AdamW, NAdam and SGD, "
        "and for Muon the sharpness in the spectral norm"
    }


def _measure_adaptive(
    optimizer: torch.optim.Optimizer, losses: Losses, own: Weights, *, run: Config, lr: float, config: ProbeConfig
) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    setting = momentum_of(optimizer)
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    found = adaptive_sharpness(
        losses,
        own,
        root=root_preconditioner(optimizer),
        num_iterations=config.num_iterations,
        tolerance=config.tolerance,
    )
    # SGD adds gradients up where the others average them, so its rate counts for that much more.
    weight = (1 - group["dampening"]) / (1 - setting.momentum) if is_sgd and setting.momentum else 1.0
    limits, counted = _limits(setting, run), weight * found.value
    return {
        "measured": "the largest eigenvalue of P^-1/2 H P^-1/2 on a few training batches, with P = "
        + ("1" if is_sgd else "sqrt(v_hat) + eps of the checkpoint, held as it is"),
        "momentum": setting.momentum,
        "nesterov": setting.nesterov,
        "sharpness": found.value,
        "sharpness_error": found.error,
        "num_products": found.num_products,
        "lr_times_sharpness": lr * counted,
        "limits": limits,
        # Of the sharpness, not of lr x sharpness: a schedule may have ended at a rate of 0.
        "lr_limits": {text: limit / counted if counted > 0 else None for text, limit in limits.items()},
    }


def _measure_muon(optimizer: Muon, losses: Losses, own: Weights, *, lr: float, config: ProbeConfig) -> dict[str, Any]:
    scales = {
        name: _lr_ratio(parameter.shape[-2], parameter.shape[-1], group["adjust_lr_fn"])
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
    }
    found = spectral_sharpness(
        losses, own, scales=scales, num_iterations=config.num_iterations, tolerance=config.tolerance
    )
    norm = found.gradient_dual_norm
    return {
        "measured": "the largest <D, H D> over steps D of Muon's length (H in the spectral norm), beside the "
        "gradient's dual norm: how much of the gradient one worst step turns around. There is no linear limit, for "
        "Muon's step does not grow with the gradient",
        "sharpness": found.value,
        "num_products": found.num_products,
        "lr_times_sharpness": lr * found.value,
        "gradient_dual_norm": norm,
        "share_of_gradient": lr * found.value / norm if norm else None,
    }


def _limits(setting: StabilityConfig, run: Config) -> dict[str, float]:
    """Return the stable products without delay, with a step of it, with error feedback, and at the run's setting.

    The last is left out where no one delay is the run's, and without its error feedback where each parameter has its
    own (``auto``).
    """
    c = run.staleness.error_feedback
    of_run = one_delay(run)
    own = [] if of_run is None else [(of_run, 0.0 if isinstance(c, str) else c)]
    limits = {}
    for delay, c in dict.fromkeys([(0, 0.0), (1, 0.0), (1, 1.0), *own]):
        text = f"delay {delay}" + (f", error feedback {c:g}" if c else "")
        limits[text] = max_stable_product(dataclasses.replace(setting, delay=delay, error_feedback=c))
    return limits


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
    dataset = open_run_data(run)
    if checkpoint.manifest["data_sha256"] != dataset.digest():
        raise ConfigError(
            f"{run.data.path or 'the built-in text'} holds other data than the run was trained on. Put the run's own "
            "data back."
        )
    loader = training_loader(run, dataset, checkpoint)
    return [loader.batch(checkpoint.step + index) for index in range(num_batches)]


def _published(run: Config, checkpoint: Checkpoint, device: torch.device) -> dict[str, nn.Parameter]:
    """Read the newest published weights, in float32, a tied pair once."""
    names = master_names(llama_parts(run))
    tensors = {name: checkpoint.tensor(f"x@{checkpoint.step}/{name}") for name in names}
    return {name: nn.Parameter(tensor.to(device, torch.float32)) for name, tensor in tensors.items()}


def _optimizers(run: Config, checkpoint: Checkpoint, weights: Weights) -> dict[str, torch.optim.Optimizer]:
    """Build the run's optimizers over the weights, with their saved state."""
    optimizers = build_optimizers(weights, run.optim, role=role)

    def read(name: str) -> Callable[[str], Tensor]:
        return lambda path: checkpoint.tensor(f"optim/{name}/{path}")

    state = {name: join_tensors(tree, read(name)) for name, tree in checkpoint.scalars["optim"].items()}
    for optimizer in optimizers.values():
        import_state(optimizer, state)
    return optimizers
