import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.optim import lr_factor
from slipstream.optim.lr import SCHEDULES


@st.composite
def schedules(draw):
    total_steps = draw(st.integers(1, 500))
    return {
        "warmup_steps": draw(st.integers(0, total_steps)),
        "total_steps": total_steps,
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "final_fraction": draw(st.floats(0, 1)),
    }


@given(schedules())
def test_rises_to_exactly_the_peak_then_never_rises_again(settings):
    factors = [lr_factor(step, **settings) for step in range(1, settings["total_steps"] + 10)]
    peak = max(settings["warmup_steps"], 1)
    assert factors[peak - 1] == 1.0
    assert factors[:peak] == [step / peak for step in range(1, peak + 1)]
    assert all(before >= after for before, after in zip(factors[peak - 1 :], factors[peak:], strict=False))
    assert all(0 <= factor <= 1 for factor in factors)


@given(schedules())
def test_constant_from_the_last_update_on(settings):
    end = lr_factor(settings["total_steps"], **settings)
    assert all(lr_factor(settings["total_steps"] + more, **settings) == end for more in (1, 2, 1000))
    decays = settings["schedule"] != "constant" and settings["total_steps"] > max(settings["warmup_steps"], 1)
    assert end == (settings["final_fraction"] if decays else 1.0)


def test_cosine_and_linear_in_the_middle():
    common = {"warmup_steps": 10, "total_steps": 110, "final_fraction": 0.2}
    assert lr_factor(60, schedule="linear", **common) == pytest.approx(0.6)
    assert lr_factor(60, schedule="cosine", **common) == pytest.approx(0.6)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    assert lr_factor(35, schedule="cosine", **common) == pytest.approx(quarter)
    assert lr_factor(35, schedule="linear", **common) == pytest.approx(0.8)
    assert lr_factor(35, schedule="constant", **common) == 1.0


def test_a_shorter_run_keeps_its_rates():
    settings = {"warmup_steps": 2, "total_steps": 200, "schedule": "cosine", "final_fraction": 0.1}
    assert lr_factor(20, **settings) > 0.97


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": 0}, "counted from 1, given step 0"),
        ({"warmup_steps": 11}, "lr_warmup_steps 11 is longer than the schedule's 10 updates"),
        ({"warmup_steps": -1}, "at least 0, given -1"),
        ({"total_steps": 0, "warmup_steps": 0}, "at least 1 update in all, given 0"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"final_fraction": 1.5}, "from 0 to 1, given 1.5"),
        ({"final_fraction": math.nan}, "from 0 to 1, given nan"),
    ],
)
def test_bad_values_are_refused(change, says):
    settings = {"step": 1, "warmup_steps": 2, "total_steps": 10, "schedule": "cosine", "final_fraction": 0.1} | change
    with pytest.raises(ConfigError, match=says):
        lr_factor(settings.pop("step"), **settings)
