"""Sentences say what the numbers do."""

import dataclasses

import pytest
from tests.unit.report.fake import arm, result

from slipstream.report.table import best_against_best
from slipstream.report.verdict import rule_verdicts, rules_sentence, switch_sentence


def rows(sync, delay, feedback):
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


def test_a_gain_without_delay_that_may_be_chance_is_called_so():
    results = [
        result(arm(), {0: 2.0, 1: 2.1, 2: 2.2}),
        result(arm(remedy="error_feedback"), {0: 1.989, 1: 2.104, 2: 2.175}),
        result(arm(delay=1), {0: 2.4, 1: 2.5, 2: 2.6}),
        result(arm(remedy="error_feedback", delay=1), {0: 2.1, 1: 2.2, 2: 2.3}),
    ]
    sentence = rule_verdicts(best_against_best(results))[0].sentence
    said = ". Synchronous training has the smaller mean with error_feedback, maybe by chance: to it the gap is +0.111"
    assert said in sentence
    assert "gains" not in sentence


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ([2.4, 2.48, 2.62], "; of 2 remedies second has the smallest loss, and closes 75 % [71, 78] of it."),
        ([2.01, 2.09, 2.21], "; of 2 remedies second has the smallest loss: with it the gap is +0.100 ± 0.000."),
    ],
)
def test_the_best_of_several_is_called_so(plain, said):
    idle = result(arm(remedy="idle", delay=1), dict(enumerate(plain)))
    cells = [dataclasses.replace(each.cell, folder=f"{arm(delay=1).label}-{each.cell.seed}") for each in idle.cells]
    shared = [dataclasses.replace(each, cell=cell) for each, cell in zip(idle.cells, cells, strict=True)]
    results = [
        result(arm(), {0: 2.0, 1: 2.1, 2: 2.2}),
        result(arm(delay=1), dict(enumerate(plain))),
        result(arm(remedy="first", delay=1), {0: 2.2, 1: 2.3, 2: 2.4}),
        result(arm(remedy="second", delay=1), {0: 2.1, 1: 2.2, 2: 2.3}),
        result(arm(remedy="second", delay=2), {0: 2.0, 1: 2.1, 2: 2.2}),
        dataclasses.replace(idle, cells=shared),
    ]
    (verdict,) = rule_verdicts(best_against_best(results))
    assert verdict.sentence.endswith(said)
    assert verdict.num_remedies == 2, "neither another delay's nor what changes nothing"


def test_divergence_is_told():
    verdict = rule_verdicts(rows([2.0, 2.1, 2.2], [2.4, "diverged", 2.62], [2.1, 2.2, 2.3]))[0]
    assert "(1 of 3 seeds diverged)" in verdict.sentence


def test_rules_are_set_in_proportion():
    assert across({"adamw": 0.4, "muon": 0.1}) == "adamw loses 4.0 times [4.0, 4.0] what muon does."
    assert rules_sentence([]) is None


def test_the_ends_of_several_rules_are_picked_by_their_means():
    said = "Of 3 rules adamw loses most and muon least by the means"
    gaps = {"adamw": 0.4, "muon": 0.1, "soap": 0.2}
    assert across(gaps) == f"{said}, 4.0 times [4.0, 4.0] as much."
    assert across(gaps, num_seeds=1) == f"{said}.", "without an interval just as well"


def across(gaps, *, num_seeds=3):
    results = []
    for rule, gap in gaps.items():
        sync = {seed: 2.0 + seed / 10 for seed in range(num_seeds)}
        results += [result(arm(rule), sync), result(arm(rule, delay=1), {k: v + gap for k, v in sync.items()})]
    return rules_sentence(rule_verdicts(best_against_best(results)))


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
        (
            [2.0, 2.1, 2.2],
            [2.4, 2.5, "diverged"],
            [2.1, "diverged", 2.2],
            r"^Do not switch: .*1 of 3 seeds diverged\)\.$",
        ),
        (
            [2.0, 2.1, "diverged"],
            [2.4, 2.5, "diverged"],
            [2.1, 2.2, "diverged"],
            r"^Undecided: synchronous training diverges as well \(1 of 3 seeds diverged\); lower the learning rate",
        ),
        (
            [2.0, 2.1, "diverged"],
            [2.4, "diverged", "diverged"],
            [2.1, "diverged", "diverged"],
            r"^Do not switch: .*2 of 3 seeds diverged\), synchronous training less often \(1 of 3 seeds diverged\)\.$",
        ),
    ],
)
def test_one_sentence_says_whether_to_switch(sync, delay, feedback, said):
    import re

    sentence = switch_sentence(rows(sync, delay, feedback))
    assert re.search(said, sentence), sentence
    assert sentence.count(". ") == 0


@pytest.mark.parametrize(("name", "said"), [("adamw", "try Muon, a larger"), ("muon", "try a larger")])
def test_muon_is_not_told_to_try_muon(name, said):
    tables = {"optim": {"name": name}}
    results = [
        result(arm(name, delay=delay), {0: 2.0 + delay, 1: 2.1 + delay, 2: 2.2 + delay}, tables=tables)
        for delay in (0, 1)
    ]
    assert said in switch_sentence(best_against_best(results))
