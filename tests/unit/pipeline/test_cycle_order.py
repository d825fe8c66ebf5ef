"""Streams of batches of any size, one at a time: the same on every stage, in order, and nobody waits for ever."""

import collections
import itertools
import queue
import random
import threading

import pytest

from slipstream.errors import ScheduleError
from slipstream.pipeline.actions import Action, add_communication, format_order
from slipstream.pipeline.cycle_order import NUM_BUFFERS, cycle_order
from slipstream.pipeline.schedules import ScheduleSpec, order

WAIT_S = 20.0
"""Far longer than any stage takes here: who waits as long waits for ever."""


def text(sizes, *, stage=0, num_ahead):
    return format_order(cycle_order(stage=stage, num_ahead=num_ahead, sizes=iter(sizes)))


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "extra"), [(2, 1, 0), (2, 4, 1), (3, 2, 0), (4, 5, 2)])
def test_equal_batches_are_those_of_two_bw(num_ranks, num_microbatches, extra):
    """But for the optimizer steps, and for the weights, which are a batch's own here."""
    spec = ScheduleSpec(
        name="two_bw", num_ranks=num_ranks, num_microbatches=num_microbatches, num_extra_in_flight=extra
    )
    for rank in range(num_ranks):
        expected = [
            Action(stage, op, microbatch, version if op == "N" else microbatch // num_microbatches)
            for stage, op, microbatch, version in order(spec, rank=rank, num_batches=4)
            if op != "O"
        ]
        sizes = [num_microbatches] * 4 + [0]
        assert text(sizes, stage=rank, num_ahead=spec.num_ahead(rank)) == format_order(expected)


def test_drained_batches_are_those_of_one_f_one_b():
    spec = ScheduleSpec(name="one_f_one_b", num_ranks=3, num_microbatches=4)
    for rank in range(3):
        expected = [action for action in order(spec, rank=rank, num_batches=3) if action.op != "O"]
        assert text([4, 0] * 3, stage=rank, num_ahead=spec.num_ahead(rank)) == format_order(expected)


def test_two_buffers_are_not_three():
    with pytest.raises(ScheduleError, match=r"batch 2 begins on stage 0 while 2 others are under way.* at least 3"):
        text([2, 2, 2, 2], num_ahead=3)
    assert text([3, 3, 3, 3, 0], num_ahead=3).count("N") == 4


class Server:
    """Gives a worker orders of any size: the next but one only when a gradient is there, none at all at times."""

    def __init__(self, num_stages: int, sizes: list[int], rng: random.Random) -> None:
        self.commands = [queue.Queue() for _ in range(num_stages)]
        self._sizes = collections.deque(sizes)
        self._rng = rng
        self._pushed = collections.Counter()
        self._num_open = 0
        self._is_asking = False
        self._lock = threading.Lock()
        self.give()

    def give(self) -> None:
        self._is_asking = False
        if not self._sizes:
            self._tell(0, None)
            return
        if self._num_open and self._rng.random() < 0.3:
            self._tell(0)
        self._num_open += 1
        self._tell(self._sizes.popleft())

    def _tell(self, *commands: int | None) -> None:
        for each in self.commands:  # one after the other, as pipes are written
            for command in commands:
                each.put(command)

    def ready(self) -> None:
        with self._lock:
            self._is_asking = True
            if self._num_open < NUM_BUFFERS:
                self.give()

    def push(self, version: int) -> None:
        with self._lock:
            self._pushed[version] += 1
            if self._pushed[version] == len(self.commands):
                self._num_open -= 1
                if self._is_asking:
                    self.give()


def run_stage(stage: int, ahead: int, server: Server, channels, done: list[list[Action]]) -> None:
    ends = []

    def sizes():
        while (size := server.commands[stage].get(timeout=WAIT_S)) is not None:
            if size:
                ends.append((ends[-1] if ends else 0) + size)
            yield size

    num_stages = len(server.commands)
    stream = cycle_order(stage=stage, num_ahead=ahead, sizes=sizes())
    for action in add_communication(stream, num_stages=num_stages, num_ranks=num_stages):
        _, op, microbatch, version = action
        direction, to = op[-1], 1 if op[-1] == "F" else -1
        if op.startswith("RECV"):
            assert channels[stage - to, direction].get(timeout=WAIT_S) == microbatch
        elif op.startswith("SEND"):
            channels[stage, direction].put(microbatch)
        elif op == "N":
            server.push(version)
        elif op == "F" and stage == 0 and microbatch == ends[-1] - 1:
            server.ready()
        done[stage].append(action)


@pytest.mark.parametrize("seed", range(12))
def test_nobody_waits_for_ever_whenever_orders_come(seed):
    rng = random.Random(seed)
    num_stages = rng.randint(2, 5)
    least = num_stages - 1
    sizes = [rng.randint(least, least + rng.choice((0, 1, 6))) for _ in range(12)]
    server = Server(num_stages, sizes, rng)
    channels = collections.defaultdict(queue.Queue)
    for stage, direction in itertools.product(range(num_stages), "FB"):
        channels[stage, direction] = queue.Queue()
    done = [[] for _ in range(num_stages)]
    threads = [
        threading.Thread(target=run_stage, args=(stage, num_stages - 1 - stage, server, channels, done), daemon=True)
        for stage in range(num_stages)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    cycle_of = [cycle for cycle, size in enumerate(sizes) for _ in range(size)]
    for actions in done:
        for op in "FB":
            run = [(action.microbatch, action.version) for action in actions if action.op == op]
            assert run == list(enumerate(cycle_of)), "each microbatch once, in order, on its own batch's weights"
        assert [action.version for action in actions if action.op == "N"] == list(range(1, len(sizes) + 1))
        ended = -1
        for action in actions:
            ended = action.version - 1 if action.op == "N" else ended
            if action.op == "F":
                assert action.version - ended <= NUM_BUFFERS, "its buffer is needed still"
