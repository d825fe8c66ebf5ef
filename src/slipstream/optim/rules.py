"""The table of rules: what a name in ``optim.name`` stands for. A new rule is a row here and a row in the battery."""

import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from slipstream.errors import ConfigError, nearest

ZOO = "pip install 'slipstream[zoo]'"
"""Installs what the rules from other packages need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a name stands for.

    Attributes:
        path: Dotted name of the optimizer class, which is imported when the rule is used and not before.
        args: Arguments that differ from the class's own defaults; ``optim.args`` overrides them.
        withheld: Arguments of the class that must stay as they are, and why.
        for_matrices: It takes the matrices of the blocks, and AdamW keeps all else. Otherwise it takes everything.
        two_dimensional: Of a packed tensor (experts, m, n) it would make one thing, so such tensors are refused.
        overwrites_grad: Its step leaves other numbers in ``param.grad`` than it found there.
        extra: The class is in a package of the ``zoo`` extra.
    """

    path: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    withheld: Mapping[str, str] = dataclasses.field(default_factory=dict)
    for_matrices: bool = False
    two_dimensional: bool = False
    overwrites_grad: bool = False
    extra: bool = False


# Language models are commonly pre-trained with a shorter second moment than Adam's 0.999.
RULES: dict[str, Rule] = {
    "adamw": Rule(path="torch.optim.AdamW", args={"betas": (0.9, 0.95)}),
    "muon": Rule(path="slipstream.optim.muon.Muon", for_matrices=True),
    "nadamw": Rule(path="torch.optim.NAdam", args={"betas": (0.9, 0.95), "decoupled_weight_decay": True}),
    "sgd": Rule(path="torch.optim.SGD", args={"momentum": 0.9}),
    "lion": Rule(path="lion_pytorch.Lion", extra=True),
    "normuon": Rule(path="slipstream.optim.normuon.NorMuon", for_matrices=True),
    "soap": Rule(path="pytorch_optimizer.SOAP", for_matrices=True, two_dimensional=True, extra=True),
    "adan": Rule(path="pytorch_optimizer.Adan", overwrites_grad=True, extra=True),
    "mars": Rule(
        path="pytorch_optimizer.MARS",
        args={"lr_1d_factor": 1.0, "weight_decay_1d": 0.0},
        withheld={"lr_1d": "vectors step at optim.lr times lr_1d_factor"},
        extra=True,
    ),
    "shampoo": Rule(
        path="pytorch_optimizer.Shampoo",
        args={"weight_decouple": True},
        withheld={"momentum": "the package averages gradients with preconditioned ones, which is not the paper's rule"},
        for_matrices=True,
        two_dimensional=True,
        extra=True,
    ),
    "basis_rotation": Rule(path="slipstream.optim.basis_rotation.BasisRotation", for_matrices=True),
}
"""Short names. Every other rule goes by its dotted name."""


def rule_of(name: str) -> Rule:
    """Return the row of a short name, or a plain one for a dotted name.

    Example:
        >>> rule_of("muon").for_matrices, rule_of("torch.optim.SGD").for_matrices
        (True, False)
    """
    return RULES.get(name, Rule(path=name))


def find_rule(name: str) -> type[Optimizer]:
    """Return the optimizer class of a short or dotted name.

    Args:
        name: A key of :data:`RULES`, or ``package.module.Class``.

    Raises:
        ConfigError: Nothing can be imported by that name, or it is no optimizer, or one that needs a closure or
            sparse gradients; or the short name needs an extra that is not installed.

    Example:
        >>> find_rule("torch.optim.SGD").__name__
        'SGD'
    """
    rule = rule_of(name)
    module_name, _, class_name = rule.path.rpartition(".")
    if not module_name:
        raise ConfigError(f"optim.name: there is no optimizer {name!r}.{_nearest_rule(name, RULES)} {_allowed()}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may fail in any way
        because = f"({type(error).__name__}: {error})"
        if rule.extra:
            raise ConfigError(f"optim.name: {name!r} needs the extra 'zoo' {because}. Install it: {ZOO}.") from error
        raise ConfigError(
            f"optim.name: cannot import {module_name!r} for {name!r} {because}.{_nearest_rule(class_name)} "
            f"{_allowed()} Install its package, or put its folder on PYTHONPATH."
        ) from error
    cls = getattr(module, class_name, None)
    if cls is None:
        near = nearest(name, (f"{module_name}.{each}" for each in _rules_in(module)))
        raise ConfigError(f"optim.name: {module_name!r} has no {class_name!r}.{near} {_allowed()}")
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        raise ConfigError(f"optim.name: {name!r} is no optimizer class. {_allowed()}")
    _check_usable(name, cls)
    return cls


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


def _allowed() -> str:
    return f"Allowed: {', '.join(RULES)}, or the dotted name of a torch.optim.Optimizer, such as torch.optim.NAdam."


def _rules_in(module: Any) -> Iterable[str]:
    return [name for name, each in vars(module).items() if isinstance(each, type) and issubclass(each, Optimizer)]


def _nearest_rule(given: str, short_names: Iterable[str] = ()) -> str:
    """Return a suggestion among torch's rules and short names: ``rmsprop`` suggests ``torch.optim.RMSprop``."""
    dotted = {name.lower(): f"torch.optim.{name}" for name in _rules_in(torch.optim) if name != "Optimizer"}
    candidates = {**dotted, **{name: name for name in short_names}}
    suggestion = nearest(given.lower(), candidates)
    for short, full in candidates.items():
        if f"'{short}'" in suggestion:
            return suggestion.replace(f"'{short}'", f"'{full}'")
    return suggestion
