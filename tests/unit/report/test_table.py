"""Rows of the table against numbers worked out by hand."""

import math

import pytest
from tests.unit.report.fake import arm, result

from slipstream.report.columns import aligned, markdown
from slipstream.report.comparison import Comparison
from slipstream.report.grid import Grid, Row
from slipstream.report.table import at_equal_lr, best_against_best

SYNC, DELAY, FEEDBACK, CONTROL = (
    arm(),
    arm(delay=1),
    arm(remedy="error_feedback", delay=1),
    arm(remedy="error_feedback"),
)


def one_rate():
    return [
        result(SYNC, {0: 2.0, 1: 2.1, 2: 2.2}),
        result(DELAY, {0: 2.4, 1: 2.48, 2: 2.62}),
        result(CONTROL, {0: 1.9, 1: 2.0, 2: 2.1}),
        result(FEEDBACK, {0: 2.1, 1: 2.2, 2: 2.3}),
    ]


def by_arm(rows):
    return {row.arm: row for row in rows}


def test_gaps_are_paired_by_seed_and_the_share_is_of_mean_gaps():
    rows = by_arm(at_equal_lr(one_rate()))
    delay = rows[DELAY].to_json()
    assert delay["val_loss_mean"] == pytest.approx(2.5)
    # Gaps 0.40, 0.38, 0.42: mean 0.4, standard deviation 0.02, times 4.30265 / sqrt(3).
    assert delay["gap_to_sync_mean"] == pytest.approx(0.4)
    assert delay["gap_to_sync_ci95"] == pytest.approx([0.4 - 0.0496828, 0.4 + 0.0496828], abs=1e-6)
    assert delay["gap_closed_share"] == pytest.approx(0.0)
    feedback = rows[FEEDBACK].to_json()
    assert feedback["gap_to_sync_ci95"] == pytest.approx([0.1, 0.1])
    assert feedback["gap_closed_share"] == pytest.approx(1 - 0.1 / 0.4)
    low, high = feedback["gap_closed_share_ci95"]
    assert low < 0.75 < high
    assert rows[SYNC].to_json()["gap_to_sync_mean"] == 0.0
    assert rows[SYNC].to_json()["gap_closed_share"] is None


def test_the_best_synchronous_arm_may_have_a_remedy():
    """A look-ahead that helps synchronous training as well must not be sold as a cure for delay."""
    rows = by_arm(at_equal_lr(one_rate()))
    feedback = rows[FEEDBACK].to_json()
    assert feedback["best_sync"] == {"remedy": "error_feedback", "lr": 0.01}
    assert feedback["gap_to_best_sync_mean"] == pytest.approx(0.2)
    assert rows[CONTROL].to_json()["gap_to_sync_mean"] == pytest.approx(-0.1)
    assert rows[CONTROL].to_json()["gap_to_best_sync_mean"] == 0.0
    assert rows[CONTROL].to_json()["gap_closed_share"] is None


def test_best_against_best_lets_every_arm_choose_its_rate():
    results = [
        result(arm(lr=0.01), {0: 2.0, 1: 2.1}),
        result(arm(lr=0.02), {0: 1.9, 1: 2.0}),
        result(arm(delay=1, lr=0.01), {0: 2.1, 1: 2.2}),
        result(arm(delay=1, lr=0.02), {0: 2.9, 1: 3.0}),
    ]
    equal = by_arm(at_equal_lr(results))
    assert equal[arm(delay=1, lr=0.02)].gap.mean == pytest.approx(1.0)
    best = best_against_best(results)
    assert [row.arm for row in best] == [arm(lr=0.02), arm(delay=1, lr=0.01)]
    assert best[1].gap.mean == pytest.approx(0.2)


def test_a_rate_at_which_seeds_diverge_is_not_the_best():
    results = [
        result(arm(lr=0.01), {0: 2.0, 1: 2.1}),
        result(arm(lr=0.02), {0: 1.5, 1: "diverged"}),
    ]
    assert best_against_best(results)[0].arm.lr == 0.01


def test_a_diverged_seed_is_a_result_and_a_crashed_one_is_none():
    rows = by_arm(
        at_equal_lr(
            [
                result(SYNC, {0: 2.0, 1: 2.1, 2: 2.2}),
                result(DELAY, {0: 2.4, 1: "diverged", 2: "crashed"}),
                result(FEEDBACK, {0: "diverged", 1: "diverged", 2: "diverged"}),
            ]
        )
    )
    delay, feedback = rows[DELAY].to_json(), rows[FEEDBACK].to_json()
    assert (delay["num_seeds"], delay["num_diverged"], delay["num_crashed"]) == (2, 1, 1)
    assert delay["gap_to_sync_mean"] == pytest.approx(0.4), "paired with the same seed alone"
    assert delay["gap_to_sync_ci95"] is None
    assert (feedback["num_seeds"], feedback["num_diverged"]) == (3, 3)
    assert feedback["val_loss_mean"] is None
    assert feedback["gap_closed_share"] is None


def test_a_seed_that_ran_away_has_a_loss_and_its_arm_no_perplexity():
    rows = by_arm(at_equal_lr([result(SYNC, {0: 2.0, 1: 2.0}), result(DELAY, {0: 2.0, 1: 4867.0})]))
    sync, delay = rows[SYNC].to_json(), rows[DELAY].to_json()
    assert sync["val_perplexity_mean"] == pytest.approx(math.exp(2.0))
    assert delay["val_loss_mean"] == 2434.5
    # Not that of the seed that held.
    assert delay["val_perplexity_mean"] is delay["perplexity_gap_to_sync_mean"] is None
    assert "2434.500 ±" in markdown(list(rows.values()))


def test_batches_and_rules_are_compared_with_their_own():
    results = [
        result(arm(batch="8"), {0: 2.0}),
        result(arm(batch="16"), {0: 3.0}),
        result(arm("muon"), {0: 1.0}),
        result(arm(batch="8", delay=1), {0: 2.5}),
        result(arm(batch="16", delay=1), {0: 3.1}),
        result(arm("muon", delay=1), {0: 1.01}),
    ]
    gaps = [round(row.gap.mean, 6) for row in at_equal_lr(results) if row.arm.delay]
    assert gaps == [0.5, 0.1, 0.01]


def test_a_table_for_people_leaves_out_what_says_nothing():
    rows = at_equal_lr(one_rate())
    head, rule, *lines = markdown(rows).splitlines()
    assert head == "| rule | remedy | delay | lr | val loss | gap to sync | gap to best sync | gap closed | seeds |"
    assert rule.count("---") == 9
    assert lines[3].startswith("| adamw | error_feedback | 1 | 0.01 | 2.200 ± 0.248 | +0.100 ± 0.000 |")
    assert "75 % [" in lines[3]
    text = aligned(rows).splitlines()
    assert len(text) == 5
    assert text[0].index("remedy") == text[4].index("error_feedback")


def test_a_share_of_no_gap_is_left_out():
    rows = at_equal_lr(
        [
            result(SYNC, {0: 2.0, 1: 2.1, 2: 2.2}),
            result(DELAY, {0: 2.01, 1: 2.09, 2: 2.21}),
            result(FEEDBACK, {0: 2.0, 1: 2.1, 2: 2.21}),
        ]
    )
    assert "gap closed" not in markdown(rows)
    share = by_arm(rows)[FEEDBACK].to_json()
    assert math.isfinite(share["gap_closed_share"])
    assert share["gap_closed_share_ci95"] is None


def test_table_json_has_the_promised_keys():
    results = one_rate()
    comparison = Comparison(
        grid=Grid(source="g", rules=(Row(name="adamw"),)),
        results=results,
        equal=at_equal_lr(results),
        best=best_against_best(results),
        verdict=[],
        same_as={},
    )
    promised = (
        "rule remedy delay lr num_seeds val_loss_mean val_loss_ci95 gap_to_sync_mean gap_to_sync_ci95 "
        "gap_closed_share num_diverged num_spikes"
    )
    table = comparison.to_json()
    for row in [*table["cells"], *table["best"]]:
        assert set(promised.split()) <= row.keys()
    assert not comparison.has_crashed
