"""The control of the gradient compensator: as much damping, in no particular direction."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from slipstream.staleness.agc import Agc
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.groups import members, to_floats


class AgcDamping:
    """The control of :class:`Agc`: scale each group's gradient to the norm that AGC gives it, and keep its direction.

    What AGC gains over this is due to its direction; what both gain, to smaller steps for stale gradients.

    Args:
        agc: Makes the corrections whose norms are taken. It learns as it does by itself.
    """

    def __init__(self, agc: Agc) -> None:
        self.agc = agc
        self.slots = agc.slots
        self._scales: dict[str, float] = {}

    @torch.no_grad()
    def correct(
        self, gradient: Gradient, *, staleness: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> Gradient:
        """Return the scaled gradient; at a staleness of 0 the very one given."""
        corrected = self.agc.correct(gradient, staleness=staleness, now=now, read=read)
        tensors = dict(gradient.tensors)
        changed = [name for name, g in gradient.tensors.items() if g is not None and corrected.tensors[name] is not g]
        groups = members(changed, self.agc.group_of)
        squares = to_floats([g.square().sum() for names in groups.values() for g in _both(names, gradient, corrected)])
        values = iter(squares)
        self._scales = {}
        for group, names in groups.items():
            raw, new = map(sum, zip(*((next(values), next(values)) for _ in names), strict=True))
            self._scales[group] = math.sqrt(new / raw) if raw > 0 else 1.0
            for name in names:
                g = gradient.tensors[name]
                assert g is not None
                tensors[name] = g * self._scales[group]
        return dataclasses.replace(gradient, tensors=tensors) if changed else gradient

    def metrics(self) -> dict[str, float]:
        """Return AGC's, and the factor on each group's gradient, by ``agc/GROUP/damping``."""
        return self.agc.metrics() | {f"agc/{group}/damping": scale for group, scale in self._scales.items()}


def agc_of(corrections: Iterable[object]) -> Agc | None:
    """Return the compensator among corrections, or the one that its control takes the norms of."""
    for each in corrections:
        if isinstance(each, Agc | AgcDamping):
            return each if isinstance(each, Agc) else each.agc
    return None


def _both(names: list[str], first: Gradient, second: Gradient) -> list[Tensor]:
    """Return the tensors of two gradients by turns."""
    found = [gradient.tensors[name] for name in names for gradient in (first, second)]
    return [tensor for tensor in found if tensor is not None]
