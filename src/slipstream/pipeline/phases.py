"""A run that begins or ends without delay: a flushing schedule before or after the one that never drains.

Two stages, two microbatches a batch, the first batch without delay; the bar is where the schedules meet::

    0F0@0 0F1@0 0B0@0 0B1@0 0N@1 0O@1 | 0F2@0 0F3@0 0B2@0 0F4@1 ...
          1F0@0 1B0@0 1F1@0 1B1@0 1N@1 1O@1 | 1F2@0 1B2@0 ...

Each stream is complete in itself: at the bar no message is under way, and the second one begins as a run that
was resumed there, with the newest version of the weights and the one before. So both are proven separately.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from slipstream.config import StalenessConfig
from slipstream.pipeline.actions import Action
from slipstream.pipeline.schedules import ScheduleSpec, stream, verify


class Phase(NamedTuple):
    """Batches that run by one schedule."""

    spec: ScheduleSpec
    first_batch: int
    end: int
    """Batch after the last."""


def phases(spec: ScheduleSpec, staleness: StalenessConfig, *, first_batch: int, num_batches: int) -> list[Phase]:
    """Return by which schedule batches first_batch ... num_batches - 1 run.

    Args:
        spec: The schedule that the settings name.
        staleness: Says up to and from which update there is no delay.
        first_batch: Where to begin.
        num_batches: Batch to stop before.

    Example:
        >>> spec = ScheduleSpec(name="two_bw", num_ranks=2, num_microbatches=2)
        >>> found = phases(spec, StalenessConfig(sync_until_step=3), first_batch=1, num_batches=9)
        >>> [(phase.spec.name, phase.first_batch, phase.end) for phase in found]
        [('one_f_one_b', 1, 3), ('two_bw', 3, 9)]
    """
    if spec.staleness == 0:
        return [Phase(spec, first_batch, num_batches)]
    flushing = dataclasses.replace(spec, name="one_f_one_b", num_extra_in_flight=0)
    # Update k is made of batch k - 1.
    begin, end = staleness.sync_until_step, staleness.sync_from_step - 1 if staleness.sync_from_step else math.inf
    bounds = ((flushing, 0, begin), (spec, begin, end), (flushing, end, math.inf))
    clipped = (
        (each, max(start, first_batch), min(stop, num_batches)) for each, start, stop in bounds if start < num_batches
    )
    return [Phase(each, int(start), int(stop)) for each, start, stop in clipped if start < stop]


def phased_stream(
    spec: ScheduleSpec, staleness: StalenessConfig, *, rank: int, first_batch: int, num_batches: int
) -> Iterator[Action]:
    """Yield what a rank's runtime executes; see :func:`slipstream.pipeline.schedules.stream`."""
    for phase in phases(spec, staleness, first_batch=first_batch, num_batches=num_batches):
        yield from stream(phase.spec, rank=rank, first_batch=phase.first_batch, num_batches=phase.end)


def verify_phases(spec: ScheduleSpec, staleness: StalenessConfig, *, num_batches: int) -> None:
    """Prove each phase on its first few batches.

    Raises:
        ScheduleError: A stream is wrong.
    """
    for phase in phases(spec, staleness, first_batch=0, num_batches=num_batches):
        verify(phase.spec, num_batches=min(phase.end, phase.first_batch + 4), first_batch=phase.first_batch)
