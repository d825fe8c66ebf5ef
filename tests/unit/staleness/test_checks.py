"""Settings without effect are named; those that make no sense are refused."""

import pytest

from slipstream.config import from_dict
from slipstream.errors import ConfigError
from slipstream.staleness.checks import check_staleness


def checked(delay: int, **staleness) -> list[str]:
    return check_staleness(from_dict({"staleness": {"delay": delay, **staleness}}), delay=delay)


IDLE = [
    (0, {"correction": "gap_aware"}, "staleness.correction 'gap_aware' has no effect at a delay of 0"),
    (0, {"delay_roles": ["q"]}, "staleness.delay_roles ['q'] has no effect at a delay of 0"),
    (0, {"delay_blocks": [0, 1]}, "staleness.delay_blocks [0, 1] has no effect"),
    (0, {"backward_weights": "pipemare"}, "staleness.backward_weights 'pipemare' has no effect at a delay of 0"),
    (0, {"prediction": "xpipe"}, "staleness.prediction 'xpipe' has no effect at a delay of 0"),
    (0, {"error_feedback": "auto"}, "staleness.error_feedback 'auto' has no effect at a delay of 0"),
    (0, {"sync_until_step": 5}, "staleness.sync_until_step 5 has no effect at a delay of 0"),
    (0, {"lr_discount": "inverse_staleness"}, "'inverse_staleness' has no effect at a delay of 0"),
    (1, {"lr_discount": "inverse_staleness"}, "'inverse_staleness' has no effect at a delay of 1"),
    (3, {"lr_discount": "pipemare"}, "has no effect with lr_discount_steps of 0"),
    (3, {"lr_discount_steps": 7}, "staleness.lr_discount_steps 7 has no effect with lr_discount 'none'"),
    (1, {"correction": "dc_asgd"}, "'dc_asgd' has no effect with a correction_strength of 0"),
    (1, {"correction": "gap_aware", "correction_strength": 0.5}, "staleness.correction_strength 0.5 has no effect"),
    (1, {"prediction_steps": 2.0}, "staleness.prediction_steps 2 has no effect without a prediction"),
    (0, {"error_feedback": 1.0}, "staleness.error_feedback at a delay of 0 is a control"),
    (0, {"prediction": "xpipe", "prediction_steps": 1.0}, "staleness.prediction at a delay of 0 is a control"),
]


@pytest.mark.parametrize(("delay", "staleness", "said"), IDLE)
def test_what_has_no_effect_is_named_once(delay, staleness, said):
    found = checked(delay, **staleness)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("delay", "staleness"),
    [
        (0, {}),
        (1, {"error_feedback": 1.0}),
        (1, {"error_feedback": "auto"}),
        (1, {"correction": "dc_asgd", "correction_strength": 0.1, "error_feedback": 0.5}),
        (1, {"backward_weights": "newest"}),
        (2, {"lr_discount": "pipemare", "lr_discount_steps": 10}),
        (1, {"sync_until_step": 3, "sync_from_step": 9}),
    ],
)
def test_what_has_an_effect_is_not(delay, staleness):
    assert checked(delay, **staleness) == []


@pytest.mark.parametrize(
    ("staleness", "said"),
    [
        ({"error_feedback": 1.0, "prediction": "xpipe"}, r"'xpipe' and staleness\.error_feedback is 1; both say what"),
        ({"error_feedback": "auto", "prediction": "xpipe"}, r"staleness\.error_feedback is auto; both say"),
        ({"error_feedback": "auto", "delay_stages": 3}, r"'auto' and staleness\.delay_stages is given"),
        ({"error_feedback": "auto", "delay_weights": [1, 1]}, r"'auto' and staleness\.delay_weights is given"),
        ({"sync_until_step": 4, "sync_from_step": 5}, r"no update between them is delayed"),
        ({"lr_discount_steps": -1}, r"staleness\.lr_discount_steps is -1; it must be 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(staleness, said):
    with pytest.raises(ConfigError, match=said):
        checked(1, **staleness)


def test_workers_have_no_one_delay_to_foretell():
    config = from_dict({"executor": "dataparallel", "staleness": {"error_feedback": "auto"}})
    with pytest.raises(
        ConfigError, match=r"error_feedback is 'auto' and the executor 'dataparallel', .* Give a number"
    ):
        check_staleness(config, delay=0)


def test_other_weights_in_the_backward_need_the_activations_of_the_forward():
    config = from_dict({"model": {"activation_checkpointing": True}, "staleness": {"backward_weights": "newest"}})
    with pytest.raises(ConfigError, match=r"'newest' and model\.activation_checkpointing is on"):
        check_staleness(config, delay=1)


@pytest.mark.parametrize("value", [True, "automatic", [1.0], None])
def test_a_coefficient_is_a_number_or_auto(value):
    assert from_dict({"staleness": {"error_feedback": 2}}).staleness.error_feedback == 2.0
    with pytest.raises(ConfigError, match=r"error_feedback' must be a number or 'auto', given"):
        from_dict({"staleness": {"error_feedback": value}})
