"""From settings to optimizers: which rule takes which parameter, with which step size and decay."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slipstream.config import OptimConfig
from slipstream.errors import ConfigError, nearest
from slipstream.optim.lr import check_schedule
from slipstream.optim.rules import RULES, Rule, find_rule, rule_of

MATRIX_ROLES = frozenset(
    {"q", "k", "v", "o", "ffn_gate", "ffn_up", "ffn_down", "expert", "expert_gate", "expert_up", "expert_down"}
)
"""Roles whose matrices Muon and its like take. Embedding, head, router, norms and biases are AdamW's beside them,
whatever their shape."""


def build_optimizers(
    params: Mapping[str, nn.Parameter], cfg: OptimConfig, *, role: Callable[[str], str]
) -> dict[str, Optimizer]:
    """Build the optimizers of the parameters that one process holds.

    Of ``muon`` and the other rules for matrices, the matrices of the blocks go to the rule and all else to AdamW; any
    other rule takes them all. Routing is by role, so a parameter has the same rule on every split of the model.
    Vectors get no weight decay.
    Every parameter group has ``param_names`` (torch's own key, in the order of its ``params``) and ``initial_lr``,
    its peak rate: a schedule sets ``group["lr"] = group["initial_lr"] * factor``.
    On a CPU no rule runs its multi-tensor (``foreach``) path unless told to: an update then depends on its own
    parameter alone, so that stages and groups can be cut anywhere without a change in the last bit.

    Args:
        params: Parameters by name.
        cfg: Name, rates, decay and arguments. ``weight_decay`` is handed to the rule as it stands: all short names
            decouple it but ``sgd``, which adds it to the gradient.
        role: Gives the role of a parameter by name.

    Returns:
        The rule by its name as given, and ``"adamw"`` after a rule for matrices; without the ones that would be empty.

    Raises:
        ConfigError: The rule cannot be found or used, or refuses an argument.

    Example:
        >>> weights = {"q.weight": nn.Parameter(torch.ones(4, 4)), "norm.weight": nn.Parameter(torch.ones(4))}
        >>> roles = {"q.weight": "q", "norm.weight": "norm"}
        >>> built = build_optimizers(weights, OptimConfig(name="muon", adamw_lr=1e-4), role=roles.__getitem__)
        >>> {name: optimizer.param_groups[0]["param_names"] for name, optimizer in built.items()}
        {'muon': ['q.weight'], 'adamw': ['norm.weight']}
    """
    routed: dict[str, dict[str, nn.Parameter]] = {cfg.name: {}}
    if rule_of(cfg.name).for_matrices:
        routed["adamw"] = {}
    for name, param in params.items():
        is_block_matrix = param.ndim >= 2 and role(name) in MATRIX_ROLES
        routed["adamw" if "adamw" in routed and not is_block_matrix else cfg.name][name] = param
    built = {}
    for rule, part in routed.items():
        cls, settings = find_rule(rule), _settings(cfg, rule)
        _check_args(cls, settings)
        if part:
            built[rule] = _build_rule(cls, part, settings)
    return built


def check_optim(cfg: OptimConfig, *, num_steps: int | None = None, device: torch.device | str = "cpu") -> list[str]:
    """Check the optimizer's settings before anything is loaded, by building it and taking one step on tiny weights.

    Args:
        cfg: The settings.
        num_steps: Updates of the run, which are the schedule's total where the settings name none.
        device: Where the run will compute.

    Returns:
        Warnings: a sentence for each setting that has no effect here.

    Raises:
        ConfigError: The optimizer cannot be found or used, an argument is unknown or refused, a rate is negative or
            not finite, or the warm-up is longer than the schedule.

    Example:
        >>> check_optim(OptimConfig(name="adamw", adamw_lr=1e-4))
        ["optim.adamw_lr has no effect with optim.name 'adamw': that rule takes all parameters."]
    """
    rates = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    if cfg.adamw_lr is not None:
        rates["adamw_lr"] = cfg.adamw_lr
    for key, value in rates.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"optim.{key} must be a finite number of at least 0, given {value}.")
    total_steps = cfg.lr_total_steps if cfg.lr_total_steps is not None else num_steps
    check_schedule(
        warmup_steps=cfg.lr_warmup_steps,
        total_steps=max(cfg.lr_warmup_steps, 1) if total_steps is None else total_steps,
        schedule=cfg.lr_schedule,
        final_fraction=cfg.lr_final_fraction,
        decay_fraction=cfg.lr_decay_fraction,
    )
    matrix, vector = (nn.Parameter(torch.ones(*shape, device=device)) for shape in ((4, 4), (4,)))
    tiny = {"matrix": matrix, "vector": vector}
    for rule, optimizer in build_optimizers(tiny, cfg, role={"matrix": "q", "vector": "norm"}.__getitem__).items():
        for param in tiny.values():
            param.grad = torch.ones_like(param)
        try:
            optimizer.step()
        except Exception as error:  # third-party rules refuse in their own ways
            raise ConfigError(
                f"optim.name: {rule!r} fails in a trial step ({type(error).__name__}: {error}). Rules must step "
                "without a closure, on dense gradients; mend optim.args, or choose another rule."
            ) from error
    return _warnings(cfg)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """What one rule is built with, and the config keys that say so."""

    name: str
    rule: Rule
    args: dict[str, Any]
    args_key: str
    lr: float
    lr_key: str
    weight_decay: float


def _settings(cfg: OptimConfig, name: str) -> _Settings:
    """Return the settings of the rule the config names, or of the AdamW beside it."""
    beside = name != cfg.name
    given = cfg.adamw_args if beside else cfg.args
    return _Settings(
        name=name,
        rule=rule_of(name),
        # TOML and JSON know lists only, while rules expect tuples (betas).
        args={key: tuple(value) if isinstance(value, list) else value for key, value in given.items()},
        args_key="optim.adamw_args" if beside else "optim.args",
        lr=cfg.adamw_lr if beside and cfg.adamw_lr is not None else cfg.lr,
        lr_key="optim.adamw_lr" if beside else "optim.lr",
        weight_decay=cfg.weight_decay,
    )


def _build_rule(cls: type[Optimizer], params: Mapping[str, nn.Parameter], settings: _Settings) -> Optimizer:
    if settings.rule.two_dimensional:
        _check_two_dimensional(params, settings.name)
    args = {**settings.rule.args, **settings.args}
    if _takes(cls, "lr"):
        args["lr"] = settings.lr
    if "foreach" in _accepted(cls) and all(param.device.type == "cpu" for param in params.values()):
        args.setdefault("foreach", False)
    groups = []
    for decayed in (True, False):
        named = [(name, param) for name, param in params.items() if (param.ndim >= 2) == decayed]
        if named:
            group: dict[str, Any] = {"params": named, "initial_lr": settings.lr}
            if _takes(cls, "weight_decay"):
                group["weight_decay"] = settings.weight_decay if decayed else 0.0
            groups.append(group)
    try:
        optimizer = cls(groups, **args)
    except Exception as error:  # ValueError by torch's rules; third-party ones raise what they like
        hint = " Write optim.name 'muon', which gives it matrices only." if cls is torch.optim.Muon else ""
        raise ConfigError(
            f"optim.name: {settings.name!r} refuses its arguments or parameters: {str(error) or repr(error)}{hint} "
            f"Look at {settings.args_key}, given {settings.args}, and at {settings.lr_key} and optim.weight_decay."
        ) from error
    if settings.rule.overwrites_grad:
        optimizer.register_step_pre_hook(_give_copies_of_gradients)
    return optimizer


def _give_copies_of_gradients(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Let a rule write to copies: what corrects stale gradients may keep the gradient until the next update."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad = param.grad.clone()


def _check_two_dimensional(params: Mapping[str, nn.Parameter], rule: str) -> None:
    for name, param in params.items():
        if param.ndim != 2:
            others = [each for each, row in RULES.items() if row.for_matrices and not row.two_dimensional]
            raise ConfigError(
                f"optim.name: {rule!r} takes single matrices and would mix those of {name}, of shape "
                f"{tuple(param.shape)}. Use {', '.join(others)}."
            )


def _check_args(cls: type[Optimizer], settings: _Settings) -> None:
    """Raise ConfigError on an argument the rule does not have, or that is set elsewhere, or not to be set."""
    own_settings = {"lr": settings.lr_key, "weight_decay": "optim.weight_decay"}
    withheld = settings.rule.withheld
    known = (_accepted(cls) | settings.rule.args.keys()) - {"params", *own_settings, *withheld}
    # Some rules take any keyword and ignore what they do not know: with a short name, what is not listed is refused.
    takes_any = _takes_any(cls) and settings.name not in RULES
    for key in settings.args:
        if key in own_settings:
            raise ConfigError(f"{settings.args_key}: {key!r} has a setting of its own; set {own_settings[key]}.")
        if key in withheld:
            raise ConfigError(
                f"{settings.args_key}: {key!r} cannot be set for {settings.name!r}: {withheld[key]}. Leave it out."
            )
        if key not in known and (key == "params" or not takes_any):
            raise ConfigError(
                f"{settings.args_key}: {settings.name!r} has no argument {key!r}.{nearest(key, known)} "
                f"Allowed: {', '.join(sorted(known))}."
            )


def _warnings(cfg: OptimConfig) -> list[str]:
    found = []
    if not rule_of(cfg.name).for_matrices:
        unused = {"adamw_lr": cfg.adamw_lr is not None, "adamw_args": bool(cfg.adamw_args)}
        for key in (key for key, is_set in unused.items() if is_set):
            found.append(f"optim.{key} has no effect with optim.name {cfg.name!r}: that rule takes all parameters.")
    if cfg.lr_schedule != "wsd" and cfg.lr_decay_fraction != OptimConfig().lr_decay_fraction:
        found.append(
            f"optim.lr_decay_fraction has no effect with optim.lr_schedule {cfg.lr_schedule!r}, only with wsd."
        )
    if cfg.lr_schedule == "constant" and cfg.lr_final_fraction != OptimConfig().lr_final_fraction:
        found.append("optim.lr_final_fraction has no effect with optim.lr_schedule 'constant', which never falls.")
    cls = find_rule(cfg.name)
    for key, value in {"lr": cfg.lr, "weight_decay": cfg.weight_decay}.items():
        if value and not _takes(cls, key):
            found.append(f"optim.{key} {value} has no effect: {cfg.name!r} has no such argument.")
    return found


def _accepted(cls: type[Optimizer]) -> set[str]:
    """Return the names of the constructor's arguments."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def _takes(cls: type[Optimizer], key: str) -> bool:
    return key in _accepted(cls) or _takes_any(cls)


def _takes_any(cls: type[Optimizer]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(cls.__init__).parameters.values())
