import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.config import OptimConfig
from slipstream.errors import ConfigError
from slipstream.optim import lr_factor
from slipstream.optim.build import check_optim
from slipstream.optim.lr import SCHEDULES, rate_factor


@st.composite
def schedules(draw):
    total_steps = draw(st.integers(1, 500))
    settings = {
        "warmup_steps": draw(st.integers(0, total_steps)),
        "total_steps": total_steps,
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "final_fraction": draw(st.floats(0, 1)),
    }
    if settings["schedule"] == "wsd":
        longest = max(total_steps - settings["warmup_steps"], 0)
        assume(longest > 0)
        settings["decay_fraction"] = draw(st.integers(1, longest)) / total_steps
    return settings


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


def test_warm_up_stable_decay():
    settings = {"warmup_steps": 10, "total_steps": 100, "schedule": "wsd", "final_fraction": 0.1}
    factors = {step: lr_factor(step, decay_fraction=0.25, **settings) for step in range(1, 102)}
    assert factors[5] == 0.5
    assert {factors[step] for step in range(10, 76)} == {1.0}
    assert factors[76] == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(1 / 25)))
    assert factors[84] == pytest.approx(0.1 + 0.9 * (1 - 0.6))
    assert factors[100] == factors[101] == 0.1
    assert lr_factor(81, **settings) < lr_factor(80, **settings) == 1.0  # a fifth, unless told otherwise


def test_warm_up_may_reach_to_the_decay_and_no_further():
    settings = {"total_steps": 10, "schedule": "wsd", "final_fraction": 0.0, "decay_fraction": 0.5}
    assert [lr_factor(step, warmup_steps=5, **settings) for step in (4, 5, 10)] == [0.8, 1.0, 0.0]
    with pytest.raises(ConfigError, match=r"warm-up of 6 updates and the decay of 5 \(.*0.5 of 10\) overlap"):
        lr_factor(1, warmup_steps=6, **settings)


def test_the_settings_make_the_schedule():
    optim = OptimConfig(lr_schedule="wsd", lr_warmup_steps=2, lr_final_fraction=0.0, lr_decay_fraction=0.5)
    assert [rate_factor(optim, num_steps=8)(step) for step in (1, 2, 4, 5, 8)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    longer = dataclasses.replace(optim, lr_total_steps=16)
    assert rate_factor(longer, num_steps=8)(8) == 1.0


def test_a_share_for_the_decay_has_no_effect_elsewhere_and_that_is_said():
    assert check_optim(OptimConfig(lr_schedule="wsd", lr_decay_fraction=0.3), num_steps=10) == []
    (warning,) = check_optim(OptimConfig(lr_decay_fraction=0.3), num_steps=10)
    assert warning == "optim.lr_decay_fraction has no effect with optim.lr_schedule 'cosine', only with wsd."
    with pytest.raises(ConfigError, match="overlap"):
        check_optim(OptimConfig(lr_schedule="wsd", lr_warmup_steps=9), num_steps=10)


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
        ({"decay_fraction": 0.0}, "above 0 and at most 1, given 0.0. 0.2 is usual"),
        ({"decay_fraction": math.nan}, "above 0 and at most 1, given nan"),
    ],
)
def test_bad_values_are_refused(change, says):
    settings = {"step": 1, "warmup_steps": 2, "total_steps": 10, "schedule": "cosine", "final_fraction": 0.1} | change
    with pytest.raises(ConfigError, match=says):
        lr_factor(settings.pop("step"), **settings)
