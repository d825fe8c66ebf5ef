"""The files of a comparison: complete, and readable without a network."""

import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.unit.report.fake import arm, result, train_by_formula

from slipstream.errors import ConfigError
from slipstream.report.compare import compare_grid, grid_and_judge
from slipstream.report.grid_file import parse_grid
from slipstream.report.render import _card
from slipstream.report.table import best_against_best
from slipstream.report.verdict import rule_verdicts

EVERYTHING = """
title = "All <kinds> of pictures & more"
description = "Everything at once."
[base.train]
num_steps = 150
[grid]
delays = [0, 1, 2]
seeds = [0, 1, 2]
[[grid.rules]]
name = "adamw"
lr = [0.01, 0.02]
[[grid.rules]]
name = "muon"
lr = [0.01, 0.02]
[[grid.remedies]]
name = "c = 1"
staleness = { error_feedback = 1.0 }
[[grid.remedies]]
name = "c = 2"
staleness = { error_feedback = 2.0 }
[[grid.reads]]
name = "q, k"
staleness = { delay_roles = ["q", "k"] }
only = { remedies = ["none"], delays = [1] }
[[grid.batches]]
name = "small"
train = { microbatch_size = 2 }
[[grid.batches]]
name = "large"
train = { microbatch_size = 4 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    grid = parse_grid(tomllib.loads(EVERYTHING), source="g.toml", folder=folder)
    assert compare_grid(grid, folder, train=train_by_formula, note=lambda text: None) is not None
    return folder


class Tags(HTMLParser):
    """Checks that what is opened is closed, and keeps what was seen."""

    VOID = ("meta", "input", "br", "circle", "rect", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.VOID or tag in ("circle", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def parsed(folder: Path) -> Tags:
    tags = Tags()
    tags.feed((folder / "report.html").read_text(encoding="utf-8"))
    assert tags.open == []
    return tags


def test_the_report_has_a_picture_for_every_axis(folder):
    assert parsed(folder).headings == [
        "All <kinds> of pictures & more",
        "What the delay costs",
        "Training loss",
        "What is stale",
        "Longer delays",
        "How much error feedback",
        "Learning rate",
        "Batch size",
        "Tables",
        "How this was made",
    ]


def test_the_report_needs_no_network_and_no_script(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<img|src=", text)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "prefers-color-scheme: dark" in text
    assert "nan" not in re.findall(r'points="([^"]*)"', text)
    assert not re.search(r'(points|cx|cy|x|y|width|height)="[^"]*(nan|inf)', text)


def test_curves_are_there_raw_and_smoothed(folder):
    classes = [value for name, value in parsed(folder).attributes if name == "class" and value]
    raw = sum("curve raw" in each for each in classes)
    assert raw > 0
    assert raw == sum("curve smoothed" in each for each in classes)


def test_the_files_agree(folder):
    table = json.loads((folder / "table.json").read_text())
    assert len(table["cells"]) == 2 * 2 * 2 * (3 * 3 + 1)
    assert len(table["best"]) == len(table["cells"]) / 2
    first = next(row for row in table["best"] if row["delay"] == 1 and row["remedy"] == "none")
    # 0.4 + 0.0004 seed: mean 0.4004.
    assert first["gap_to_sync_mean"] == pytest.approx(0.4004)
    assert first["lr"] == 0.01
    feedback = next(row for row in table["best"] if row["delay"] == 1 and row["remedy"] == "c = 1")
    assert feedback["gap_closed_share"] == pytest.approx(0.5, abs=1e-3)
    markdown = (folder / "table.md").read_text()
    assert markdown.startswith("# All <kinds> of pictures & more\n")
    assert "+0.400 ± 0.001" in markdown
    assert "+0.400 ± 0.001" in parsed(folder).text


def test_what_is_picked_on_the_seeds_it_is_judged_by_is_said_to_be(folder, tmp_path):
    said = "The best of several remedies, and the rules that lose most and least, are picked by their means"
    assert said in parsed(folder).text
    assert '<div class="cure">best of 2: <b>c = 2</b> closes' in (folder / "report.html").read_text(encoding="utf-8")
    grid = parse_grid({"grid": {"rules": [{"name": "adamw"}]}}, source="g.toml", folder=tmp_path)
    assert compare_grid(grid, tmp_path, train=train_by_formula, note=lambda text: None) is not None
    assert said not in parsed(tmp_path).text


RATES = """
[base.train]
num_steps = 20
[grid]
delays = [0, 1]
seeds = [0, 1]
[[grid.rules]]
name = "adamw"
lr = {rates}
"""


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param([0.01, 500.0], id="a loss beyond exp"),
        pytest.param([0.01, 3e37], id="a loss at the end of float32"),
        pytest.param([0.0, 0.01, 0.02], id="no rate at all"),
        pytest.param([0.0, 0.01], id="no rate at all, beside a single one"),
    ],
)
def test_any_rate_that_may_be_trained_with_can_be_reported(rates, tmp_path):
    grid = parse_grid(tomllib.loads(RATES.format(rates=rates)), source="g.toml", folder=tmp_path)
    assert compare_grid(grid, tmp_path, train=train_by_formula, note=lambda text: None) is not None
    assert ("Learning rate" in parsed(tmp_path).headings) is (sum(rate > 0 for rate in rates) > 1)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r'(points|cx|cy|x|y|width|height)="[^"]*(nan|inf)', html)
    rows = json.loads((tmp_path / "table.json").read_text())["cells"]
    assert [row["val_loss_mean"] is not None for row in rows] == [True] * 2 * len(rates)


@pytest.mark.parametrize(
    ("delayed", "said"),
    [
        ([2.4, 2.48, 2.62], None),
        ([1.9, 2.001, 2.099], "a gain"),
        ([2.01, 2.09, 2.21], "not to be told from 0 with these seeds"),
        ([2.4], "one seed: no interval"),
        ([1.9], "one seed: no interval"),
    ],
)
def test_a_card_says_what_its_interval_does(delayed, said):
    sync = dict(enumerate([2.0, 2.1, 2.2][: len(delayed)]))
    rows = best_against_best([result(arm(), sync), result(arm(delay=1), dict(enumerate(delayed)))])
    (verdict,) = rule_verdicts(rows)
    assert re.findall(r'class="cure">([^<]*)<', _card(verdict)) == ([said] if said else [])


def test_an_interrupted_grid_writes_nothing(tmp_path):
    grid = parse_grid({"grid": {"rules": [{"name": "adamw"}]}}, source="g.toml", folder=tmp_path)
    stopped = compare_grid(grid, tmp_path, train=lambda configs, keep_checkpoints: False, note=lambda text: None)
    assert stopped is None
    assert not list(tmp_path.iterdir())


def test_failed_cells_are_named_in_every_file(tmp_path):
    def train(configs, *, keep_checkpoints):
        train_by_formula(configs)
        for name, config in configs.items():
            folder = Path(config.run_dir)
            if "delay 1" in name:
                (folder / "summary.json").unlink()
                kind = "crashed" if "seed 0" in name else "diverged"
                (folder / "failure.json").write_text(json.dumps({"kind": kind, "message": "Traceback\nit <broke>"}))
        return True

    grid = parse_grid({"grid": {"rules": [{"name": "adamw"}]}}, source="g.toml", folder=tmp_path)
    comparison = compare_grid(grid, tmp_path, train=train, note=lambda text: None)
    assert comparison is not None
    assert comparison.has_crashed
    name = "adamw, none, delay 1, lr 0.001, seed 0"
    table = json.loads((tmp_path / "table.json").read_text())
    assert {each["kind"] for each in table["failures"]} == {"crashed", "diverged"}
    assert table["failures"][0]["cell"] == name
    assert f"* {name}: crashed: it <broke>" in (tmp_path / "table.md").read_text()
    assert name in parsed(tmp_path).text
    assert f"{name}: crashed: it <broke>" in comparison.to_text(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("", ""), "give one of the two"),
        (("a.toml", "b.toml"), "give one of the two"),
        (("", "none.toml"), r"cannot read the config file none\.toml"),
    ],
)
def test_what_to_compare_must_be_clear(words, said):
    with pytest.raises(ConfigError, match=said):
        grid_and_judge(*words, num_seeds=3, tolerance=0.005)
