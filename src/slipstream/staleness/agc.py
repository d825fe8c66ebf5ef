"""The adaptive gradient compensator: a first-order correction with the curvature of each group of parameters."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from slipstream.staleness.curvature import Curvature, CurvatureKind
from slipstream.staleness.displacement import MeanDisplacement
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.groups import GroupOf, Slots, Statistics, members, to_floats
from slipstream.staleness.guards import Guards
from slipstream.staleness.pairs import ConcurrentPairs, Pair
from slipstream.staleness.probes import fidelity

Rate = Callable[[str, int], float]
"""Gives the learning rate of a parameter at an update (from 1)."""


class Agc:
    r"""Add what the curvature says the gradient has missed since it was read.

    .. math:: g + \rho\,\kappa_G\, h \odot (y_{now} - x_{read})

    with a diagonal curvature h per group (:class:`~slipstream.staleness.curvature.Curvature`), a ramp
    :math:`\rho`, and a gain that is measured on pairs which did not make h,

    .. math:: \kappa_G = \mathrm{clip}\Big(
        \frac{\mathrm{EMA}\langle\Delta g, h\,\Delta w\rangle_G}{\mathrm{EMA}\,|h\,\Delta w|_G^2}, 0, 1\Big),

    so that a curvature which predicts nothing switches itself off. Pairs come from :meth:`correct` itself
    (:class:`~slipstream.staleness.pairs.ConcurrentPairs`) or from :meth:`probe`; each second one of a group goes to
    the gain. A gradient is corrected before it enters the statistics.

    Args:
        curvature: Kind; see :class:`~slipstream.staleness.curvature.Curvature`.
        displacement: ``exact``: y now less x read. ``ema``: the mean signed displacement of a step times the staleness.
        group_of: Gives the group of a parameter; ``None``: each is a group of its own.
        lr: Bounds the curvature by what a rate allows; ``None``: no bound.
        decay: Of every average.
        concurrent_pairs: Take pairs from the gradients that are corrected; otherwise from :meth:`probe` alone.
        guards: See :class:`Guards`.

    Cost:
        Persistent: one gradient and one copy of the weights for concurrent pairs, the mean square of the gradient, two
        more copies of the weights with ``ema``, two tensors with ``secant_diag``. Transient: one gradient. Two waits
        for the device an update.

    Source:
        AsyncLM, "Efficient and Adaptive Async Pre-training of Language Models", ACL 2025, from a description; there is
        no code.

    Differs:
        The source writes the displacement as staleness times a mean step and leaves its sign open; takes pairs of
        consecutive gradients, which are biased; and has no gain, bound or trust region.
    """

    def __init__(
        self,
        *,
        curvature: CurvatureKind = "secant_group",
        displacement: Literal["exact", "ema"] = "exact",
        group_of: GroupOf | None = None,
        lr: Rate | None = None,
        decay: float = 0.99,
        concurrent_pairs: bool = True,
        guards: Guards | None = None,
    ) -> None:
        self.group_of: GroupOf = group_of or (lambda name: name)
        self.curvature = Curvature(curvature, decay=decay, keeps_mean_square=lr is not None)
        self.guards = guards or Guards()
        self._lr = lr
        self._decay = decay
        self._pairs = ConcurrentPairs() if concurrent_pairs else None
        self._mean = MeanDisplacement(decay=decay) if displacement == "ema" else None
        self._facts = Statistics(("pairs", "gain_dot", "gain_square", "started", "update"))
        self.slots: Slots = self._facts.slots | self.curvature.slots
        if self._pairs is not None:
            self.slots |= self._pairs.slots
        if self._mean is not None:
            self.slots |= self._mean.slots
        self._metrics: dict[str, dict[str, float]] = {}
        self._probe_metrics: dict[str, float] = {}

    @torch.no_grad()
    def correct(
        self, gradient: Gradient, *, staleness: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> Gradient:
        """Return the corrected gradient; at a staleness of 0 the very one given."""
        update = gradient.read_version + staleness + 1
        for name in gradient.tensors:
            self._facts.set("update", name, update)
        if self._mean is not None:
            self._mean.observe(gradient, now, update=update)
        corrected = self._corrected(gradient, update, now, read) if staleness > 0 else gradient
        if self._pairs is not None:
            pair = self._pairs.pair(gradient, read)
            if pair is not None:
                self._learn(pair)
            self._pairs.hold(gradient, read, version=update)
        self.curvature.observe(gradient.tensors)
        return corrected

    @torch.no_grad()
    def probe(
        self,
        gradient_old: Mapping[str, Tensor | None],
        weights_old: Mapping[str, Tensor],
        gradient_new: Mapping[str, Tensor | None],
        weights_new: Mapping[str, Tensor],
    ) -> None:
        """Learn from two gradients of *one* batch (a microbatch will do) at two points of the weights.

        The batch's noise is in both and cancels, so this alone tells single elements apart, and how much of the change
        a correction foretells; that is measured before anything is learnt. A caller does it every n-th cycle: it costs
        one more forward and backward.

        Args:
            gradient_old: At ``weights_old``, scaled as the gradients to be corrected are (mean over tokens; clipped
                by the factor of the batch's own gradient).
            weights_old: By name.
            gradient_new: At ``weights_new``, scaled by the same factor.
            weights_new: By name.
        """
        change, moved = {}, {}
        for name, old in gradient_old.items():
            new = gradient_new.get(name)
            if old is not None and new is not None:
                change[name] = new - old
                moved[name] = weights_new[name].to(new.dtype) - weights_old[name].to(new.dtype)
        stale = {name: g for name in change if (g := gradient_old[name]) is not None}
        self._probe_metrics = fidelity(stale, change, self._foretold(stale, moved))
        self._learn(Pair(change=change, moved=moved, same_batch=True))

    def _foretold(self, gradient: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the correction of a gradient would be by now, within the trust radius, without the ramp."""
        found: dict[str, Tensor] = {}
        for names in members(moved, self.group_of).values():
            h, gain = self._diagonals(names, moved), self.gain(names)
            found |= {name: gain * h[name][0] * moved[name] for name in names}
            size, limit = _norm(found, names), self.guards.trust_radius * _norm(gradient, names)
            if size > limit:
                found |= {name: found[name] * (limit / size) for name in names}
        return found

    def _learn(self, pair: Pair) -> None:
        """Take a pair into the curvature, or, each second one of a group, into its gain."""
        groups = members(pair.change, self.group_of)
        dots: list[Tensor] = []
        is_held_out = {group: self._facts.largest("pairs", names) % 2 == 1 for group, names in groups.items()}
        for group, names in groups.items():
            h = self._diagonals(names, pair.moved) if is_held_out[group] else {}
            for name in names:
                change, moved = pair.change[name], pair.moved[name]
                if is_held_out[group]:
                    predicted = h[name][0] * moved
                    dots += [(change * predicted).sum(), predicted.square().sum()]
                else:
                    dots += self.curvature.fit_dots(name, change, moved)
        values = iter(to_floats(dots))
        for group, names in groups.items():
            found = {name: (next(values), next(values)) for name in names}
            if not all(math.isfinite(value) for both in found.values() for value in both):
                continue
            for name, (dot, square) in found.items():
                self._facts.set("pairs", name, self._facts.get("pairs", name) + 1)
                if is_held_out[group]:
                    self._facts.average("gain_dot", name, dot, decay=self._decay)
                    self._facts.average("gain_square", name, square, decay=self._decay)
                    continue
                self.curvature.fit(name, dot, square)
                if pair.same_batch:
                    self.curvature.fit_elements(name, pair.change[name], pair.moved[name])

    def _diagonals(self, names: list[str], like: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the curvature of a group's parameters, and how much of it is at the bound."""
        lr = None
        if self._lr is not None:
            lr = {name: self._lr(name, max(int(self._facts.get("update", name)), 1)) for name in names}
        return self.curvature.diagonals(names, like, scale=self.curvature.scale(names), lr=lr)

    def gain(self, names: list[str]) -> float:
        """Return kappa of a group: 0 before the first held-out pair."""
        square = self._facts.total("gain_square", names)
        return min(max(self._facts.total("gain_dot", names) / square, 0.0), 1.0) if square > 0 else 0.0

    def _ramp(self, names: list[str], update: int) -> float:
        """Return the share of the correction that a group gets by now, and note when it begins."""
        guards = self.guards
        if update <= guards.warmup_steps or self._facts.largest("pairs", names) < guards.min_pairs:
            return 0.0
        for name in names:
            if not self._facts.has("started", name):
                self._facts.set("started", name, update)
        since = update - self._facts.largest("started", names) + 1
        return min(since / guards.ramp_steps, 1.0) if guards.ramp_steps > 0 else 1.0

    def _corrected(
        self, gradient: Gradient, update: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> Gradient:
        groups = members(gradient.tensors, self.group_of)
        proposals: dict[str, dict[str, Tensor]] = {}
        dots: list[Tensor] = []
        for group, names in groups.items():
            ramp, gain = self._ramp(names, update), self.gain(names)
            self._metrics[group] = {
                "pairs": self._facts.largest("pairs", names),
                "ramp": ramp,
                "gain": gain,
                "curvature": self.curvature.scale(names),
            }
            proposals[group] = {}
            if ramp * gain * self.curvature.scale(names) == 0.0:
                continue
            moved = self._moved(gradient, names, update, now, read)
            h = self._diagonals(names, now)
            for name, displacement in moved.items():
                proposals[group][name] = ramp * gain * h[name][0] * displacement
                dots += _dots(gradient.tensors[name], proposals[group][name], h[name][1])
        values = iter(to_floats(dots))
        tensors = dict(gradient.tensors)
        for group, correction in proposals.items():
            found = [[next(values) for _ in range(5)] for _ in correction]
            scale = self._guarded_scale(group, found)
            for name, c in correction.items():
                g = gradient.tensors[name]
                if scale > 0.0 and g is not None:
                    tensors[name] = torch.add(g, c, alpha=scale)
        return dataclasses.replace(gradient, tensors=tensors)

    def _moved(
        self, gradient: Gradient, names: list[str], update: int, now: Mapping[str, Tensor], read: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return how far the weights have moved since they were read; without those that have not, or have no gradient.

        Signed, towards now: with the direction of descent in its place the correction would double the error.
        """
        found = {}
        for name in names:
            g, staleness = gradient.tensors[name], update - 1 - gradient.version_of(name)
            if g is None or staleness <= 0:
                continue
            if self._mean is None:
                found[name] = now[name].to(g.dtype) - read[name].to(g.dtype)
            else:
                found[name] = self._mean.over(name, staleness)
        return found

    def _guarded_scale(self, group: str, found: list[list[float]]) -> float:
        """Return the factor on a group's correction, from the sums of its parameters; 0: the raw gradient."""
        guards = self.guards
        gg, gc, cc, bounded, numel = (sum(column) for column in zip(*found, strict=True)) if found else (0.0,) * 5
        new = math.sqrt(max(gg + 2 * gc + cc, 0.0)) if math.isfinite(gg + gc + cc) else math.nan
        cosine = (gg + gc) / (math.sqrt(gg) * new) if gg > 0 and new > 0 else math.nan
        relative = math.sqrt(cc / gg) if gg > 0 and math.isfinite(cc / gg) else math.nan
        is_raw = bool(found) and not cosine >= guards.min_cosine
        trust = 1.0
        if not is_raw and relative > guards.trust_radius:
            trust = guards.trust_radius / relative
        scale = 0.0 if is_raw or not found else trust
        self._metrics[group] |= {
            "raw": float(is_raw),
            "cosine": (cosine if math.isfinite(cosine) else 0.0) if found else 1.0,
            "trust": trust,
            "relative_correction": scale * relative if scale > 0.0 else 0.0,
            "bounded": bounded / numel if numel else 0.0,
        }
        return scale

    def metrics(self) -> dict[str, float]:
        """Return every guard of every group, at the last stale gradient, by ``agc/GROUP/NAME``.

        ``pairs``, ``ramp`` and ``gain`` (0: no correction), ``curvature`` (lambda), ``bounded`` (share of elements at
        the upper bound), ``cosine`` and ``raw`` (1: the correction was thrown away), ``trust`` (below 1: cut to the
        trust radius), ``relative_correction`` (norm of what was added over the gradient's). Of the last probe
        ``probe/NAME``, see :func:`~slipstream.staleness.probes.fidelity`.
        """
        by_group = {f"agc/{group}/{name}": value for group, row in self._metrics.items() for name, value in row.items()}
        return by_group | {f"probe/{name}": value for name, value in self._probe_metrics.items()}


def _norm(tensors: Mapping[str, Tensor], names: list[str]) -> float:
    return math.sqrt(sum(to_floats([tensors[name].square().sum() for name in names])))


def _dots(g: Tensor | None, c: Tensor, bounded: Tensor) -> list[Tensor]:
    """Return the squares and the product of gradient and correction, elements at the bound, and elements."""
    assert g is not None
    count = torch.full((), float(g.numel()), device=g.device)
    return [g.square().sum(), (g * c).sum(), c.square().sum(), bounded * count, count]
