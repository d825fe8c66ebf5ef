"""The order of one stage where batches come one at a time, each of its own size, and nothing is known of the next.

It is two_bw's, without optimizer steps: whoever hands out the batches makes them. Two stages, batches of 3 and 2
microbatches; a digit is the forward of one, a small one its backward, which takes two columns here::

    0·1₀▁2₁▁3₂▁4₃▁·₄▁   where there is a next batch when the last one has begun, the stages do not drain
    ·0₀▁1₁▁2₂▁3₃▁4₄▁
    0·1₀▁2₁▁·₂▁·3·4₃▁   where there is none for now, what has begun is finished, and the next one fills them again
    ·0₀▁1₁▁2₂▁···3₃▁4
"""

from collections import deque
from collections.abc import Iterator

from slipstream.errors import ScheduleError
from slipstream.pipeline.actions import Action

NUM_BUFFERS = 2
"""Of weights, in turns: while a batch begins, the one before may be under way still."""


def cycle_order(*, stage: int, num_ahead: int, sizes: Iterator[int]) -> Iterator[Action]:
    """Yield F, B and N actions; an action's version is the number of its batch, counted from 0.

    Weights are two buffers in turns, so batch c may not begin before the last backward of batch c - 2: a batch that
    another one follows must have ``num_ahead`` microbatches or more.

    Args:
        stage: Whose actions.
        num_ahead: Forwards that it starts ahead of its backwards.
        sizes: Microbatches of the next batch, asked for when all forwards so far have begun. 0: none for now; all that
            has begun is finished, then the next one is asked for.

    Raises:
        ScheduleError: A third batch would begin.

    Example:
        >>> " ".join(map(str, cycle_order(stage=0, num_ahead=1, sizes=iter([2, 1, 0]))))
        '0F0@0 0F1@0 0B0@0 0F2@1 0B1@0 0N@1 0B2@1 0N@2'
    """
    begun = done = 0
    batch = -1  # the newest
    ends: deque[int] = deque()  # of the batches under way
    for size in sizes:
        if size:
            batch += 1
            ends.append(begun + size)
            if len(ends) > NUM_BUFFERS:
                raise ScheduleError(
                    f"batch {batch} begins on stage {stage} while {len(ends) - 1} others are under way; there are "
                    f"{NUM_BUFFERS} buffers of weights. Give batches of at least {num_ahead} microbatches."
                )
        end = begun + size
        while begun < end or (not size and done < begun):
            if begun < end:
                yield Action(stage, "F", begun, batch)
                begun += 1
            if begun - done > (num_ahead if size else 0):
                of = batch - len(ends) + 1
                yield Action(stage, "B", done, of)
                done += 1
                if done == ends[0]:
                    ends.popleft()
                    yield Action(stage, "N", None, of + 1)
