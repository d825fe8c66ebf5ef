"""What workers and the server say to each other, but for the tensors. Imports no torch."""

import dataclasses
from typing import Literal

from slipstream.dataparallel.ledger import Lease
from slipstream.dataparallel.router_tally import RouterRows

Rejection = Literal["unknown", "incarnation", "epoch", "duplicate", "quarantined", "lease", "version", "non_finite"]
"""Why a push was not counted:

``unknown``: a worker that never joined, or left. ``incarnation``: an earlier life of it. ``epoch``: made before the
server was restored. ``duplicate``: counted before. ``quarantined``: too many gradients that were not finite. ``lease``:
its microbatches were given to another, or counted. ``version``: not the weights it was told to read. ``non_finite``:
this gradient is not.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """A gradient has arrived.

    Attributes:
        worker: Who computed it.
        incarnation: Grows each time the worker starts anew.
        sequence: Grows with each push of an incarnation, from 1.
        epoch: Of the server, as the worker was told.
        lease_id: Its microbatches.
        read_version: Of the weights.
        num_tokens: Valid tokens.
        is_finite: Whether its global norm is.
        compute_s: Seconds of forward and backward.
        communication_s: Seconds of fetching and pushing.
        wire_bytes: That the gradient took on its way.
        wire_error: What it lost there, relative to its norm.
        router: What the routers did, of a model with experts.
    """

    worker: int
    incarnation: int
    sequence: int
    epoch: int
    lease_id: int
    read_version: int
    num_tokens: int
    is_finite: bool = True
    compute_s: float = 0.0
    communication_s: float = 0.0
    wire_bytes: int = 0
    wire_error: float = 0.0
    router: RouterRows = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a push.

    Attributes:
        rejection: ``None``: accepted.
        staleness: Version now - version read, of an accepted push.
        weight: Its tokens as a share of a step's.
        makes_step: The shards must make an optimizer step now.
    """

    rejection: Rejection | None = None
    staleness: int = 0
    weight: float = 0.0
    makes_step: bool = False

    @property
    def is_accepted(self) -> bool:
        """Whether the shards must accumulate the gradient."""
        return self.rejection is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker shall do next.

    Attributes:
        worker: Who.
        incarnation: Of that worker.
        epoch: Of the server.
        version: Of the weights to read.
        lease: Microbatches to compute.
    """

    worker: int
    incarnation: int
    epoch: int
    version: int
    lease: Lease


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """Answer to a pull.

    Attributes:
        action: ``work``: see the order. ``wait``: the request is parked; an order follows. ``rejoin``: the server does
            not count on this incarnation any more. ``stop``: quarantined.
        order: Where there is work.
    """

    action: Literal["work", "wait", "rejoin", "stop"]
    order: Order | None = None
