"""Runs of the executor `dataparallel` through the files on disk."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import from_dict, load_toml, resolve, to_toml
from slipstream.dataparallel.checks import check_dataparallel
from slipstream.errors import ConfigError
from slipstream.report.run_report import render_runs
from slipstream.report.runs import open_runs
from slipstream.train.checkpoint import newest_complete
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter

EXAMPLE = Path(__file__).parents[3] / "configs" / "async_dp.toml"


def settings(run_dir, *, num_steps=8, **changes):
    tables = {
        "run_dir": str(run_dir),
        "executor": "dataparallel",
        "engine": "inline",
        "data": {"sequence_length": 16},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "dropout": 0.1},
        "optim": {"lr": 0.01, "lr_warmup_steps": 2, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": 8},
        "dataparallel": {"emulate_speeds": [1.0, 1.0, 1.0, 0.25], "emulate_jitter": 0.2},
        "train": {"num_steps": num_steps, "microbatch_size": 1},
        "evaluate": {"num_sequences": 4},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change
    return from_dict(tables)


def train(run_dir, *, resume=False, allow_change=(), **changes):
    return launch(settings(run_dir, **changes), reporter=SilentReporter(), resume=resume, allow_change=allow_change)


def rows(run_dir: Path):
    names = ("step", "loss", "grad_norm", "lr", "staleness_mean", "staleness_max", "step_s", "tokens_per_s")
    return [tuple(row[name] for name in names) for row in read_json_lines(run_dir / "metrics.jsonl")]


def test_the_summary_has_what_a_run_of_workers_is_judged_by(tmp_path):
    summary = train(tmp_path, num_steps=30)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["num_workers"], summary["engine"], summary["mode"]) == (4, "inline", "async")
    assert 0.9 < summary["throughput_share"] <= 1.05
    assert summary["staleness_max"] >= summary["staleness_mean"] > 0
    histogram = {int(staleness): count for staleness, count in summary["staleness_histogram"].items()}
    assert sum(histogram.values()) == summary["pushes_accepted"]
    assert max(histogram) == summary["staleness_max"]
    assert (summary["pushes_rejected"], summary["restarts"], summary["ledger_balanced"]) == (0, 0, True)
    assert summary["tokens_committed"] >= 30 * 8 * 16
    assert len(read_json_lines(tmp_path / "evaluations.jsonl")) == 2
    row = read_json_lines(tmp_path / "metrics.jsonl")[-1]
    assert row["tokens_per_s"] == pytest.approx(row["num_tokens"] / row["step_s"])


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_resumed_equals_continuous_bitwise(tmp_path, mode):
    options = {"dataparallel": {"mode": mode}, "staleness": {"error_feedback": 0.5}}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "halves", num_steps=4, **options)
    halves = train(tmp_path / "halves", resume=True, **options)
    assert rows(tmp_path / "whole") == rows(tmp_path / "halves")
    differing = {key for key in whole if whole[key] != halves[key]} - {"peak_memory_bytes", "config_hash"}
    assert not differing


def test_resume_with_other_workers_and_with_another_executor(tmp_path):
    train(tmp_path, num_steps=3)
    three = train(tmp_path, num_steps=6, resume=True, dataparallel={"emulate_speeds": [1.0, 1.0, 2.0]})
    assert (three["num_workers"], three["num_steps"], three["ledger_balanced"]) == (3, 6, True)
    alone = dataclasses.replace(settings(tmp_path, num_steps=8), executor="single")
    launch(alone, reporter=SilentReporter(), resume=True)
    back = train(tmp_path, num_steps=10, resume=True)
    assert (back["num_steps"], back["num_workers"], back["ledger_balanced"]) == (10, 4, True)
    assert back["tokens_committed"] == pytest.approx(10 * 8 * 16, abs=6 * 8 * 16)


def test_what_another_executor_makes_of_the_order_is_told(tmp_path):
    """The numbers are those of the ledger that was saved."""

    class Notes(SilentReporter):
        def __init__(self):
            self.all = []

        def note(self, text):
            self.all.append(text)

    def notes(executor, num_steps):
        reporter = Notes()
        config = dataclasses.replace(settings(tmp_path, num_steps=num_steps), executor=executor)
        launch(config, reporter=reporter, resume=True)
        return [each for each in reporter.all if "microbatches" in each]

    train(tmp_path, num_steps=5)
    checkpoint, _ = newest_complete(tmp_path / "checkpoints")
    committed = {
        number
        for start, stop in checkpoint.scalars["dataparallel"]["sequencer"]["ledger"]["committed"]
        for number in range(start, stop)
    }
    lost, repeated = len(set(range(40)) - committed), len(committed - set(range(40)))
    assert lost
    assert notes("dataparallel", 5) == []
    (note,) = notes("single", 7)
    assert "'single' goes on at microbatch 40, " in note
    assert f"{lost} microbatches before it are left out, {repeated} after it" in note
    assert notes("dataparallel", 9) == []


def test_throughput_is_that_of_the_clock_it_is_measured_by(tmp_path):
    """Steps of another executor, or on another engine, took none of this clock's time."""
    steady = {"emulate_jitter": 0.0}
    alone = dataclasses.replace(settings(tmp_path / "single", num_steps=20, dataparallel=steady), executor="single")
    launch(alone, reporter=SilentReporter())
    assert 0.8 < train(tmp_path / "single", num_steps=40, resume=True, dataparallel=steady)["throughput_share"] <= 1.01
    shares = []
    for num_steps, mode in ((7, "async"), (14, "sync"), (24, "async")):
        changes = {"dataparallel": steady | {"mode": mode}, "allow_change": ("dataparallel.mode",)}
        summary = train(tmp_path / "modes", num_steps=num_steps, resume=num_steps > 7, **changes)
        shares.append(summary["throughput_share"])
    assert shares[1] == pytest.approx(4 * 0.25 / 3.25)
    assert all(0.6 < share <= 1.01 for share in shares[::2])


def test_throughput_is_judged_by_the_speeds_of_now(tmp_path):
    slow, fast = ({"emulate_jitter": 0.0, "emulate_speeds": [speed] * 4} for speed in (1.0, 10.0))
    train(tmp_path, num_steps=20, dataparallel=slow)
    share = train(tmp_path, num_steps=60, resume=True, dataparallel=fast)["throughput_share"]
    assert 0.4 < share <= 1.01


@pytest.mark.parametrize("correction", ["dc_asgd", "gap_aware", "agc"])
def test_a_correction_begins_at_a_resume(tmp_path, correction):
    """The versions that gradients in flight had read were not kept: they go out again."""
    train(tmp_path, num_steps=5)
    names = ("staleness.correction", "staleness.correction_strength")
    staleness = {"correction": correction, "correction_strength": 0.1}
    summary = train(tmp_path, num_steps=12, resume=True, allow_change=names, staleness=staleness)
    assert (summary["num_steps"], summary["ledger_balanced"]) == (12, True)


def test_what_alters_the_trajectory_must_be_allowed_by_name(tmp_path):
    train(tmp_path, num_steps=2)
    with pytest.raises(ConfigError, match=r"dataparallel\.mode: 'async' -> 'sync'"):
        train(tmp_path, num_steps=4, resume=True, dataparallel={"mode": "sync"})


def test_synchronous_workers_wait_for_the_slowest(tmp_path):
    shares = {
        mode: train(tmp_path / mode, num_steps=20, dataparallel={"mode": mode, "emulate_jitter": 0.0})
        for mode in ("async", "sync")
    }
    assert shares["sync"]["throughput_share"] == pytest.approx(4 * 0.25 / 3.25)
    assert shares["sync"]["staleness_max"] == 0
    assert shares["async"]["tokens_per_s"] > 2.9 * shares["sync"]["tokens_per_s"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dataparallel": {"num_workers": 3}}, r"num_workers is 3, .* has 4 speeds"),
        ({"dataparallel": {"emulate_speeds": [1.0, 0.0]}}, r"has 0 for worker 1; a speed is more than 0"),
        ({"dataparallel": {"emulate_jitter": 9.0}}, r"emulate_jitter is 9,.* 0 to 3"),
        ({"dataparallel": {"pushes_per_step": 5}}, r"pushes_per_step is 5, but dataparallel.num_workers is 4"),
        ({"dataparallel": {"min_microbatches": 3}}, r"has 8 microbatches .* too few for 4 gradients .* to 12 or more"),
        ({"dataparallel": {"min_microbatches": 2, "max_microbatches": 1}}, r"max_microbatches is 1, less than"),
        ({"dataparallel": {"max_staleness": -1}}, r"max_staleness is -1; it must be 0 or more"),
        ({"dataparallel": {"mode": "sync"}, "pipeline": {"num_microbatches": 6}}, r"6 microbatches .* 4 workers"),
        ({"dataparallel": {"mode": "sync", "max_microbatches": 1}}, r"max_microbatches is 1, .* at least 2, or take"),
        (
            {"dataparallel": {"emulate_microbatch_ms": 1e308}},
            r"emulate_microbatch_ms is 1e\+308; allowed is 1e-6 to 1e9",
        ),
        ({"dataparallel": {"mode": "sync", "max_staleness": 2}}, r"max_staleness is 2, but with mode 'sync'"),
        ({"staleness": {"delay": 1}}, r"staleness.delay is 1, but with the executor 'dataparallel'"),
        ({"staleness": {"sync_until_step": 3}}, r"sync_until_step is 3, but with the executor 'dataparallel'"),
        ({"staleness": {"prediction": "xpipe"}}, r"without staleness.prediction_steps"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_dataparallel(resolve(settings("unused", **changes), vocab_size=257, cuda=False))


def test_workers_are_counted_where_nobody_says():
    for changes, expected in (({}, 4), ({"emulate_speeds": []}, 2), ({"emulate_speeds": [], "num_workers": 5}, 5)):
        config = resolve(settings("unused", dataparallel=changes), vocab_size=257, cuda=False)
        assert config.dataparallel.num_workers == expected


def test_the_command_line_takes_speeds_with_commas(tmp_path, capsys):
    words = ["--executor", "dataparallel", "--dataparallel.emulate-speeds", "1,1,0.5", "--run-dir", str(tmp_path)]
    assert main(["config", "show", *words]) == 0
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert load_toml(tmp_path / "shown.toml").dataparallel.emulate_speeds == (1.0, 1.0, 0.5)


RAY = ["train", "--config", str(EXAMPLE), "--engine", "ray"]


def test_without_ray_its_engine_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*RAY, "--run-dir", str(tmp_path / "run")]) == 2
    assert "pip install 'slipstream[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "no Ray cluster can be reached at 127.0.0.1:1"),
        ("ray://head:10001", "give host:port"),
        ("head", "give host:port"),
    ],
)
def test_a_ray_cluster_that_is_not_there_is_named(tmp_path, capsys, monkeypatch, address, sentence):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    assert main([*RAY, "--dataparallel.ray-address", address, "--run-dir", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("ray_address", "head:6379"), ("ray_transport", "c10d")])
def test_settings_of_ray_belong_to_its_engine(name, value):
    config = resolve(settings("unused", dataparallel={name: value}), vocab_size=257, cuda=False)
    with pytest.raises(ConfigError, match=rf"{name} is given, but the engine is 'inline'"):
        check_dataparallel(config)


def test_the_example_config_is_sound():
    config = resolve(load_toml(str(EXAMPLE)), vocab_size=257, cuda=False)
    check_dataparallel(config)
    assert config.dataparallel.num_workers == 4


def test_a_step_that_takes_no_time_has_no_rate(tmp_path, capsys):
    """Two equal workers push at the same instant of the virtual clock, and each push makes a step."""
    dataparallel = {"emulate_speeds": [1.0, 1.0], "emulate_jitter": 0.0, "pushes_per_step": 1}
    file = tmp_path / "settings.toml"
    file.write_text(
        to_toml(settings(tmp_path / "run", dataparallel=dataparallel, pipeline={"num_microbatches": 2}, num_steps=6))
    )
    assert main(["train", "--config", str(file), "--log.every-steps", "1"]) == 0
    rates = [row["tokens_per_s"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert None in rates
    assert any(rates)
    assert "tok/s n/a" in capsys.readouterr().out


def test_what_nobody_counted_is_not_told_as_zero(tmp_path, capsys):
    """Workers of one process each count no waiting, and no one number is the delay of all their gradients."""
    file = tmp_path / "settings.toml"
    file.write_text(to_toml(settings(tmp_path / "run", num_steps=6)))
    assert main(["train", "--config", str(file), "--log.every-steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "| bubble n/a |" in said
    assert re.search(r"bubble fraction +not counted", said)
    assert {row["bubble_fraction"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")} == {None}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["bubble_fraction"], summary["delay"]) == (None, None)
    html = render_runs(open_runs([tmp_path / "run"]))
    assert "% idle" not in html
    assert "ranks idle" not in html
