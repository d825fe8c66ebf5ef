"""`slipstream compare` as it is typed."""

import json
import re
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.train.metrics import read_json_lines

GRID = """
title = "Two by two by two"
[base]
data = { sequence_length = 8 }
model = { num_layers = 1, dim = 8, num_heads = 2, num_kv_heads = 1, ffn_dim = 8 }
pipeline = { num_microbatches = 1 }
train = { num_steps = 6, microbatch_size = 2, device = "cpu" }
evaluate = { num_sequences = 4 }

[grid]
delays = [0, 1]
seeds = [0, 1]

[[grid.rules]]
name = "adamw"
lr = 0.01

[[grid.rules]]
name = "muon"
lr = 0.02
"""


def run(*words: object) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.fixture
def grid(tmp_path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


def test_a_grid_is_trained_compared_and_reported(grid, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("compare", grid, "--run-dir", out, "--json") == 0
    captured = capsys.readouterr()
    table = json.loads(captured.out)
    assert table == json.loads((out / "table.json").read_text())
    assert [(row["rule"], row["remedy"], row["delay"], row["num_seeds"]) for row in table["cells"]] == [
        ("adamw", "none", 0, 2),
        ("adamw", "none", 1, 2),
        ("muon", "none", 0, 2),
        ("muon", "none", 1, 2),
    ]
    assert captured.err.count("val_loss") == 8
    cells = sorted((out / "cells").iterdir())
    assert len(cells) == 8
    delayed = out / "cells" / "adamw--none--delay-1--lr-0.01--seed-1"
    assert [row["staleness_max"] for row in read_json_lines(delayed / "metrics.jsonl")] == [0, 1, 1, 1, 1, 1]
    losses = [json.loads((cell / "summary.json").read_text())["val_loss"] for cell in cells]
    sync, late = table["cells"][:2]
    assert sync["val_loss_mean"] == pytest.approx(sum(losses[:2]) / 2)
    assert late["gap_to_sync_mean"] == pytest.approx((sum(losses[2:4]) - sum(losses[:2])) / 2)
    assert (out / "report.html").exists()

    assert run("compare", grid, "--run-dir", out) == 0
    again = capsys.readouterr().out
    assert "8 runs, 8 of them have a result already" in again
    assert "[1/8]" not in again
    assert re.search(r"adamw +none +1 +0\.01", again)
    assert f"report: {out / 'report.html'}" in again


def test_a_config_of_ones_own_is_judged(tmp_path, capsys):
    config = tmp_path / "mine.toml"
    config.write_text(
        "executor = 'pipeline'\n[data]\nsequence_length = 8\n"
        "[model]\nnum_layers = 1\ndim = 8\nnum_heads = 2\nnum_kv_heads = 1\nffn_dim = 8\n"
        "[pipeline]\nnum_stages = 1\nnum_microbatches = 1\n[train]\nnum_steps = 5\nmicrobatch_size = 2\n"
        "[evaluate]\nnum_sequences = 4\n"
    )
    assert run("compare", "--from", config, "--run-dir", tmp_path / "out", "--num-seeds", 2) == 0
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [(row["remedy"], row["delay"]) for row in table["cells"]] == [
        ("none", 0),
        ("none", 1),
        ("error_feedback", 1),
    ]
    assert re.match(r"(Switch|Do not switch yet|Undecided): ", table["verdict"][0])
    assert table["verdict"][0] in capsys.readouterr().out


def test_rows_that_were_lost_cost_no_table(grid, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("compare", grid, "--run-dir", out, "--json") == 0
    table = json.loads(capsys.readouterr().out)
    first, second, *_ = sorted((out / "cells").glob("*/metrics.jsonl"))
    first.unlink()
    second.write_text("".join(second.read_text().splitlines(keepends=True)[:3]))
    assert run("compare", grid, "--run-dir", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cells"] == table["cells"]


@pytest.mark.parametrize("text", ["[]", "{", "{}", "3"])
def test_a_damaged_summary_is_named(grid, tmp_path, capsys, text):
    cell = tmp_path / "out" / "cells" / "adamw--none--delay-0--lr-0.01--seed-0"
    cell.mkdir(parents=True)
    (cell / "summary.json").write_text(text)
    assert run("compare", grid, "--run-dir", tmp_path / "out") == 2
    assert f"{cell} holds a summary or failure file that cannot be read" in capsys.readouterr().err


def test_a_crashed_cell_is_reported_and_the_exit_code_tells(grid, tmp_path, capsys):
    out = tmp_path / "out"
    (out / "cells" / "muon--none--delay-1--lr-0.02--seed-1").mkdir(parents=True)
    (out / "cells" / "muon--none--delay-1--lr-0.02--seed-1" / "checkpoints").write_text("in the way")
    assert run("compare", grid, "--run-dir", out) == 1
    said = capsys.readouterr().out
    assert re.search(r"muon, none, delay 1, lr 0\.02, seed 1: crashed: .+", said)
    rows = json.loads((out / "table.json").read_text())["cells"]
    assert [row["num_crashed"] for row in rows] == [0, 0, 0, 1]
    assert rows[3]["val_loss_mean"] is not None


WRONG = {
    "no grid": (["compare"], r"give one of the two"),
    "no file": (["compare", "none.toml"], r"cannot read the grid none\.toml"),
    "a typo in a row": (["compare", "typo.toml"], r"grid\.remedies, row 'ef': unknown key 'staleness\.error_feedbak'"),
    "a wrong cell": (
        ["compare", "rule.toml"],
        r"cell 'adamv, none, delay 0, lr 0\.001, seed 0': optim\.name: there is no optimizer 'adamv'",
    ),
    "a run's config": (["compare", "run.toml"], r"compare --from run\.toml"),
    "no workers": (["compare", "good.toml", "--num-workers", "0"], r"0 runs at a time .* give 1 or more"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_input_is_a_sentence_and_nothing_is_trained(fault, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    remedy = "[[grid.remedies]]\nname = 'ef'\nstaleness = { error_feedbak = 1.0 }\n"
    Path("typo.toml").write_text(GRID + remedy)
    Path("rule.toml").write_text("[grid]\n[[grid.rules]]\nname = 'adamv'\n")
    Path("run.toml").write_text("[train]\nnum_steps = 3\n")
    Path("good.toml").write_text(GRID)
    words, said = WRONG[fault]
    assert run(*words, "--run-dir", "out") == 2
    captured = capsys.readouterr()
    assert re.search(said, captured.err), captured
    assert "Traceback" not in captured.err
    assert not Path("out").exists()


def test_a_file_is_no_folder_to_compare_in(grid, tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    assert run("compare", grid, "--run-dir", tmp_path / "taken") == 2
    assert "is a file. Choose another --run-dir" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"
