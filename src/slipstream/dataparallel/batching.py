"""The work seam: how many microbatches does each worker compute a cycle? Imports no torch."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.dataparallel.cycles import Cost, Cycle, CycleHistory

HYSTERESIS = 0.05
"""A new plan must bring the ratio of the longest to the shortest cycle down by this share."""

LARGEST_CHANGE = 0.25
"""Of a worker's microbatches, by one plan; but always at least one microbatch."""


class EqualBatches:
    """Every worker computes alike, whatever its speed; the remainder goes to the first ones.

    Also the base of policies that measure: it keeps the cycles of the live workers.

    Args:
        step_microbatches: Microbatches that make an optimizer step.
        pushes_per_step: Pushes that a step is made of on average, at least; 0: as many as there are live workers.
        min_microbatches: Least of a worker, from 1.
        max_microbatches: Most of a worker, what its memory takes; 0: no limit. It is never more than a step's, for one
            gradient makes one step.
    """

    def __init__(
        self, *, step_microbatches: int, pushes_per_step: int = 0, min_microbatches: int = 1, max_microbatches: int = 0
    ) -> None:
        self.step_microbatches = step_microbatches
        self.pushes_per_step = pushes_per_step
        self.least = min_microbatches
        self.most = max(min(max_microbatches or step_microbatches, step_microbatches), min_microbatches)
        self.histories: dict[int, CycleHistory] = {}
        self._plan: dict[int, int] = {}
        self._is_outdated = False

    @property
    def cycle_microbatches(self) -> int:
        """Microbatches that all live workers together compute while each pushes once."""
        num_live = len(self.histories)
        wanted = self.step_microbatches
        if self.pushes_per_step:
            wanted = round(num_live * self.step_microbatches / self.pushes_per_step)
        return max(wanted, num_live * self.least)

    @property
    def round_microbatches(self) -> int:
        """Microbatches of one push of each live worker, with all bounds, as far as their speeds are known."""
        return sum(self.plan.values())

    @property
    def plan(self) -> dict[int, int]:
        """Microbatches of each live worker's next cycle."""
        if self._is_outdated:
            self._is_outdated = False
            share, rest = divmod(self.cycle_microbatches, max(len(self.histories), 1))
            for position, worker in enumerate(sorted(self.histories)):
                self._plan[worker] = self._bounded(share + (position < rest))
        return self._plan

    def _bounded(self, count: int) -> int:
        return min(max(count, self.least), self.most)

    def join(self, worker: int, *, pace_s: float = 0.0) -> None:
        """Count a worker in; it guesses that a microbatch takes so many seconds."""
        self.histories[worker] = CycleHistory(expected_pace_s=pace_s)
        self._is_outdated = True

    def leave(self, worker: int) -> None:
        """Count a worker out, and forget how fast it was."""
        if self.histories.pop(worker, None) is not None:
            self._plan.pop(worker, None)
            self._is_outdated = True

    def observe(self, worker: int, cycle: Cycle) -> None:
        """Take note of a cycle of a live worker."""
        self.histories[worker].observe(cycle)

    def num_microbatches(self, worker: int) -> int:
        """Return what a live worker computes next."""
        return self.plan[worker]

    def deadline_s(self, worker: int, num_microbatches: int) -> float:
        """Return the seconds after which a live worker is given up."""
        return self.histories[worker].deadline_s(num_microbatches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        histories = [[worker, history.state_dict()] for worker, history in self.histories.items()]
        return {"histories": histories, "plan": list(self.plan.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.histories = {}
        for worker, cycles in state["histories"]:
            self.histories[worker] = CycleHistory()
            self.histories[worker].load_state_dict(cycles)
        # The settings may be others than when the plan was made.
        self._plan = {worker: self._bounded(count) for worker, count in state["plan"]}
        self._is_outdated = True


class DynamicBatches(EqualBatches):
    """Give faster workers more, so that all cycles take the same time (dynamic batch scheduling).

    A worker that was not measured yet computes the least there is: one calibration cycle. Once all live workers are
    measured, and whenever they have pushed once each since, a new plan is considered: the one whose longest cycle is
    shortest. After the first it may change a worker's share by a quarter, and is adopted only if it makes the cycles
    more even by 5 %. Where the fastest would need more than a step's microbatches, all get less.

    Cost:
        A plan costs O((workers + microbatches) log workers); one a round makes that O(log workers) a push and
        microbatch.
    """

    def __init__(
        self, *, step_microbatches: int, pushes_per_step: int = 0, min_microbatches: int = 1, max_microbatches: int = 0
    ) -> None:
        self._since_plan = 0
        self._is_new = True
        self._first_speeds: dict[int, float] = {}
        self._speed_sum = 0.0
        super().__init__(
            step_microbatches=step_microbatches,
            pushes_per_step=pushes_per_step,
            min_microbatches=min_microbatches,
            max_microbatches=max_microbatches,
        )

    @property
    def plan(self) -> dict[int, int]:
        """Microbatches of each live worker's next cycle."""
        return self._plan

    @property
    def round_microbatches(self) -> int:
        """Microbatches of one push of each live worker, with all bounds, as far as their speeds are known."""
        if self._is_new or len(self.histories) == 1:
            return min(self.cycle_microbatches, len(self.histories) * self.most)
        return super().round_microbatches

    def num_microbatches(self, worker: int) -> int:
        """Return what a live worker computes next; alone it computes all, and there is nothing to find out."""
        return self._bounded(self.cycle_microbatches) if len(self.histories) == 1 else self._plan[worker]

    def join(self, worker: int, *, pace_s: float = 0.0) -> None:
        """Count a worker in, for a calibration; the others go on as they are until everyone is measured."""
        super().join(worker, pace_s=pace_s)
        self._plan[worker] = self.least
        self._begin_anew()

    def leave(self, worker: int) -> None:
        """Count a worker out, and forget how fast it was."""
        super().leave(worker)
        self._speed_sum -= self._first_speeds.pop(worker, 0.0)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._is_new = True
        self._since_plan = 0

    def observe(self, worker: int, cycle: Cycle) -> None:
        """Take note of a cycle; plan anew when it is time."""
        super().observe(worker, cycle)
        self._since_plan += 1
        if worker not in self._first_speeds:
            self._plan[worker] = self._first_share(worker, 1 / max(cycle.pace_s, 1e-12))
        if self._since_plan >= len(self.histories) == len(self._first_speeds):
            self._replan()

    def _first_share(self, worker: int, speed: float) -> int:
        """Return a worker's share by its speed among those known; the unknown are taken for as fast as the mean."""
        self._first_speeds[worker] = speed
        self._speed_sum += speed
        mean = self._speed_sum / len(self._first_speeds)
        return self._bounded(round(self.cycle_microbatches * speed / (mean * len(self.histories))))

    def _replan(self) -> None:
        self._since_plan = 0
        workers = sorted(self.histories)
        costs = [self.histories[worker].cost() for worker in workers]
        total = min(self.cycle_microbatches, self._most_while_even(costs))
        now = [self.plan[worker] for worker in workers]
        lower, upper = [self.least] * len(now), [self.most] * len(now)
        if not self._is_new:
            change = [max(1, int(LARGEST_CHANGE * count)) for count in now]
            bounds = (
                [max(self.least, count - each) for count, each in zip(now, change)],
                [min(self.most, count + each) for count, each in zip(now, change)],
            )
            if sum(bounds[0]) <= total <= sum(bounds[1]):
                lower, upper = bounds
        plan = assign(costs, total, lower=lower, upper=upper)
        if self._is_new or unevenness(costs, plan) <= (1 - HYSTERESIS) * unevenness(costs, now):
            self._plan = dict(zip(workers, plan))
        self._is_new = False

    def _most_while_even(self, costs: Sequence[Cost]) -> int:
        """Return the microbatches of all while the fastest computes a step's, and nobody takes longer."""
        longest_s = min(cost.of(self.step_microbatches) for cost in costs)
        within = [int((longest_s - cost.fixed_s) / max(cost.each_s, 1e-12) + 1e-6) for cost in costs]
        return sum(min(max(count, self.least), self.step_microbatches) for count in within)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return super().state_dict() | {
            "since_plan": self._since_plan,
            "is_new": self._is_new,
            "first_speeds": list(self._first_speeds.items()),
            "speed_sum": self._speed_sum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; a state of equal batches holds no plan worth keeping."""
        super().load_state_dict(state)
        self._since_plan = int(state.get("since_plan", 0))
        self._is_new = bool(state.get("is_new", True))
        self._first_speeds = dict(state.get("first_speeds", ()))
        self._speed_sum = float(state.get("speed_sum", 0.0))


def assign(costs: Sequence[Cost], total: int, *, lower: Sequence[int], upper: Sequence[int]) -> list[int]:
    """Share microbatches out so that the longest cycle is as short as can be.

    Greedy: begin at the lower bounds and give each further microbatch to the worker whose cycle would then be the
    shortest. Cycles only grow with their microbatches, so the result is optimal.

    Args:
        costs: Of each worker.
        total: Microbatches in all; the bounds have the last word.
        lower: Least of each worker.
        upper: Most of each worker.

    Example:
        >>> assign([Cost(0, 1), Cost(0, 1 / 2), Cost(0, 1 / 4)], 7, lower=[1] * 3, upper=[9] * 3)
        [1, 2, 4]
    """
    counts = list(lower)
    heap = [(cost.of(count + 1), i) for i, (cost, count) in enumerate(zip(costs, counts)) if count < upper[i]]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        if not heap:
            break
        _, i = heap[0]
        counts[i] += 1
        if counts[i] < upper[i]:
            heapq.heapreplace(heap, (costs[i].of(counts[i] + 1), i))
        else:
            heapq.heappop(heap)
    return counts


def unevenness(costs: Sequence[Cost], counts: Sequence[int]) -> float:
    """Return the longest cycle over the shortest."""
    cycles = [cost.of(count) for cost, count in zip(costs, counts)]
    return max(cycles) / max(min(cycles), 1e-12)
