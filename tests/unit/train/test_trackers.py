"""Trackers are shown what the files hold, resume where they were, and cannot sink a run."""

import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch

from slipstream.config import from_dict
from slipstream.errors import ConfigError
from slipstream.train import own, trackers
from slipstream.train.launch import launch
from slipstream.train.many_checks import PlannedRun, check_runs
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter
from slipstream.train.trackers import Trackers, check_trackers


class Notes(SilentReporter):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def train(run_dir, *names, num_steps=4, reporter=None, resume=False, overwrite=False):
    tables = {
        "run_dir": str(run_dir),
        "data": {"sequence_length": 16},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
        "optim": {"lr_total_steps": 40},
        "pipeline": {"num_microbatches": 2},
        "train": {"num_steps": num_steps, "microbatch_size": 2},
        "evaluate": {"num_sequences": 4, "every_steps": 2},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "log": {"trackers": names},
    }
    return launch(from_dict(tables), reporter=reporter or SilentReporter(), resume=resume, overwrite=overwrite)


def log_of(kept):
    """A tracker that keeps what it is shown in a list of the caller's."""

    class Keeping:
        def __init__(self, config, *, identity, resume_step):
            kept.append(("open", identity, resume_step))

        def log(self, figures, *, step):
            kept.append(("log", step, figures))

        def close(self, *, failed):
            kept.append(("close", failed))

    return Keeping


@pytest.fixture
def kept(monkeypatch):
    found = []
    monkeypatch.setattr(trackers, "KINDS", {"wandb": log_of(found)})
    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    monkeypatch.setattr("slipstream.train.launch.check_trackers", lambda names: None)
    return found


def test_a_tracker_is_shown_every_row(tmp_path, kept):
    train(tmp_path, "wandb")
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    shown = {
        step: figures for _, step, figures in (event for event in kept if event[0] == "log") if "train/loss" in figures
    }
    assert {step: figures["train/loss"] for step, figures in shown.items()} == {
        row["step"]: row["loss"] for row in rows
    }
    assert "train/step" not in shown[1]
    evaluated = [event[1] for event in kept if event[0] == "log" and "validation/val_loss" in event[2]]
    assert evaluated == [0, 2, 4]
    assert kept[0][0] == "open"
    assert kept[-1] == ("close", False)
    steps = [event[1] for event in kept if event[0] == "log"]
    assert steps == sorted(steps)


def test_nested_figures_are_shown_and_lists_are_not():
    row = {"step": 3, "mfu": None, "skipped": True, "router": {"load_max": 2.0, "by_layer": [1.0]}}
    assert dict(trackers._numbers(row, "train/")) == {"train/skipped": 1.0, "train/router/load_max": 2.0}


def test_a_resumed_run_goes_on_under_the_same_name(tmp_path, kept):
    train(tmp_path, "wandb", num_steps=2)
    train(tmp_path, "wandb", num_steps=4, resume=True)
    train(tmp_path, "wandb", num_steps=2, overwrite=True)
    (_, first, zero), (_, second, two), (_, third, _) = (event for event in kept if event[0] == "open")
    assert (zero, two) == (0, 2)
    assert first == second != third
    assert first.startswith(tmp_path.name)


class Broken:
    """Fails at the call of a number, counted from its making."""

    def __init__(self, at):
        self.left = at

    def __call__(self, config, *, identity, resume_step):
        self._maybe()
        return self

    def _maybe(self):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no route to host\nmore words")

    def log(self, figures, *, step):
        self._maybe()

    def close(self, *, failed):
        self._maybe()


@pytest.mark.parametrize("at", [0, 1, 4, 8])
def test_a_failing_tracker_is_named_once_and_changes_nothing(tmp_path, monkeypatch, kept, at):
    plain = train(tmp_path / "plain")
    monkeypatch.setattr(trackers, "KINDS", {"wandb": log_of(kept), "trackio": Broken(at)})
    notes = Notes()
    summary = train(tmp_path / "run", "trackio", "wandb", reporter=notes)
    assert summary["weights_sha256"] == plain["weights_sha256"]
    said = [text for text in notes.texts if "trackio" in text]
    assert said == [
        "warning: the tracker trackio fails and is left out from here on; training goes on. no route to host"
    ]
    assert sum(event[0] == "log" for event in kept) == 7, "the other one is shown everything"


def test_the_failure_of_a_run_reaches_its_trackers(tmp_path, monkeypatch, kept):
    from slipstream.train.single import SingleExecutor

    def fail(self, *, stop_requested=False):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(SingleExecutor, "run_step", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path, "wandb")
    assert kept[-1] == ("close", True)


def test_what_is_not_installed_is_refused_before_anything_happens(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("wandb", "trackio") else found(name))
    with pytest.raises(ConfigError, match=r"names wandb, which is not installed: pip install 'slipstream\[wandb\]'"):
        train(tmp_path / "run", "wandb")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"wandb and trackio, which are not .*'slipstream\[wandb,trackio\]'"):
        check_trackers(["wandb", "trackio", "wandb"])
    check_trackers([])


def test_many_runs_and_modules_of_ones_own_are_refused_as_well(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    config = from_dict({"run_dir": str(tmp_path / "run"), "log": {"trackers": ["wandb"]}})
    with pytest.raises(ConfigError, match="names wandb, which is not installed"):
        check_runs([PlannedRun(name="first", config=config)], overwrite=False, warn=print)
    with pytest.raises(ConfigError, match="names wandb, which is not installed"):
        own.fit(torch.nn.Linear, {}, config)
    assert not (tmp_path / "run").exists()


def test_a_misspelt_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"log.trackers', item 0 is 'tensorbord'\. Did you mean 'tensorboard'"):
        from_dict({"log": {"trackers": ["tensorbord"]}})


def test_tensorboard_shows_one_curve_over_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, "tensorboard", num_steps=4)
    # As after a crash: what was written after the checkpoint is made anew, and must not be there twice.
    (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    train(tmp_path, "tensorboard", num_steps=6, resume=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in shown] == pytest.approx([row["loss"] for row in rows])
    assert {event.step for event in events.Scalars("validation/val_loss")} == {0, 2, 4, 6}


def test_wandb_offline_keeps_a_run_that_can_be_synced(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    notes = Notes()
    config = from_dict({"run_dir": str(tmp_path), "log": {"trackers": ["wandb"]}})
    tmp_path.mkdir(exist_ok=True)
    for resume_step in (0, 2):
        shown = Trackers(config, note=notes.note, resume_step=resume_step)
        for step in (resume_step + 1, resume_step + 2):
            shown.row({"step": step, "loss": 2.5, "grad_norm": math.inf}, of="train")
        shown.close()
    assert notes.texts == []
    identity = json.loads((tmp_path / "trackers.json").read_text())["id"]
    folders = list((tmp_path / "wandb").glob(f"offline-run-*-{identity}"))
    assert len(folders) >= 1
    assert all(list(folder.glob("*.wandb")) for folder in folders)
    # Its own process writes the end of a file after `finish` has come back.
    unwritten, deadline = {file for folder in folders for file in folder.glob("*.wandb")}, time.monotonic() + 30
    while unwritten and time.monotonic() < deadline:
        unwritten = {file for file in unwritten if b"train/loss" not in file.read_bytes()}
        time.sleep(0.02)
    assert not unwritten


def test_trackio_gives_back_what_it_was_shown(tmp_path):
    """In a process of its own, because the place is read from the environment when the package is imported."""
    pytest.importorskip("trackio")
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "kept")}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO_PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # and nothing else: the log is read by programs
    identity = json.loads((tmp_path / "trackers.json").read_text())["id"]
    assert told["runs"] == [identity]
    assert [(row["step"], row["train/loss"]) for row in told["rows"]] == [(1, 2.5), (2, 2.25), (3, 2.5), (4, 2.25)]
    assert told["rows"][0]["train/grad_norm"] == math.inf
    assert told["notes"] == []


TRACKIO_PROGRAM = """
import json, math, sys
import trackio
from slipstream.config import from_dict
from slipstream.train.trackers import Trackers

notes = []
config = from_dict({"run_dir": sys.argv[1], "log": {"trackers": ["trackio"]}})
for resume_step in (0, 2):
    shown = Trackers(config, note=notes.append, resume_step=resume_step)
    shown.row({"step": resume_step + 1, "loss": 2.5, "grad_norm": math.inf}, of="train")
    shown.row({"step": resume_step + 2, "loss": 2.25, "grad_norm": 1.0}, of="train")
    shown.close()
runs = [run.name for run in trackio.Api().runs("slipstream")]
rows = trackio.sqlite_storage.SQLiteStorage.get_logs("slipstream", runs[0])
print(json.dumps({"notes": notes, "runs": runs, "rows": rows}, default=str))
"""


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_take_what_they_are_given(name):
    """Their own signatures, where they are installed: a keyword that is gone would only show as a warning."""
    module = pytest.importorskip(name)
    known = inspect.signature(module.init).parameters
    wanted = {"wandb": {"id", "dir", "settings"}, "trackio": {"embed", "auto_log_gpu"}}[name]
    assert wanted | {"project", "name", "resume", "config"} <= set(known)
