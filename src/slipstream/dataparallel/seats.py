"""What the engine `inline` knows of its workers, and what can happen to them."""

import dataclasses

from slipstream.dataparallel.faults import Fault
from slipstream.dataparallel.messages import Push
from slipstream.dataparallel.worker import Work


@dataclasses.dataclass
class Seat:
    """A worker as the engine sees it.

    Attributes:
        incarnation: Of the one that sits here.
        is_here: Whether it lives; a quarantined one does not compute, but counts as here.
        sequence: Pushes made by this incarnation.
        cycles: Cycles begun, over all incarnations.
        slowness: Factor on the time of its cycles.
        num_probes: Microbatches that it has to compute beside its next lease.
        num_nan: Gradients to spoil.
        duplicate: Send the next push twice.
        late_copy: Send the next push once more, after the one that follows.
    """

    incarnation: int
    is_here: bool = True
    sequence: int = 0
    cycles: int = 0
    slowness: float = 1.0
    num_probes: int = 0
    num_nan: int = 0
    duplicate: bool = False
    late_copy: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A gradient reaches the server; a copy is a message that arrives once too often."""

    push: Push
    work: Work
    is_copy: bool = False


Event = Arrival | Fault
"""What the engine waits for."""
