"""Same-batch probes: one batch's gradient at two points of the weights, and what a correction makes of the first."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from slipstream.staleness.groups import to_floats


def fidelity(
    gradient: Mapping[str, Tensor], change: Mapping[str, Tensor], correction: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return how near a corrected gradient comes to the fresh one of the same batch, over all parameters together.

    Args:
        gradient: At the weights that were read.
        change: From it to the gradient at the newer weights.
        correction: What would be added.

    Returns:
        ``change``: norm of the change over the gradient's. ``explained``: share of the change's square that the
        correction takes away; below 0 it makes things worse. ``cosine_stale``: between the stale gradient and the fresh
        one. ``cosine_corrected``: between the corrected gradient and the fresh one. Empty where one of them is 0.

    Example:
        >>> import torch
        >>> g, d = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}
        >>> {name: round(value, 3) for name, value in fidelity(g, d, {"w": 0.5 * d["w"]}).items()}
        {'change': 1.0, 'explained': 0.75, 'cosine_stale': 0.707, 'cosine_corrected': 0.949}
    """
    gg, dd, cc, gd, gc, dc = (
        math.fsum(to_floats(_dots(first, second)))
        for first, second in (
            (gradient, gradient),
            (change, change),
            (correction, correction),
            (gradient, change),
            (gradient, correction),
            (change, correction),
        )
    )
    fresh, corrected = gg + 2 * gd + dd, gg + 2 * gc + cc
    if not (gg > 0 and dd > 0 and fresh > 0 and corrected > 0):
        return {}
    return {
        "change": math.sqrt(dd / gg),
        "explained": (2 * dc - cc) / dd,
        "cosine_stale": (gg + gd) / math.sqrt(gg * fresh),
        "cosine_corrected": (gg + gd + gc + dc) / math.sqrt(corrected * fresh),
    }


def _dots(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Sequence[Tensor]:
    return [(first[name] * second[name]).sum() for name in first]
