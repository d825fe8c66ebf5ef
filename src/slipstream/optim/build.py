"""From settings to optimizers: which rule takes which parameter, with which step size and decay."""

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slipstream.config import OptimConfig
from slipstream.errors import ConfigError, nearest
from slipstream.optim.lr import check_schedule
from slipstream.optim.muon import Muon

RULES: dict[str, type[Optimizer]] = {"adamw": torch.optim.AdamW, "muon": Muon}
"""Short names. Every other rule goes by its dotted name."""

RULE_ARGS: dict[str, dict[str, Any]] = {"adamw": {"betas": (0.9, 0.95)}}
"""Arguments that a short name stands for, where they are not the rule's own defaults. Language models are commonly
pre-trained with a shorter second moment than AdamW's 0.999; `optim.args` overrides it."""

MUON_ROLES = frozenset(
    {"q", "k", "v", "o", "ffn_gate", "ffn_up", "ffn_down", "expert", "expert_gate", "expert_up", "expert_down"}
)
"""Roles whose matrices Muon takes. Embedding, head, router, norms and biases are AdamW's, whatever their shape."""


def build_optimizers(
    params: Mapping[str, nn.Parameter], cfg: OptimConfig, *, role: Callable[[str], str]
) -> dict[str, Optimizer]:
    """Build the optimizers of the parameters that one process holds.

    With ``muon``, the matrices of the blocks go to :class:`Muon` and all else to AdamW; any other rule takes them all.
    Routing is by role, so a parameter has the same rule on every split of the model. Vectors get no weight decay.
    Every parameter group has ``param_names`` (torch's own key, in the order of its ``params``) and ``initial_lr``,
    its peak rate: a schedule sets ``group["lr"] = group["initial_lr"] * factor``.
    On a CPU no rule runs its multi-tensor (``foreach``) path unless told to: an update then depends on its own
    parameter alone, so that stages and groups can be cut anywhere without a change in the last bit.

    Args:
        params: Parameters by name.
        cfg: Name, rates, decay and arguments. ``weight_decay`` is handed to the rule as it stands: AdamW and Muon
            decouple it, while ``torch.optim.SGD``, say, adds it to the gradient.
        role: Gives the role of a parameter by name.

    Returns:
        ``"muon"`` and ``"adamw"``, or the rule's name as given, in this order; without the ones that would be empty.

    Raises:
        ConfigError: The rule cannot be found or used, or refuses an argument.

    Example:
        >>> weights = {"q.weight": nn.Parameter(torch.ones(4, 4)), "norm.weight": nn.Parameter(torch.ones(4))}
        >>> roles = {"q.weight": "q", "norm.weight": "norm"}
        >>> built = build_optimizers(weights, OptimConfig(name="muon", adamw_lr=1e-4), role=roles.__getitem__)
        >>> {name: optimizer.param_groups[0]["param_names"] for name, optimizer in built.items()}
        {'muon': ['q.weight'], 'adamw': ['norm.weight']}
    """
    if cfg.name != "muon":
        routed = {cfg.name: dict(params)}
    else:
        routed = {"muon": {}, "adamw": {}}
        for name, param in params.items():
            is_block_matrix = role(name) in MUON_ROLES and param.ndim >= 2
            routed["muon" if is_block_matrix else "adamw"][name] = param
    built = {}
    for rule, part in routed.items():
        cls, settings = find_rule(rule), _settings(cfg, rule)
        _check_args(cls, settings)
        if part:
            built[rule] = _build_rule(cls, part, settings)
    return built


def find_rule(name: str) -> type[Optimizer]:
    """Return the optimizer class of a short or dotted name.

    Args:
        name: ``adamw``, ``muon``, or ``package.module.Class``.

    Raises:
        ConfigError: Nothing can be imported by that name, or it is no optimizer, or one that needs a closure or
            sparse gradients.

    Example:
        >>> find_rule("torch.optim.SGD").__name__
        'SGD'
    """
    if name in RULES:
        return RULES[name]
    module_name, _, class_name = name.rpartition(".")
    allowed = f"Allowed: {', '.join(RULES)}, or the dotted name of a torch.optim.Optimizer, such as torch.optim.NAdam."
    if not module_name:
        raise ConfigError(f"optim.name: there is no optimizer {name!r}.{_nearest_rule(name)} {allowed}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may fail in any way
        raise ConfigError(
            f"optim.name: cannot import {module_name!r} for {name!r} ({type(error).__name__}: {error})."
            f"{_nearest_rule(class_name)} {allowed} Install its package, or put its folder on PYTHONPATH."
        ) from error
    cls = getattr(module, class_name, None)
    if cls is None:
        near = nearest(name, (f"{module_name}.{each}" for each in _rules_in(module)))
        raise ConfigError(f"optim.name: {module_name!r} has no {class_name!r}.{near} {allowed}")
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        raise ConfigError(f"optim.name: {name!r} is no optimizer class. {allowed}")
    _check_usable(name, cls)
    return cls


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
        ["optim.adamw_lr has no effect with optim.name 'adamw': it is for 'muon'."]
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

    rule: str
    args: dict[str, Any]
    args_key: str
    lr: float
    lr_key: str
    weight_decay: float


def _settings(cfg: OptimConfig, rule: str) -> _Settings:
    """Return the settings of the rule the config names, or of the AdamW beside Muon."""
    beside_muon = rule != cfg.name
    given = cfg.adamw_args if beside_muon else cfg.args
    return _Settings(
        rule=rule,
        # TOML and JSON know lists only, while rules expect tuples (betas).
        args={key: tuple(value) if isinstance(value, list) else value for key, value in given.items()},
        args_key="optim.adamw_args" if beside_muon else "optim.args",
        lr=cfg.adamw_lr if beside_muon and cfg.adamw_lr is not None else cfg.lr,
        lr_key="optim.adamw_lr" if beside_muon else "optim.lr",
        weight_decay=cfg.weight_decay,
    )


def _build_rule(cls: type[Optimizer], params: Mapping[str, nn.Parameter], settings: _Settings) -> Optimizer:
    args = {**RULE_ARGS.get(settings.rule, {}), **settings.args}
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
        return cls(groups, **args)
    except Exception as error:  # ValueError by torch's rules; third-party ones raise what they like
        hint = " Write optim.name 'muon', which gives it matrices only." if cls is torch.optim.Muon else ""
        raise ConfigError(
            f"optim.name: {settings.rule!r} refuses its arguments or parameters: {error}{hint} "
            f"Look at {settings.args_key}, given {settings.args}, and at {settings.lr_key} and optim.weight_decay."
        ) from error


def _check_args(cls: type[Optimizer], settings: _Settings) -> None:
    """Raise ConfigError on an argument the rule does not have or that has a setting of its own."""
    own_settings = {"lr": settings.lr_key, "weight_decay": "optim.weight_decay"}
    for key in settings.args:
        if key in own_settings:
            raise ConfigError(f"{settings.args_key}: {key!r} has a setting of its own; set {own_settings[key]}.")
        if not _takes(cls, key) or key == "params":
            allowed = sorted(_accepted(cls) - {"params", *own_settings})
            raise ConfigError(
                f"{settings.args_key}: {settings.rule!r} has no argument {key!r}.{nearest(key, allowed)} "
                f"Allowed: {', '.join(allowed)}."
            )


def _check_usable(name: str, cls: type[Optimizer]) -> None:
    """Raise ConfigError on a rule that cannot step on given dense gradients."""
    if issubclass(cls, torch.optim.SparseAdam):
        raise ConfigError(f"optim.name: {name!r} takes sparse gradients only; ours are dense. Use torch.optim.Adam.")
    parameters = list(inspect.signature(cls.step).parameters.values())[1:]
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
    if required:
        raise ConfigError(
            f"optim.name: {name!r} cannot step without {', '.join(required)}: it evaluates the loss again within a "
            "step, which a stale gradient does not allow. Use a rule whose step() needs no closure, such as adamw."
        )


def _warnings(cfg: OptimConfig) -> list[str]:
    found = []
    if cfg.name != "muon":
        unused = {"adamw_lr": cfg.adamw_lr is not None, "adamw_args": bool(cfg.adamw_args)}
        for key in (key for key, is_set in unused.items() if is_set):
            found.append(f"optim.{key} has no effect with optim.name {cfg.name!r}: it is for 'muon'.")
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
    parameters = inspect.signature(cls.__init__).parameters.values()
    return key in _accepted(cls) or any(each.kind is each.VAR_KEYWORD for each in parameters)


def _rules_in(module: Any) -> Iterable[str]:
    return [name for name, each in vars(module).items() if isinstance(each, type) and issubclass(each, Optimizer)]


def _nearest_rule(given: str) -> str:
    """Return a suggestion for a short or misspelt name: ``SGD`` suggests ``torch.optim.SGD``."""
    dotted = {name.lower(): f"torch.optim.{name}" for name in _rules_in(torch.optim) if name != "Optimizer"}
    candidates = {**dotted, **{name: name for name in RULES}}
    suggestion = nearest(given.lower(), candidates)
    for short, full in candidates.items():
        if f"'{short}'" in suggestion:
            return suggestion.replace(f"'{short}'", f"'{full}'")
    return suggestion
