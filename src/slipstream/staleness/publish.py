"""The publish seam: which weights x do readers get, given the optimizer's own weights y?"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.staleness.corrections import Slots


class PublishMethod(Protocol):
    """Writes the next version ``x`` from the master weights ``y``, around one optimizer step.

    ``published`` is the buffer that the next version will occupy. It is free from :meth:`before_step` on, so a
    method may keep what it needs of the old ``y`` there.
    """

    @property
    def changes_weights(self) -> bool:
        """Whether x can differ from y by more than a cast, so that an evaluation has two points to look at."""

    @property
    def slots(self) -> Slots:
        """Tensors that a resumed run needs, by slot and parameter name."""
        return {}

    def coefficients(self) -> Mapping[str, Tensor]:
        """Return the coefficient of each parameter, where the method sets it itself."""
        return {}

    def before_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor], *, update: int) -> None:
        """Look at ``y`` before the optimizer makes an update (from 1) of it."""

    def after_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> None:
        """Write ``x``; the optimizer has stepped since :meth:`before_step`, or skipped its step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""


class PublishMasters(PublishMethod):
    """Publish the master weights as they are: x = y."""

    changes_weights = False

    def before_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor], *, update: int) -> None:
        """Do nothing."""

    @torch.no_grad()
    def after_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> None:
        """Copy, casting to the published dtype."""
        for name, y in masters.items():
            published[name].copy_(y)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no history."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


class LookAhead(PublishMethod):
    """Base of methods that publish beyond y along the update just made."""

    changes_weights = True

    def __init__(self) -> None:
        self._previous: dict[str, Tensor] = {}

    @torch.no_grad()
    def before_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor], *, update: int) -> None:
        """Keep ``y_t``, in the buffer that is about to be written."""
        for name, y in masters.items():
            free = published[name]
            self._previous[name] = free.copy_(y) if free.dtype == y.dtype else y.clone()

    @staticmethod
    def _extrapolate(published: Tensor, previous: Tensor, y: Tensor, coefficient: float | Tensor) -> None:
        """Write ``y + c (y - y_prev)``; ``previous`` is used up."""
        # lerp(y_prev, y, 1 + c) is that in one pass.
        published.copy_(torch.lerp(previous, y, 1.0 + coefficient, out=previous))


class ErrorFeedback(LookAhead):
    r"""Update-level error feedback in publish form.

    The literal rule corrects each update by what it would have been one step earlier,

    .. math:: x_{t+1} = x_t - u_t - c\,(u_t - u_{t-1}),

    the first update being ordinary. For zero weight decay this is exactly plain delayed optimization of ``y`` with

    .. math:: x_{t+1} = y_{t+1} + c\,(y_{t+1} - y_t)

    handed to the forward pass, after a first update that publishes ``x_1 = y`` and then moves ``y <- y + c u_0``.
    So the optimizer stays unmodified. With decoupled weight decay the two differ only in where the decay is
    evaluated, by ``O(lr * weight_decay * |u|)``.

    A skipped step is an update ``u_t = 0``.

    Args:
        coefficient: c, without dimension. 1 compensates one step of delay; for a constant delay tau the matching
            value is tau. 0 is :class:`PublishMasters`, which takes no part in any of this.

    Cost:
        No persistent memory: the old ``y`` waits in the buffer that is about to be written. Where the published
        dtype is not the masters', one transient copy of the masters instead.

    Source:
        Zmushko et al. 2026, arXiv 2606.30634, as two independent secondary descriptions give it; the paper's own
        text was not at hand. "Error feedback" in gradient compression is something else.
    """

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient
        self._has_history = False

    @torch.no_grad()
    def after_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> None:
        """Write ``x_{t+1}``."""
        for name, y in masters.items():
            previous = self._previous.pop(name)
            if self._has_history:
                self._extrapolate(published[name], previous, y, self.coefficient)
            else:
                first_update = previous - y
                published[name].copy_(y)
                y.add_(first_update, alpha=self.coefficient)
        self._has_history = True

    def state_dict(self) -> dict[str, Any]:
        """Return the one flag of history."""
        return {"has_history": self._has_history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the flag; absent (saved without error feedback): no history."""
        self._has_history = bool(state.get("has_history", False))


class Windowed(PublishMethod):
    """A publish method that works on some updates only; on the others the masters are published as they are.

    Where it begins, it begins without history; where it ends, the next version is y itself.

    Args:
        method: The method.
        first: First update (from 1) whose version it writes.
        last: Last one; ``None``: no end.
    """

    def __init__(self, method: PublishMethod, *, first: int, last: int | None) -> None:
        self._method = method
        self._first = first
        self._last = last
        self._update = 0
        self._plain = PublishMasters()

    @property
    def changes_weights(self) -> bool:
        """As the method."""
        return self._method.changes_weights

    @property
    def slots(self) -> Slots:
        """As the method."""
        return self._method.slots

    def coefficients(self) -> Mapping[str, Tensor]:
        """As the method, where it works."""
        return self._current().coefficients()

    def _current(self) -> PublishMethod:
        is_inside = self._first <= self._update and (self._last is None or self._update <= self._last)
        return self._method if is_inside else self._plain

    def before_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor], *, update: int) -> None:
        """Take note of the update."""
        self._update = update
        self._current().before_step(masters, published, update=update)

    def after_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> None:
        """Write the next version."""
        self._current().after_step(masters, published)

    def state_dict(self) -> dict[str, Any]:
        """As the method, so that a run may be resumed with other updates than these."""
        return self._method.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the method."""
        self._method.load_state_dict(state)


def build_publish_method(error_feedback: float) -> PublishMethod:
    """Return the method for an error-feedback coefficient; at 0 nothing is added to the weights, not even 0."""
    return ErrorFeedback(error_feedback) if error_feedback else PublishMasters()
