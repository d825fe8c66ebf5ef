import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import SCHEDULE_DELAY
from slipstream.errors import ConfigError, ScheduleError
from slipstream.pipeline.actions import Action, format_order
from slipstream.pipeline.schedules import ORDERS, ScheduleSpec, order, schedule_spec, stream, verify

FLUSHING = [name for name, delay in SCHEDULE_DELAY.items() if delay == 0]


@st.composite
def two_bw_specs(draw: st.DrawFn) -> ScheduleSpec:
    num_ranks = draw(st.integers(1, 7))
    extra = draw(st.integers(0, 9))
    least = max(1, num_ranks - 1 + extra)
    return ScheduleSpec(
        name="two_bw",
        num_ranks=num_ranks,
        num_microbatches=draw(st.integers(least, least + 8)),
        num_extra_in_flight=extra,
    )


@st.composite
def flushing_specs(draw: st.DrawFn) -> ScheduleSpec:
    return schedule_spec(
        draw(st.sampled_from(FLUSHING)),
        num_ranks=draw(st.integers(1, 6)),
        num_microbatches=draw(st.integers(1, 16)),
        num_virtual_stages=draw(st.integers(1, 4)),
    )


def test_every_schedule_of_the_config_is_here() -> None:
    assert set(ORDERS) == set(SCHEDULE_DELAY)


@settings(deadline=None, max_examples=150)
@given(spec=two_bw_specs(), first_batch=st.integers(0, 4), count=st.integers(1, 5))
def test_two_bw_keeps_its_promises(spec: ScheduleSpec, first_batch: int, count: int) -> None:
    # verify() raises unless: no deadlock, dependencies met, versions max(b - 1, 0), channels first in first out.
    facts = verify(spec, first_batch=first_batch, num_batches=first_batch + count)

    assert facts.max_live_versions <= 2
    assert facts.staleness_max == (1 if first_batch + count > 1 else 0)
    started = count * spec.num_microbatches
    stated = [spec.num_ranks - stage + spec.num_extra_in_flight for stage in range(spec.num_ranks)]
    if spec.num_extra_in_flight == 0:
        assert list(facts.peak_activations) == [min(bound, started) for bound in stated]
    else:
        assert all(peak <= min(bound, started) for peak, bound in zip(facts.peak_activations, stated))
    if spec.num_ranks > 1:
        assert facts.peak_activations[0] == min(stated[0], started)
        assert facts.peak_activations[-1] == 1


@settings(deadline=None, max_examples=100)
@given(spec=flushing_specs(), first_batch=st.integers(0, 3), count=st.integers(1, 3))
def test_flushing_schedules_keep_theirs(spec: ScheduleSpec, first_batch: int, count: int) -> None:
    facts = verify(spec, first_batch=first_batch, num_batches=first_batch + count)

    assert (facts.max_live_versions, facts.staleness_max) == (1, 0)
    m, p = spec.num_microbatches, spec.num_ranks
    if spec.name == "gpipe":
        assert list(facts.peak_activations) == [m] * p
    if spec.name == "one_f_one_b":
        assert list(facts.peak_activations) == [min(p - stage, m) for stage in range(p)]


@settings(deadline=None, max_examples=60)
@given(spec=two_bw_specs().filter(lambda spec: spec.num_ranks > 1 and spec.num_microbatches > 1))
def test_two_versions_suffice_from_the_stated_number_of_microbatches_on_and_not_below(spec: ScheduleSpec) -> None:
    least = spec.num_ranks - 1 + spec.num_extra_in_flight
    verify(dataclasses.replace(spec, num_microbatches=least), num_batches=4)
    if least > 1:
        with pytest.raises(ConfigError, match=f"needs at least {least} .* given {least - 1}: .* Raise .* to {least}"):
            dataclasses.replace(spec, num_microbatches=least - 1)
        below = dataclasses.replace(spec, num_microbatches=least)
        object.__setattr__(below, "num_microbatches", least - 1)
        with pytest.raises(ScheduleError):
            verify(below, num_batches=4)


@settings(deadline=None)
@given(spec=two_bw_specs(), rank=st.integers(0, 6))
def test_step_comes_the_stated_number_of_pairs_after_its_norm(spec: ScheduleSpec, rank: int) -> None:
    spec = dataclasses.replace(spec, num_extra_in_flight=0)
    rank = min(rank, spec.num_ranks - 1)
    actions = list(order(spec, rank=rank, num_batches=5))
    room = spec.num_microbatches - spec.num_ranks + 1 + rank
    for version in range(1, 5):  # the last one has no forwards to stand behind
        norm, step = (actions.index(Action(rank, op, None, version)) for op in ("N", "O"))
        between = [action.op for action in actions[norm:step] if action.op in "FB"]
        forwards = between.count("F")
        if version == 4:
            assert forwards <= min(rank + 1, room)
        else:
            assert between == ["F", "B"] * min(rank + 1, room)


@settings(deadline=None)
@given(spec=two_bw_specs())
def test_step_stands_before_the_first_forward_that_reads_its_version(spec: ScheduleSpec) -> None:
    for rank in range(spec.num_ranks):
        seen = 0
        for action in order(spec, rank=rank, num_batches=5):
            if action.op == "F":
                assert action.version is not None
                assert action.version <= seen
            elif action.op == "O":
                assert action.version == seen + 1
                seen += 1


@settings(deadline=None, max_examples=50)
@given(spec=st.one_of(two_bw_specs(), flushing_specs()), num_batches=st.integers(7, 9))
def test_six_batches_show_all_that_more_do(spec: ScheduleSpec, num_batches: int) -> None:
    assert verify(spec, num_batches=6) == verify(spec, num_batches=num_batches)


@pytest.mark.parametrize("name", ORDERS)
def test_endless_stream_begins_like_a_long_one(name: str) -> None:
    spec = schedule_spec(name, num_ranks=3, num_microbatches=4)
    for rank in range(3):
        endless = itertools.islice(stream(spec, rank=rank), 200)
        long = itertools.islice(stream(spec, rank=rank, num_batches=50), 200)
        assert format_order(endless) == format_order(long)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_resumed_stream_makes_the_updates_that_the_first_one_still_owed(name: str, rank: int) -> None:
    spec = schedule_spec(name, num_ranks=3, num_microbatches=4)
    whole = list(order(spec, rank=rank, num_batches=7))
    resumed = list(order(spec, rank=rank, first_batch=3, num_batches=7))

    def of_batches_from_3(actions: list[Action], ops: str) -> list[Action]:
        return [a for a in actions if a.op in ops and (a.microbatch is None or a.microbatch >= 12)]

    for ops in ("F", "B"):
        assert of_batches_from_3(resumed, ops) == of_batches_from_3(whole, ops)
    assert [a for a in resumed if a.op == "O"] == [a for a in whole if a.op == "O"][3 * len(spec.stages(rank)) :]


def test_no_batches_no_actions() -> None:
    for name in ORDERS:
        spec = schedule_spec(name, num_ranks=4, num_microbatches=6)
        assert list(stream(spec, rank=0, num_batches=0)) == []
        assert list(stream(spec, rank=1, first_batch=3, num_batches=3)) == []


def test_one_rank_needs_no_messages() -> None:
    for name in ORDERS:
        spec = schedule_spec(name, num_ranks=1, num_microbatches=3)
        assert not [a for a in stream(spec, rank=0, num_batches=2) if "_" in a.op]
        verify(spec, num_batches=3)


@settings(deadline=None)
@given(num_ranks=st.integers(2, 12), extra=st.integers(0, 30))
def test_extra_microbatches_are_spread_over_the_hops(num_ranks: int, extra: int) -> None:
    spec = ScheduleSpec(
        name="two_bw", num_ranks=num_ranks, num_microbatches=num_ranks + extra, num_extra_in_flight=extra
    )
    ahead = [spec.num_ahead(rank) for rank in range(num_ranks)]
    hops = [nearer - further for nearer, further in itertools.pairwise(ahead)]
    assert (ahead[0], ahead[-1]) == (num_ranks - 1 + extra, 0)
    assert min(hops) >= 1
    assert max(hops) - min(hops) <= 1


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"name": "two_wb"}, r"unknown pipeline schedule 'two_wb'. Did you mean 'two_bw'\? Allowed: two_bw, "),
        ({"num_ranks": 0}, "num_ranks is 0; give 1 or more"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"num_virtual_stages": 0}, "num_virtual_stages is 0"),
        ({"num_extra_in_flight": -1}, "num_extra_in_flight is -1; give 0 or more"),
        ({"num_virtual_stages": 2}, "two_bw has one stage a rank, but num_virtual_stages is 2"),
        ({"name": "gpipe", "num_extra_in_flight": 1}, "gpipe cannot start microbatches of the next batch ahead"),
        ({"num_microbatches": 6}, "two_bw with 8 stages needs at least 7 microbatches .* given 6"),
        ({"num_extra_in_flight": 3}, "with 8 stages and 3 extra in flight needs at least 10 .* given 8"),
    ],
)
def test_settings_that_do_not_fit(settings_: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScheduleSpec(**{"name": "two_bw", "num_ranks": 8, "num_microbatches": 8} | settings_)


def test_rank_that_does_not_exist() -> None:
    spec = ScheduleSpec(name="gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ConfigError, match="rank is 2; ranks are 0 to 1"):
        order(spec, rank=2)


def test_a_setting_of_another_schedule_is_left_aside() -> None:
    spec = schedule_spec("gpipe", num_ranks=2, num_microbatches=2, num_extra_in_flight=2, num_virtual_stages=3)
    assert (spec.num_extra_in_flight, spec.num_virtual_stages) == (0, 1)
