"""A few workers under a virtual clock: the sequencer, batches and ledger of a real run, without tensors."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.dataparallel.batching import DynamicBatches, EqualBatches
from slipstream.dataparallel.events import EventQueue
from slipstream.dataparallel.ledger import Ledger
from slipstream.dataparallel.messages import Order, Push
from slipstream.dataparallel.sequencer import Sequencer


class Cycle(NamedTuple):
    """One gradient of one worker.

    Attributes:
        worker: Whose.
        begin_s: The weights are read.
        end_s: It is done, and applied.
        read_version: Of the weights.
        staleness: Steps made meanwhile.
        num_microbatches: It is made of.
    """

    worker: int
    begin_s: float
    end_s: float
    read_version: int
    staleness: int
    num_microbatches: int


class Course(NamedTuple):
    """What happened.

    Attributes:
        cycles: In the order of their ends.
        steps_s: When each step was made.
    """

    cycles: list[Cycle]
    steps_s: list[float]


def asynchronous(
    speeds: Sequence[float], *, until_s: float, step_microbatches: int, pushes_per_step: int = 0, dynamic: bool = False
) -> Course:
    """Let workers go on by themselves; a microbatch takes a second at speed 1, messages take no time."""
    policy = (DynamicBatches if dynamic else EqualBatches)(
        step_microbatches=step_microbatches, pushes_per_step=pushes_per_step
    )
    sequencer = Sequencer(policy, Ledger(microbatch_tokens=2))
    queue: EventQueue[tuple[Order, float]] = EventQueue()
    course = Course([], [])
    sequence = itertools.count(1)

    def ask(worker: int) -> None:
        reply = sequencer.pull(worker, 1, now_s=queue.now_s)
        if reply.order is not None:
            begin(reply.order)

    def begin(order: Order) -> None:
        queue.schedule(queue.now_s + order.lease.num_microbatches / speeds[order.worker], (order, queue.now_s))

    for worker in range(len(speeds)):
        sequencer.join(worker, 1)
    for worker in range(len(speeds)):
        ask(worker)
    while queue.next_s <= until_s:
        order, begun_s = queue.pop()
        verdict = sequencer.push(
            Push(
                worker=order.worker,
                incarnation=1,
                sequence=next(sequence),
                epoch=order.epoch,
                lease_id=order.lease.id,
                read_version=order.version,
                num_tokens=2 * order.lease.num_microbatches,
                compute_s=queue.now_s - begun_s,
            )
        )
        course.cycles.append(
            Cycle(order.worker, begun_s, queue.now_s, order.version, verdict.staleness, order.lease.num_microbatches)
        )
        if verdict.makes_step:
            course.steps_s.append(queue.now_s)
        ask(order.worker)
        for admitted in sequencer.admit(now_s=queue.now_s):
            begin(admitted)
    return course


def synchronous(speeds: Sequence[float], *, until_s: float, step_microbatches: int) -> Course:
    """Let the same workers wait for the slowest at every step, with equal shares."""
    share = step_microbatches // len(speeds)
    step_s = share / min(speeds)
    course = Course([], [])
    for step in range(int(until_s / step_s)):
        for worker, speed in enumerate(speeds):
            course.cycles.append(Cycle(worker, step * step_s, step * step_s + share / speed, step, 0, share))
        course.steps_s.append((step + 1) * step_s)
    return course
