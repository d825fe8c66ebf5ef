"""A pipeline schedule as data: the action, its text form, and the pass that adds communication.

One stream of actions feeds the runtime, the validator, the simulator, the plots and the golden tests. The text
form is that of torch.distributed.pipelining with the weights version behind an ``@``::

    0F4@1       stage 0 runs the forward of microbatch 4 on weights version 1
    0N@2        stage 0 hands in its share of the gradient norm that version 2 is clipped by
    0O@2        stage 0 makes its optimizer step and publishes version 2
    1RECV_F4    stage 1 waits for the activations of microbatch 4

Microbatches are counted over the whole run: batch b owns microbatches b m ... (b+1) m - 1, and its gradient makes
version b+1.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, get_args

from slipstream.errors import ScheduleError

Op = Literal["F", "B", "I", "W", "N", "O", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""F forward, B backward, I / W its input- and weight-gradient halves, N norm posted (waits for nobody, but a
tied embedding's stage for the head's gradient, which has been sent by then), O optimizer step and publish (waits until
every stage has posted N), SEND (never waits) and RECV (waits) of each direction."""

COMPUTE_OPS = frozenset({"F", "B", "I", "W"})
"""Ops that run one microbatch on one weights version."""
STEP_OPS = frozenset({"N", "O"})
"""Ops that belong to a whole batch; their version is the one being made."""
COMMUNICATION_OPS = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
"""Ops between ranks. The stage is the one that sends or receives."""

_PATTERN = re.compile(r"(\d+)(" + "|".join(sorted(get_args(Op), key=len, reverse=True)) + r")(\d*)(?:@(\d+))?")


class Action(NamedTuple):
    """One thing one stage does.

    Attributes:
        stage: Stage, from 0.
        op: What is done, see :data:`Op`.
        microbatch: Microbatch, counted over the whole run; none for N and O.
        version: Weights version: read by F, B, I, W, made by N and O; none for communication.

    Example:
        >>> str(Action(0, "F", 4, 1)), str(Action(0, "O", None, 1)), str(Action(1, "RECV_F", 4))
        ('0F4@1', '0O@1', '1RECV_F4')
    """

    stage: int
    op: Op
    microbatch: int | None = None
    version: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        version = "" if self.version is None else f"@{self.version}"
        return f"{self.stage}{self.op}{microbatch}{version}"


def parse(text: str) -> Action:
    """Read one action from its text form.

    Raises:
        ScheduleError: The text is not an action, or lacks or has too much of what its op needs.

    Example:
        >>> parse("2B7@1")
        Action(stage=2, op='B', microbatch=7, version=1)
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"'{text}' is not an action. Write stage, op, microbatch and @version, as in 0F4@1, 0O@1 or 1RECV_F4; "
            f"ops are {', '.join(get_args(Op))}."
        )
    stage, op, microbatch, version = match.groups()
    if (microbatch != "") != (op not in STEP_OPS) or (version is not None) != (op not in COMMUNICATION_OPS):
        form = f"{stage}{op}"
        form += "" if op in STEP_OPS else "MICROBATCH"
        form += "" if op in COMMUNICATION_OPS else "@VERSION"
        raise ScheduleError(f"'{text}' does not fit its op {op}. Write {form}.")
    return Action(
        int(stage),
        op,  # type: ignore[arg-type]  # the pattern admits nothing but an Op
        int(microbatch) if microbatch else None,
        int(version) if version is not None else None,
    )


def parse_order(text: str) -> list[Action]:
    """Read actions separated by blanks; the inverse of :func:`format_order`."""
    return [parse(word) for word in text.split()]


def format_order(actions: Iterable[Action]) -> str:
    """Write actions on one line.

    Example:
        >>> format_order(parse_order("0F0@0  0B0@0 0N@1 0O@1"))
        '0F0@0 0B0@0 0N@1 0O@1'
    """
    return " ".join(map(str, actions))


def stage_rank(stage: int, *, num_ranks: int) -> int:
    """Return the rank that holds a stage: rank r holds stages r, r + num_ranks, r + 2 num_ranks, ..."""
    return stage % num_ranks


def add_communication(order: Iterable[Action], *, num_stages: int, num_ranks: int) -> Iterator[Action]:
    """Add the sends and receives to one rank's compute order.

    A receive stands right before the action that needs it and a send right after the action that feeds it, so an
    optimizer step placed before a forward also stands before the wait for that forward's input. Neighbouring stages
    on one rank hand over without a message. Pure and lazy: an infinite order gives an infinite stream, and an
    action is taken from ``order`` only when it is asked for.

    Args:
        order: F, B, I, W, N and O actions of one rank, in the order of execution.
        num_stages: Stages of the whole pipeline.
        num_ranks: Ranks; see :func:`stage_rank`.

    Returns:
        The order with communication.

    Example:
        >>> format_order(add_communication(parse_order("1F0@0 1B0@0"), num_stages=3, num_ranks=3))
        '1RECV_F0 1F0@0 1SEND_F0 1RECV_B0 1B0@0 1SEND_B0'
    """
    between_ranks = num_ranks > 1
    for action in order:
        stage, op, microbatch, _ = action
        downstream = between_ranks and stage < num_stages - 1
        upstream = between_ranks and stage > 0
        if op == "F":
            if upstream:
                yield Action(stage, "RECV_F", microbatch)
            yield action
            if downstream:
                yield Action(stage, "SEND_F", microbatch)
        elif op in ("B", "I"):
            if downstream:
                yield Action(stage, "RECV_B", microbatch)
            yield action
            if upstream:
                yield Action(stage, "SEND_B", microbatch)
        else:
            yield action
