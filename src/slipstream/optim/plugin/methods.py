"""What the plug-in does around one step: hold gradients back, look ahead along the update."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.optim.plugin.entries import PREFIX, Entries

HELD = f"{PREFIX}held"
TAU = f"{PREFIX}tau"
OFFSET = f"{PREFIX}offset"
HISTORY = f"{PREFIX}has_history"


@dataclasses.dataclass(frozen=True)
class Delay:
    r"""Hold every gradient back ``tau`` steps: the staleness of a pipeline without flushes, on one device.

    The t-th call of ``step()`` applies the gradient of the (t - tau)-th, so gradient b is computed on version
    ``max(b - tau, 0)`` of the weights, exactly as if a pipeline had stashed old weights. The first ``tau`` calls only
    store: they leave the weights, the optimizer's moments and its step count alone.

    A scheduler goes on counting calls. A parameter without a gradient (an expert without tokens) has none ``tau``
    steps later either. A step that never happens (a gradient scaler skips it) holds nothing and releases nothing.

    Args:
        tau: Delay in steps; 0 takes no part.

    Raises:
        ConfigError: ``tau`` is no whole number from 0.

    Cost:
        ``tau`` gradients a parameter, kept in the optimizer's state, and a copy of one while it is exchanged.
        Contents are exchanged, never references: a gradient may be a view of a buffer that DDP or Megatron owns.

    Example:
        >>> from slipstream.optim.plugin import attach
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = attach(torch.optim.SGD([weight], lr=1.0), Delay(1))
        >>> for gradient in (1.0, 10.0, 100.0):
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        ...     print(weight.item())
        0.0
        -1.0
        -11.0
    """

    tau: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.tau, bool) or not isinstance(self.tau, int) or self.tau < 0:
            raise ConfigError(f"Delay: tau is {self.tau!r}; a delay is a whole number of steps, 0 or more.")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of an entry."""
        return (*self._slots, HELD, TAU)

    @property
    def _slots(self) -> list[str]:
        """Keys of the held gradients, oldest first."""
        return [f"{PREFIX}gradient_{age}" for age in range(self.tau)]

    def prepare(self, entry: dict[str, Any], param: Tensor) -> None:
        """Fill an entry that holds nothing yet, so that a checkpoint can be loaded into it."""
        if HELD not in entry:
            entry.update({slot: torch.zeros_like(param, requires_grad=False) for slot in self._slots})
            entry.update({HELD: 0, TAU: self.tau})

    def begin_step(self, entries: Entries, params: Iterable[Tensor]) -> None:
        """Put the oldest gradients where the optimizer looks for them, and store the new ones."""
        for param in params:
            if param.grad is not None or entries.read(param).get(HELD):
                self._exchange(entries.write(param), param)

    def _exchange(self, entry: dict[str, Any], param: Tensor) -> None:
        slots = self._slots
        held = entry.get(HELD, 0)  # bit k: slot k has a gradient, rather than none
        oldest, fresh = entry.get(slots[0]), param.grad
        if oldest is None or (fresh is not None and oldest.dtype != fresh.dtype):
            oldest = torch.zeros_like(param if fresh is None else fresh, requires_grad=False)
        for slot in slots[1:]:
            entry.setdefault(slot, torch.zeros_like(oldest))
        if held & 1 and fresh is not None:
            moved = fresh.clone()
            fresh.copy_(oldest)
            oldest.copy_(moved)
        elif held & 1:
            param.grad = oldest.clone()
        elif fresh is not None:
            oldest.copy_(fresh)
            param.grad = None
        later = [entry[slot] for slot in slots[1:]]
        entry.update(zip(slots, [*later, oldest], strict=True))
        entry[HELD] = (held >> 1) | (int(fresh is not None) << (self.tau - 1))
        entry[TAU] = self.tau


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    r"""Update-level error feedback: what synchronous training would have done, one step late.

    .. math:: x_{t+1} = x_t - u_t - c\,(u_t - u_{t-1}),

    the first update being ordinary; u is the optimizer's update, rate and decoupled weight decay included. The same
    sequence is that of plain optimization of ``y`` with

    .. math:: x_{t+1} = y_{t+1} + c\,(y_{t+1} - y_t)

    handed to the forward pass. That is the form used here, because an optimizer's hooks can bring it about with the
    least memory: before a step the parameters become ``y``, the optimizer steps on them, after it they become ``x``.
    What is kept is the offset ``x - y``, not ``y``: so the parameters stay the truth, and weights that someone else
    changes between two steps (a clamp, an average swapped in, another checkpoint) keep that change.

    It helps a rule with momentum whose gradients are stale, and only such a one.

    Args:
        c: Coefficient, without dimension, at least 0. 1 makes good one step of delay, tau matches a delay of tau, 0
            takes no part.

    Raises:
        ConfigError: ``c`` is negative or not finite.

    Cost:
        One tensor a parameter, of the parameter's shape and type, in the optimizer's state; one more for one parameter
        at a time; five passes over the parameters a step.

    Example:
        >>> from slipstream.optim.plugin import attach
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = attach(torch.optim.SGD([weight], lr=1.0), ErrorFeedback(c=1.0))
        >>> for gradient in (1.0, 2.0, 2.0):
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        ...     print(weight.item())
        -1.0
        -4.0
        -6.0

    Source:
        Zmushko et al. 2026, arXiv 2606.30634, as two independent secondary descriptions give it; the paper's own
        text was not at hand. "Error feedback" in gradient compression is something else.

    Differs:
        Decoupled weight decay is evaluated at ``y``, where the optimizer steps, rather than at ``x``: a difference of
        ``O(lr * weight_decay * |u|)``, and none without decay.
    """

    c: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.c) and self.c >= 0):
            raise ConfigError(f"ErrorFeedback: c is {self.c!r}; the coefficient is a finite number, 0 or more.")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of an entry."""
        return (OFFSET, HISTORY)

    def prepare(self, entry: dict[str, Any], param: Tensor) -> None:
        """Fill an entry without history, so that a checkpoint can be loaded into it."""
        if HISTORY not in entry:
            entry.update({OFFSET: torch.zeros_like(param, requires_grad=False), HISTORY: 0})

    def has_history(self, entries: Entries, params: Iterable[Tensor]) -> bool:
        """Return whether any of these parameters has been updated before."""
        return any(entries.read(param).get(HISTORY) for param in params)

    def begin_step(self, entries: Entries, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Turn ``x`` into ``y``; return a copy of ``y_t`` for each parameter that takes part.

        The offsets leave the state until :meth:`end_step`: a step that fails half-way must not leave copies of the
        weights where offsets are looked for.
        """
        before = {}
        for param in params:
            entry = entries.read(param)
            if not entry.get(HISTORY) and param.grad is None:
                continue  # never updated: x = y, and it will be after this step
            free = entry.pop(OFFSET, None)
            if entry.pop(HISTORY, 0):
                param.sub_(free)
            before[param] = param.clone().detach_() if free is None else free.copy_(param)
        return before

    def end_step(self, entries: Entries, before: dict[Tensor, Tensor], *, first: bool) -> None:
        """Turn ``y`` into the next ``x``; the first update publishes ``y`` and moves ``y`` to ``y + c u_0`` instead."""
        for param, offset in before.items():
            if first:
                offset.sub_(param).mul_(-self.c)
            else:
                # lerp(y_t, y_{t+1}, 1 + c) = y_{t+1} + c (y_{t+1} - y_t). The offset is what was really added, after
                # rounding: so taking it off gives y back, to the last bit where the update is small beside the weight,
                # to a rounding elsewhere.
                x = torch.lerp(offset, param, 1.0 + self.c)
                torch.sub(x, param, out=offset)
                param.copy_(x)
            entries.write(param).update({OFFSET: offset, HISTORY: 1})

    def withdraw(self, entries: Entries, params: Iterable[Tensor]) -> None:
        """Turn ``x`` into ``y`` for good."""
        for param in params:
            entry = entries.read(param)
            if entry.get(HISTORY):
                param.sub_(entry[OFFSET])
