"""Proof, before a run, that a set of action streams can run and computes what it claims.

The validator executes the streams as the runtime does, without the tensors: receives wait, sends do not, each
channel (sender, receiver, direction) is first in, first out, and an optimizer step waits until every stage has
posted its share of the norm. What it checks beside progress is listed at :func:`validate`.
"""

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NoReturn

from slipstream.errors import ScheduleError
from slipstream.pipeline.actions import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """What a validated set of streams needs and does."""

    max_live_versions: int
    """Most weights versions that one stage holds at once."""
    staleness_max: int
    """Largest (version at the update - version read)."""
    peak_activations: tuple[int, ...]
    """Most microbatches between forward and backward at once, one number a stage."""


def validate(
    streams: Sequence[Sequence[Action]],
    *,
    num_microbatches: int,
    staleness: int,
    max_activations: Sequence[int] | None = None,
    first_batch: int = 0,
) -> ScheduleFacts:
    """Execute streams symbolically and raise at the first action that is wrong.

    Checked:

    * every dependency is met and nothing waits for ever; messages leave each channel in the order in which they
      entered it, and none is left over;
    * every stage runs each microbatch forward and backward once and in order (gradients accumulate in this order,
      and sums of floats depend on it);
    * batch b reads version max(b - staleness, 0) on every stage, forward and backward, and that version
      has been published there by then;
    * a step comes after its norm, which comes after the batch's last backward (with the line above: at most
      staleness + 1 versions are live, and version v finds buffer v mod (staleness + 1) free);
    * at the step to version v every stage has started the same number of forwards, so that no forward message is
      under way when all stages pause there: an evaluation can use the forward channels;
    * no rank has more microbatches between forward and backward than ``max_activations``.

    Args:
        streams: Complete finite streams with communication, one a rank.
        num_microbatches: Microbatches a batch.
        staleness: Updates between the version a batch reads and the newest: 1 for two_bw, 0 for flushing schedules.
        max_activations: One bound a rank, over all its stages; none: any number is allowed.
        first_batch: Batch at which the streams start. The stages then hold version ``first_batch`` and the
            ``staleness`` ones before it.

    Returns:
        What the streams need.

    Raises:
        ScheduleError: With the name of the action.

    Cost:
        About 2 us an action.
    """
    execution = _Execution(
        streams,
        num_microbatches=num_microbatches,
        staleness=staleness,
        max_activations=max_activations,
        first_batch=first_batch,
    )
    execution.run()
    return execution.facts()


class _Stage:
    """What has happened on one stage so far."""

    def __init__(self, rank: int, *, first_microbatch: int, version: int) -> None:
        self.rank = rank
        self.next_forward = self.next_backward = self.next_weight = first_microbatch
        self.normed = self.version = version
        self.reads_left: Counter[int] = Counter()
        self.peak = 0
        self.max_live = 1


class _Execution:
    """Streams, the point each rank has reached, and the messages under way."""

    def __init__(
        self,
        streams: Sequence[Sequence[Action]],
        *,
        num_microbatches: int,
        staleness: int,
        max_activations: Sequence[int] | None,
        first_batch: int,
    ) -> None:
        self.streams = streams
        self.num_microbatches = num_microbatches
        self.staleness = staleness
        self.max_activations = max_activations
        self.first_batch = first_batch
        self.staleness_max = 0
        self.stages: dict[int, _Stage] = {}
        self.in_flight = [0] * len(streams)
        self.norms: Counter[int] = Counter()
        self.forwards_at_step: dict[int, int] = {}
        # A channel is (sending rank, receiving rank, direction); a message is (receiving stage, microbatch).
        self.channels: dict[tuple[int, int, str], deque[tuple[int, int]]] = defaultdict(deque)
        self.received: set[tuple[str, int, int]] = set()
        for rank, stream in enumerate(streams):
            for action in stream:
                self._register(rank, action)
        if sorted(self.stages) != list(range(len(self.stages))):
            raise ScheduleError(f"stages {sorted(self.stages)} act, but they must be 0 to {len(self.stages) - 1}.")
        for state in self.stages.values():
            # A stream that starts in mid-run holds the versions that are read after its start from the first on.
            state.max_live = 1 + sum(version < first_batch for version in state.reads_left)

    def _register(self, rank: int, action: Action) -> None:
        stage = self.stages.get(action.stage)
        if stage is None:
            start = self.first_batch * self.num_microbatches
            stage = self.stages[action.stage] = _Stage(rank, first_microbatch=start, version=self.first_batch)
        if stage.rank != rank:
            _fail(action, f"stands in the stream of rank {rank}, but stage {action.stage} is on rank {stage.rank}")
        if action.op in ("B", "W"):
            assert action.version is not None
            stage.reads_left[action.version] += 1

    def run(self) -> None:
        """Advance every rank as far as it gets, in turns, until all are done or none moves."""
        positions = [0] * len(self.streams)
        moved = True
        while moved:
            moved = False
            for rank, stream in enumerate(self.streams):
                position = positions[rank]
                while position < len(stream) and self._execute(stream[position]):
                    position += 1
                moved = moved or position > positions[rank]
                positions[rank] = position
        waiting = [stream[position] for stream, position in zip(self.streams, positions) if position < len(stream)]
        if waiting:
            others = ", ".join(map(str, waiting[1:])) or "nobody else"
            _fail(waiting[0], f"waits for ever (deadlock); the other ranks wait at: {others}")
        self._check_end()

    def _execute(self, action: Action) -> bool:
        """Execute one action; return False where it has to wait."""
        stage = self.stages[action.stage]
        op = action.op
        if op == "F":
            return self._forward(action, stage)
        if op in ("B", "I"):
            return self._backward(action, stage)
        if op == "W":
            self._weight(action, stage)
            return True
        if op == "N":
            self._norm(action, stage)
            return True
        if op == "O":
            return self._step(action, stage)
        if op in ("SEND_F", "SEND_B"):
            self._send(action, stage)
            return True
        return self._receive(action, stage)

    def _forward(self, action: Action, stage: _Stage) -> bool:
        microbatch = self._check_turn(action, stage.next_forward)
        if not self._input_ready(action, "F", action.stage - 1):
            return False
        version = self._check_version(action)
        if version > stage.version:
            _fail(
                action,
                f"reads version {version} before {action.stage}O@{version}: the stage holds {stage.version} at most",
            )
        stage.next_forward = microbatch + 1
        stage.peak = max(stage.peak, stage.next_forward - stage.next_weight)
        self.in_flight[stage.rank] += 1
        in_flight = self.in_flight[stage.rank]
        if self.max_activations is not None and in_flight > self.max_activations[stage.rank]:
            allowed = self.max_activations[stage.rank]
            _fail(action, f"is microbatch number {in_flight} in flight on rank {stage.rank}; {allowed} allowed")
        return True

    def _backward(self, action: Action, stage: _Stage) -> bool:
        microbatch = self._check_turn(action, stage.next_backward)
        if microbatch >= stage.next_forward:
            _fail(action, "comes before its forward")
        if not self._input_ready(action, "B", action.stage + 1):
            return False
        stage.next_backward = microbatch + 1
        if action.op == "B":
            self._weight(action, stage)
        else:
            self._check_version(action)
        return True

    def _weight(self, action: Action, stage: _Stage) -> None:
        microbatch = self._check_turn(action, stage.next_weight)
        if microbatch >= stage.next_backward:
            _fail(action, "comes before its input gradient")
        version = self._check_version(action)
        stage.next_weight = microbatch + 1
        stage.reads_left[version] -= 1
        self.in_flight[stage.rank] -= 1

    def _norm(self, action: Action, stage: _Stage) -> None:
        version = self._check_made(action, stage.normed)
        if stage.next_weight < version * self.num_microbatches:
            _fail(
                action, f"comes before the batch's last backward, of microbatch {version * self.num_microbatches - 1}"
            )
        stage.normed = version
        self.norms[version] += 1

    def _step(self, action: Action, stage: _Stage) -> bool:
        version = self._check_made(action, stage.version)
        if stage.normed < version:
            _fail(action, f"comes before {action.stage}N@{version}")
        if self.norms[version] < len(self.stages):
            return False
        live = sum(old < version and reads > 0 for old, reads in stage.reads_left.items())
        # The batch just finished read version - 1 - staleness and no later batch does, so its buffer is free.
        assert live <= self.staleness, f"{action}: {live + 1} live versions"
        expected = self.forwards_at_step.setdefault(version, stage.next_forward)
        if stage.next_forward != expected:
            _fail(
                action,
                f"comes after {stage.next_forward} forwards, on another stage after {expected}: forward messages "
                "would be under way when all stages pause at this step",
            )
        stage.version = version
        stage.max_live = max(stage.max_live, live + 1)
        read = max(version - 1 - self.staleness, 0)
        self.staleness_max = max(self.staleness_max, version - 1 - read)
        return True

    def _send(self, action: Action, stage: _Stage) -> None:
        assert action.microbatch is not None
        done, to = (stage.next_forward, 1) if action.op == "SEND_F" else (stage.next_backward, -1)
        if action.microbatch >= done:
            _fail(action, "comes before what it sends is computed")
        receiver = action.stage + to
        if receiver not in self.stages:
            _fail(action, f"has no stage to send to; stages are 0 to {len(self.stages) - 1}")
        channel = self.channels[stage.rank, self.stages[receiver].rank, action.op[-1]]
        channel.append((receiver, action.microbatch))

    def _receive(self, action: Action, stage: _Stage) -> bool:
        assert action.microbatch is not None
        direction = action.op[-1]
        sender = action.stage + (-1 if direction == "F" else 1)
        if sender not in self.stages:
            _fail(action, f"has no stage to receive from; stages are 0 to {len(self.stages) - 1}")
        channel = self.channels[self.stages[sender].rank, stage.rank, direction]
        if not channel:
            return False
        receiver, microbatch = channel.popleft()
        if (receiver, microbatch) != (action.stage, action.microbatch):
            _fail(
                action, f"would take the message {receiver}RECV_{direction}{microbatch}, which is first in its channel"
            )
        self.received.add((direction, receiver, microbatch))
        return True

    def _input_ready(self, action: Action, direction: str, neighbour: int) -> bool:
        """Whether the action's input is there; raise where its receive is missing."""
        source = self.stages.get(neighbour)
        if source is None:
            return True
        assert action.microbatch is not None
        if source.rank == self.stages[action.stage].rank:
            return action.microbatch < (source.next_forward if direction == "F" else source.next_backward)
        key = (direction, action.stage, action.microbatch)
        if key not in self.received:
            _fail(action, f"comes before its input: {action.stage}RECV_{direction}{action.microbatch} is missing")
        self.received.remove(key)
        return True

    def _check_turn(self, action: Action, expected: int) -> int:
        if action.microbatch != expected:
            _fail(action, f"is out of turn: microbatch {expected} is next for {action.op} on stage {action.stage}")
        return expected

    def _check_version(self, action: Action) -> int:
        assert action.microbatch is not None
        batch = action.microbatch // self.num_microbatches
        expected = max(batch - self.staleness, 0)
        if action.version != expected:
            _fail(action, f"reads version {action.version}, but batch {batch} must read {expected} everywhere")
        return expected

    def _check_made(self, action: Action, last: int) -> int:
        if action.version != last + 1:
            _fail(action, f"is out of turn: version {last + 1} is next for {action.op} on stage {action.stage}")
        return last + 1

    def _check_end(self) -> None:
        for (_, _, direction), messages in self.channels.items():
            if messages:
                stage, microbatch = messages[0]
                raise ScheduleError(f"{stage}RECV_{direction}{microbatch} is missing: its message is never received.")
        for number, state in self.stages.items():
            batches, rest = divmod(state.next_forward, self.num_microbatches)
            if rest or state.next_weight < state.next_forward:
                raise ScheduleError(
                    f"stage {number} ends in mid-batch: {state.next_forward} forwards, {state.next_weight} backwards, "
                    f"{self.num_microbatches} microbatches a batch. End the streams after whole batches."
                )
            if state.version != batches:
                raise ScheduleError(f"{number}O@{state.version + 1} is missing: its batch ran, but makes no update.")

    def facts(self) -> ScheduleFacts:
        return ScheduleFacts(
            max_live_versions=max((stage.max_live for stage in self.stages.values()), default=1),
            staleness_max=self.staleness_max,
            peak_activations=tuple(self.stages[number].peak for number in sorted(self.stages)),
        )


def _fail(action: Action, reason: str) -> NoReturn:
    raise ScheduleError(f"{action} {reason}.")
