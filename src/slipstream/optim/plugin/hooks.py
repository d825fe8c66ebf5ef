"""What happens in an optimizer's hooks: around its steps, and around saving and loading its state."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.errors import CheckpointError, ConfigError, StalenessError
from slipstream.optim.plugin.entries import Entries, complete, parameters, saved_entries, without_entries
from slipstream.optim.plugin.methods import HELD, HISTORY, TAU, Delay, ErrorFeedback


@dataclasses.dataclass
class _Step:
    """What the pre-hook leaves to the post-hook.

    Attributes:
        updated: Parameters that the optimizer steps on.
        before: For error feedback: ``y_t`` of those that take part.
        first: Whether this is the first update, which error feedback leaves as it is.
        passes: Neither method takes part in this step.
    """

    updated: list[Tensor]
    before: dict[Tensor, Tensor] = dataclasses.field(default_factory=dict)
    first: bool = False
    passes: bool = False


class Hooks:
    """The hooks of one optimizer. It holds no reference to that, so that neither keeps the other alive."""

    def __init__(self, methods: tuple[Delay | ErrorFeedback, ...]) -> None:
        self._delay = next((method for method in methods if isinstance(method, Delay) and method.tau), None)
        self._feedback = next((method for method in methods if isinstance(method, ErrorFeedback) and method.c), None)
        self._methods = [method for method in (self._delay, self._feedback) if method is not None]
        self._keys = [method.keys for method in self._methods]
        self._waiting: dict[Tensor, dict[str, Any]] = {}
        self._saved: dict[Tensor, dict[str, Any]] = {}
        self._step: _Step | None = None
        self._handles: list[Any] = []

    def install(self, optimizer: Optimizer) -> None:
        """Register the hooks; take up what the optimizer's state holds."""
        for param in parameters(optimizer):
            entry = optimizer.state.get(param, {})
            self._check_delay(entry)
            self._saved[param] = complete(entry, keys=self._keys)
        self.after_load(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
            optimizer.register_state_dict_post_hook(self.after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self.before_load),
            optimizer.register_load_state_dict_post_hook(self.after_load),
        ]

    @torch.no_grad()
    def uninstall(self, optimizer: Optimizer) -> None:
        """Undo :meth:`install`, and withdraw from the parameters."""
        for handle in self._handles:
            handle.remove()
        entries = self._entries(optimizer)
        if self._feedback is not None:
            self._feedback.withdraw(entries, parameters(optimizer))
        entries.drop(parameters(optimizer))

    def _entries(self, optimizer: Optimizer) -> Entries:
        return Entries(optimizer.state, self._waiting)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no type
    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Release the oldest gradients and hand the optimizer its own weights."""
        if _is_nested(optimizer):
            return
        if self._step is not None:
            raise StalenessError(
                f"an earlier step of this {type(optimizer).__name__} ended in an error half-way, so its weights and "
                "the gradients held back no longer fit together. Load a checkpoint, or call remove(optimizer) and "
                "attach again to go on from the weights as they are."
            )
        self._check_call(optimizer, args, kwargs)
        params, entries = list(parameters(optimizer)), self._entries(optimizer)
        stepped = [param for param in params if param.grad is not None]
        if _will_skip(optimizer) or self._is_initialisation(optimizer, stepped):
            self._step = _Step(stepped, passes=True)
            return
        if self._delay is not None:
            self._delay.begin_step(entries, params)
            stepped = [param for param in params if param.grad is not None]
        self._step = _Step(stepped)
        if self._feedback is not None:
            self._step.first = not self._feedback.has_history(entries, params)
            self._step.before = self._feedback.begin_step(entries, params)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no type
    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Publish the next weights; let waiting entries into the state that the rule has now made."""
        if _is_nested(optimizer):
            return
        step, self._step = self._step, None
        assert step is not None, "a step ended that never began"
        entries = self._entries(optimizer)
        if step.passes:
            self._prepare(entries, step.updated)
        if self._feedback is not None:
            self._feedback.end_step(entries, step.before, first=step.first)
        entries.settle([*step.updated, *step.before])

    def after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add what the optimizer's state cannot hold yet."""
        self._entries(optimizer).add_waiting(optimizer, state_dict)

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check a state_dict before it replaces anything; keep the entries and hand on the rest."""
        for entry in state_dict["state"].values():
            self._check_delay(entry)
        self._saved = saved_entries(optimizer, state_dict, keys=self._keys)
        return without_entries(state_dict)

    def after_load(self, optimizer: Optimizer) -> None:
        """Put the entries back as they were saved."""
        self._step = None
        entries, params = self._entries(optimizer), list(parameters(optimizer))
        entries.drop(params)
        entries.add(self._saved)
        self._saved = {}
        self._prepare(entries, [param for param in params if param.requires_grad and optimizer.state.get(param)])

    def _prepare(self, entries: Entries, params: list[Tensor]) -> None:
        """Give entries to parameters that have state: flattened checkpoints load only keys that are there."""
        for param in params:
            for method in self._methods:
                method.prepare(entries.write(param), param)

    def _check_call(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what cannot work, before anything is changed."""
        if any(arg is not None for arg in args[1:]) or kwargs.get("closure") is not None:
            raise ConfigError(
                "step was given a closure, which computes gradients inside the step; the plug-in needs them before it. "
                "Call backward first, then step() without a closure."
            )
        if self._delay is None:
            return
        if getattr(optimizer, "grad_scale", None) is not None or "grad_scaler" in kwargs:
            raise ConfigError(
                f"{type(optimizer).__name__} was given gradients that are still multiplied by the loss scale, which "
                f"may be another one by the time Delay({self._delay.tau}) releases them. Call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer), or build the optimizer with fused=False."
            )
        if any(param.grad is not None and param.grad.is_sparse for param in parameters(optimizer)):
            raise ConfigError("Delay holds dense gradients only. Use layers that make dense ones (sparse=False).")

    def _check_delay(self, entry: Any) -> None:
        held_for = entry.get(TAU) if isinstance(entry, Mapping) else None
        if self._delay is not None and isinstance(held_for, int) and held_for != self._delay.tau:
            raise CheckpointError(
                f"the optimizer's state holds gradients of Delay({held_for}), attached is Delay({self._delay.tau}). "
                f"Load it with Delay({held_for}) attached; then call remove(optimizer), which drops them, and attach "
                "the other delay."
            )

    def _is_initialisation(self, optimizer: Optimizer, stepped: list[Tensor]) -> bool:
        """Return whether this step is there only to make the optimizer create its state.

        torch.distributed.checkpoint and torchtitan make it on zero gradients, before saving or loading. It can happen
        only while there is no state, so gradients are looked at only until then.
        """
        entries = self._entries(optimizer)
        begun = any(optimizer.state.get(param) for param in stepped) and any(
            entries.read(param).get(HELD) or entries.read(param).get(HISTORY) for param in stepped
        )
        return bool(stepped) and not begun and not any(_is_nonzero(param.grad) for param in stepped)


def _is_nonzero(gradient: Tensor | None) -> bool:
    assert gradient is not None
    if gradient.is_sparse:
        return True
    # Of a sharded tensor the local part alone: asking for all of it would be a collective.
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return bool(local.any())


def _will_skip(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer will skip this step by itself, as a gradient scaler has found infinities."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _is_nested(optimizer: Optimizer) -> bool:
    """Return whether the hooks run for a step within a step: that of a base class, called by a subclass's own.

    torch hooks each class's step, and the base class's only if that was ever used by itself; so in some processes a
    subclass that calls ``super().step()`` runs its hooks twice.
    """
    hooked = getattr(type(optimizer).step, "__code__", None)
    depth, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is hooked and frame.f_locals.get("self") is optimizer:
            depth += 1
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    return depth > 1
