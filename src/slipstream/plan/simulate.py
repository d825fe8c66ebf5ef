"""Event simulation of a pipeline schedule: what each rank does when, and what that costs.

Simulated are the very streams that the runtime executes. A rank does one thing at a time, sends cost it nothing, and
an input arrives ``latency_ms`` after it was sent.
"""

import dataclasses
import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from slipstream.config import PipelineSchedule
from slipstream.errors import ConfigError, ScheduleError
from slipstream.pipeline.actions import COMMUNICATION_OPS, Action
from slipstream.pipeline.schedules import ScheduleSpec, order, schedule_spec, verify

LEAST_MS, MOST_MS = 1e-9, 1e12
"""Of times that are not 0; sums and ratios of these are numbers, too."""

_REPEATS_AFTER = 6
"""Batches after which no stream shows anything new: two fill the pipeline, and a batch is like the one before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How long things take, in ms; where a sequence is allowed it has one number a stage."""

    forward_ms: float | Sequence[float] = 1.0
    """Forward of one microbatch on one stage."""
    backward_ms: float | Sequence[float] = 2.0
    """Backward of one microbatch on one stage; its input- and weight-gradient halves (I, W) take half each."""
    optimizer_ms: float | Sequence[float] = 0.0
    """Optimizer step and publish of one stage."""
    norm_ms: float = 0.0
    """From the last stage's posting of its norm until every stage knows the sum."""
    latency_ms: float = 0.0
    """From the end of an action on one rank until the next rank has its output."""
    jitter: float = 0.0
    """Relative standard deviation of each forward's, backward's and step's time."""
    seed: int = 0
    """Seed of the jitter."""


class Span(NamedTuple):
    """One action on a rank's time axis.

    Attributes:
        action: What was done. N takes no time.
        start_ms: Begin.
        end_ms: End.
    """

    action: Action
    start_ms: float
    end_ms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A pipeline's run, simulated or measured: the spans of each rank in order."""

    ranks: tuple[tuple[Span, ...], ...]
    """One sequence of spans a rank."""
    num_microbatches: int
    """Microbatches a batch."""

    @property
    def start_ms(self) -> float:
        """Begin of the first span."""
        return min((spans[0].start_ms for spans in self.ranks if spans), default=0.0)

    @property
    def end_ms(self) -> float:
        """End of the last span."""
        return max((spans[-1].end_ms for spans in self.ranks if spans), default=0.0)

    @property
    def makespan_ms(self) -> float:
        """Time from the first begin to the last end."""
        return self.end_ms - self.start_ms

    @property
    def bubble_fraction(self) -> float:
        """Idle time / (ranks x makespan); fill and drain count as idle, the optimizer step does not."""
        available = len(self.ranks) * self.makespan_ms
        busy = sum(span.end_ms - span.start_ms for spans in self.ranks for span in spans)
        return max(0.0, 1.0 - busy / available) if available else 0.0

    @property
    def step_time_ms(self) -> float:
        """Median time between rank 0's optimizer steps, without the last interval (drain) and the first (fill).

        With fewer than three steps there is nothing else, and it is the makespan divided by their number.
        """
        ends = [span.end_ms for spans in self.ranks[:1] for span in spans if span.action[:2] == (0, "O")]
        if len(ends) < 3:
            return self.makespan_ms / max(1, len(ends))
        intervals = [later - earlier for earlier, later in itertools.pairwise(ends)]
        return statistics.median(intervals[1:-1] or intervals[:-1])


def simulate(orders: Sequence[Iterable[Action]], *, num_microbatches: int, times: Times) -> Timeline:
    """Give every action its begin and end.

    Args:
        orders: Finite streams, one a rank, with or without communication (which is implied by the dependencies).
        num_microbatches: Microbatches a batch.
        times: What an action takes.

    Returns:
        The timeline, with the compute, N and O actions of each stream in its order.

    Raises:
        ScheduleError: The ranks wait for one another for ever.

    Cost:
        About 2 us an action.

    Example:
        >>> spec = ScheduleSpec(name="gpipe", num_ranks=2, num_microbatches=2)
        >>> orders = [order(spec, rank=rank, num_batches=1) for rank in range(2)]
        >>> simulate(orders, num_microbatches=2, times=Times()).makespan_ms  # (m + p - 1) (F + B)
        9.0
    """
    return _Simulation(orders, times).run(num_microbatches)


class _Simulation:
    """Heads of all streams, and when what they need is there."""

    def __init__(self, orders: Sequence[Iterable[Action]], times: Times) -> None:
        self.streams = [[action for action in actions if action.op not in COMMUNICATION_OPS] for actions in orders]
        self.rank_of = {action.stage: rank for rank, actions in enumerate(self.streams) for action in actions}
        self.times = times
        self.random = random.Random(times.seed)
        self.num_stages = num_stages = len(self.rank_of)
        forward = _per_stage(times.forward_ms, num_stages, "forward_ms")
        backward = _per_stage(times.backward_ms, num_stages, "backward_ms")
        optimizer = _per_stage(times.optimizer_ms, num_stages, "optimizer_ms")
        half = [value / 2 for value in backward]
        self.durations = {"F": forward, "B": backward, "I": half, "W": half, "O": optimizer, "N": [0.0] * num_stages}
        # When an output has reached the next stage, by (direction, stage it is for, microbatch).
        self.arrivals: dict[tuple[str, int, int | None], float] = {}
        self.norms: dict[int | None, list[float]] = defaultdict(list)

    def run(self, num_microbatches: int) -> Timeline:
        """Advance every rank as far as it gets, in turns; times do not depend on whose turn it is."""
        spans: list[list[Span]] = [[] for _ in self.streams]
        moved = True
        while moved:
            moved = False
            for stream, done in zip(self.streams, spans):
                clock = done[-1].end_ms if done else 0.0
                while len(done) < len(stream):
                    action = stream[len(done)]
                    ready = self._ready(action)
                    if ready is None:
                        break
                    start = max(clock, ready)
                    clock = start + self._duration(action)
                    self._finish(action, clock)
                    done.append(Span(action, start, clock))
                    moved = True
        waiting = [str(stream[len(done)]) for stream, done in zip(self.streams, spans) if len(done) < len(stream)]
        if waiting:
            raise ScheduleError(f"deadlock: no rank can go on; they wait at {', '.join(waiting)}.")
        return Timeline(ranks=tuple(map(tuple, spans)), num_microbatches=num_microbatches)

    def _ready(self, action: Action) -> float | None:
        """Return when the action's input is there, or nothing where that is not yet known."""
        stage, op, microbatch, version = action
        if op == "F" and stage > 0:
            return self.arrivals.pop(("F", stage, microbatch), None)
        if op in ("B", "I") and stage < self.num_stages - 1:
            return self.arrivals.pop(("B", stage, microbatch), None)
        if op == "O":
            posted = self.norms[version]
            if len(posted) < self.num_stages:
                return None
            return max(posted) + (self.times.norm_ms if len(self.streams) > 1 else 0.0)
        return 0.0

    def _duration(self, action: Action) -> float:
        duration = self.durations[action.op][action.stage]
        if self.times.jitter:
            duration *= max(0.0, 1.0 + self.times.jitter * self.random.gauss(0.0, 1.0))
        return duration

    def _finish(self, action: Action, end_ms: float) -> None:
        stage, op, microbatch, version = action
        if op == "N":
            self.norms[version].append(end_ms)
        elif op in ("F", "B", "I"):
            direction, receiver = ("F", stage + 1) if op == "F" else ("B", stage - 1)
            rank = self.rank_of.get(receiver)
            if rank is not None:
                latency = 0.0 if rank == self.rank_of[stage] else self.times.latency_ms
                self.arrivals[direction, receiver, microbatch] = end_ms + latency


def _per_stage(value: float | Sequence[float], num_stages: int, name: str) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [value] * num_stages
    if len(values) != num_stages:
        raise ConfigError(f"{name} has {len(values)} numbers for {num_stages} stages; give one, or one a stage.")
    if min(values, default=0.0) < 0:
        raise ConfigError(f"{name} is {min(values)}; give 0 or more.")
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Simulate a pipeline schedule without running it."""

    pipeline_schedule: PipelineSchedule = "two_bw"
    """Order of forwards, backwards and optimizer steps."""
    num_stages: int = 4
    """Pipeline stages, one rank each (interleaved: ranks, with num_virtual_stages stages each)."""
    num_microbatches: int = 4
    """Microbatches a batch."""
    num_batches: int = 4
    """Batches to run, from an empty pipeline to an empty pipeline."""
    num_extra_in_flight: int = 0
    """Further microbatches started ahead, to hide message latency (two_bw)."""
    num_virtual_stages: int = 2
    """Stages a rank holds (interleaved); each takes this part of a rank's forward and backward time."""
    forward_ms: float = 1.0
    """Forward of one microbatch through one rank's layers."""
    backward_ms: float = 2.0
    """Backward of one microbatch through one rank's layers."""
    optimizer_ms: float = 0.0
    """Optimizer step of one rank."""
    norm_ms: float = 0.0
    """From the last rank's share of the gradient norm until all ranks know the sum."""
    latency_ms: float = 0.0
    """From the end of an action until the neighbouring rank has its output."""


def build_timeline(config: SimulateConfig) -> Timeline:
    """Simulate the schedule that the settings describe.

    Raises:
        ConfigError: A setting is out of range, or the sizes do not fit the schedule.
    """
    spec = _spec(config)
    part = spec.num_virtual_stages
    times = Times(
        forward_ms=config.forward_ms / part,
        backward_ms=config.backward_ms / part,
        optimizer_ms=config.optimizer_ms / part,
        norm_ms=config.norm_ms,
        latency_ms=config.latency_ms,
    )
    orders = [order(spec, rank=rank, num_batches=config.num_batches) for rank in range(spec.num_ranks)]
    return simulate(orders, num_microbatches=spec.num_microbatches, times=times)


def run_simulate(config: SimulateConfig, timeline: Timeline | None = None) -> dict[str, Any]:
    """Validate and simulate a schedule, and return what `slipstream simulate --json` prints.

    Args:
        config: The settings.
        timeline: Their timeline, where :func:`build_timeline` has made it already.

    Returns:
        The schedule's sizes and ``bubble_fraction`` (idle / (ranks x makespan), fill and drain included),
        ``max_live_versions``, ``staleness_max``, ``peak_activations`` (microbatches, one number a stage),
        ``makespan_ms``, ``step_time_ms`` (median in the steady state), ``ideal_step_time_ms`` (a rank's work for one
        batch) and ``step_time_over_ideal``.

    Raises:
        ConfigError: A setting is out of range, or the sizes do not fit the schedule.
    """
    spec = _spec(config)
    if timeline is None:
        timeline = build_timeline(config)
    facts = verify(spec, num_batches=min(config.num_batches, _REPEATS_AFTER))
    ideal = spec.num_microbatches * (config.forward_ms + config.backward_ms) + config.optimizer_ms
    return {
        "pipeline_schedule": spec.name,
        "num_stages": spec.num_stages,
        "num_ranks": spec.num_ranks,
        "num_microbatches": spec.num_microbatches,
        "num_batches": config.num_batches,
        "num_extra_in_flight": spec.num_extra_in_flight,
        "bubble_fraction": timeline.bubble_fraction,
        "max_live_versions": facts.max_live_versions,
        "staleness_max": facts.staleness_max,
        "peak_activations": list(facts.peak_activations),
        "makespan_ms": timeline.makespan_ms,
        "step_time_ms": timeline.step_time_ms,
        "ideal_step_time_ms": ideal,
        "step_time_over_ideal": timeline.step_time_ms / ideal if ideal else None,
    }


def without_effect(config: SimulateConfig) -> list[str]:
    """Return a sentence for each setting that was given and that the schedule does not look at."""
    schedule, default = config.pipeline_schedule, SimulateConfig()
    users = {"num_extra_in_flight": "two_bw", "num_virtual_stages": "interleaved"}
    return [
        f"{name} {getattr(config, name)} has no effect with the schedule '{schedule}', only with {user}."
        for name, user in users.items()
        if schedule != user and getattr(config, name) != getattr(default, name)
    ]


def _spec(config: SimulateConfig) -> ScheduleSpec:
    for name in ("num_stages", "num_batches"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; give 1 or more.")
    for name in ("forward_ms", "backward_ms", "optimizer_ms", "norm_ms", "latency_ms"):
        value = getattr(config, name)
        if value and not LEAST_MS <= value <= MOST_MS:
            raise ConfigError(
                f"{name} is {value}; give 0, or a number of milliseconds from {LEAST_MS:g} to {MOST_MS:g}."
            )
    return schedule_spec(
        config.pipeline_schedule,
        num_ranks=config.num_stages,
        num_microbatches=config.num_microbatches,
        num_virtual_stages=config.num_virtual_stages,
        num_extra_in_flight=config.num_extra_in_flight,
    )
