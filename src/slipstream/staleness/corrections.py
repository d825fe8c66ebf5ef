"""The gradient seam: what is done to a gradient because it is stale?

Every correction sees ``now``, the optimizer's weights y, and ``read``, the published weights x that the gradient was
computed on. So where a publish method already looks ahead, a correction compensates only what is left.
"""

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Protocol

import torch
from torch import Tensor

from slipstream.config import StalenessConfig
from slipstream.staleness.agc import Agc, Rate
from slipstream.staleness.damping import AgcDamping
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.groups import Slots as Slots
from slipstream.staleness.groups import grouping
from slipstream.staleness.guards import Guards


class Correction(Protocol):
    """Changes a clipped gradient in view of how far the weights moved since it was read.

    At zero staleness a correction returns its input, bitwise: each parameter by itself, where they differ in that.
    """

    slots: Slots
    """What a resumed run needs."""

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

    The adaptive form divides lambda by the root of a running mean of :math:`g^2`.

    Args:
        strength: lambda, in units of 1 / (gradient x weight); adaptive: in units of 1 / weight.
        adaptive: DC-ASGD-a.
        decay: Of the running mean.
        eps: Added to the mean before the root.

    Cost:
        One transient tensor per parameter, and one persistent when adaptive; the weights read are held anyway.

    Source:
        Zheng et al. 2017, arXiv 1609.08326, equations 10 and 14.
    """

    def __init__(self, strength: float, *, adaptive: bool = False, decay: float = 0.95, eps: float = 1e-7) -> None:
        self.strength = strength
        self.adaptive = adaptive
        self.decay = decay
        self.eps = eps
        self.slots: Slots = {"mean_square": {}} if adaptive else {}

    @torch.no_grad()
    def correct(
        self, gradient: Gradient, *, staleness: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> Gradient:
        """Return the gradient with the first-order term of the curvature."""
        tensors: dict[str, Tensor | None] = {}
        for name, g in gradient.tensors.items():
            tensors[name] = g
            if g is None:
                continue
            curvature = g * g
            if self.adaptive:
                mean = _running_mean(self.slots["mean_square"], name, curvature, decay=self.decay)
                curvature = curvature / (mean + self.eps).sqrt()
            if _is_stale(gradient, name, staleness):
                moved = now[name] - read[name].to(g.dtype)
                tensors[name] = torch.addcmul(g, curvature, moved, value=self.strength)
        return dataclasses.replace(gradient, tensors=tensors) if staleness > 0 else gradient


class GapAware:
    r"""Divide each parameter's gradient by how many typical steps its weights have moved.

    .. math:: g / (1 + \mathrm{RMS}(w_{now} - w_{read}) / \mathrm{RMS}(\text{typical step}))

    Args:
        decay: Of the running mean of the step's RMS.

    Cost:
        One persistent copy of the weights, to see each step.

    Source:
        Barkai, Hakimi, Schuster 2020, arXiv 1909.10802, per parameter tensor.
    """

    def __init__(self, *, decay: float = 0.99) -> None:
        self.decay = decay
        self.slots: Slots = {"last": {}, "typical_step": {}}

    @torch.no_grad()
    def correct(
        self, gradient: Gradient, *, staleness: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> Gradient:
        """Return the damped gradient."""
        tensors = dict(gradient.tensors)
        for name, g in gradient.tensors.items():
            last, y = self.slots["last"].get(name), now[name].detach()
            if last is not None:
                step = _rms(y - last)
                if step > 0:
                    _running_mean(self.slots["typical_step"], name, step, decay=self.decay)
            self.slots["last"][name] = y.clone()
            typical = self.slots["typical_step"].get(name)
            if g is not None and typical is not None and _is_stale(gradient, name, staleness):
                tensors[name] = g / (1 + _rms(y - read[name].to(y.dtype)) / typical)
        return dataclasses.replace(gradient, tensors=tensors) if staleness > 0 else gradient


class GradientFeedback:
    r"""Error feedback on the gradient instead of the update: an ablation.

    .. math:: g_t + c\,(g_t - g_{t-1})

    The difference of two gradients is mostly noise, which an adaptive rule then takes for curvature.

    Args:
        coefficient: c.

    Cost:
        One persistent gradient.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self.slots: Slots = {"previous": {}}

    @torch.no_grad()
    def correct(
        self, gradient: Gradient, *, staleness: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> Gradient:
        """Return the extrapolated gradient; a parameter that had none before is left as it is."""
        tensors = dict(gradient.tensors)
        for name, g in gradient.tensors.items():
            previous = self.slots["previous"].pop(name, None)
            if g is not None:
                self.slots["previous"][name] = g.clone()
                if previous is not None and _is_stale(gradient, name, staleness):
                    tensors[name] = torch.lerp(previous, g, 1.0 + self.coefficient)
        return dataclasses.replace(gradient, tensors=tensors) if staleness > 0 else gradient


def build_corrections(
    config: StalenessConfig,
    *,
    role: Callable[[str], str] | None = None,
    lr: Rate | None = None,
    warmup_steps: int = 0,
) -> tuple[Correction, ...]:
    """Return the corrections that the settings name.

    Args:
        config: The settings.
        role: Gives the role of a parameter by name; ``None``: ``agc`` makes each parameter a group.
        lr: Gives the rate of a parameter at an update; ``None``: ``agc`` does not bound its curvature.
        warmup_steps: Updates without ``agc``.
    """
    strength = config.correction_strength
    match config.correction:
        case "dc_asgd":
            return (DcAsgd(strength),)
        case "dc_asgd_adaptive":
            return (DcAsgd(strength, adaptive=True),)
        case "gap_aware":
            return (GapAware(),)
        case "gradient_feedback":
            return (GradientFeedback(strength),)
        case "agc" | "agc_damping":
            settings = config.agc
            agc = Agc(
                curvature=settings.curvature,
                displacement=settings.displacement,
                group_of=None if role is None else grouping(settings, role=role),
                lr=lr,
                decay=settings.decay,
                concurrent_pairs=not settings.probe_every,
                guards=Guards(
                    warmup_steps=warmup_steps,
                    min_pairs=settings.min_pairs,
                    ramp_steps=settings.ramp_steps,
                    trust_radius=settings.trust_radius,
                ),
            )
            return (agc,) if config.correction == "agc" else (AgcDamping(agc),)
        case "none":
            return ()


def _is_stale(gradient: Gradient, name: str, staleness: int) -> bool:
    """Return whether one parameter was updated since it was read; ``staleness`` is that of the oldest one."""
    return gradient.version_of(name) < gradient.read_version + staleness


def _running_mean(slot: MutableMapping[str, Tensor], name: str, value: Tensor, *, decay: float) -> Tensor:
    """Update a running mean, which begins at its first value, and return it."""
    slot[name] = torch.lerp(value, slot[name], decay) if name in slot else value.clone()
    return slot[name]


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
