"""Faults to inject into the inline engine. Imports no torch."""

import dataclasses
from typing import Literal

FaultKind = Literal["kill", "hang", "slow", "join", "nan", "duplicate", "late"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to a worker.

    Attributes:
        kind: ``kill``: the worker and its work are gone, and the server sees it. ``hang``: its gradient arrives
            ``seconds`` later than due. ``slow``: its cycles take ``factor`` times as long from now on. ``join``: it
            comes, or comes back. ``nan``: its next ``count`` gradients are not finite. ``duplicate``: its next push
            arrives twice. ``late``: a second copy of its next push arrives after the push that follows.
        worker: Number of the worker.
        at_s: When, by the virtual clock.
    """

    kind: FaultKind
    worker: int
    at_s: float = 0.0
    seconds: float = 0.0
    factor: float = 1.0
    count: int = 1
