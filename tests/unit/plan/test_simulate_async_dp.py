"""Asynchronous data parallelism on paper, against what can be said without a simulation."""

import dataclasses
import itertools
import json
import math
from collections import deque

import pytest

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.pipeline.cycle_order import cycle_order
from slipstream.plan.async_dp_text import async_dp_text, histogram_bars
from slipstream.plan.async_simulation import AsyncSimulation
from slipstream.plan.fleet import Fleet, FleetConfig, parse_speeds
from slipstream.plan.simulate_async_dp import simulate_async_dp
from slipstream.plan.station import Station

JITTER = "lognormal:0.3"


def found(**settings) -> dict:
    return simulate_async_dp(FleetConfig(**settings))


@pytest.mark.parametrize("dynamic_batches", [True, False])
@pytest.mark.parametrize("num_workers", [1, 4, 16])
def test_equal_workers_are_in_step_and_nothing_is_gained(num_workers, dynamic_batches):
    result = found(num_workers=num_workers, dynamic_batches=dynamic_batches, num_cycles=20)
    assert result["throughput_share"] == pytest.approx(1.0)
    assert result["sync_throughput_share"] == pytest.approx(1.0)
    assert result["speedup_vs_sync"] == pytest.approx(1.0)
    assert result["staleness_mean"] == pytest.approx((num_workers - 1) / num_workers)
    assert result["cycle_s"] == pytest.approx(0.8)
    assert result["ledger_balanced"]
    assert not result["pushes_rejected"]


@pytest.mark.parametrize("dynamic_batches", [True, False])
def test_one_slow_worker_holds_up_synchronous_training_alone(dynamic_batches):
    result = found(speeds="1,1,1,0.25", dynamic_batches=dynamic_batches, num_cycles=200)
    assert result["sync_throughput_share"] == pytest.approx(4 * 0.25 / 3.25)
    assert result["throughput_share"] == pytest.approx(1.0, abs=0.01)
    assert result["speedup_vs_sync"] == pytest.approx(3.25, rel=0.01)


@pytest.mark.parametrize(("num_workers", "gain"), [(8, 1.3), (64, 1.6), (512, 2.0)])
def test_nobody_waits_for_jitter(num_workers, gain):
    result = found(num_workers=num_workers, jitter=JITTER, num_cycles=max(10, 1600 // num_workers))
    assert 0.95 <= result["throughput_share"] <= 1.05
    assert result["speedup_vs_sync"] >= gain


@pytest.mark.parametrize("pushes_per_step", [0, 1, 4])
@pytest.mark.parametrize("dynamic_batches", [True, False])
def test_mean_staleness_is_set_by_concurrency_alone(pushes_per_step, dynamic_batches):
    settings = {"pushes_per_step": pushes_per_step, "dynamic_batches": dynamic_batches}
    result = found(num_workers=16, speeds="lognormal:0.5", jitter=JITTER, num_cycles=60, **settings)
    assert result["staleness_mean"] == pytest.approx(15 / result["pushes_per_step"], rel=0.02)
    assert result["staleness_mean_expected"] == pytest.approx(15 / result["pushes_per_step"])
    if not dynamic_batches:
        assert result["pushes_per_step"] == pytest.approx(pushes_per_step or 16, rel=0.02)


def test_dynamic_batches_bring_the_largest_staleness_down():
    settings = {"speeds": "1,2,4,8", "pushes_per_step": 1, "num_cycles": 100}
    even, plain = found(**settings), found(**settings, dynamic_batches=False)
    assert plain["staleness_max"] >= 3 * even["staleness_max"]


def test_a_busy_server_sets_the_pace():
    """Eight workers ask for ten pushes a second of a server that takes in five."""
    result = found(num_workers=8, server_ms=200.0, dynamic_batches=False, num_cycles=40)
    assert result["pushes_per_s"] == pytest.approx(5.0, rel=0.01)
    assert result["throughput_share"] == pytest.approx(0.5, rel=0.01)
    assert result["server_apply_utilisation"] == pytest.approx(1.0, abs=0.01)
    assert result["shards_needed"] == 3  # 10 * 0.2 / 3 = 0.67; two would be full
    enough = found(num_workers=8, server_ms=200.0, num_shards=3, dynamic_batches=False, num_cycles=40)
    assert enough["pushes_per_s"] == pytest.approx(8 / (0.8 + 0.2 / 3), rel=0.01)
    assert enough["server_apply_utilisation"] == pytest.approx(enough["pushes_per_s"] * 0.2 / 3, rel=0.05)


LINK = {"num_parameters": 1e9, "link_gbps": 40.0}  # 2 GB in 0.4 s


def test_a_worker_alone_fetches_computes_and_pushes_in_turn():
    result = found(num_workers=1, num_cycles=20, **LINK)
    assert result["cycle_s"] == pytest.approx(0.4 + 0.8 + 0.4)
    assert result["throughput_share"] == pytest.approx(0.5)
    assert result["server_in_utilisation"] == pytest.approx(0.25, abs=0.02)


def test_one_link_for_eight_workers_is_always_busy():
    result = found(num_workers=8, dynamic_batches=False, num_cycles=40, **LINK)
    assert result["pushes_per_s"] == pytest.approx(1 / 0.4, rel=0.02)
    assert result["throughput_share"] == pytest.approx(2.5 / 10, rel=0.02)
    assert result["server_in_utilisation"] == pytest.approx(1.0, abs=0.02)
    assert result["sync_throughput_share"] == pytest.approx(0.8 / (0.8 + 2 * 7 / 8 * 0.4))
    # 8 workers of 1.6 s a cycle push 5 times a second: 2 s of transfers each second
    assert result["shards_needed"] == 3


def test_many_shards_leave_only_the_workers_own_links():
    result = found(num_workers=8, num_shards=1000, dynamic_batches=False, num_cycles=20, **LINK)
    assert result["throughput_share"] == pytest.approx(0.5, rel=0.01)


def test_local_steps_make_messages_rare():
    result = found(num_workers=4, local_steps=16, microbatches_per_worker=2, num_shards=1000, num_cycles=20, **LINK)
    assert result["throughput_share"] == pytest.approx(3.2 / (3.2 + 0.8), rel=0.01)
    assert result["sync_throughput_share"] == pytest.approx(0.2 / (0.2 + 2 * 3 / 4 * 0.4))


def test_a_synchronous_pipeline_drains_and_an_overlapped_exchange_is_free():
    fleet = Fleet(FleetConfig(num_workers=4, num_stages=4, microbatches_per_worker=4))
    assert fleet.sync_step_s(1) == pytest.approx(0.7)
    assert sum(fleet.own_units_per_s) == pytest.approx(40)
    # Each stage sends its quarter over its own link.
    fleet = Fleet(FleetConfig(num_workers=4, num_stages=4, microbatches_per_worker=4, sync_overlap=0.5, **LINK))
    assert fleet.all_reduce_s == pytest.approx(0.15)
    assert fleet.sync_step_s(1) == pytest.approx(0.7)


@pytest.mark.parametrize("num_stages", [2, 4, 9])
def test_a_pipeline_alone_never_drains_and_lags_behind_its_own_last_gradient(num_stages):
    result = found(num_workers=1, num_stages=num_stages, num_cycles=20)
    assert result["throughput_share"] == pytest.approx(1.0)
    assert set(result["staleness_histogram"]) == {"1"}
    assert result["staleness_mean_expected"] == pytest.approx(1.0)
    assert result["speedup_vs_sync"] == pytest.approx((8 + num_stages - 1) / 8)


@pytest.mark.parametrize("num_stages", [2, 4, 9])
def test_one_that_drains_waits_for_its_last_stage_and_lags_behind_nothing(num_stages):
    result = found(num_workers=1, num_stages=num_stages, num_cycles=20, pipeline_schedule="one_f_one_b")
    assert result["throughput_share"] == pytest.approx(8 / (8 + num_stages - 1))
    assert set(result["staleness_histogram"]) == {"0"}
    assert result["speedup_vs_sync"] == pytest.approx(1.0)


@pytest.mark.parametrize("pushes_per_step", [0, 1])
@pytest.mark.parametrize("speeds", ["constant", "lognormal:0.5"])
@pytest.mark.parametrize("dynamic_batches", [True, False])
def test_staleness_of_pipelines_that_never_drain(dynamic_batches, speeds, pushes_per_step):
    settings = {"speeds": speeds, "dynamic_batches": dynamic_batches, "pushes_per_step": pushes_per_step}
    result = found(num_workers=16, num_stages=4, jitter=JITTER, num_cycles=60, **settings)
    # Where a step is of one worker's microbatches, dynamic batches cannot give the fastest all that it would need.
    is_bounded = dynamic_batches and speeds != "constant" and pushes_per_step
    assert result["staleness_mean"] == pytest.approx(result["staleness_mean_expected"], rel=0.2 if is_bounded else 0.06)
    if speeds == "constant":
        per_step = result["pushes_per_step"]
        assert result["staleness_mean_expected"] == pytest.approx((1 + 15 * (1 + 4 / 8)) / per_step)
    assert result["ledger_balanced"]
    assert not result["pushes_rejected"]


@pytest.mark.parametrize(("num_stages", "count"), [(2, 6), (4, 8), (4, 4), (8, 8)])
def test_a_pipeline_of_uneven_cycles_takes_what_its_stages_take_action_by_action(num_stages, count):
    """A cycle slower than those beside it holds up stages of theirs: that is in the simulation, to the last."""
    settings = {"num_stages": num_stages, "microbatches_per_worker": count, "dynamic_batches": False}
    fleet = Fleet(FleetConfig(num_workers=1, jitter=JITTER, **settings))
    _, end = AsyncSimulation(fleet, num_cycles=40).run()
    paces = [fleet.cycle_s(0, cycle, count) / count for cycle in range(1, end.version + 1)]
    assert end.now_s == pytest.approx(end_of_last_backward(num_stages, count, paces))


def end_of_last_backward(num_stages: int, count: int, paces: list[float]) -> float:
    sizes = [count] * len(paces) + [0]
    todo = [
        deque(action for action in cycle_order(stage=stage, num_ahead=ahead, sizes=iter(sizes)) if action[1] in "FB")
        for stage, ahead in enumerate(reversed(range(num_stages)))
    ]
    free, done = [0.0] * num_stages, {}
    while any(todo):
        for stage, actions in enumerate(todo):
            while actions:
                _, op, microbatch, _ = actions[0]
                before = {"F": ("F", stage - 1, microbatch), "B": ("B", stage + 1, microbatch)}[op]
                if op == "B" and stage == num_stages - 1:
                    before = ("F", stage, microbatch)
                if before not in done and (op, stage) != ("F", 0):
                    break
                took = paces[microbatch // count] * (1 / 3 if op == "F" else 2 / 3)
                free[stage] = done[op, stage, microbatch] = max(free[stage], done.get(before, 0.0)) + took
                actions.popleft()
    return free[0]


def test_two_uneven_pipelines_are_as_stale_as_they_were_in_a_run():
    """benchmarks/results/hybrid.md: 1.19 in the mean and 2 at most; draining 0.50 and 2."""
    settings = {"speeds": "1,0.5", "num_stages": 2, "microbatches_per_worker": 6, "jitter": "lognormal:0.1"}
    ahead, drained = found(**settings), found(**settings, pipeline_schedule="one_f_one_b")
    assert (ahead["staleness_mean"], ahead["staleness_max"]) == (pytest.approx(1.19, abs=0.04), 2)
    assert (drained["staleness_mean"], drained["staleness_max"]) == (pytest.approx(0.50, abs=0.04), 2)
    # Eight and four microbatches, each with one of filling.
    assert drained["throughput_share"] == pytest.approx((8 / 9 * 2 + 4 / 5) / 3, abs=0.02)


def test_no_stage_of_a_pipeline_computes_while_it_fetches_or_pushes():
    """2 GB of four stages at 40 Gb/s each: 0.1 s each way."""
    settings = {"num_workers": 1, "num_stages": 4, "num_cycles": 20, "num_shards": 8, **LINK}
    assert found(**settings)["cycle_s"] == pytest.approx(0.1 + 0.8 + 0.1)
    drained = found(**settings, pipeline_schedule="one_f_one_b")
    assert drained["cycle_s"] == pytest.approx(0.1 + 1.1 + 0.1)


def test_local_steps_drain_a_pipeline_where_it_pushes_or_at_each_of_them():
    settings = {"num_workers": 2, "num_stages": 3, "local_steps": 4, "microbatches_per_worker": 8, "num_cycles": 20}
    assert found(**settings)["throughput_share"] == pytest.approx(32 / 34)
    assert found(**settings, pipeline_schedule="one_f_one_b")["throughput_share"] == pytest.approx(8 / 10)


def test_pipelines_that_fail_or_must_wait_begin_empty():
    settings = {"num_workers": 8, "num_stages": 4, "jitter": JITTER, "num_cycles": 60}
    failing = found(**settings, failures_per_hour=60.0, restart_s=20.0)
    assert failing["failures"] > 3
    assert failing["ledger_balanced"]
    bounded = found(**settings, max_staleness=2)
    assert bounded["staleness_max"] <= 2 < found(**settings)["staleness_max"]
    assert bounded["ledger_balanced"]


def test_stragglers_cost_the_others_nothing():
    settings = {"num_workers": 16, "straggler_fraction": 0.05, "straggler_slowdown": 5.0, "num_cycles": 100}
    result = found(**settings)
    assert result["throughput_share"] == pytest.approx(1.0, abs=0.05)
    # Of 16 cycles at least one is slow in 1 - 0.95^16 = 56 % of the steps.
    mean_step = 0.8 * (1 + 4 * (1 - 0.95**16))
    assert result["sync_throughput_share"] == pytest.approx(0.8 * 1.2 / mean_step, rel=0.2)


def test_failures_cost_their_own_share_and_the_ledger_balances():
    settings = {"num_workers": 16, "failures_per_hour": 60.0, "restart_s": 20.0, "num_cycles": 100}
    result = found(**settings)
    assert result["failures"] > 10
    assert result["ledger_balanced"]
    assert 0.95 <= result["throughput_share"] <= 1.001
    # A failure every 3.75 s, and 20 s each time, leave synchronous training hardly a step.
    rate = 16 / 60
    fleet = Fleet(FleetConfig(**settings))
    of_all = fleet.sync_units_per_s(num_steps=20) / sum(fleet.own_units_per_s)
    assert of_all == pytest.approx(0.8 / ((1 / rate + 20) * math.expm1(rate * 0.8)))
    # Both are shares of one thing, which the workers that have failed do not add to.
    assert result["sync_throughput_share"] > 1.05 * of_all
    assert result["throughput_share"] / result["sync_throughput_share"] == pytest.approx(result["speedup_vs_sync"])
    assert result["speedup_vs_sync"] > 4


def test_a_bound_on_staleness_holds():
    settings = {"num_workers": 8, "pushes_per_step": 1, "jitter": "lognormal:0.8", "num_cycles": 100}
    assert found(**settings)["staleness_max"] > 16
    assert found(**settings, max_staleness=16)["staleness_max"] <= 16


def test_the_seed_settles_everything():
    settings = {"num_workers": 8, "speeds": JITTER, "jitter": JITTER, "failures_per_hour": 60.0, "num_cycles": 20}
    assert found(**settings) == found(**settings)
    assert found(**settings) != found(**settings, seed=1)


def test_drawn_speeds_and_jitter_have_the_mean_they_say():
    fleet = Fleet(FleetConfig(num_workers=4000, speeds="lognormal:0.5", jitter="lognormal:0.5", microbatch_ms=1000.0))
    assert sum(fleet.own_units_per_s) / 4000 == pytest.approx(1.0, rel=0.03)
    even = Fleet(FleetConfig(num_workers=1, jitter="lognormal:0.5", microbatch_ms=1000.0, local_steps=4))
    times = [even.cycle_s(0, cycle, 1) / 4 for cycle in range(4000)]
    assert sum(times) / 4000 == pytest.approx(1.0, rel=0.02)
    # The mean of four independent steps has a quarter of their variance.
    assert sum((each - 1) ** 2 for each in times) / 4000 == pytest.approx(math.expm1(0.25) / 4, rel=0.15)


def test_a_list_of_speeds_is_repeated():
    fleet = Fleet(FleetConfig(speeds="1,0.5", num_workers=6))
    assert fleet.own_units_per_s == pytest.approx((10, 5) * 3)
    assert Fleet(FleetConfig(speeds="1,0.5,2")).num_workers == 3
    assert parse_speeds("2") == (2.0,)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"speeds": "normal:0.3"}, "speeds is 'normal:0.3'; give 'constant' or 'lognormal:SIGMA'"),
        ({"speeds": "lognormal:x"}, "or a list such as 1,1,1,0.25"),
        ({"speeds": "1,0"}, "speeds has 0 for worker 1"),
        ({"speeds": "1,nan"}, "speeds has nan for worker 1"),
        ({"speeds": "1,1,1", "num_workers": 4}, "speeds lists 3 workers, which does not divide num_workers of 4"),
        ({"jitter": "lognormal:9"}, "jitter is 'lognormal:9'; give .* from 0 to 3"),
        ({"jitter": "1,2"}, "jitter is '1,2'"),
        ({"num_workers": -1}, "num_workers is -1; give 0 or more"),
        ({"num_workers": 4, "pushes_per_step": 5}, "pushes_per_step is 5, but num_workers is 4"),
        ({"num_shards": 0}, "num_shards is 0; give a whole number of 1 or more"),
        ({"link_gbps": -1.0}, "link_gbps is -1; give 0, or a number from 1e-09 to 1e"),
        ({"link_gbps": 1e-320}, "link_gbps is .*; give 0, or a number from 1e-09 to 1e"),
        ({"num_parameters": 1e308}, r"num_parameters is 1e\+308; give a number from 1e-09 to 1e"),
        ({"speeds": "1e-300,1e300"}, "speeds has 1e-300 for worker 0; a speed is a number from 1e-06 to 1e"),
        ({"microbatch_ms": 0.0}, "microbatch_ms is 0; give milliseconds from 1e-6 to 1e9"),
        ({"microbatch_ms": 1e-320}, "give milliseconds from 1e-6 to 1e9"),
        ({"microbatch_ms": 1e308}, "give milliseconds from 1e-6 to 1e9"),
        ({"num_stages": 10}, "microbatches_per_worker is 8; two_bw with 10 stages needs 9 at least"),
        ({"straggler_fraction": 1.5}, "straggler_fraction is 1.5; it is a share"),
        ({"straggler_slowdown": 0.5}, "straggler_slowdown is 0.5; give a number from 1 to 1e"),
    ],
)
def test_bad_input_says_what_to_give(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Fleet(FleetConfig(**settings))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_number_must_be_one(value):
    fields = [each.name for each in dataclasses.fields(FleetConfig) if each.type is float]
    assert len(fields) > 8
    for name in fields:
        with pytest.raises(ConfigError, match=f"^{name} is "):
            Fleet(FleetConfig(**{name: value}))


def test_numbers_of_many_digits_are_cut_short():
    text = async_dp_text(found(num_workers=4, link_gbps=1e-9, lease_deadlines=False, num_cycles=10))
    assert max(map(len, text.splitlines())) < 120
    assert "s simulated" in text


FAILING = {"num_workers": 50, "straggler_fraction": 0.01, "straggler_slowdown": 1000.0, "failures_per_hour": 60.0}


@pytest.mark.parametrize("restart_s", [300.0, 600.0])
def test_synchronous_training_that_failures_never_let_finish_a_step_has_no_speed_up(restart_s):
    result = found(**FAILING, restart_s=restart_s, num_cycles=10)
    assert result["speedup_vs_sync"] is None
    assert result["sync_throughput_share"] < 1e-9
    text = async_dp_text(result)
    assert "failures let synchronous training get next to nothing done" in text
    assert "failures end them before they are done" in text, "more than 100 % of the workers' own speeds"
    assert max(map(len, text.splitlines())) < 120
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"speeds": "1e-6,1e6"},
        {"link_gbps": 1e-9, "num_parameters": 1e12, "wire_bytes": 1e12},
        {"link_gbps": 1e12, "num_parameters": 1e-9, "microbatch_ms": 1e-6},
        {"server_ms": 1e12, "microbatch_ms": 1e-6},
        {"failures_per_hour": 1e12, "restart_s": 1e12},
        {"failures_per_hour": 1e-9, "restart_s": 1e-9},
        {"straggler_fraction": 0.5, "straggler_slowdown": 1e12, "failures_per_hour": 1.0},
    ],
)
def test_numbers_at_the_ends_of_their_ranges_give_figures_or_a_sentence(settings):
    try:
        result = found(**{"num_workers": 2, "num_cycles": 10, "lease_deadlines": False, **settings})
    except ConfigError:
        return
    json.dumps(result, allow_nan=False)
    assert max(map(len, async_dp_text(result).splitlines())) < 140


def test_workers_that_fail_before_they_are_done_are_not_simulated_for_ever():
    with pytest.raises(ConfigError, match=r"Give shorter cycles .* fewer failures_per_hour"):
        found(num_workers=2, failures_per_hour=1e6, restart_s=0.0, microbatch_ms=10_000.0, num_cycles=10)


def test_a_first_cycle_beyond_its_deadline_is_tried_again_with_more_patience():
    """Nothing was measured yet: 60 s, which a push misses by 40; the second time it has 120."""
    settings = {"num_workers": 2, "microbatch_ms": 100_000.0, "num_cycles": 10}
    assert found(**settings)["throughput_share"] == pytest.approx(1.0), "the first misses come before what is measured"
    assert found(**settings, lease_deadlines=False)["throughput_share"] == pytest.approx(1.0)


def test_cycles_beyond_all_patience_are_said_to_get_nowhere():
    settings = {"num_workers": 2, "microbatch_ms": 65 * 60_000.0, "num_cycles": 10}
    with pytest.raises(ConfigError, match=r"0 failures, and .*--lease-deadlines false"):
        found(**settings)
    assert found(**settings, lease_deadlines=False)["throughput_share"] == pytest.approx(1.0)


def test_a_station_serves_in_order():
    link = Station(service_s=1.0, least_s=1.5)
    assert [link.serve(at_s) for at_s in (0.0, 0.5, 5.0)] == [1.5, 2.5, 6.5]
    assert [link.busy_s(at_s) for at_s in (5.5, 6.0, 9.0)] == [2.5, 3.0, 3.0]


def test_bars_cover_every_staleness():
    assert len(histogram_bars({0: 1, 1: 2})) == 2
    lines = histogram_bars(dict.fromkeys(range(100), 1))
    assert len(lines) <= 16
    assert sum(float(line.split("%")[0].split()[-1]) for line in lines) == pytest.approx(100.0, abs=1.0)


def test_the_command_prints_figures_or_bars(capsys):
    words = ["simulate", "async-dp", "--num-workers", "8", "--speeds", JITTER, "--jitter", JITTER, "--num-cycles", "20"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"throughput_share", "speedup_vs_sync", "staleness_mean", "staleness_max"} <= set(result)
    assert main([*words, "--link-gbps", "100", "--server-ms", "100"]) == 0
    text = capsys.readouterr().out
    assert "█" in text
    assert "asynchronous" in text
    assert "give more with --num-shards" in text
    assert "messages and applying take no time" in async_dp_text(result)
    assert main(["simulate", "async-dp", "--speeds", "fast"]) == 2
    assert "speeds is 'fast'" in capsys.readouterr().err


def test_the_pipelines_simulator_is_the_command_without_a_word(capsys):
    words = ["simulate", "--pipeline-schedule", "two_bw", "--num-stages", "2", "--num-microbatches", "2", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["pipeline_schedule"] == "two_bw"


def test_cost_grows_with_the_cycles_and_not_with_the_workers_too(monkeypatch):
    """Comparisons in the event queue, the one structure that all workers are in, by workers for a cycle each."""

    class Counted(float):
        comparisons = 0

        def __lt__(self, other: float) -> bool:
            Counted.comparisons += 1
            return float(self) < float(other)

        def __add__(self, other: float) -> "Counted":
            return Counted(float(self) + float(other))

        __radd__ = __add__

    monkeypatch.setattr(Fleet, "cycle_s", lambda self, worker, cycle, count: Counted(0.1 + (worker * 7919 % 97) / 97))
    counts = []
    for num_workers in (64, 512):
        Counted.comparisons = 0
        found(num_workers=num_workers, num_cycles=10, dynamic_batches=False)
        counts.append(Counted.comparisons / num_workers)
    assert all(each > 0 for each in counts)
    assert all(later < 2.5 * earlier for earlier, later in itertools.pairwise(counts))
