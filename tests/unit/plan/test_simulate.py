"""The simulator against the theory of pipeline schedules."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError, ScheduleError
from slipstream.pipeline.actions import Action, parse_order
from slipstream.pipeline.schedules import ORDERS, ScheduleSpec, order, schedule_spec, stream
from slipstream.plan.simulate import SimulateConfig, Span, Timeline, Times, build_timeline, run_simulate, simulate

times_ms = st.integers(1, 50).map(lambda tenths: tenths / 10)
sizes = st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(1, 6)).map(
    lambda x: (x[0], max(1, x[0] - 1) + x[1], x[2])
)


def relative_step_time(name: str, p: int, m: int, **settings_) -> float:
    config = SimulateConfig(pipeline_schedule=name, num_stages=p, num_microbatches=m, num_batches=8, **settings_)
    return run_simulate(config)["step_time_over_ideal"]


@settings(deadline=None, max_examples=60)
@given(size=sizes, forward_ms=times_ms, backward_ms=times_ms)
def test_flushing_wastes_the_fill_and_drain_of_every_batch(size, forward_ms: float, backward_ms: float) -> None:
    p, m, n = size
    for name in ("one_f_one_b", "gpipe"):
        config = SimulateConfig(
            pipeline_schedule=name,
            num_stages=p,
            num_microbatches=m,
            num_batches=n,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
        )
        timeline = build_timeline(config)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.step_time_ms == pytest.approx((m + p - 1) * (forward_ms + backward_ms))
        assert run_simulate(config, timeline)["step_time_over_ideal"] == pytest.approx((m + p - 1) / m)


@settings(deadline=None, max_examples=60)
@given(size=sizes, forward_ms=times_ms, backward_ms=times_ms)
def test_two_bw_wastes_one_fill_and_drain_a_run(size, forward_ms: float, backward_ms: float) -> None:
    p, m, n = size
    config = SimulateConfig(
        num_stages=p, num_microbatches=m, num_batches=n, forward_ms=forward_ms, backward_ms=backward_ms
    )
    timeline = build_timeline(config)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m * n + p - 1))
    assert timeline.makespan_ms == pytest.approx((m * n + p - 1) * (forward_ms + backward_ms))


@pytest.mark.parametrize(
    ("p", "m", "one_f_one_b", "interleaved"),
    [(4, 4, 1.75, 1.38), (8, 8, 1.88, 1.44), (8, 32, 1.22, 1.11), (16, 16, 1.94, 1.47)],
)
def test_step_time_over_the_ideal(p: int, m: int, one_f_one_b: float, interleaved: float) -> None:
    assert relative_step_time("one_f_one_b", p, m) == pytest.approx(one_f_one_b, abs=0.006)
    assert relative_step_time("interleaved", p, m) == pytest.approx(interleaved, abs=0.006)
    assert relative_step_time("interleaved", p, m) == pytest.approx((2 * m + p - 1) / (2 * m))
    assert relative_step_time("two_bw", p, m) == pytest.approx(1.0)


def two_bw_step_overhead(*, m: int, optimizer_ms: float, norm_ms: float = 0.0) -> float:
    config = SimulateConfig(
        num_stages=8, num_microbatches=m, num_batches=12, optimizer_ms=optimizer_ms, norm_ms=norm_ms
    )
    return build_timeline(config).step_time_ms - m * 3


def test_deferred_step_costs_its_own_time_alone() -> None:
    assert two_bw_step_overhead(m=8, optimizer_ms=1) == pytest.approx(1)
    assert two_bw_step_overhead(m=16, optimizer_ms=1) == pytest.approx(1)


def test_step_right_after_the_last_backward_would_bring_the_flush_back() -> None:
    spec = ScheduleSpec(name="two_bw", num_ranks=8, num_microbatches=8)

    def early(rank: int) -> list[Action]:
        actions = [a for a in order(spec, rank=rank, num_batches=12) if a.op != "O"]
        return list(itertools.chain.from_iterable((a, a._replace(op="O")) if a.op == "N" else (a,) for a in actions))

    timeline = simulate([early(rank) for rank in range(8)], num_microbatches=8, times=Times(optimizer_ms=1))
    assert timeline.step_time_ms - 8 * 3 == pytest.approx(1 + 7 * 2)


def test_norm_hides_behind_the_deferral_except_where_there_is_no_room() -> None:
    assert two_bw_step_overhead(m=8, optimizer_ms=0, norm_ms=3) == pytest.approx(0)
    assert two_bw_step_overhead(m=7, optimizer_ms=0, norm_ms=3) == pytest.approx(3)


def cycle_ms(*, p: int, m: int, extra: int, latency_ms: float) -> float:
    config = SimulateConfig(
        num_stages=p, num_microbatches=m, num_batches=60, num_extra_in_flight=extra, latency_ms=latency_ms
    )
    timeline = build_timeline(config)
    starts = [span.start_ms for span in timeline.ranks[0] if span.action.op == "F"]
    return (starts[40 * m] - starts[20 * m]) / (20 * m)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 3, 7])
def test_extra_microbatches_hide_latency_hop_by_hop(p: int, extra: int) -> None:
    bare = math.ceil(max(0, p - 1 - extra) / (extra + 1))  # hops in a row without an extra microbatch
    stated = 3 + 2 * 0.5 * bare / (bare + 1)
    assert cycle_ms(p=p, m=24, extra=extra, latency_ms=0.5) == pytest.approx(stated, rel=0.002)


@pytest.mark.parametrize("name", ORDERS)
def test_simulated_order_is_the_executed_order(name: str) -> None:
    spec = schedule_spec(name, num_ranks=4, num_microbatches=6)
    streams = [list(stream(spec, rank=rank, num_batches=3)) for rank in range(4)]
    timeline = simulate(streams, num_microbatches=6, times=Times(latency_ms=0.3, jitter=0.3))
    for spans, actions in zip(timeline.ranks, streams):
        assert [span.action for span in spans] == [a for a in actions if "_" not in a.op]
        for span, following in itertools.pairwise(spans):
            assert span.start_ms <= span.end_ms <= following.start_ms


def test_inputs_arrive_before_they_are_used() -> None:
    spec = schedule_spec("interleaved", num_ranks=3, num_microbatches=5)
    orders = [order(spec, rank=rank, num_batches=2) for rank in range(3)]
    timeline = simulate(orders, num_microbatches=5, times=Times(latency_ms=0.7, jitter=0.5, norm_ms=0.2))
    spans = {span.action: span for rank in timeline.ranks for span in rank}
    for (stage, op, microbatch, version), span in spans.items():
        if op == "F" and stage > 0:
            assert span.start_ms >= spans[Action(stage - 1, "F", microbatch, version)].end_ms + 0.7
        if op == "B":
            source = spans.get(Action(stage + 1, "B", microbatch, version))
            assert source is None or span.start_ms >= source.end_ms + 0.7
            assert span.start_ms >= spans[Action(stage, "F", microbatch, version)].end_ms
        if op == "O":
            assert span.start_ms >= 0.2 + max(spans[Action(other, "N", None, version)].end_ms for other in range(6))


def test_the_slowest_stage_sets_the_pace() -> None:
    spec = ScheduleSpec(name="two_bw", num_ranks=3, num_microbatches=4)
    orders = [order(spec, rank=rank, num_batches=10) for rank in range(3)]
    times = Times(forward_ms=[1, 2, 1], backward_ms=[2, 4, 2], optimizer_ms=[0, 0.5, 0])
    assert simulate(orders, num_microbatches=4, times=times).step_time_ms == pytest.approx(4 * 6 + 0.5)


def test_split_backward_halves_let_the_neighbour_start_earlier() -> None:
    streams = [
        "0F0@0 0I0@0 0W0@0 0N@1 0O@1",
        "1F0@0 1I0@0 1W0@0 1N@1 1O@1",
    ]
    whole = [text.replace("I0", "B0").replace(f"{i}W0@0 ", "") for i, text in enumerate(streams)]

    def makespan(texts: list[str]) -> float:
        return simulate([parse_order(text) for text in texts], num_microbatches=1, times=Times()).makespan_ms

    assert makespan(whole) == 1 + 1 + 2 + 2
    assert makespan(streams) == 1 + 1 + 1 + 2


def test_jitter_is_a_function_of_its_seed() -> None:
    spec = ScheduleSpec(name="two_bw", num_ranks=2, num_microbatches=2)

    def run(seed: int) -> Timeline:
        orders = [order(spec, rank=rank, num_batches=3) for rank in range(2)]
        return simulate(orders, num_microbatches=2, times=Times(jitter=0.2, seed=seed))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ScheduleError, match="deadlock: no rank can go on; they wait at 0B0@0, 1F0@0"):
        simulate([parse_order("0B0@0 0F0@0"), parse_order("1F0@0 1B0@0")], num_microbatches=1, times=Times())


def test_numbers_of_one_stage_too_few() -> None:
    with pytest.raises(ConfigError, match="forward_ms has 1 numbers for 2 stages"):
        simulate([parse_order("0F0@0"), parse_order("1F0@0")], num_microbatches=1, times=Times(forward_ms=[1.0]))


def test_measured_spans_need_not_begin_at_zero() -> None:
    spans = (Span(Action(0, "F", 0, 0), 10.0, 11.0), Span(Action(0, "B", 0, 0), 13.0, 15.0))
    timeline = Timeline(ranks=(spans,), num_microbatches=1)
    assert (timeline.makespan_ms, timeline.bubble_fraction) == (5.0, pytest.approx(0.4))


def test_nothing_at_all() -> None:
    timeline = simulate([[], []], num_microbatches=1, times=Times())
    assert (timeline.makespan_ms, timeline.bubble_fraction, timeline.step_time_ms) == (0.0, 0.0, 0.0)


def test_the_command_s_answer() -> None:
    result = json.loads(json.dumps(run_simulate(SimulateConfig(num_stages=8, num_microbatches=8, num_batches=64))))
    assert result["bubble_fraction"] == pytest.approx(7 / (8 * 64 + 7))
    assert result["max_live_versions"] == 2
    assert result["staleness_max"] == 1
    assert result["peak_activations"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert result["step_time_ms"] == result["ideal_step_time_ms"] == 24


def test_the_command_s_answer_for_interleaved_has_a_number_a_stage() -> None:
    result = run_simulate(SimulateConfig(pipeline_schedule="interleaved", num_stages=2, num_virtual_stages=3))
    assert (result["num_ranks"], result["num_stages"], len(result["peak_activations"])) == (2, 6, 6)
    assert (result["max_live_versions"], result["staleness_max"]) == (1, 0)


def test_a_single_batch_is_not_stale() -> None:
    assert run_simulate(SimulateConfig(num_batches=1))["staleness_max"] == 0


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"num_stages": 0}, "num_stages is 0; give 1 or more"),
        ({"num_batches": 0}, "num_batches is 0"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"forward_ms": -1.0}, "forward_ms is -1.0; give 0, or a number of milliseconds from 1e-09 to 1e"),
        ({"backward_ms": 1e308}, r"backward_ms is 1e\+308; give 0, or a number of milliseconds from 1e-09 to 1e"),
        ({"latency_ms": math.nan}, "latency_ms is nan"),
        ({"num_stages": 9, "num_microbatches": 4}, "two_bw with 9 stages needs at least 8 microbatches"),
    ],
)
def test_settings_out_of_range(settings_: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_simulate(SimulateConfig(**settings_))
