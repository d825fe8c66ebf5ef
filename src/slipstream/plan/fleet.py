"""A fleet of workers and a server on paper: how fast, how even, how reliable, and over what links. Imports no torch."""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Literal

from slipstream.config import Switch
from slipstream.dataparallel.emulation import Emulation
from slipstream.errors import ConfigError

SPREAD = "'constant' or 'lognormal:SIGMA' with SIGMA from 0 to 3, the standard deviation of the logarithm"

LEAST, MOST = 1e-9, 1e12
"""Of numbers that are not 0: a clock that has to hold both a step and a restart keeps the digits of either."""

LEAST_SPEED, MOST_SPEED = 1e-6, 1e6

MOST_RETRIES = 700.0
"""Failures in a step, on average, from which on it is never done: the expected time is beyond all floats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Workers, links and server of a simulated asynchronous data-parallel run."""

    num_workers: int = 0
    """Workers; 0: as many as --speeds lists, and 8 where it is no list."""
    speeds: str = "constant"
    """Speed of each worker, fixed: `constant`, `lognormal:SIGMA` (mean 1), or a list such as 1,1,1,0.25, repeated where
    there are several times as many workers."""
    jitter: str = "constant"
    """Spread of the time of each cycle (with --local-steps of each step in it): `constant`, or `lognormal:SIGMA` (mean
    1)."""
    straggler_fraction: float = 0.0
    """Share of the cycles (with --local-steps of the steps) that take --straggler-slowdown times as long."""
    straggler_slowdown: float = 10.0
    """How many times as long those take."""
    failures_per_hour: float = 0.0
    """Failures of each worker in an hour of its life, at random moments."""
    restart_s: float = 60.0
    """Seconds until a failed worker is back."""
    microbatch_ms: float = 100.0
    """Time of a microbatch at speed 1."""
    microbatches_per_worker: int = 8
    """Microbatches of a worker's cycle, on average (with --local-steps of each step in it)."""
    local_steps: int = 1
    """Steps that a worker makes by itself before it pushes (pseudo-gradient); 1: it pushes gradients."""
    pushes_per_step: int = 0
    """Pushes that make a step; 0: as many as there are workers."""
    dynamic_batches: Switch = True
    """Give faster workers more microbatches, so that all cycles take the same time."""
    max_staleness: int = 0
    """A worker waits for new work while taking it could make any gradient staler than this; 0: no bound."""
    lease_deadlines: Switch = True
    """Give up a worker whose cycle takes much longer than its last ones, as a run does; its push is then rejected."""
    num_parameters: float = 1e9
    """Of the model; says how much goes over the links."""
    wire_bytes: float = 2.0
    """Bytes a parameter on the links, each way: 2 for bfloat16, 1 for int8."""
    link_gbps: float = 0.0
    """Speed of the link of each worker (with --num-stages of each of its stages) and of each shard, each way, in
    gigabits a second; 0: messages take no time."""
    server_ms: float = 0.0
    """Time in which one shard with the whole model takes in a push; shards share it; 0: none."""
    num_shards: int = 1
    """Machines that the server's weights are divided among."""
    num_stages: int = 1
    """Pipeline stages of a worker, which have a link each; --microbatch-ms is then the time on one stage. The
    synchronous twin drains its pipeline at every step."""
    pipeline_schedule: Literal["two_bw", "one_f_one_b"] = "two_bw"
    """With --num-stages above 1: `two_bw` goes on with the next gradient while the one before is finished, so that each
    is stale by one of the worker's own; `one_f_one_b` drains between two. With --local-steps a pipeline drains where it
    pushes, with `one_f_one_b` at each of the steps."""
    sync_overlap: float = 0.0
    """Share of the synchronous twin's compute time in which it can exchange gradients at the same time."""
    num_cycles: int = 0
    """Cycles of each worker to measure, on average; 0: as many as make 8000 pushes, at least 20."""
    seed: int = 0
    """Seed of everything drawn."""

    @property
    def asks_ahead(self) -> bool:
        """Whether a worker goes on with the next gradient before it has pushed the last: its pipeline never drains."""
        return self.num_stages > 1 and self.pipeline_schedule == "two_bw" and self.local_steps == 1

    def check(self) -> None:
        """Refuse numbers outside their range.

        Raises:
            ConfigError: One is.
        """
        for name in ("microbatches_per_worker", "local_steps", "num_shards", "num_stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a whole number of 1 or more.")
        for name in ("num_workers", "pushes_per_step", "num_cycles", "max_staleness"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more.")
        if not 1e-6 <= self.microbatch_ms <= 1e9:
            raise ConfigError(f"microbatch_ms is {self.microbatch_ms:g}; give milliseconds from 1e-6 to 1e9.")
        for name in ("num_parameters", "wire_bytes"):
            if not LEAST <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {getattr(self, name):g}; give a number from {LEAST:g} to {MOST:g}.")
        if self.asks_ahead and self.microbatches_per_worker < self.num_stages - 1:
            raise ConfigError(
                f"microbatches_per_worker is {self.microbatches_per_worker}; two_bw with {self.num_stages} stages "
                f"needs {self.num_stages - 1} at least. Give more, or --pipeline-schedule one_f_one_b."
            )
        for name in ("link_gbps", "server_ms", "failures_per_hour", "restart_s"):
            if getattr(self, name) and not LEAST <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {getattr(self, name):g}; give 0, or a number from {LEAST:g} to {MOST:g}.")
        for name in ("straggler_fraction", "sync_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name):g}; it is a share, from 0 to 1.")
        if not 1 <= self.straggler_slowdown <= MOST:
            raise ConfigError(f"straggler_slowdown is {self.straggler_slowdown:g}; give a number from 1 to {MOST:g}.")


class Fleet:
    """What the settings say of each worker and message.

    Args:
        config: The settings.

    Attributes:
        num_workers: How many.
        pushes_per_step: That make a step.
        unit_s: Seconds of one *unit* at speed 1. A worker's cycle is a number of units; a unit is one microbatch in
            each of the local steps.
        fill_units: Units that pass while the pipeline of a worker fills and drains, beside those of its cycle.
        own_units_per_s: What each worker reaches alone, with its jitter and stragglers and without messages; what its
            pipeline idles is not taken off. Stragglers count whole, though a failure may end one before it is done.
        transfer_s: Seconds of a model, or of a gradient of it, over a worker's links.
        shard_transfer_s: Seconds it takes of each shard's link.
        apply_s: Seconds a push takes of each shard.

    Raises:
        ConfigError: A setting is out of its range, or two contradict each other.
    """

    def __init__(self, config: FleetConfig) -> None:
        config.check()
        self.config = config
        listed = parse_speeds(config.speeds)
        self.num_workers = config.num_workers or (len(listed) if isinstance(listed, tuple) else 8)
        self.pushes_per_step = config.pushes_per_step or self.num_workers
        if self.pushes_per_step > self.num_workers:
            raise ConfigError(
                f"pushes_per_step is {self.pushes_per_step}, but num_workers is {self.num_workers}. Leave the "
                "first at 0 for as many as there are workers, or give at most that."
            )
        speeds = _drawn_speeds(listed, self.num_workers, seed=config.seed)
        sigma = parse_spread(config.jitter, name="jitter")
        self.unit_s = config.local_steps * config.microbatch_ms / 1000
        # The mean of several lognormal times is nearly lognormal, and has their variance divided by their number.
        sigma_of_mean = math.sqrt(math.log1p(math.expm1(sigma**2) / config.local_steps))
        self._cycles = Emulation(microbatch_s=self.unit_s, speeds=speeds, jitter=sigma_of_mean, seed=config.seed)
        self._steps = dataclasses.replace(self._cycles, microbatch_s=config.microbatch_ms / 1000, jitter=sigma)
        self._mean_slowness = 1 + config.straggler_fraction * (config.straggler_slowdown - 1)
        num_fills = config.local_steps if config.pipeline_schedule == "one_f_one_b" else 1
        self.fill_units = (config.num_stages - 1) * num_fills / config.local_steps
        self.own_units_per_s = tuple(speed / (self.unit_s * self._mean_slowness) for speed in speeds)
        per_link_s = config.num_parameters * config.wire_bytes * 8e-9 / config.link_gbps if config.link_gbps else 0.0
        self.transfer_s = per_link_s / config.num_stages
        self.shard_transfer_s = per_link_s / config.num_shards
        self.apply_s = config.server_ms / 1000 / config.num_shards
        self.all_reduce_s = 2 * (self.num_workers - 1) / self.num_workers * self.transfer_s
        """Seconds of a ring all-reduce of a gradient; its start-up times are left out."""

    def cycle_s(self, worker: int, cycle: int, num_units: int) -> float:
        """Return the compute seconds of a worker's cycle.

        Args:
            worker: Who.
            cycle: Counts the worker's cycles.
            num_units: In it.
        """
        slowness = self._slowness(worker, cycle, num_steps=self.config.local_steps)
        return slowness * self._cycles.cycle_s(worker, cycle, num_units)

    def sync_step_s(self, step: int) -> float:
        """Return the seconds of a step in which all have equal shares and wait for the slowest, failures left out."""
        config = self.config
        # A pipeline that drains at each step takes as long as one microbatch more for each stage but one.
        count = config.microbatches_per_worker + config.num_stages - 1
        compute_s = max(
            self._slowness(worker, step, num_steps=1) * self._steps.cycle_s(worker, step, count)
            for worker in range(self.num_workers)
        )
        return compute_s + max(0.0, self.all_reduce_s - config.sync_overlap * compute_s)

    def sync_units_per_s(self, *, num_steps: int) -> float:
        """Return the throughput of synchronous training, failures included; 0 where they let no step be done.

        A failure costs everyone the step under way and the restart; with failures at random moments the expected time
        of a step of T seconds is (1 / rate + restart) (exp(rate T) - 1). That checkpoints lie further back is left out.

        Args:
            num_steps: To average over.
        """
        rate, restart_s = self.num_workers * self.config.failures_per_hour / 3600, self.config.restart_s
        steps_s = [self.sync_step_s(step) for step in range(1, num_steps + 1)]
        if rate * max(steps_s) > MOST_RETRIES:
            return 0.0
        if rate:
            steps_s = [(1 / rate + restart_s) * math.expm1(rate * step_s) for step_s in steps_s]
        units = self.num_workers * self.config.microbatches_per_worker / self.config.local_steps
        return units * num_steps / sum(steps_s)

    def life_s(self, worker: int, incarnation: int) -> float:
        """Return after how many seconds a worker fails; infinite where none does."""
        rate = self.config.failures_per_hour / 3600
        return random.Random(f"{self.config.seed}/{worker}/{incarnation}/life").expovariate(rate) if rate else math.inf

    def shards_needed(self, *, most_busy: float) -> int:
        """Return the fewest shards that keep links and server below a utilisation while no worker waits for them.

        Args:
            most_busy: The utilisation, from 0 to 1.
        """
        fill = 0.0 if self.config.asks_ahead else self.fill_units
        pushes_per_s = sum(
            1 / ((share + fill) / speed + 2 * self.transfer_s)
            for share, speed in zip(self._shares(), self.own_units_per_s, strict=True)
        )
        whole_s = self.config.num_shards * max(self.shard_transfer_s, self.apply_s)
        return max(1, math.ceil(pushes_per_s * whole_s / most_busy - 1e-9))

    def staleness_mean_expected(self, pushes_per_step: float) -> float:
        """Return the mean staleness of a gradient where messages take no time and nobody fails.

        Worker w pushes every n_w u_w seconds, n_w microbatches of u_w each. A drained pipeline reads after its push, so
        each of the others pushes once meanwhile. One that never drains reads when its first stage begins with its last
        microbatch and pushes (n_w + p) u_w later; so its own gradient before is missing too.

        Args:
            pushes_per_step: Pushes that make a step.
        """
        if not self.config.asks_ahead:
            return (self.num_workers - 1) / pushes_per_step
        rates = [speed / share for share, speed in zip(self._shares(), self.own_units_per_s, strict=True)]
        others = sum(
            (1 + self.config.num_stages / share) * (1 - rate / sum(rates))
            for share, rate in zip(self._shares(), rates, strict=True)
        )
        return (1 + others) / pushes_per_step

    def _shares(self) -> list[float]:
        """Return the microbatches of each worker's cycle, on average."""
        share = self.config.microbatches_per_worker
        if not self.config.dynamic_batches:
            return [float(share)] * self.num_workers
        mean = sum(self.own_units_per_s) / self.num_workers
        return [share * speed / mean for speed in self.own_units_per_s]

    def _slowness(self, worker: int, cycle: int, *, num_steps: int) -> float:
        fraction = self.config.straggler_fraction
        if not fraction:
            return 1.0
        draw = random.Random(f"{self.config.seed}/{worker}/{cycle}/straggler")
        num_slow = sum(draw.random() < fraction for _ in range(num_steps))
        return 1 + (self.config.straggler_slowdown - 1) * num_slow / num_steps


def parse_spread(text: str, *, name: str) -> float:
    """Return the standard deviation of the logarithm that a text such as ``lognormal:0.3`` gives.

    Args:
        text: ``constant`` or ``lognormal:SIGMA``.
        name: Of the setting, for the message.

    Raises:
        ConfigError: It is neither.
    """
    kind, _, value = text.strip().partition(":")
    if kind == "constant" and not value:
        return 0.0
    try:
        sigma = float(value)
    except ValueError:
        sigma = math.nan
    if kind != "lognormal" or not 0 <= sigma <= 3:
        allowed = f"{SPREAD}{', or a list such as 1,1,1,0.25' if name == 'speeds' else ''}"
        raise ConfigError(f"{name} is '{text}'; give {allowed}.")
    return sigma


def parse_speeds(text: str) -> float | tuple[float, ...]:
    """Return a list of speeds, or the spread to draw them with.

    Raises:
        ConfigError: It is neither, or a speed is out of its range.

    Example:
        >>> parse_speeds("1, 0.25"), parse_speeds("lognormal:0.3"), parse_speeds("constant")
        ((1.0, 0.25), 0.3, 0.0)
    """
    try:
        speeds = tuple(float(word) for word in text.split(","))
    except ValueError:
        return parse_spread(text, name="speeds")
    for position, speed in enumerate(speeds):
        if not LEAST_SPEED <= speed <= MOST_SPEED:
            allowed = f"from {LEAST_SPEED:g} to {MOST_SPEED:g}"
            raise ConfigError(f"speeds has {speed:g} for worker {position}; a speed is a number {allowed}.")
    return speeds


def _drawn_speeds(given: float | Sequence[float], num_workers: int, *, seed: int) -> tuple[float, ...]:
    if isinstance(given, float):
        draw = random.Random(f"{seed}/speeds")
        return tuple(math.exp(given * draw.gauss(0.0, 1.0) - given**2 / 2) for _ in range(num_workers))
    if num_workers % len(given):
        raise ConfigError(
            f"speeds lists {len(given)} workers, which does not divide num_workers of {num_workers}. Give a list of "
            "that length, or of one that divides it and is repeated, or leave num_workers out."
        )
    return tuple(given) * (num_workers // len(given))
