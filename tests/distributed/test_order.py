"""What the ranks execute is what the schedule says and the simulator draws, in that order, within the stated memory."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.distributed.harness import as_pipeline, on_rank, pipeline_executor, settings, single, whole
from tests.distributed.pool import shared_pool

from slipstream.pipeline.actions import parse
from slipstream.pipeline.flow import channel_window
from slipstream.pipeline.runtime import pipeline_spec
from slipstream.pipeline.schedules import ScheduleSpec, order, stream, verify
from slipstream.pipeline.transport import NUM_AHEAD
from slipstream.plan.simulate import Times, simulate


def recorded(rank, config):
    """Train as one rank; return every action with begin and end, and the most microbatches that were in flight."""
    executor = pipeline_executor(rank, config, record_steps=config.train.num_steps)
    for _ in range(config.train.num_steps):
        executor.run_step()
    executor.close()
    buffers = [len(program.parts.modules) for program in executor._programs.values()]
    return [(str(action), begin, end) for action, begin, end in executor.spans], executor.peak_in_flight, buffers


@st.composite
def sizes(draw):
    schedule = draw(st.sampled_from(["two_bw", "two_bw", "two_bw", "one_f_one_b", "gpipe", "interleaved"]))
    num_stages = draw(st.integers(1, 3 if schedule == "interleaved" else 4))
    extra = draw(st.integers(0, 3)) if schedule == "two_bw" else 0
    least = num_stages - 1 + extra if schedule == "two_bw" else 1
    return schedule, num_stages, draw(st.integers(max(least, 1), max(least, 1) + 3)), draw(st.integers(1, 4)), extra


@given(sizes())
@hypothesis_settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_ranks_execute_what_the_simulator_draws(size):
    schedule, num_stages, num_microbatches, num_batches, extra = size
    config = settings(
        model={"num_layers": 6, "dim": 4, "ffn_dim": 4},
        pipeline={"num_microbatches": num_microbatches},
        train={"num_steps": num_batches, "microbatch_size": 1},
    )
    config = as_pipeline(config, num_stages, schedule, extra=extra)
    spec = pipeline_spec(config)
    facts = verify(spec, num_batches=num_batches)
    orders = [list(order(spec, rank=rank, num_batches=num_batches)) for rank in range(num_stages)]
    timeline = simulate(orders, num_microbatches=num_microbatches, times=Times())
    results = shared_pool(num_stages).run(recorded, config)

    for rank, (spans, peaks, buffers) in enumerate(results):
        executed = [parse(text) for text, _, _ in spans]
        assert executed == list(stream(spec, rank=rank, num_batches=num_batches))
        computed = [action for action in executed if "SEND" not in action.op and "RECV" not in action.op]
        assert computed == [span.action for span in timeline.ranks[rank]]
        assert peaks == [facts.peak_activations[stage] for stage in spec.stages(rank)]
        assert set(buffers) == {spec.staleness + 1}
        for stage in spec.stages(rank):
            assert versions_needed([action for action in executed if action.stage == stage]) <= facts.max_live_versions
    assert facts.max_live_versions <= 2
    assert facts.staleness_max <= 1
    if schedule == "two_bw":
        assert all(results[rank][1][0] <= num_stages - rank + extra for rank in range(num_stages))
    assert messages_arrive_after_they_left([spans for spans, _, _ in results])


def versions_needed(actions) -> int:
    """The most weights versions that outstanding backwards and the newest version take up at once."""
    latest, outstanding, most = 0, {}, 1
    for action in actions:
        if action.op == "F":
            outstanding[action.microbatch] = action.version
        elif action.op == "B":
            assert outstanding.pop(action.microbatch) == action.version
        elif action.op == "O":
            latest = action.version
        most = max(most, len({latest, *outstanding.values()}))
    return most


def messages_arrive_after_they_left(ranks) -> bool:
    """One clock serves all processes of a machine."""
    left, arrived = {}, {}
    for text, begin, end in itertools.chain.from_iterable(ranks):
        action = parse(text)
        if action.op.startswith("SEND"):
            receiver = action.stage + (1 if action.op == "SEND_F" else -1)
            left[receiver, action.op[-1], action.microbatch] = begin
        elif action.op.startswith("RECV"):
            arrived[action.stage, action.op[-1], action.microbatch] = end
    return left.keys() == arrived.keys() and all(arrived[key] > left[key] for key in left)


# --- bounded channels -------------------------------------------------------------------------------------------


def runs_through(spec: ScheduleSpec, *, num_batches: int, window) -> bool:
    """Whether ranks whose sends wait get to the end, all pausing for one another at every step.

    A message can leave once its receive is posted, and ``NUM_AHEAD`` are posted ahead. A sender keeps ``window``
    messages at most and waits for the oldest. A pause is an evaluation, or the end of a run that was asked to stop.
    """
    ranks = range(spec.num_ranks)
    streams = [list(stream(spec, rank=rank, num_batches=num_batches)) for rank in ranks]
    positions, paused_at = [0] * spec.num_ranks, [0] * spec.num_ranks
    sent: dict[tuple, int] = {}
    taken: dict[tuple, int] = {}
    last_stage = [max(spec.stages(rank)) for rank in ranks]

    def step(rank) -> bool:
        if paused_at[rank] > min(paused_at):
            return False
        action = streams[rank][positions[rank]]
        if action.op.startswith("SEND"):
            other = action.stage + (1 if action.op == "SEND_F" else -1)
            key = (rank, other % spec.num_ranks, action.op[-1], min(action.stage, other) % spec.num_ranks)
            if sent.get(key, 0) - window(rank) >= taken.get(key, 0) + NUM_AHEAD:
                return False
            sent[key] = sent.get(key, 0) + 1
        elif action.op.startswith("RECV"):
            other = action.stage + (-1 if action.op == "RECV_F" else 1)
            key = (other % spec.num_ranks, rank, action.op[-1], min(action.stage, other) % spec.num_ranks)
            if sent.get(key, 0) <= taken.get(key, 0):
                return False
            taken[key] = taken.get(key, 0) + 1
        elif action.op == "O" and action.stage == last_stage[rank]:
            paused_at[rank] = action.version
        positions[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while positions[rank] < len(streams[rank]) and step(rank):
                moved = True
    return all(position == len(each) for position, each in zip(positions, streams))


@given(
    schedule=st.sampled_from(["two_bw", "one_f_one_b", "gpipe", "interleaved"]),
    num_ranks=st.integers(1, 9),
    more=st.integers(0, 9),
    extra=st.integers(0, 12),
    virtual=st.integers(2, 3),
)
@hypothesis_settings(max_examples=150, deadline=None, database=None)
def test_what_a_channel_keeps_is_enough(schedule, num_ranks, more, extra, virtual):
    extra = extra if schedule == "two_bw" else 0
    spec = ScheduleSpec(
        name=schedule,
        num_ranks=num_ranks,
        num_microbatches=max(1, num_ranks - 1 + extra if schedule == "two_bw" else 1) + more,
        num_extra_in_flight=extra,
        num_virtual_stages=virtual if schedule == "interleaved" else 1,
    )
    assert runs_through(spec, num_batches=4, window=functools.partial(channel_window, spec))


def test_a_pause_needs_room_for_what_the_rank_before_has_in_flight():
    """With its own in-flight number as its bound, a rank waited at a gradient while the other paused: a deadlock."""
    spec = ScheduleSpec(name="two_bw", num_ranks=2, num_microbatches=5, num_extra_in_flight=4)
    assert not runs_through(spec, num_batches=3, window=lambda rank: spec.num_ahead(rank) + 2)
    config = settings(
        model={"num_layers": 2}, pipeline={"num_microbatches": 5}, staleness={"delay": 1}, train={"num_steps": 5}
    )
    found = whole(shared_pool(2).run(on_rank, as_pipeline(config, 2, extra=4), tuple(range(6))))
    assert found == single(config, evaluate_at=tuple(range(6)))


@pytest.mark.parametrize(
    ("num_stages", "schedule", "extra"), [(4, "two_bw", 0), (3, "two_bw", 2), (2, "interleaved", 0)]
)
def test_late_ranks_change_nothing(num_stages, schedule, extra):
    """Ranks that dawdle at random actions, and evaluations between all steps: races would show."""
    config = settings(
        model={"tie_embeddings": True, "dropout": 0.1},
        pipeline={"num_microbatches": 4},
        staleness={"delay": int(schedule == "two_bw")},
    )
    expected = single(config, evaluate_at=(0, 1, 2, 3, 4, 5))
    config = as_pipeline(config, num_stages, schedule, extra=extra)
    assert whole(shared_pool(num_stages).run(on_rank, config, (0, 1, 2, 3, 4, 5), 0.004)) == expected
