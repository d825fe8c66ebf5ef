"""How far the weights move in a step, on average: where the weights that a gradient read are not held."""

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.staleness.gradient import Gradient
from slipstream.staleness.groups import Statistics


class MeanDisplacement:
    r"""The mean signed displacement of a step, over about as many steps as gradients are stale.

    .. math:: \bar v \leftarrow \beta \bar v + (1 - \beta)(y_{j+1} - y_j), \qquad
              \beta = 1 - \frac{2}{\bar\tau + 2}

    Args:
        decay: Of the mean staleness.

    Cost:
        Two copies of the weights.
    """

    def __init__(self, *, decay: float) -> None:
        self._decay = decay
        self._facts = Statistics(("mean_staleness", "last_update"))
        self._last: dict[str, Tensor] = {}
        self._mean: dict[str, Tensor] = {}
        self.slots = {"last_weights": self._last, "mean_displacement": self._mean} | self._facts.slots

    def observe(self, gradient: Gradient, now: Mapping[str, Tensor], *, update: int) -> None:
        """Look at the weights, at each gradient before it is corrected.

        Args:
            gradient: Whose staleness counts.
            now: The optimizer's weights.
            update: The one that the gradient goes into; several gradients may go into one.
        """
        for name in gradient.tensors:
            staleness = update - 1 - gradient.version_of(name)
            is_first = not self._facts.has("mean_staleness", name)
            decay = 0.0 if is_first else self._decay
            self._facts.average("mean_staleness", name, staleness, decay=decay)
            num_steps = update - self._facts.get("last_update", name)
            y = now[name].detach()
            if not is_first and num_steps > 0:
                step = (y - self._last[name]) / num_steps
                beta = 1.0 - 2.0 / (self._facts.get("mean_staleness", name) + 2.0)
                held = self._mean.get(name)
                self._mean[name] = step if held is None else torch.lerp(step, held, beta)
            if is_first or num_steps > 0:
                self._last[name] = y.clone()
                self._facts.set("last_update", name, update)

    def over(self, name: str, staleness: int) -> Tensor:
        """Return the displacement over a number of steps, at most four times the mean staleness."""
        num_steps = min(float(staleness), 4.0 * self._facts.get("mean_staleness", name))
        if name not in self._mean:
            return torch.zeros_like(self._last[name])
        return num_steps * self._mean[name]
