import itertools
import json
import math
import random

import pytest

from slipstream.errors import ConfigError
from slipstream.staleness.aalr import AsyncAwareLr, expected_staleness


def factors(aalr: AsyncAwareLr, stalenesses: list[int]) -> list[float]:
    return [aalr.factor(update=k, stalenesses=[staleness]) for k, staleness in enumerate(stalenesses, start=1)]


def test_exactly_one_up_to_the_threshold():
    aalr = AsyncAwareLr(3.0, num_in_flight=4)
    assert factors(aalr, [0, 0, 3, 5, 4, 3, 3, 3]) == [1.0] * 8  # mean never above 3


@pytest.mark.parametrize("num_in_flight", [1, 4])
def test_exactly_one_without_staleness(num_in_flight):
    assert factors(AsyncAwareLr("auto", num_in_flight=num_in_flight), [0] * 300) == [1.0] * 300
    assert factors(AsyncAwareLr(0.0, num_in_flight=num_in_flight), [0] * 300) == [1.0] * 300


def test_above_the_threshold_the_ratio():
    aalr = AsyncAwareLr(2.0, num_in_flight=4, window=10)
    assert factors(aalr, [5] * 20)[-1] == pytest.approx(2 / 5)


def test_down_at_once_and_up_by_two_percent():
    aalr = AsyncAwareLr(2.0, num_in_flight=1, window=4)
    factors(aalr, [2] * 10)
    assert factors(aalr, [10]) == [pytest.approx(2 / 4)]
    rising = factors(aalr, [0] * 60)
    assert rising[:3] == [pytest.approx(0.5 * 1.02 ** (k + 1)) for k in range(3)]
    steps = [later / earlier for earlier, later in itertools.pairwise(rising)]
    assert max(steps) == pytest.approx(1.02)
    assert min(steps) >= 1.0
    assert rising[-1] == 1.0
    assert rising.index(1.0) == 35  # 0.5 * 1.02^36 is the first above 1


def test_bounds():
    aalr = AsyncAwareLr(1.0, num_in_flight=1)
    found = factors(aalr, [1000] * 50 + [0] * 5000)
    assert min(found) == 0.1
    assert max(found) == 1.0


def test_the_window_grows_with_what_is_in_flight():
    few, many = (AsyncAwareLr(1.0, num_in_flight=count) for count in (4, 50))
    for aalr in (few, many):
        factors(aalr, [9] * 100 + [0] * 150)
    assert few.metrics()["aalr/mean_staleness"] == 0.0
    assert many.metrics()["aalr/mean_staleness"] == pytest.approx(50 * 9 / 200)


@pytest.mark.parametrize(("num_in_flight", "per_update"), [(2, 1), (4, 1), (8, 4), (4, 4), (16, 3)])
def test_auto_never_bites_at_the_staleness_that_concurrency_gives(num_in_flight, per_update):
    """Whatever the workers' speeds: the mean of what they push is (C - 1) / k, on which their order has no say."""
    rng = random.Random(0)
    speeds = [rng.choice((1.0, 2.0, 5.0)) for _ in range(num_in_flight)]
    due = [rng.random() / speed for speed in speeds]
    read, version, seen = [0] * num_in_flight, 0, []
    aalr = AsyncAwareLr("auto", num_in_flight=num_in_flight, gradients_per_update=per_update)
    found = []
    for push in range(1, 6001):
        worker = min(range(num_in_flight), key=due.__getitem__)
        seen.append(version - read[worker])
        if push % per_update == 0:
            found.append(aalr.factor(update=version + 1, stalenesses=seen[-per_update:]))
            version += 1
        read[worker] = version
        due[worker] += 1.0 / speeds[worker]
    assert math.fsum(seen) / len(seen) == pytest.approx(expected_staleness(num_in_flight, per_update), rel=0.02)
    assert set(found) == {1.0}


def test_auto_follows_workers_that_leave_without_holding_the_past_against_those_who_stay():
    aalr = AsyncAwareLr("auto", num_in_flight=8)
    factors(aalr, [7] * 100)
    aalr.set_concurrency(num_in_flight=2)
    assert aalr.threshold == 1.5
    assert factors(aalr, [7] * 6 + [1] * 200) == [1.0] * 206
    assert factors(aalr, [4] * 100)[-1] == pytest.approx(1.5 / 4)


def test_auto_bites_beyond_its_margin():
    aalr = AsyncAwareLr("auto", num_in_flight=5, gradients_per_update=2)
    assert aalr.threshold == 3.0
    assert factors(aalr, [6] * 100)[-1] == pytest.approx(0.5)


def test_a_fixed_threshold_that_always_bites_is_told_with_its_factor():
    aalr = AsyncAwareLr(1.0, num_in_flight=4)
    warning = aalr.warning(num_in_flight=9, gradients_per_update=2)
    assert warning is not None
    assert "threshold 1 is below the mean staleness of 4" in warning
    assert "multiplied by 0.25" in warning
    assert aalr.warning(num_in_flight=2) is None
    assert AsyncAwareLr("auto", num_in_flight=4).warning(num_in_flight=4) is None
    assert factors(aalr, [4] * 100)[-1] == pytest.approx(0.25)


def test_metrics_are_the_factor_and_what_it_was_made_of():
    aalr = AsyncAwareLr(2.0, num_in_flight=4)
    factors(aalr, [4, 4])
    assert aalr.metrics() == {"aalr/factor": 0.5, "aalr/mean_staleness": 4.0, "aalr/threshold": 2.0}


@pytest.mark.parametrize("threshold", ["auto", 2.0])
def test_state_round_trips(threshold):
    rng = random.Random(1)
    seen = [rng.randrange(12) for _ in range(400)]
    whole, first = (AsyncAwareLr(threshold, num_in_flight=3) for _ in "ab")
    expected = factors(whole, seen)
    factors(first, seen[:170])
    second = AsyncAwareLr(threshold, num_in_flight=1)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert second.state_dict()["num_in_flight"] == 1, "which is for the executor to say"
    second.load_concurrency(state)
    assert factors(second, seen[170:]) == expected[170:]
    assert min(expected) < 1.0
    assert second.metrics() == whole.metrics()


@pytest.mark.parametrize("threshold", [-1.0, math.nan, math.inf])
def test_a_threshold_is_a_staleness(threshold):
    with pytest.raises(ConfigError, match="aalr_threshold"):
        AsyncAwareLr(threshold, num_in_flight=2)
