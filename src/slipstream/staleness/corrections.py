"""The gradient seam: what is done to a gradient because it is stale?"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from slipstream.staleness.gradient import Gradient


class Correction(Protocol):
    """Changes a clipped gradient in view of how far the weights moved since it was read.

    At zero staleness a correction returns its input, bitwise.
    """

    def correct(
        self, gradient: Gradient, *, staleness: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> Gradient:
        """Return the corrected gradient.

        Args:
            gradient: Finite and already clipped.
            staleness: Updates between the version read and the newest.
            now: The optimizer's weights y, by name.
            read: The published weights x that the gradient was computed on, by name.
        """


class DcAsgd:
    r"""Delay compensation by a diagonal outer-product curvature.

    .. math:: g + \lambda\, g \odot g \odot (w_{now} - w_{read})

    Args:
        strength: lambda, in units of 1 / (gradient x weight).

    Cost:
        One transient tensor per parameter; the weights read are held by the ring of versions anyway.

    Source:
        Zheng et al. 2017, arXiv 1609.08326, equation 10.

    Differs:
        The displacement is from the published weights x that this gradient read to the optimizer's y, so that a
        publish method and this correction do not both compensate the same staleness.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength

    @torch.no_grad()
    def correct(
        self, gradient: Gradient, *, staleness: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> Gradient:
        """Return ``g + lambda g g (now - read)``; at zero staleness the gradient itself."""
        if staleness == 0:
            return gradient
        tensors = {
            name: None if g is None else torch.addcmul(g, g * g, now[name] - read[name].to(g), value=self.strength)
            for name, g in gradient.tensors.items()
        }
        return Gradient(
            tensors=tensors,
            read_version=gradient.read_version,
            num_tokens=gradient.num_tokens,
            reduction=gradient.reduction,
        )
