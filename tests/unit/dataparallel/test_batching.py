import itertools
import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.dataparallel.batching import DynamicBatches, EqualBatches, assign, unevenness
from slipstream.dataparallel.cycles import DEADLINE_FLOOR_S, FIRST_DEADLINE_S, Cost, Cycle, CycleHistory

costs = st.builds(Cost, st.floats(0, 5), st.floats(0.05, 5))


def cycle(n, seconds, tokens=1):
    return Cycle(num_microbatches=n, num_tokens=n * tokens, compute_s=seconds)


@settings(max_examples=60, deadline=None)
@given(st.lists(costs, min_size=1, max_size=4), st.integers(1, 10), st.data())
def test_greedy_is_as_good_as_trying_everything(found, total, data):
    lower = [data.draw(st.integers(0, 2)) for _ in found]
    upper = [low + data.draw(st.integers(0, 6)) for low in lower]
    total = min(max(total, sum(lower)), sum(upper))
    counts = assign(found, total, lower=lower, upper=upper)
    assert sum(counts) == total
    assert all(low <= count <= high for low, count, high in zip(lower, counts, upper))

    def longest(counts):
        return max(cost.of(count) for cost, count in zip(found, counts))

    every = itertools.product(*(range(low, high + 1) for low, high in zip(lower, upper)))
    assert longest(counts) == pytest.approx(min(longest(each) for each in every if sum(each) == total))


def test_bounds_have_the_last_word():
    assert assign([Cost(0, 1)] * 2, 9, lower=[1, 1], upper=[2, 3]) == [2, 3]
    assert assign([Cost(0, 1)] * 2, 1, lower=[1, 1], upper=[2, 3]) == [1, 1]


def test_the_fit_recovers_fixed_and_proportional_parts():
    history = CycleHistory()
    for n in (2, 4, 8, 4, 2, 8):
        history.observe(cycle(n, 0.5 + 0.25 * n))
    cost = history.cost()
    assert (cost.fixed_s, cost.each_s) == (pytest.approx(0.5), pytest.approx(0.25))


def test_one_size_of_cycle_has_no_fixed_part():
    history = CycleHistory()
    for seconds in (1.9, 2.1):
        history.observe(cycle(4, seconds))
    assert history.cost() == Cost(0.0, pytest.approx(0.5))


def test_an_outlier_is_left_out_and_a_new_pace_is_not():
    history = CycleHistory()
    for seconds in (1.0, 1.1, 0.9, 1.0, 50.0, 1.0):
        history.observe(cycle(1, seconds))
    assert history.cost().of(1) == pytest.approx(1.0)
    for _ in range(3):
        history.observe(cycle(1, 10.0))
    assert history.cost().of(1) == pytest.approx(10.0), "ten times slower, and known after three cycles"
    assert len(history) == 3
    for _ in range(6):
        history.observe(cycle(1, 1.0))
    assert history.cost().of(1) == pytest.approx(1.0)


def test_only_the_last_hundred_count():
    history = CycleHistory()
    for i in range(300):
        history.observe(cycle(1, 1.0 + 0.001 * i))
    assert len(history) == 100
    assert history.cost().of(1) == pytest.approx(statistics.fmean(1.0 + 0.001 * i for i in range(200, 300)))


def test_deadlines_are_measured_and_have_a_floor():
    history = CycleHistory()
    assert history.deadline_s(4) == FIRST_DEADLINE_S
    for seconds in (9.0, 10.0, 11.0):
        history.observe(cycle(1, seconds))
    assert history.deadline_s(2) == 2 * 3 * 10, "three cycles do not tell how far a worker strays"
    for seconds in (9.0, 10.0, 11.0) * 6:
        history.observe(cycle(1, seconds))
    assert history.deadline_s(2) == 2 * (10 + 6 * 1)
    fast = CycleHistory()
    fast.observe(cycle(1, 0.01))
    assert fast.deadline_s(2) == DEADLINE_FLOOR_S


def run(policy, speeds, *, rounds=40):
    """Let workers of given speeds go round, each as often as it can."""
    clock = dict.fromkeys(speeds, 0.0)
    for _ in range(rounds * len(speeds)):
        worker = min(clock, key=lambda each: (clock[each], each))
        n = policy.num_microbatches(worker)
        clock[worker] += n / speeds[worker]
        policy.observe(worker, cycle(n, n / speeds[worker]))
    return policy.plan


@pytest.mark.parametrize("kind", [EqualBatches, DynamicBatches])
def test_plans_sum_to_what_the_pushes_a_step_say(kind):
    for pushes, expected in ((0, 30), (4, 30), (1, 120), (2, 60)):
        policy = kind(step_microbatches=30, pushes_per_step=pushes)
        for worker in range(4):
            policy.join(worker)
        plan = run(policy, {0: 1, 1: 2, 2: 4, 3: 8})
        if kind is DynamicBatches and pushes in (1, 2):
            # The fastest would need more than a step's microbatches, of which one gradient makes no more than one step.
            assert plan == {0: 3, 1: 7, 2: 15, 3: 30}
            continue
        assert sum(plan.values()) == expected
        if pushes == 0:
            assert plan == ({0: 2, 1: 4, 2: 8, 3: 16} if kind is DynamicBatches else {0: 8, 1: 8, 2: 7, 3: 7})


def test_a_death_gives_its_share_to_the_others_and_a_join_is_calibrated():
    policy = DynamicBatches(step_microbatches=30)
    for worker in range(4):
        policy.join(worker)
    speeds = {0: 1, 1: 2, 2: 4, 3: 8}
    run(policy, speeds)
    policy.leave(3)
    assert run(policy, {worker: speeds[worker] for worker in range(3)}) == {0: 4, 1: 9, 2: 17}
    policy.join(3)
    assert policy.num_microbatches(3) == 1
    assert run(policy, speeds) == {0: 2, 1: 4, 2: 8, 3: 16}


def test_a_worker_that_becomes_ten_times_slower_gets_less():
    policy = DynamicBatches(step_microbatches=40)
    for worker in range(4):
        policy.join(worker)
    assert run(policy, dict.fromkeys(range(4), 1.0)) == dict.fromkeys(range(4), 10)
    plan = run(policy, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.1})
    assert plan[3] == 1
    assert unevenness([Cost(0, 1)] * 3 + [Cost(0, 10)], [plan[worker] for worker in range(4)]) <= 1.4


def test_small_gains_change_nothing_and_a_plan_changes_a_quarter_at_most():
    policy = DynamicBatches(step_microbatches=40)
    for worker in range(2):
        policy.join(worker)
    assert run(policy, {0: 1.0, 1: 1.0}) == {0: 20, 1: 20}
    assert run(policy, {0: 1.0, 1: 1.04}) == {0: 20, 1: 20}
    plans = []
    for _ in range(12):
        for worker, speed in ((0, 1.0), (1, 4.0)):
            n = policy.num_microbatches(worker)
            policy.observe(worker, cycle(n, n / speed))
        plans.append(policy.plan[1])
    assert plans[-1] == 32
    changed = [after / before for before, after in itertools.pairwise([20, *plans])]
    assert max(changed) <= 1.25
    assert sum(ratio > 1 for ratio in changed) >= 3


def test_memory_limits_hold():
    policy = DynamicBatches(step_microbatches=30, max_microbatches=10)
    for worker in range(4):
        policy.join(worker)
    assert max(run(policy, {0: 1, 1: 2, 2: 4, 3: 8}).values()) == 10


def test_more_workers_than_microbatches_get_one_each():
    policy = EqualBatches(step_microbatches=2)
    for worker in range(5):
        policy.join(worker)
    assert policy.plan == dict.fromkeys(range(5), 1)


def test_state_round_trip_goes_on_alike():
    policy = DynamicBatches(step_microbatches=30)
    for worker in range(4):
        policy.join(worker)
    speeds = {0: 1, 1: 2, 2: 4, 3: 7.3}
    run(policy, speeds, rounds=2)
    copy = DynamicBatches(step_microbatches=30)
    copy.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert run(copy, speeds, rounds=5) == run(policy, speeds, rounds=5)
    assert copy.state_dict() == policy.state_dict()


def test_a_plan_of_uneven_batches_is_forgotten_where_they_shall_be_even():
    uneven = DynamicBatches(step_microbatches=30)
    for worker in range(4):
        uneven.join(worker)
    assert run(uneven, {0: 1, 1: 2, 2: 4, 3: 8})[3] == 16
    even = EqualBatches(step_microbatches=30)
    even.load_state_dict(json.loads(json.dumps(uneven.state_dict())))
    assert even.plan == {0: 8, 1: 8, 2: 7, 3: 7}


def test_a_plan_of_larger_steps_is_cut_to_what_is_allowed_now():
    old, new = DynamicBatches(step_microbatches=30), DynamicBatches(step_microbatches=30, max_microbatches=10)
    for worker in range(2):
        old.join(worker)
    run(old, {0: 1, 1: 9})
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.num_microbatches(1) == 10


@pytest.mark.parametrize("kind", [EqualBatches, DynamicBatches])
def test_a_round_is_that_of_the_bounds(kind):
    policy = kind(step_microbatches=16, max_microbatches=2)
    for worker in range(4):
        policy.join(worker)
    assert policy.round_microbatches == 8
    run(policy, dict.fromkeys(range(4), 1.0))
    assert policy.round_microbatches == sum(policy.plan.values()) == 8
