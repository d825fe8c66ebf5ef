"""Grids with asynchronous workers: what their cells are, and what tables and report say of them."""

import re
import tomllib
from pathlib import Path

import pytest
from tests.unit.report.fake import result
from tests.unit.report.fake_runs import worker_summary

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.report.cells import Arm, cells_of
from slipstream.report.columns import markdown
from slipstream.report.compare import compare_grid
from slipstream.report.grid import Grid
from slipstream.report.grid_file import parse_grid
from slipstream.report.run_report import render_runs
from slipstream.report.runs import open_runs
from slipstream.report.table import at_equal_lr, by_rule
from slipstream.report.worker_charts import worker_sentence
from slipstream.report.workers import run_of_workers
from slipstream.train.launch import launch
from slipstream.train.progress import SilentReporter

GRID = """
[base]
data = { sequence_length = 8 }
model = { num_layers = 1, dim = 8, num_heads = 1, num_kv_heads = 1, ffn_dim = 8 }
pipeline = { num_microbatches = 4 }
train = { num_steps = 12, microbatch_size = 1, device = "cpu" }
evaluate = { num_sequences = 2 }
log = { every_steps = 1 }
dataparallel = { emulate_speeds = [1.0, 4.0], dynamic_batches = false }
staleness = { agc = { min_pairs = 2, ramp_steps = 2 } }
[grid]
delays = [0]
seeds = [0]
[[grid.rules]]
name = "adamw"
[[grid.workers]]
name = "c = K"
dataparallel = { pushes_per_step = 0 }
[[grid.workers]]
name = "c = 1"
dataparallel = { pushes_per_step = 1 }
[[grid.remedies]]
name = "full"
staleness = { correction = "agc", lr_discount = "aalr", aalr_threshold = 0.5 }
dataparallel = { dynamic_batches = true }
only = { workers = ["c = K", "c = 1"] }
[[grid.remedies]]
name = "without AGC"
against = "full"
dataparallel = { dynamic_batches = true }
only = { workers = ["c = 1"] }
"""


def grid(text: str = GRID) -> Grid:
    return parse_grid(tomllib.loads(text), source="g.toml", folder=Path())


def test_workers_take_the_place_of_a_delay():
    cells = cells_of(grid())
    assert [(cell.arm.remedy, cell.arm.workers, cell.arm.delay) for cell in cells] == [
        ("none", "", 0),
        ("none", "c = K", 1),
        ("none", "c = 1", 1),
        ("full", "c = K", 1),
        ("full", "c = 1", 1),
        ("without AGC", "c = 1", 1),
    ]
    synchronous, *asynchronous = (cell.config for cell in cells)
    assert synchronous.executor == "single"
    assert synchronous.dataparallel == Config().dataparallel, "without effect there, so no other run"
    assert {(config.executor, config.engine, config.staleness.delay) for config in asynchronous} == {
        ("dataparallel", "inline", None)
    }
    assert [config.dataparallel.pushes_per_step for config in asynchronous] == [0, 1, 0, 1, 1]
    assert asynchronous[0].staleness == Config().staleness, "settings of a method that is not there are no other run"
    assert asynchronous[2].staleness.agc.min_pairs == 2
    assert [config.dataparallel.dynamic_batches for config in asynchronous] == [False, False, True, True, True]
    assert {config.batch_tokens * config.train.num_steps for config in (synchronous, *asynchronous)} == {12 * 4 * 8}
    assert len({cell.folder for cell in cells}) == 6


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pushes_per_step = 1", "mode = 'sync'", r"workers, row 'c = 1' sets engine or dataparallel\.mode"),
        ('against = "full"', 'against = "ful"', r"row 'without AGC': against names 'ful'.* Did you mean 'full'\?"),
        ('workers = ["c = 1"]', 'workers = ["c = 2"]', r"only\.workers names 'c = 2'.*It has: c = K, c = 1"),
        ("pushes_per_step = 0 }", "}\nonly = { delays = [0] }", r"row 'c = K': only limits the rules and remedies"),
    ],
)
def test_a_mistake_is_named(old, new, said):
    assert old in GRID
    with pytest.raises(ConfigError, match=said):
        grid(GRID.replace(old, new))


def test_each_kind_of_workers_stands_beside_what_is_synchronous():
    sync, naive, full = (Arm("adamw", remedy, "all", "", delay, 0.1, crew) for remedy, delay, crew in ARMS)
    rows = at_equal_lr(
        [result(sync, {0: 2.0, 1: 2.0}), result(naive, {0: 2.5, 1: 2.7}), result(full, {0: 2.2, 1: 2.4})],
        {"full": "none"},
    )
    assert {name: [row.arm for row in group] for name, group in by_rule(rows).items()} == {
        "adamw, c = 1": [sync, naive, full]
    }
    assert rows[2].against is not None
    assert rows[2].against.mean == pytest.approx(-0.3)
    assert rows[1].perplexity_gap is not None
    assert rows[1].perplexity_gap.mean == pytest.approx((2.71828**2.5 + 2.71828**2.7) / 2 - 2.71828**2, rel=1e-4)
    head, _, *body = markdown(rows).splitlines()
    assert re.sub(r" +", " ", head).startswith("| rule | workers | remedy |")
    assert "against none" in head
    assert "−0.300 ± 0.000" in body[2]


ARMS = (("none", 0, ""), ("none", 3, "c = 1"), ("full", 3, "c = 1"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workers")

    def train(configs, *, keep_checkpoints):
        for config in configs.values():
            launch(config, reporter=SilentReporter())
        return True

    assert compare_grid(grid(), folder, train=train, note=lambda text: None) is not None
    return folder


def test_tables_and_report_tell_of_workers(folder):
    table = (folder / "table.md").read_text()
    assert "staleness (max)" in table
    assert "perplexity" in table
    assert "adamw, c = 1: asynchronous workers cost" in table
    report = (folder / "report.html").read_text()
    for heading in ("Workers", "The gradient compensator by group", "The async-aware rate"):
        assert f"<h2>{heading}</h2>" in report
    assert "the ledger balances in all of 5 runs: " in report
    for name in ("c = 1, equal batches", "c = 1, dynamic batches"):
        assert f"<h3>{name}: shares</h3>" in report
        assert f"<h3>{name}: staleness</h3>" in report


def picture(html: str, title: str) -> tuple[str, str]:
    """Return the drawing below a title without its name and colours, and the table below it."""
    found = re.search(rf"<h3>{re.escape(title)}</h3><svg[^>]*>(.*?)</svg>.*?<table>(.*?)</table>", html)
    assert found, title
    return re.sub(r"\bc\d\b|clip-[\w-]+", "", found[1]), found[2]


def test_the_report_of_a_run_draws_its_workers_as_the_comparison_does(folder):
    (run,) = open_runs([next((folder / "cells").glob("adamw--full--workers-c-1--*"))])
    lone, compared = render_runs([run]), (folder / "report.html").read_text()
    for mine, of_arm in (
        (f"{run.name}: shares", "c = 1, dynamic batches: shares"),
        (f"{run.name}: staleness", "c = 1, dynamic batches: staleness"),
        (run.name, "adamw, full, c = 1"),
    ):
        assert picture(lone, mine) == picture(compared, of_arm)


def test_a_run_without_workers_has_none():
    assert run_of_workers(Config(), {"val_loss": 2.0}, [{"step": 1, "step_s": 1.0}]) is None


def sentence(**changes) -> str:
    runs = [
        run_of_workers(Config(), worker_summary([3, 1]) | changed, [{"step": 1, "step_s": 1.0}])
        for changed in ({}, changes)
    ]
    return worker_sentence([run for run in runs if run is not None])


def test_what_became_of_data_and_gradients_is_added_up_over_runs():
    assert sentence(throughput_share=0.5, tokens_dropped=2, restarts=0) == (
        "2 workers trained at 50.0% to 96.7% of the sum of their own speeds; the ledger balances in all of 2 runs: "
        "819,200 tokens committed, 130 dropped; 1,000 gradients counted, 4 rejected; 1 restart of workers."
    )
    assert "; the ledger balances in ONLY 1 of 2 runs: " in sentence(ledger_balanced=False)


def test_shares_and_rates_are_of_what_was_committed():
    summary = {
        "staleness_histogram_by_worker": {"10": {"0": 3, "4": 1}, "2": {"1": 4}},
        "microbatches_by_worker": {"10": 3, "2": 1},
        "tokens_committed": 400,
        "staleness_mean": 1.0,
        "staleness_max": 4,
        "throughput_share": 0.9,
        "pushes_accepted": 8,
        "pushes_rejected": 2,
        "ledger_balanced": True,
    }
    metrics = {"agc/q.0/ramp": 1.0, "agc/q.0/gain": 0.5, "agc/k.0/ramp": 0.0, "agc/k.0/gain": 0.0, "aalr/factor": 0.8}
    rows = [{"step": 1, "step_s": 2.0, "method_metrics": metrics}, {"step": 2, "step_s": 2.0}]
    run = run_of_workers(Config(), summary, rows)
    assert run is not None
    assert [(each.number, each.share, each.tokens_per_s) for each in run.workers] == [(2, 0.25, 25.0), (10, 0.75, 75.0)]
    assert (run.workers[1].staleness_mean, run.workers[1].staleness_max) == (1.0, 4)
    assert [(group.group, group.gain) for group in run.groups] == [("q.0", 0.5)], "k.0 has not begun"
    assert run.lr_factor == [(1, 0.8)]
