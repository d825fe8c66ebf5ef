"""2N steps == N + resume + N, bitwise, through the files on disk."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from slipstream.config import from_dict
from slipstream.errors import CheckpointError, ConfigError, NonFiniteError
from slipstream.staleness.updater import Updater
from slipstream.train.export import export_hub
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter
from slipstream.train.rundir import RunDir
from slipstream.train.trained import newest_checkpoint


def settings(run_dir: Path, *, num_steps: int, **changes):
    tables = {
        "run_dir": str(run_dir),
        "data": {"sequence_length": 16},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "dropout": 0.1},
        "optim": {"lr": 0.01, "lr_warmup_steps": 2, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": 2},
        "train": {"num_steps": num_steps, "microbatch_size": 2},
        "evaluate": {"num_sequences": 4},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    return from_dict(tables)


def train(run_dir: Path, *, num_steps: int, resume: bool = False, reporter=None, allow_change=(), **changes):
    config = settings(run_dir, num_steps=num_steps, **changes)
    return launch(config, reporter=reporter or SilentReporter(), resume=resume, allow_change=allow_change)


def trajectory(run_dir: Path):
    keys = ("step", "loss", "grad_norm", "lr", "staleness_mean", "staleness_max")
    return [tuple(row[key] for key in keys) for row in read_json_lines(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("rule", ["adamw", "muon", "torch.optim.NAdam"])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_resumed_equals_continuous(tmp_path, rule, delay):
    options = {"optim": {"name": rule}, "staleness": {"delay": delay, "error_feedback": 1.0}}
    whole = train(tmp_path / "whole", num_steps=8, **options)
    train(tmp_path / "halves", num_steps=4, **options)
    halves = train(tmp_path / "halves", num_steps=8, resume=True, **options)
    assert trajectory(tmp_path / "whole") == trajectory(tmp_path / "halves")
    for key in ("weights_sha256", "val_loss", "val_loss_y", "staleness_mean"):
        assert whole[key] == halves[key], key


@pytest.mark.parametrize(
    "remedy",
    [
        {"correction": "agc", "agc": {"min_pairs": 2, "ramp_steps": 3, "curvature": "fisher", "displacement": "ema"}},
        {"correction": "agc_damping", "agc": {"min_pairs": 2, "ramp_steps": 3}},
        {"lr_discount": "aalr", "aalr_threshold": 0.5},
    ],
)
def test_what_remembers_gradients_resumes_with_them(tmp_path, remedy):
    options = {"staleness": {"delay": 1} | remedy}
    whole = train(tmp_path / "whole", num_steps=10, **options)
    train(tmp_path / "halves", num_steps=5, **options)
    halves = train(tmp_path / "halves", num_steps=10, resume=True, **options)
    plain = train(tmp_path / "plain", num_steps=10, staleness={"delay": 1})
    assert trajectory(tmp_path / "whole") == trajectory(tmp_path / "halves")
    assert whole["weights_sha256"] == halves["weights_sha256"] != plain["weights_sha256"]


def test_resume_before_anything_stale_was_made(tmp_path):
    """At step 1 with delay 3 fewer versions exist than buffers."""
    options = {"staleness": {"delay": 3, "error_feedback": 2.0}, "optim": {"name": "muon"}}
    whole = train(tmp_path / "whole", num_steps=5, **options)
    train(tmp_path / "parts", num_steps=1, **options)
    parts = train(tmp_path / "parts", num_steps=5, resume=True, **options)
    assert whole["weights_sha256"] == parts["weights_sha256"]


def test_resume_across_the_end_of_an_epoch(tmp_path):
    text = tmp_path / "small.txt"
    text.write_text("".join(f"line {i} of a small text\n" for i in range(60)))
    from slipstream.data import prepare

    prepare([str(text)], tmp_path / "data")
    data = {"data": {"path": str(tmp_path / "data"), "sequence_length": 16}}
    whole = train(tmp_path / "whole", num_steps=40, **data)
    train(tmp_path / "halves", num_steps=23, **data)
    halves = train(tmp_path / "halves", num_steps=40, resume=True, **data)
    assert whole["weights_sha256"] == halves["weights_sha256"]


def test_resume_at_the_last_step_changes_nothing(tmp_path):
    first = train(tmp_path, num_steps=3)
    again = train(tmp_path, num_steps=3, resume=True)
    assert first == again
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 3


def test_rows_after_the_checkpoint_are_made_anew(tmp_path):
    train(tmp_path, num_steps=4, checkpoint={"every_steps": 2, "keep_last": 5})
    before = trajectory(tmp_path)
    last = tmp_path / "checkpoints" / "step-00000004"
    (last / "manifest.json").unlink()
    said = []

    class Listener(SilentReporter):
        def note(self, text):
            said.append(text)

    train(tmp_path, num_steps=4, resume=True, reporter=Listener())
    assert trajectory(tmp_path) == before
    assert any("step-00000004 is incomplete" in text and "Falling back" in text for text in said)
    assert any("resuming at step 2" in text for text in said)


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    train(tmp_path, num_steps=4, checkpoint={"every_steps": 2, "keep_last": 5})
    file = tmp_path / "checkpoints" / "step-00000004" / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[:-10])
    elif damage == "flip":
        data[-10] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    said = []

    class Listener(SilentReporter):
        def note(self, text):
            said.append(text)

    train(tmp_path, num_steps=4, resume=True, reporter=Listener())
    assert any("resuming at step 2" in text for text in said)


@pytest.mark.parametrize("damage", [b"\xff\xfe\n", b"[1]\n", b'{"loss": 1.0}\n', b"{\n"])
def test_a_damaged_row_is_named_and_nothing_is_lost(tmp_path, damage):
    train(tmp_path, num_steps=2)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(damage + metrics.read_bytes())
    before = metrics.read_bytes()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 1 "):
        train(tmp_path, num_steps=3, resume=True)
    assert metrics.read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_lost_rows_are_told(tmp_path, name):
    """As when the machine lost power: the file is there, its end is not. The last evaluation is then made anew."""
    expected = train(tmp_path, num_steps=3)["val_loss"]
    file = tmp_path / name
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]) + "\0" * 100)
    said = []

    class Listener(SilentReporter):
        def note(self, text):
            said.append(text)

    if name == "metrics.jsonl":
        with pytest.raises(CheckpointError, match=f"{name} has no row of step 3"):
            train(tmp_path, num_steps=3, resume=True, reporter=Listener())
    else:
        assert train(tmp_path, num_steps=3, resume=True, reporter=Listener())["val_loss"] == expected
    assert any("has rows of 1 of the 3 steps" in text for text in said) == (name == "metrics.jsonl")
    assert train(tmp_path, num_steps=4, resume=True)["num_steps"] == 4


def test_no_complete_checkpoint_at_all_is_an_error_and_nothing_is_lost(tmp_path):
    train(tmp_path, num_steps=2)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").write_text("{")
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is complete"):
        train(tmp_path, num_steps=4, resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_what_alters_the_trajectory_must_be_allowed_by_name(tmp_path):
    train(tmp_path, num_steps=2)
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.01 -> 0\.02(.|\n)*--allow-change optim\.lr"):
        train(tmp_path, num_steps=4, resume=True, optim={"lr": 0.02})
    train(tmp_path, num_steps=4, resume=True, optim={"lr": 0.02}, allow_change=("optim.lr",))
    assert read_json_lines(tmp_path / "metrics.jsonl")[-1]["lr"] > 0.01


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optim": {"name": "sgd"}}, r"optim\.name is 'sgd' and was 'adamw': .*--init-from "),
        ({"model": {"dim": 24}}, "the settings of the model give other parameters than the checkpoint holds"),
        ({"model": {"tie_embeddings": True}}, "the settings of the model give other parameters"),
    ],
)
def test_what_no_checkpoint_can_follow_is_not_offered(tmp_path, change, said):
    train(tmp_path, num_steps=2)
    ((table, settings),) = change.items()
    names = tuple(f"{table}.{name}" for name in settings)
    with pytest.raises(ConfigError, match=f"made with other settings(.|\n)*{said}") as refusal:
        train(tmp_path, num_steps=4, resume=True, **change)
    assert "--allow-change" not in str(refusal.value)
    with pytest.raises(ConfigError, match=f"^{said}"):
        train(tmp_path, num_steps=4, resume=True, allow_change=names, **change)


OF_WORKERS = {
    "executor": "dataparallel",
    "engine": "inline",
    "dataparallel": {"num_workers": 2, "unit": "pseudo_gradient", "local_steps": 2},
}


@pytest.mark.parametrize("begins", ["workers", "single"])
def test_pseudo_gradients_and_other_runs_do_not_go_on_as_each_other(tmp_path, begins):
    """Their optimizers differ: the moments of one would be taken for the other's."""
    own = {"model": {"dropout": 0.0}, "dataparallel": OF_WORKERS["dataparallel"]}
    one, other = (OF_WORKERS | own, {"executor": "single"} | own)[:: 1 if begins == "workers" else -1]
    train(tmp_path, num_steps=2, **one)
    with pytest.raises(ConfigError, match="neither can go on as the other"):
        train(tmp_path, num_steps=4, resume=True, **other)


def test_workers_do_not_take_over_microbatches_of_another_size(tmp_path):
    """They count them from the beginning of the run; some data would be read again and some never."""
    workers = {"executor": "dataparallel", "engine": "inline", "dataparallel": {"num_workers": 2}}
    allowed = ("train.microbatch_size",)
    train(tmp_path / "a", num_steps=2, **workers)
    with pytest.raises(ConfigError, match="workers count microbatches from the beginning of the run, all of one size"):
        train(tmp_path / "a", num_steps=3, resume=True, allow_change=allowed, train={"microbatch_size": 1}, **workers)
    train(tmp_path / "b", num_steps=2)
    train(tmp_path / "b", num_steps=3, resume=True, allow_change=allowed, train={"microbatch_size": 4})
    with pytest.raises(ConfigError, match="workers count microbatches"):
        train(tmp_path / "b", num_steps=4, resume=True, allow_change=allowed, **workers)
    train(tmp_path / "c", num_steps=2)
    train(tmp_path / "c", num_steps=4, resume=True, **workers)
    assert newest_checkpoint(RunDir(tmp_path / "c")).manifest["next_sequence"] == 16


def spoil(monkeypatch, updates):
    """Let the gradients of some updates not be finite."""
    prepare = Updater.prepare

    def spoiled(self, gradient, grad_norm, **how):
        is_bad = self.weights.latest + 1 in updates
        return prepare(self, gradient, torch.full_like(grad_norm, math.nan) if is_bad else grad_norm, **how)

    monkeypatch.setattr(Updater, "prepare", spoiled)


@pytest.mark.parametrize("prediction", ["xpipe", "spectrain"])
def test_resumed_equals_continuous_where_the_next_update_is_skipped(tmp_path, monkeypatch, prediction):
    spoil(monkeypatch, {5})
    name = "sgd" if prediction == "spectrain" else "adamw"
    options = {"optim": {"name": name}, "staleness": {"delay": 1, "prediction": prediction}}
    train(tmp_path / "whole", num_steps=8, **options)
    train(tmp_path / "halves", num_steps=4, **options)
    train(tmp_path / "halves", num_steps=8, resume=True, **options)
    assert trajectory(tmp_path / "whole") == trajectory(tmp_path / "halves")


def test_skipped_updates_in_a_row_are_counted_over_a_resume(tmp_path, monkeypatch):
    spoil(monkeypatch, {3, 4, 5, 6})
    train(tmp_path, num_steps=4)
    with pytest.raises(NonFiniteError, match="those of the last 4 batches"):
        train(tmp_path, num_steps=8, resume=True)


def test_a_batch_of_another_size_goes_on_where_the_last_one_ended(tmp_path):
    """Four batches of 4 sequences, two of 8, four of 4: each sequence is read once, so a rate of 0 shows all losses."""
    still = {"optim": {"lr": 0.0, "weight_decay": 0.0}, "model": {"dropout": 0.0}, "staleness": {"delay": 1}}
    allowed = ("train.microbatch_size",)
    train(tmp_path / "one", num_steps=12, **still)
    train(tmp_path / "two", num_steps=4, **still)
    train(tmp_path / "two", num_steps=6, resume=True, allow_change=allowed, train={"microbatch_size": 4}, **still)
    train(tmp_path / "two", num_steps=10, resume=True, allow_change=allowed, **still)
    one, two = ([row[1] for row in trajectory(tmp_path / run)] for run in ("one", "two"))
    pairs = [(one[4] + one[5]) / 2, (one[6] + one[7]) / 2]
    assert two == pytest.approx([*one[:4], *pairs, *one[8:]], rel=1e-6)
    assert newest_checkpoint(RunDir(tmp_path / "two")).manifest["next_sequence"] == 48
    export_hub(tmp_path / "two", tmp_path / "hub")
    assert f"| tokens seen | {48 * 16} |" in (tmp_path / "hub" / "README.md").read_text()


def test_free_settings_may_change(tmp_path):
    train(tmp_path, num_steps=2)
    train(tmp_path, num_steps=3, resume=True, checkpoint={"keep_last": 1}, log={"every_steps": 1})
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 3
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_delay_may_grow_when_allowed(tmp_path):
    train(tmp_path, num_steps=2, staleness={"delay": 0})
    train(tmp_path, num_steps=5, resume=True, staleness={"delay": 2}, allow_change=("staleness.delay",))
    assert [row["staleness_max"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [0, 0, 2, 2, 2]


def test_a_total_left_open_stays_what_it_was(tmp_path):
    config = {"optim": {"lr": 0.01}}
    tables = settings(tmp_path, num_steps=4)
    import dataclasses

    open_total = dataclasses.replace(tables, optim=dataclasses.replace(tables.optim, lr_total_steps=None))
    launch(open_total, reporter=SilentReporter())
    longer = dataclasses.replace(open_total, train=dataclasses.replace(open_total.train, num_steps=6))
    launch(longer, reporter=SilentReporter(), resume=True)
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert rows[3]["lr"] == rows[5]["lr"] == pytest.approx(config["optim"]["lr"] * 0.1)


def test_keep_last_never_removes_the_only_one(tmp_path):
    train(tmp_path, num_steps=4, checkpoint={"every_steps": 1, "keep_last": 1})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_the_manifest_says_what_the_checkpoint_is(tmp_path):
    summary = train(tmp_path, num_steps=2)
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000002" / "manifest.json").read_text())
    assert manifest["weights_sha256"] == summary["weights_sha256"]
    assert manifest["next_sequence"] == 8
    assert manifest["config"]["optim"]["lr"] == 0.01
    assert len(manifest["tokenizer"]) == len(manifest["data_sha256"]) == 64


def test_before_the_first_checkpoint_the_first_evaluation_is_made_anew(tmp_path):
    """Nothing was saved, so that it may have been of another model."""
    train(tmp_path, num_steps=2)
    for step in (tmp_path / "checkpoints").iterdir():
        shutil.rmtree(step)
    found = train(tmp_path, num_steps=2, resume=True, model={"seed": 7, "init_std": 0.5})
    expected = train(tmp_path / "other", num_steps=2, model={"seed": 7, "init_std": 0.5})
    assert [row["step"] for row in read_json_lines(tmp_path / "evaluations.jsonl")] == [0, 2]
    assert found["val_loss_before"] == expected["val_loss_before"]


def without_times(rows):
    return [{key: value for key, value in row.items() if key != "evaluation_s"} for row in rows]


@pytest.mark.parametrize("keep_best", [False, True])
def test_a_run_can_end_where_it_was_stopped(tmp_path, keep_best):
    """At a step that was saved but never evaluated, since it was not the last one then."""
    keep = {"keep_best": keep_best}
    whole = train(tmp_path / "whole", num_steps=3, checkpoint=keep)
    train(tmp_path / "run", num_steps=5, checkpoint={"every_steps": 3, "keep_last": 5})
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000005")
    ended = train(tmp_path / "run", num_steps=3, resume=True, checkpoint=keep)
    for key in ("num_steps", "val_loss", "weights_sha256", "best_step", "best_val_loss"):
        assert ended.get(key) == whole.get(key), key
    evaluations = [without_times(read_json_lines(tmp_path / run / "evaluations.jsonl")) for run in ("run", "whole")]
    assert evaluations[0] == evaluations[1]
    best = newest_checkpoint(RunDir(tmp_path / "run")).manifest.get("best")
    assert best == newest_checkpoint(RunDir(tmp_path / "whole")).manifest.get("best")
    assert train(tmp_path / "run", num_steps=3, resume=True, checkpoint=keep)["val_loss"] == whole["val_loss"]
    assert without_times(read_json_lines(tmp_path / "run" / "evaluations.jsonl")) == evaluations[1], "each row once"
