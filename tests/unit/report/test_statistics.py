"""Statistics against tables and numbers worked out by hand."""

import math
import random

import pytest

from slipstream.report.statistics import Estimate, mean, paired, ratio, share_closed, smoothed, spikes, t_quantile


@pytest.mark.parametrize(
    ("degrees", "level", "t"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.30265),
        (3, 0.95, 3.18245),
        (4, 0.95, 2.77645),
        (5, 0.95, 2.57058),
        (9, 0.95, 2.26216),
        (10, 0.95, 2.22814),
        (29, 0.95, 2.04523),
        (120, 0.95, 1.97993),
        (4, 0.99, 4.60409),
        (7, 0.90, 1.89458),
    ],
)
def test_t_quantiles_are_those_of_the_tables(degrees, level, t):
    assert t_quantile(degrees, level=level) == pytest.approx(t, abs=1e-5)


def test_the_interval_of_a_mean_by_hand():
    # 2.0, 2.2, 2.4, 2.6: mean 2.3, standard deviation 0.258199, over sqrt(4) 0.129099, times 3.18245 0.410852.
    found = mean([2.0, 2.2, 2.4, 2.6])
    assert found.mean == pytest.approx(2.3)
    assert found.interval == pytest.approx([1.889148, 2.710852], abs=1e-5)


def test_one_value_has_no_interval():
    assert mean([2.0]) == Estimate(mean=2.0)


def test_pairing_takes_the_seed_out():
    """The seeds differ by far more than the arms; of the differences nothing of that is left."""
    first, second = {0: 1.1, 1: 5.1, 2: 9.1}, {2: 9.0, 0: 1.0, 1: 5.0, 7: 3.0}
    differences = paired(first, second)
    assert list(differences) == [0, 1, 2]
    found = mean(list(differences.values()))
    assert found.mean == pytest.approx(0.1)
    assert found.interval == pytest.approx([0.1, 0.1])


def test_fieller_by_hand():
    # a = 1, 2, 3 and b = 4, 4, 5: means 2 and 13/3, variances 1 and 1/3, covariance 1/2; t^2 / n = 18.51282 / 3. Of
    # 16.72080 R^2 - 2 * 5.58120 R - 2.17094 = 0 the roots are (5.58120 -+ 8.21277) / 16.72080.
    found = ratio({0: 1.0, 1: 2.0, 2: 3.0}, {0: 4.0, 1: 4.0, 2: 5.0})
    assert found is not None
    assert found.mean == pytest.approx(6 / 13)
    assert found.interval == pytest.approx([-0.157383, 0.824959], abs=1e-5)


def test_fieller_covers_the_true_ratio_as_often_as_it_says():
    """1500 experiments of 4 seeds whose noise is shared in part: 95 % of intervals hold the ratio."""
    draw, held, bounded = random.Random(0), 0, 0
    for _ in range(1500):
        shared = [draw.gauss(0, 0.05) for _ in range(4)]
        b = {seed: 0.4 + shared[seed] + draw.gauss(0, 0.02) for seed in range(4)}
        a = {seed: 0.1 + 0.3 * shared[seed] + draw.gauss(0, 0.02) for seed in range(4)}
        found = ratio(a, b)
        assert found is not None
        if found.interval is not None:
            bounded += 1
            held += found.interval[0] <= 0.25 <= found.interval[1]
    assert bounded > 1490
    assert 0.935 < held / bounded < 0.965


def test_a_ratio_to_what_may_be_zero_has_no_interval():
    found = ratio({0: 0.1, 1: 0.2, 2: 0.1}, {0: 0.1, 1: -0.1, 2: 0.03})
    assert found is not None
    assert found.interval is None
    assert ratio({0: 1.0}, {1: 1.0}) is None
    assert ratio({0: 1.0, 1: 1.0}, {0: 1.0, 1: -1.0}) is None


def test_the_share_closed_by_hand():
    plain = {0: 0.40, 1: 0.38, 2: 0.42}
    assert share_closed({seed: gap / 4 for seed, gap in plain.items()}, plain).mean == pytest.approx(0.75)
    assert share_closed(plain, plain).interval == pytest.approx([0.0, 0.0])
    assert share_closed({0: -0.04, 1: -0.04, 2: -0.04}, plain).mean == pytest.approx(1.1)
    closed = share_closed({0: 0.10, 1: 0.12, 2: 0.08}, plain)
    assert closed.low < closed.mean < closed.high
    assert share_closed({0: 0.1}, {0: 0.4}) == Estimate(mean=0.75)


def test_a_spike_is_found_once_and_where_it_begins():
    draw = random.Random(1)
    losses = [3.0 + draw.gauss(0, 0.01) for _ in range(400)]
    assert spikes(losses) == []
    losses[250] = losses[251] = 3.2
    losses[390] = 3.5
    assert spikes(losses) == [251, 391]
    losses[100] = 9.0
    assert 101 not in spikes(losses), "the first 128 steps are judged by none"
    assert spikes([1.0] * 128 + [2.0]) == [129], "any rise above a flat line is one"
    assert spikes([1.0] * 128) == []


def test_six_sigma_is_the_threshold():
    before = [1.0, 2.0] * 64
    center, sigma = 1.5, math.sqrt(128 * 0.25 / 127)
    assert spikes([*before, center + 5.99 * sigma]) == []
    assert spikes([*before, center + 6.01 * sigma]) == [129]


def test_smoothing_has_no_bias_at_the_beginning():
    assert smoothed([4.0, 4.0, 4.0, 4.0], span=9) == pytest.approx([4.0] * 4)
    # span 3: the weight halves each step.
    assert smoothed([1.0, 0.0, 4.0], span=3) == pytest.approx([1.0, 0.5 / 1.5, (0.25 + 4) / 1.75])
