"""Many runs side by side: none sinks the others, and none is trained twice."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.config import Config, from_dict, to_toml
from slipstream.errors import ConfigError
from slipstream.train.many import train_all
from slipstream.train.many_progress import SilentObserver, TimeLeft
from slipstream.train.outcome import read_outcome
from slipstream.train.rundir import RunDir

SMALL = {
    "data": {"sequence_length": 8},
    "model": {"num_layers": 1, "dim": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 8},
    "pipeline": {"num_microbatches": 1},
    "train": {"num_steps": 4, "microbatch_size": 2, "device": "cpu"},
    "evaluate": {"num_sequences": 4},
}

GRID_MAIN = """
import sys
from pathlib import Path
from slipstream.config import from_dict, load_toml
from slipstream.train.many import train_all
from slipstream.train.many_progress import SilentObserver
sys.exit(0 if train_all({"long": load_toml(sys.argv[1])}, observer=SilentObserver(), num_workers=1) else 143)
"""


def config(run_dir: Path, **tables) -> Config:
    merged = {key: SMALL.get(key, {}) | tables.get(key, {}) for key in SMALL | tables}
    return dataclasses.replace(from_dict(merged), run_dir=str(run_dir))


class Log(SilentObserver):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.begun: list[str] = []
        self.kinds: dict[str, str] = {}
        self.on_step_do = lambda news: None

    def note(self, text):
        self.notes.append(text)

    def began(self, run):
        self.begun.append(run.name)

    def on_step(self, run, news):
        self.on_step_do(news)

    def ended(self, run, outcome, *, seconds):
        self.kinds[run.name] = outcome.kind


def test_what_failed_is_told_and_the_rest_is_trained_and_never_twice(tmp_path):
    """One run diverges, one crashes while it trains; the second call tries only the crashed one again."""
    configs = {
        "good": config(tmp_path / "good"),
        "diverges": config(tmp_path / "diverges", optim={"lr": 1e30}, train={"max_skipped_steps": 1, "num_steps": 9}),
        "crashes": config(tmp_path / "crashes", checkpoint={"every_steps": 1}),
        "late": config(tmp_path / "late", staleness={"delay": 1}),
    }
    (tmp_path / "crashes").mkdir()
    (tmp_path / "crashes" / "checkpoints").write_text("in the way of the folder")
    log = Log()
    assert train_all(configs, observer=log, num_workers=2)
    assert log.kinds == {"good": "finished", "diverges": "diverged", "crashes": "crashed", "late": "finished"}
    assert json.loads((tmp_path / "diverges" / "failure.json").read_text())["kind"] == "diverged"
    crashed = read_outcome(tmp_path / "crashes")
    assert crashed is not None
    assert "cannot save a checkpoint" in crashed.message
    good = RunDir(tmp_path / "good")
    assert good.summary.exists()
    assert not good.checkpoints.exists(), "a grid of checkpoints fills a disk"

    (tmp_path / "crashes" / "checkpoints").unlink()
    before = good.metrics.read_bytes()
    again = Log()
    assert train_all(configs, observer=again, num_workers=2)
    assert again.begun == ["crashes"]
    assert again.kinds == {"crashes": "finished"}
    assert not (tmp_path / "crashes" / "failure.json").exists()
    assert good.metrics.read_bytes() == before


def test_checkpoints_are_kept_where_asked(tmp_path):
    assert train_all({"a": config(tmp_path / "a")}, observer=Log(), num_workers=1, keep_checkpoints=True)
    assert [path.name for path in RunDir(tmp_path / "a").checkpoints.iterdir()] == ["step-00000004"]


def test_a_signal_saves_what_is_under_way_and_the_next_call_goes_on(tmp_path):
    long = config(tmp_path / "long", train={"num_steps": 3000}, optim={"lr_total_steps": 3000})
    log = Log()
    told = []

    def stop(news):
        if news["step"] > 3 and not told:
            told.append(news["step"])
            os.kill(os.getpid(), signal.SIGTERM)

    log.on_step_do = stop
    assert train_all({"long": long, "next": config(tmp_path / "next")}, observer=log, num_workers=1) is False
    assert log.begun == ["long"]
    assert read_outcome(tmp_path / "long") is None
    saved = [path.name for path in RunDir(tmp_path / "long").checkpoints.iterdir()]
    assert len(saved) == 1
    reached = int(saved[0].removeprefix("step-"))
    shorter = dataclasses.replace(long, train=dataclasses.replace(long.train, num_steps=reached + 5))
    with pytest.raises(ConfigError, match=r"long: .* holds a run with other settings:\n  train\.num_steps: 3000 -> "):
        train_all({"long": shorter}, observer=Log(), num_workers=1)


def test_a_signal_to_the_whole_process_group_saves_too(tmp_path):
    """As a batch system sends it: parent, fork server and runs get it at once."""
    long = config(tmp_path / "long", train={"num_steps": 100000}, optim={"lr_total_steps": 100000})
    (tmp_path / "long.toml").write_text(to_toml(long))
    process = subprocess.Popen([sys.executable, "-c", GRID_MAIN, tmp_path / "long.toml"], start_new_session=True)
    metrics = RunDir(tmp_path / "long").metrics
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == 143
    assert read_outcome(tmp_path / "long") is None
    assert [path.name for path in RunDir(tmp_path / "long").checkpoints.iterdir()]


def test_a_killed_process_is_a_crash(tmp_path):
    long = config(tmp_path / "long", train={"num_steps": 100000}, optim={"lr_total_steps": 100000})
    log = Log()

    def kill(news):
        for process in multiprocessing.active_children():
            if process.name == "long":
                process.kill()

    log.on_step_do = kill
    assert train_all({"long": long}, observer=log, num_workers=1)
    assert log.kinds == {"long": "crashed"}
    outcome = read_outcome(tmp_path / "long")
    assert outcome is not None
    assert outcome.message == "the process was killed by SIGKILL"


WRONG = {
    "model": ({"model": {"num_heads": 3}}, r"^bad: model\.num_heads is 3"),
    "rule": ({"optim": {"name": "adamv"}}, r"^bad: optim\.name: there is no optimizer 'adamv'"),
    "role": ({"staleness": {"delay": 1, "delay_roles": ["kk"]}}, r"^bad: staleness\.delay_roles names 'kk'"),
    "remedy": (
        {"optim": {"name": "muon"}, "staleness": {"prediction": "xpipe"}},
        r"^bad: staleness\.prediction 'xpipe'",
    ),
    "data": ({"train": {"microbatch_size": 900000}}, r"^bad: .* train split is too small"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_mistake_in_the_last_run_stops_before_the_first(fault, tmp_path):
    tables, said = WRONG[fault]
    log = Log()
    with pytest.raises(Exception, match=said):
        train_all({"good": config(tmp_path / "good"), "bad": config(tmp_path / "bad", **tables)}, observer=log)
    assert log.begun == []
    assert not list(tmp_path.iterdir())


def test_settings_without_effect_are_warned_about_once_for_all_seeds(tmp_path):
    configs = {
        f"seed {seed}": config(tmp_path / str(seed), optim={"adamw_lr": 0.1}, data={"seed": seed}, model={"seed": seed})
        for seed in range(3)
    }
    log = Log()
    assert train_all(configs, observer=log, num_workers=2)
    assert [note for note in log.notes if "adamw_lr has no effect" in note] == [
        "warning: seed 0: optim.adamw_lr has no effect with optim.name 'adamw': that rule takes all parameters."
    ]


def test_other_settings_are_refused_or_begun_anew(tmp_path):
    assert train_all({"a": config(tmp_path / "a")}, observer=Log(), num_workers=1)
    other = {"a": config(tmp_path / "a", optim={"lr": 0.5})}
    with pytest.raises(ConfigError, match=r"(?s)a: .*optim\.lr: 0\.001 -> 0\.5.*--overwrite"):
        train_all(other, observer=Log(), num_workers=1)
    again = Log()
    assert train_all(other, observer=again, num_workers=1, overwrite=True)
    assert again.kinds == {"a": "finished"}
    quiet = {"a": dataclasses.replace(other["a"], log=dataclasses.replace(other["a"].log, every_steps=3))}
    third = Log()
    assert train_all(quiet, observer=third, num_workers=1, overwrite=True)
    assert third.begun == [], "how often it logs makes no other run"


def test_time_left_counts_steps_of_all_runs(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    left = TimeLeft(total_steps=300)
    assert left.seconds() is None
    left.reached("a", 1)
    clock[0] = 110.0
    left.reached("a", 100)
    assert left.seconds() == pytest.approx(10 / 100 * 200)
    left.ended("a", 100)
    left.reached("resumed", 51)
    clock[0] = 115.0
    left.reached("resumed", 100)
    assert left.seconds() == pytest.approx(15 / 150 * 100), "the 50 steps it was resumed after took no time here"


def test_a_remedy_without_effect_is_named_with_its_row_and_a_control_is_not(tmp_path):
    idle = {"delay": 1, "correction": "dc_asgd"}
    control = {"delay": 0, "error_feedback": 1.0}
    configs = {
        "cell 'adamw, dc_asgd'": config(tmp_path / "a", staleness=idle),
        "cell 'adamw, control'": config(tmp_path / "b", staleness=control),
    }
    log = Log()
    train_all(configs, observer=log, num_workers=2)
    (warning,) = [note for note in log.notes if note.startswith("warning")]
    assert warning.startswith("warning: cell 'adamw, dc_asgd': staleness.correction 'dc_asgd' has no effect")
