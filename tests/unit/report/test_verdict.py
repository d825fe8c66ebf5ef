"""Sentences say what the numbers do."""

import pytest
from tests.unit.report.fake import arm, result

from slipstream.report.table import best_against_best
from slipstream.report.verdict import rule_verdicts, rules_sentence, switch_sentence


def rows(sync, delay, feedback, *, tables=None):
    feedback_tables = {"staleness": {"delay": 1, "error_feedback": 1.0}, "pipeline": {"num_stages": 4}}
    results = [
        result(arm(), dict(enumerate(sync))),
        result(arm(delay=1), dict(enumerate(delay))),
        result(arm(remedy="error_feedback", delay=1), dict(enumerate(feedback)), tables=feedback_tables),
    ]
    return best_against_best(results)


def test_a_rule_is_summed_up():
    verdict = rule_verdicts(rows([2.0, 2.1, 2.2], [2.4, 2.48, 2.62], [2.1, 2.2, 2.3]))[0]
    assert verdict.sentence == (
        "adamw: one step of delay costs 0.400 ± 0.050 nats per token; error_feedback closes 75 % [71, 78] of it."
    )


def test_what_cannot_be_told_from_zero_is_not_called_a_cost():
    verdict = rule_verdicts(rows([2.0, 2.1, 2.2], [2.01, 2.09, 2.21], [2.0, 2.1, 2.21]))[0]
    assert "costs nothing that these seeds could tell from 0" in verdict.sentence
    assert "closes" not in verdict.sentence


def test_a_gain_without_delay_is_owned_up_to():
    results = [
        result(arm(), {0: 2.0, 1: 2.1}),
        result(arm(remedy="error_feedback"), {0: 1.9, 1: 2.0}),
        result(arm(delay=1), {0: 2.4, 1: 2.5}),
        result(arm(remedy="error_feedback", delay=1), {0: 2.1, 1: 2.2}),
    ]
    sentence = rule_verdicts(best_against_best(results))[0].sentence
    assert "Synchronous training gains from error_feedback too: to it the gap is +0.200" in sentence


def test_divergence_is_told():
    verdict = rule_verdicts(rows([2.0, 2.1, 2.2], [2.4, "diverged", 2.62], [2.1, 2.2, 2.3]))[0]
    assert "(1 of 3 seeds diverged)" in verdict.sentence


def test_rules_are_set_in_proportion():
    results = []
    for rule, gap in (("adamw", 0.4), ("muon", 0.1)):
        results += [
            result(arm(rule), {0: 2.0, 1: 2.1, 2: 2.2}),
            result(arm(rule, delay=1), {0: 2.0 + gap, 1: 2.1 + gap, 2: 2.2 + gap}),
        ]
    sentence = rules_sentence(rule_verdicts(best_against_best(results)))
    assert sentence is not None
    assert sentence.startswith("adamw loses 4.0 times [4.0, 4.0] what muon does")
    assert rules_sentence([]) is None


@pytest.mark.parametrize(
    ("sync", "delay", "feedback", "said"),
    [
        (
            [2.0, 2.1, 2.2],
            [2.4, 2.5, 2.6],
            [2.001, 2.101, 2.201],
            r"^Switch: one step of delay with staleness\.error_feedback = 1 costs \+0\.001 .*1\.75 times as fast "
            r"\(4 stages, 4 microbatches\)\.$",
        ),
        ([2.0, 2.1, 2.2], [2.0, 2.1, 2.2], [2.4, 2.5, 2.6], r"^Switch: one step of delay without a remedy"),
        ([2.0, 2.1, 2.2], [2.4, 2.5, 2.6], [2.3, 2.4, 2.5], r"^Do not switch yet: .* costs \+0\.300 .*; try Muon"),
        ([2.0, 2.1, 2.2], [2.4, 2.5, 2.6], [2.0, 2.13, 2.2], r"^Undecided: .* 3 seeds leave it open; .*--num-seeds 6"),
        ([2.0], [2.4], [2.0], r"^Undecided: .* on a single seed"),
        ([2.0, 2.1], ["diverged"] * 2, ["diverged"] * 2, r"^Undecided: too few runs finished"),
        ([2.0, 2.1, 2.2], [2.4, 2.5, "diverged"], [2.1, "diverged", 2.2], r"^Do not switch: .*1 of 3 seeds diverged"),
    ],
)
def test_one_sentence_says_whether_to_switch(sync, delay, feedback, said):
    import re

    sentence = switch_sentence(rows(sync, delay, feedback))
    assert re.search(said, sentence), sentence
    assert sentence.count(". ") == 0
