"""Pipeline schedules: integers in, actions out.

Three stages, three microbatches a batch; a digit is the forward of a microbatch, a small one its backward, which takes
two columns here, and a block an optimizer step. A flushing schedule drains the pipeline at each step, two_bw never::

    one_f_one_b, two batches               two_bw, three batches
    012····₀▁·₁▁·₂▁█345····₃▁·₄▁·₅▁█       012····₀▁3₁▁4₂▁5₃▁█6₄▁7₅▁8₆▁█₇▁·₈▁█
    ·01··₀▁2₁▁·₂▁··█·34··₃▁5₄▁·₅▁··█       ·01··₀▁2₁▁3₂▁4₃▁5₄▁█6₅▁7₆▁8₇▁█₈▁··█
    ··0₀▁1₁▁2₂▁····█··3₃▁4₄▁5₅▁····█       ··0₀▁1₁▁2₂▁3₃▁4₄▁5₅▁█6₆▁7₇▁8₈▁█···█

* ``gpipe``: all forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965).
* ``one_f_one_b``: forward and backward in turn, so that stage s holds p - s microbatches at most
  (Narayanan et al., 2019, PipeDream; flushing as in arXiv 2006.09503, section 3.1).
* ``interleaved``: one_f_one_b over v stages a rank; the fill takes 1/v of the time (Narayanan et al., 2021,
  arXiv 2104.04473, section 2.2). Rank r holds stages r, r + p, r + 2p, ...
* ``two_bw``: PipeDream-2BW (Narayanan et al., 2021, arXiv 2006.09503, section 3.1): no flush, two weights versions,
  every gradient but the first one step stale.

In every schedule batch b's gradient makes version b+1, N is posted right after the batch's last backward, and O
comes at the same number of forwards on all stages.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from slipstream.config import SCHEDULE_DELAY, PipelineSchedule
from slipstream.errors import ConfigError, nearest
from slipstream.pipeline.actions import Action, add_communication
from slipstream.pipeline.validation import ScheduleFacts, validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """A schedule and its sizes.

    Raises:
        ConfigError: The sizes do not fit the schedule.
    """

    name: PipelineSchedule
    """Which schedule."""
    num_ranks: int
    """Ranks p; each holds one stage, or num_virtual_stages."""
    num_microbatches: int
    """Microbatches m a batch."""
    num_virtual_stages: int = 1
    """Stages a rank holds (interleaved)."""
    num_extra_in_flight: int = 0
    """Microbatches k that two_bw starts on stage 0 beyond the p that fill the pipeline; they hide message latency."""

    def __post_init__(self) -> None:
        if self.name not in ORDERS:
            raise ConfigError(
                f"unknown pipeline schedule '{self.name}'.{nearest(self.name, ORDERS)} Allowed: {', '.join(ORDERS)}."
            )
        for field, least in (
            ("num_ranks", 1),
            ("num_microbatches", 1),
            ("num_virtual_stages", 1),
            ("num_extra_in_flight", 0),
        ):
            if getattr(self, field) < least:
                raise ConfigError(f"{field} is {getattr(self, field)}; give {least} or more.")
        if self.name != "interleaved" and self.num_virtual_stages != 1:
            raise ConfigError(
                f"{self.name} has one stage a rank, but num_virtual_stages is {self.num_virtual_stages}. "
                "Leave it at 1 or choose the schedule interleaved."
            )
        if self.name != "two_bw" and self.num_extra_in_flight:
            raise ConfigError(
                f"{self.name} cannot start microbatches of the next batch ahead, but num_extra_in_flight is "
                f"{self.num_extra_in_flight}. Leave it at 0 or choose the schedule two_bw."
            )
        least = self.num_ranks - 1 + self.num_extra_in_flight
        if self.name == "two_bw" and self.num_microbatches < least:
            extra = f" and {self.num_extra_in_flight} extra in flight" if self.num_extra_in_flight else ""
            raise ConfigError(
                f"two_bw with {self.num_ranks} stages{extra} needs at least {least} microbatches a batch (one fewer "
                f"than the stages, plus the extra ones), given {self.num_microbatches}: below that two weights "
                f"versions do not suffice. Raise num_microbatches to {least}, or use fewer stages."
            )

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.num_virtual_stages

    @property
    def staleness(self) -> int:
        """Updates between the version that a batch reads and the newest one."""
        return SCHEDULE_DELAY[self.name]

    def stages(self, rank: int) -> range:
        """Return the stages that a rank holds."""
        return range(rank, self.num_stages, self.num_ranks)

    def num_ahead(self, rank: int) -> int:
        """Return how many forwards, over all its stages, a rank starts ahead of its backwards.

        A rank's stream is one sequence of slots: slot i runs forward i, then backward i - num_ahead. So at most
        num_ahead + 1 microbatches are between forward and backward.
        """
        hops = self.num_ranks - 1 - rank  # to the last rank
        if self.name == "gpipe":
            return self.num_microbatches - 1
        if self.name == "interleaved":
            return 2 * hops + (self.num_virtual_stages - 1) * max(map(len, _groups(self)))
        return hops + self._extra_ahead(hops)

    def _extra_ahead(self, hops: int) -> int:
        """Return the part of num_extra_in_flight that a stage ``hops`` before the last one has.

        While neighbours differ by one microbatch, a backward must be back within one cycle of F + B, so two message
        latencies lengthen the cycle however many microbatches are in flight. Only where neighbours differ by more
        is there room, so the extra ones are spread evenly over the hops: all k on stage 0, none on the last. With
        latency L a cycle then takes F + B + 2 L n / (n + 1) where n = ceil((p - 1 - k) / (k + 1)) hops in a row have
        none, and F + B from k = p - 1 on (if 2 L <= F + B). They absorb jitter in the same way.
        """
        if self.num_ranks == 1:
            return 0
        each, rest = divmod(self.num_extra_in_flight, self.num_ranks - 1)
        return each * hops + (rest + 1) * hops // self.num_ranks


def schedule_spec(
    name: PipelineSchedule,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_virtual_stages: int = 2,
    num_extra_in_flight: int = 0,
) -> ScheduleSpec:
    """Build a spec from settings of which the schedule may use only a part.

    ``num_virtual_stages`` is left aside where the schedule has one stage a rank, and ``num_extra_in_flight`` where it
    starts nothing ahead: one set of settings serves all schedules.

    Raises:
        ConfigError: The sizes do not fit the schedule.
    """
    return ScheduleSpec(
        name=name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_virtual_stages=num_virtual_stages if name == "interleaved" else 1,
        num_extra_in_flight=num_extra_in_flight if name == "two_bw" else 0,
    )


def order(
    spec: ScheduleSpec,
    *,
    rank: int,
    first_batch: int = 0,
    num_batches: int | None = None,
) -> Iterator[Action]:
    """Yield one rank's F, B, N and O actions over batches first_batch ... num_batches - 1.

    Args:
        spec: Schedule and sizes.
        rank: Whose actions.
        first_batch: Batch to start at. To resume after step k, start at batch k with weights versions k and (two_bw)
            k - 1; microbatches of batch k that were in flight at the save are run again.
        num_batches: Batch to stop before; ``None``: never.

    Example:
        >>> spec = ScheduleSpec(name="two_bw", num_ranks=2, num_microbatches=2)
        >>> " ".join(map(str, order(spec, rank=0, num_batches=2)))
        '0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0N@1 0F3@0 0B2@0 0O@1 0B3@0 0N@2 0O@2'
    """
    if not 0 <= rank < spec.num_ranks:
        raise ConfigError(f"rank is {rank}; ranks are 0 to {spec.num_ranks - 1}.")
    return ORDERS[spec.name](spec, rank, first_batch, num_batches)


def stream(
    spec: ScheduleSpec,
    *,
    rank: int,
    first_batch: int = 0,
    num_batches: int | None = None,
) -> Iterator[Action]:
    """Yield what :func:`order` yields, with sends and receives: the stream that a rank's runtime executes."""
    actions = order(spec, rank=rank, first_batch=first_batch, num_batches=num_batches)
    return add_communication(actions, num_stages=spec.num_stages, num_ranks=spec.num_ranks)


def verify(spec: ScheduleSpec, *, num_batches: int, first_batch: int = 0) -> ScheduleFacts:
    """Validate all ranks' streams over batches first_batch ... num_batches - 1.

    A schedule repeats itself with each batch once the pipeline is full (within two batches), so a few batches prove
    any number.

    Raises:
        ScheduleError: A stream is wrong; see :func:`slipstream.pipeline.validation.validate`.
    """
    ranks = range(spec.num_ranks)
    return validate(
        [list(stream(spec, rank=rank, first_batch=first_batch, num_batches=num_batches)) for rank in ranks],
        num_microbatches=spec.num_microbatches,
        staleness=spec.staleness,
        max_activations=[spec.num_ahead(rank) + 1 for rank in ranks],
        first_batch=first_batch,
    )


def flushing(spec: ScheduleSpec, rank: int, first_batch: int, num_batches: int | None) -> Iterator[Action]:
    """Drain the pipeline at each step: gpipe, one_f_one_b and interleaved, which differ in num_ahead alone.

    With several stages a rank, microbatches go in groups of p: a group passes the rank's first stage, then its
    second, and so on; backward the other way round.
    """
    m = spec.num_microbatches
    stages = spec.stages(rank)
    groups = _groups(spec)
    forwards = [(stage, i) for group in groups for stage in stages for i in group]
    backwards = [(stage, i) for group in groups for stage in reversed(stages) for i in group]
    ahead = spec.num_ahead(rank)
    for batch in itertools.count(first_batch) if num_batches is None else range(first_batch, num_batches):
        for slot in range(len(forwards) + ahead):
            if slot < len(forwards):
                stage, i = forwards[slot]
                yield Action(stage, "F", batch * m + i, batch)
            if slot >= ahead:
                stage, i = backwards[slot - ahead]
                yield Action(stage, "B", batch * m + i, batch)
                if i == m - 1:
                    yield Action(stage, "N", None, batch + 1)
        for stage in stages:
            yield Action(stage, "O", None, batch + 1)


def two_bw(spec: ScheduleSpec, rank: int, first_batch: int, num_batches: int | None) -> Iterator[Action]:
    """Forward and backward in turn for ever; batch b reads version max(b - 1, 0).

    Where the step stands. Version b+1 is first read by batch b+2, so on every stage O@(b+1) must come after the
    batch's last backward and before forward (b+2) m. It comes right before forward

        (b+1) m + min(p + k, m).

    On stage s (k = 0) that is min(s + 1, m - p + 1 + s) forward/backward pairs after the last backward: s + 1 pairs,
    in which the last backward reaches stage 0 and the norm becomes known, or as many as two versions have room for.
    On stage 0 there is room at all for m >= p - 1 + k. The number of forwards is the same on all stages, so a pause
    of all of them at one step leaves no forward message under way (backward ones wait in their channels).
    """
    m = spec.num_microbatches
    ahead = spec.num_ahead(rank)
    wait = min(spec.num_ranks + spec.num_extra_in_flight, m)
    first = end = first_batch * m  # forwards begin at `first`; `end` follows the last one begun
    version = first_batch
    for slot in itertools.count(first):
        if slot == (version + 1) * m + wait:
            version += 1
            yield Action(rank, "O", None, version)
        is_open = num_batches is None or slot < num_batches * m
        if is_open:
            yield Action(rank, "F", slot, max(slot // m - 1, 0))
            end = slot + 1
        backward = slot - ahead
        if first <= backward < end:
            yield Action(rank, "B", backward, max(backward // m - 1, 0))
            if (backward + 1) % m == 0:
                yield Action(rank, "N", None, backward // m + 1)
        if not is_open and backward >= end - 1:
            break
    for made in range(version + 1, end // m + 1):
        yield Action(rank, "O", None, made)


def _groups(spec: ScheduleSpec) -> list[range]:
    """Cut a batch's microbatches into groups of p or a few more, as equal as can be.

    A group smaller than p would leave the last rank without work for the first, and with four ranks or more the
    order would even wait for itself.
    """
    m = spec.num_microbatches
    count = max(1, m // spec.num_ranks)
    cuts = [m * i // count for i in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


Order = Callable[[ScheduleSpec, int, int, int | None], Iterator[Action]]

ORDERS: Mapping[str, Order] = MappingProxyType(
    {"two_bw": two_bw, "one_f_one_b": flushing, "gpipe": flushing, "interleaved": flushing}
)
"""The function that makes each schedule's order."""
