"""The state of an optimizer by parameter name: exact, and independent of how parameters were grouped or split.

``Optimizer.state_dict`` numbers parameters and, when loaded, casts every floating tensor to its parameter's type. Here
a tensor keeps its own type, and each parameter's entry can be loaded by whichever stage holds the parameter later.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.errors import CheckpointError

GROUP_PREFIX = "group."
"""Begins the keys of values that a rule keeps in its parameter groups (Prodigy's distance, say)."""

WHOLE_OPTIMIZER = ""
"""Name of the entry, absent for torch's own rules, of what belongs to no parameter."""

_SETTINGS = frozenset({"params", "param_names", "lr", "initial_lr", "weight_decay"})
"""Group keys that come from the config, whatever they are by now."""


_ON_HOST = frozenset({"step", "mu_product"})
"""State that torch's rules keep on the host: on the device each step would wait for it, once a parameter."""


def export_state(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state by parameter name.

    Args:
        optimizer: Any whose parameters were given with names, as :func:`build_optimizers` does.

    Returns:
        For every parameter, in order, its state as the rule keeps it: tensors, numbers, none, texts, and dicts, lists
        and tuples of them. Empty for a parameter that never had a gradient. Group values that have left the
        optimizer's defaults stand in the entry of each parameter of the group under ``group.KEY``; settings that come
        from the config (rates, decay) are left out. Tensors are the optimizer's own, not copies: its next step
        changes them.

    Raises:
        CheckpointError: A group has no names, or a state holds something that cannot be stored.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([("w", weight)], lr=0.1, momentum=0.9)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> export_state(optimizer)
        {'w': {'momentum_buffer': tensor([1., 1.])}}
    """
    exported: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        moved = {
            f"{GROUP_PREFIX}{key}": value
            for key, value in group.items()
            if key not in _SETTINGS and not (key in optimizer.defaults and _same(value, optimizer.defaults[key]))
        }
        for name, param in _named(group):
            # .get: reading optimizer.state[param] would create an entry, which rules take for a begun state.
            exported[name] = {**optimizer.state.get(param, {}), **moved}
    whole = _whole_state(optimizer)
    if whole:
        exported[WHOLE_OPTIMIZER] = whole
    for name, entry in exported.items():
        _check_storable(entry, where=f"{type(optimizer).__name__}, parameter {name!r}")
    return exported


def import_state(optimizer: Optimizer, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a freshly built optimizer an exported state; training goes on exactly as it would have.

    Args:
        optimizer: One of the same rule that has not stepped yet. Its parameters may be grouped in another way, and
            may be any part of the exported ones.
        saved: What :func:`export_state` returned, of one optimizer or several; entries of other parameters are passed
            over. Tensors are copied, to the parameter's device, and keep their type.

    Raises:
        CheckpointError: A parameter has no entry, or a group's parameters disagree on a value of the group.
    """
    whole = saved.get(WHOLE_OPTIMIZER, {})
    if whole.get("extra"):
        optimizer.load_state_dict({**optimizer.state_dict(), **copy.deepcopy(whole["extra"])})
    for group in optimizer.param_groups:
        _import_group_values(group, saved)
        for name, param in _named(group):
            state = {key: value for key, value in saved[name].items() if not str(key).startswith(GROUP_PREFIX)}
            if state:
                optimizer.state[param] = _restored(state, param, group=group)
    for key, value in whole.get("state", {}).items():
        optimizer.state[key] = copy.deepcopy(value)


def split_tensors(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Part a state into its tensors and a JSON-able tree of the rest, for a file of each kind.

    Args:
        state: What :func:`export_state` returned, or one parameter's entry of it.

    Returns:
        The tensors by path, not copied; and the tree, in which a tensor is ``{"tensor": path}``, a dict
        ``{"dict": [[key, value], ...]}`` (JSON has text keys only) and a tuple ``{"tuple": [...]}``. Floats survive
        Python's ``json`` exactly, infinities included.

    Example:
        >>> tensors, tree = split_tensors({"step": torch.tensor(3.0), "betas": (0.9, None)})
        >>> tree
        {'dict': [['step', {'tensor': 'step'}], ['betas', {'tuple': [0.9, None]}]]}
        >>> join_tensors(tree, tensors.__getitem__)
        {'step': tensor(3.), 'betas': (0.9, None)}
    """
    tensors: dict[str, Tensor] = {}

    def split(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, Tensor):
            key = "/".join(path)
            assert key not in tensors, f"two tensors at {key}"
            tensors[key] = node.detach()
            return {"tensor": key}
        if isinstance(node, Mapping):
            return {"dict": [[key, split(value, (*path, _path_step(key)))] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            items = [split(value, (*path, _path_step(i))) for i, value in enumerate(node)]
            return items if isinstance(node, list) else {"tuple": items}
        return node

    tree = split(state, ())
    return tensors, tree


def join_tensors(tree: Any, read: Callable[[str], Tensor]) -> Any:
    """Undo :func:`split_tensors`, also after the tree went through JSON.

    Args:
        tree: The JSON-able tree.
        read: Returns the tensor of a path; whatever it raises where there is none passes through.

    Raises:
        CheckpointError: The tree is none that :func:`split_tensors` makes.
    """
    if isinstance(tree, list):
        return [join_tensors(item, read) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    if "tensor" in tree:
        return read(tree["tensor"])
    if "tuple" in tree:
        return tuple(join_tensors(item, read) for item in tree["tuple"])
    if "dict" in tree:
        return {key: join_tensors(value, read) for key, value in tree["dict"]}
    raise CheckpointError(f"optimizer state: cannot read a node with keys {sorted(tree)}. Use another checkpoint.")


def _named(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if "param_names" not in group:
        raise CheckpointError(
            "the optimizer's parameters have no names, so that its state cannot be stored by name. Build it from "
            "(name, parameter) pairs, such as model.named_parameters()."
        )
    return zip(group["param_names"], group["params"], strict=True)


def _whole_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return state under keys that are no parameters, and top-level entries that a rule adds to its state_dict."""
    state = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    extra = {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
    return {key: value for key, value in {"state": state, "extra": extra}.items() if value}


def _import_group_values(group: dict[str, Any], saved: Mapping[str, Mapping[str, Any]]) -> None:
    missing = [name for name, _ in _named(group) if name not in saved]
    if missing:
        shown = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        raise CheckpointError(
            f"optimizer state: no entry for {len(missing)} of {len(group['params'])} parameters ({shown}). Resume with "
            "the model and the optimizer that the checkpoint was made with."
        )
    values: dict[str, Any] = {}
    for name, _ in _named(group):
        for key, value in saved[name].items():
            if not str(key).startswith(GROUP_PREFIX):
                continue
            if key in values and not _same(values[key], value):
                raise CheckpointError(
                    f"optimizer state: {key!r} is {values[key]!r} for {group['param_names'][0]} and {value!r} for "
                    f"{name}, which are now in one group. Resume with the split that the checkpoint was made with."
                )
            values[key] = value
    group.update({key.removeprefix(GROUP_PREFIX): copy.deepcopy(value) for key, value in values.items()})


def _restored(value: Any, param: Tensor, *, group: Mapping[str, Any], key: Any = None) -> Any:
    """Return a copy of a state value, with tensors on the device where the rule would have made them."""
    if isinstance(value, Tensor):
        if key in _ON_HOST and not (group.get("capturable") or group.get("fused")):
            return value.detach().clone()
        if value.shape == param.shape:
            # In the parameter's memory layout, as rules make it.
            return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value.detach())
        return value.detach().to(param.device, copy=True)
    if isinstance(value, Mapping):
        return {each: _restored(item, param, group=group, key=each) for each, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(item, param, group=group) for item in value)
    return value


def _check_storable(value: Any, *, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise CheckpointError(
                    f"{where}: cannot store state under the key {key!r}. Allowed: texts and whole numbers."
                )
            _check_storable(item, where=f"{where}, {key!r}")
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for item in value:
            _check_storable(item, where=where)
    elif not (value is None or isinstance(value, Tensor | bool | int | float | str)):
        raise CheckpointError(
            f"{where}: cannot store state of type {type(value).__name__}. Allowed: tensors, numbers, none, texts, and "
            "dicts, lists and tuples of them."
        )


def _same(first: Any, second: Any) -> bool:
    """Compare values that may hold tensors or NaN, to the last bit and type."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return list(first) == list(second) and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second or (first != first and second != second))


def _path_step(key: Any) -> str:
    return key if isinstance(key, str) else f"[{key}]"
