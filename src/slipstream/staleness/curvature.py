r"""A diagonal estimate of the loss's curvature for each group of parameters, from pairs of gradients.

All kinds are one regression: the change of the gradient against a direction that the kind gives,

.. math:: h = \lambda_G\, s, \qquad
    \lambda_G = \max\Big(\frac{\mathrm{EMA}\langle\Delta g,\, s\,\Delta w\rangle_G}
                              {\mathrm{EMA}\,|s\,\Delta w|^2_G},\, 0\Big),

with s = 1 for a secant, the mean square of the raw gradient for ``fisher`` and its root for ``fisher_root``. It is the
ratio of two averages: an average of ratios would be ruled by the pairs that hardly moved.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from slipstream.staleness.groups import Statistics

CurvatureKind = Literal["secant_group", "secant_diag", "fisher", "fisher_root"]


class Curvature:
    """Estimates a non-negative diagonal of the Hessian.

    Args:
        kind: ``secant_group``: one number a group. ``secant_diag``: element by element from same-batch pairs, shrunk to
            the group's number. ``fisher``, ``fisher_root``: the shape of the raw gradient's mean square, or of its
            root, with a scale for each group.
        decay: Of every average.
        keeps_mean_square: Keep the raw gradient's mean square though the kind does not need it (the bound does).

    Cost:
        ``secant_diag``: two tensors a parameter. Mean square: one.
    """

    def __init__(self, kind: CurvatureKind, *, decay: float = 0.99, keeps_mean_square: bool = True) -> None:
        self.kind = kind
        self._decay = decay
        self._sums = Statistics(("fit_dot", "fit_square"))
        self.slots = dict(self._sums.slots)
        self._mean_square: MutableMapping[str, Tensor] | None = None
        if keeps_mean_square or kind in ("fisher", "fisher_root"):
            self._mean_square = self.slots.setdefault("mean_square", {})
        self._dots: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        if kind == "secant_diag":
            self.slots |= {"element_dot": self._dots, "element_square": self._squares}

    def observe(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Take raw gradients into their mean square."""
        if self._mean_square is None:
            return
        for name, g in gradients.items():
            if g is not None:
                held = self._mean_square.get(name)
                square = g * g
                self._mean_square[name] = square if held is None else torch.lerp(square, held, self._decay)

    def fit_dots(self, name: str, change: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """Return what one parameter adds to the two averages of its group, as scalars."""
        direction = self._shape(name, moved) * moved
        return (change * direction).sum(), direction.square().sum()

    def fit(self, name: str, dot: float, square: float) -> None:
        """Take what :meth:`fit_dots` gave into the averages."""
        self._sums.average("fit_dot", name, dot, decay=self._decay)
        self._sums.average("fit_square", name, square, decay=self._decay)

    def fit_elements(self, name: str, change: Tensor, moved: Tensor) -> None:
        """Take a same-batch pair into the averages of single elements."""
        if self.kind == "secant_diag":
            for held, product in ((self._dots, change * moved), (self._squares, moved * moved)):
                held[name] = torch.lerp(product, held.get(name, torch.zeros_like(product)), self._decay)

    def scale(self, names: Iterable[str]) -> float:
        """Return lambda of a group; 0 before the first pair."""
        names = list(names)
        square = self._sums.total("fit_square", names)
        return max(self._sums.total("fit_dot", names) / square, 0.0) if square > 0 else 0.0

    def diagonals(
        self, names: Sequence[str], like: Mapping[str, Tensor], *, scale: float, lr: Mapping[str, float] | None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        r"""Return h of a group's parameters, within :math:`0 \le h \le (\sqrt{v} + \epsilon) / \eta`.

        Above that bound a step of Adam's size would overshoot, and no rate that trains allows such a curvature.

        Args:
            names: All of the group, or those wanted.
            like: A tensor of each one's shape and type.
            scale: Of the group.
            lr: Rate of each; ``None``: no upper bound.

        Returns:
            By name: h, and the fraction of its elements at the upper bound, as a scalar.
        """
        found = {}
        weight = self._prior_weight(names)
        for name in names:
            h = scale * self._shape(name, like[name])
            if name in self._squares:
                prior = scale * weight
                square = self._squares[name] + weight
                h = torch.where(square > 0, (self._dots[name] + prior).clamp_min(0.0) / square, h)
            bounded = torch.zeros((), device=like[name].device)
            v = None if self._mean_square is None else self._mean_square.get(name)
            if v is not None and lr is not None and lr[name] > 0:
                bound = (v.sqrt() + 1e-8) / lr[name]
                bounded = (h > bound).float().mean()
                h = torch.minimum(h.expand_as(bound), bound)
            found[name] = (h, bounded)
        return found

    def _prior_weight(self, names: Iterable[str]) -> Tensor | float:
        """Return what the group's number weighs beside an element's own: its mean squared displacement."""
        held = [self._squares[name] for name in names if name in self._squares]
        if not held:
            return 0.0
        total = torch.stack([square.sum() for square in held]).sum()
        return total / sum(square.numel() for square in held)

    def _shape(self, name: str, like: Tensor) -> Tensor:
        """Return s: a tensor, or a 1 for all elements."""
        if self.kind in ("fisher", "fisher_root") and self._mean_square is not None:
            v = self._mean_square.get(name)
            if v is None:
                return torch.zeros((), dtype=like.dtype, device=like.device)
            return v if self.kind == "fisher" else v.sqrt()
        return torch.ones((), dtype=like.dtype, device=like.device)
