r"""Pairs of gradients at two points of the weights: which may tell the curvature?

A gradient is the slope plus the noise of its batch, so the change between two of them is
:math:`\Delta g = H \Delta w + n_a - n_b`. Against the displacement :math:`\Delta w` the noise averages out only if
neither :math:`n_a` nor :math:`n_b` is in it. Consecutive gradients b, a of one worker break that: a was read *after* b
had been applied, so the displacement holds :math:`-\eta\,n_b`, and what comes out is not H but about
:math:`H + 1/(K\eta)` with K workers and a rate of :math:`\eta`: a figure of the optimizer, not of the loss.

::

    versions      1     2     3     4     5     6
    worker 1      read------------> b makes 4
    worker 2            read------------> a makes 5     b, a: a read version 2, before b made 4: a pair
    worker 1                        read------> c       b, c: c read version 4, which holds b's noise: none
"""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from slipstream.staleness.gradient import Gradient
from slipstream.staleness.groups import Statistics

NO_WORKER = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two gradients at two points.

    Attributes:
        change: Change of the gradient, by parameter.
        moved: Displacement between the points, by the same parameters.
        same_batch: Both gradients are of one batch, so that even single elements carry little noise.
    """

    change: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]
    same_batch: bool = False


class ConcurrentPairs:
    """Holds the newest gradient and pairs it with the next one, where that is free of their noise.

    The gradient applied last, b, made version v_b. The next one, a, makes a pair with it if a read a version before
    v_b, another one than b did, and comes from another worker. One held gradient is enough: whoever is stale by one
    update or more has read a version before the newest.

    In one process with a delay of tau, and in a pipeline of delay 1, batches b and b + 1 are such a pair: batch b + 1
    reads version b + 1 - tau, before batch b made version b + 1. Without delay there is none.

    Cost:
        One gradient and one copy of the weights.
    """

    def __init__(self) -> None:
        self._notes = Statistics(("held_read", "held_version", "held_worker"))
        self._gradients: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self.slots = {"held_gradient": self._gradients, "held_weights": self._weights} | self._notes.slots

    def pair(self, gradient: Gradient, read: Mapping[str, Tensor]) -> Pair | None:
        """Return the pair that a gradient makes with the one held, in the parameters where it makes one.

        Args:
            gradient: Clipped, not yet corrected.
            read: The weights it was computed on.
        """
        names = [name for name, g in gradient.tensors.items() if g is not None and self._is_pair(gradient, name)]
        if not names:
            return None
        change = {name: _tensor(gradient, name) - self._gradients[name] for name in names}
        moved = {name: read[name].to(change[name].dtype) - self._weights[name] for name in names}
        return Pair(change=change, moved=moved)

    def _is_pair(self, gradient: Gradient, name: str) -> bool:
        if name not in self._gradients:
            return False
        read, worker = gradient.version_of(name), self._notes.get("held_worker", name)
        is_other_worker = gradient.worker is None or gradient.worker != worker
        precedes = read < self._notes.get("held_version", name)
        return precedes and is_other_worker and read != self._notes.get("held_read", name)

    def hold(self, gradient: Gradient, read: Mapping[str, Tensor], *, version: int) -> None:
        """Hold a gradient in place of the last.

        Args:
            gradient: Clipped, not yet corrected.
            read: The weights it was computed on; copied, since their buffer is written again.
            version: What it makes.
        """
        for name, g in gradient.tensors.items():
            if g is None:
                self._gradients.pop(name, None)
                self._weights.pop(name, None)
                continue
            self._gradients[name] = g.clone()
            self._weights[name] = read[name].detach().to(g.dtype, copy=True)
            self._notes.set("held_read", name, gradient.version_of(name))
            self._notes.set("held_version", name, version)
            self._notes.set("held_worker", name, NO_WORKER if gradient.worker is None else gradient.worker)


def _tensor(gradient: Gradient, name: str) -> Tensor:
    tensor = gradient.tensors[name]
    assert tensor is not None
    return tensor
