"""Error feedback that sets its coefficient itself, from how well one update foretells those that are missing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.staleness.corrections import Slots
from slipstream.staleness.publish import LookAhead

MAX_SAMPLE = 4096
"""Entries of a tensor that are looked at: their correlation is known to about 1.6 % from one update."""

MAX_SHARE = 2.0
"""Largest coefficient, as a multiple of the delay."""


class AutoErrorFeedback(LookAhead):
    r"""Publish :math:`x = y + c\,(y - y_{prev})` with the c that makes x the best guess of where y will be.

    Between the version that a batch reads and its own update lie tau updates that nobody knows yet. Of all multiples
    of the last known update u, the nearest to their sum in mean square is

    .. math:: c = \sum_{j=1}^{\tau} \langle u_{t+j}, u_t \rangle \Big/ \langle u_t, u_t \rangle,

    a regression that each parameter tensor makes for itself: both averages run exponentially over the updates past.
    For updates that are an average of white gradients, c is :math:`\beta` at a delay of 1 and
    :math:`\beta + \dots + \beta^\tau` beyond; what keeps its direction has c = tau, what is noise has 0.

    The first c is 0, and the rule leads in by :math:`1 - d^n` over the first n updates.

    Args:
        delay: tau, at least 1.
        decay: d, of both averages.
        max_sample: Entries of a tensor that are looked at, evenly spread.

    Attributes:
        slots: By parameter: the sampled last tau updates (``recent``), and both averages.

    Cost:
        ``delay * max_sample`` numbers a tensor, and what :class:`~slipstream.staleness.publish.ErrorFeedback` costs.
        No communication: a tensor lives whole on its stage, so any number of stages comes to the same c, bitwise.

    Differs:
        There is no literal rule beside it: the first update publishes y and moves nothing else.
    """

    def __init__(self, *, delay: int, decay: float = 0.95, max_sample: int = MAX_SAMPLE) -> None:
        assert delay >= 1
        super().__init__()
        self._delay = delay
        self._decay = decay
        self._max_sample = max_sample
        self._num_updates = 0
        self._slots: Slots = {"recent": {}, "product": {}, "square": {}}

    @property
    def slots(self) -> Slots:
        """What a resumed run needs, by slot and parameter name."""
        return self._slots

    def coefficients(self) -> dict[str, Tensor]:
        """Return the coefficient that each parameter has come to."""
        return {name: self._coefficient(name) for name in self._slots["product"]}

    @torch.no_grad()
    def after_step(self, masters: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> None:
        """Take the update into the averages and write ``x_{t+1}``."""
        for name, y in masters.items():
            previous = self._previous.pop(name)
            self._observe(name, self._sample(previous) - self._sample(y))
            self._extrapolate(published[name], previous, y, self._coefficient(name))
        self._num_updates += 1

    def _sample(self, tensor: Tensor) -> Tensor:
        """Return some entries of a tensor; an odd stride does not stay in a few columns of a matrix."""
        stride = -(-tensor.numel() // self._max_sample)
        return tensor.detach().flatten()[:: stride | 1]

    def _observe(self, name: str, update: Tensor) -> None:
        recent = self._slots["recent"].get(name)
        if recent is None or len(recent) != self._delay:  # the run was resumed with another delay
            recent = update.new_zeros(self._delay, update.numel())
        # The tau updates that were missing when the oldest one kept was the last one known.
        missing, last = recent[1:].sum(0).add_(update), recent[0]
        for slot, value in (("product", last.dot(missing)), ("square", last.dot(last))):
            held = self._slots[slot].get(name)
            self._slots[slot][name] = torch.lerp(value, torch.zeros_like(value) if held is None else held, self._decay)
        self._slots["recent"][name] = torch.cat((recent[1:], update[None]))

    def _coefficient(self, name: str) -> Tensor:
        product, square = self._slots["product"][name], self._slots["square"][name]
        ratio = torch.where(square > 0, product / square, torch.zeros_like(square))
        return ratio.clamp_(0.0, MAX_SHARE * self._delay).mul_(1.0 - self._decay**self._num_updates)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates seen."""
        return {"num_updates": self._num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the number; absent (saved with another method): none."""
        self._num_updates = int(state.get("num_updates", 0))
