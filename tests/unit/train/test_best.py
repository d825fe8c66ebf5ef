"""The checkpoint with the smallest validation loss is kept, however old, and can be named."""

import json

import pytest

from slipstream.config import from_dict
from slipstream.errors import CheckpointError, ConfigError
from slipstream.train.export import export_hub
from slipstream.train.idle import idle_settings
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter
from slipstream.train.rundir import RunDir
from slipstream.train.trained import chosen_checkpoint, open_trained


def train(run_dir, *, num_steps, resume=False, **checkpoint):
    """Rates so large that the loss goes up and down."""
    tables = {
        "run_dir": str(run_dir),
        "data": {"sequence_length": 16},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
        "optim": {"lr": 0.3, "lr_total_steps": 40},
        "staleness": {"delay": 1, "error_feedback": 1.0},
        "pipeline": {"num_microbatches": 2},
        "train": {"num_steps": num_steps, "microbatch_size": 2},
        "evaluate": {"num_sequences": 8, "every_steps": 2},
        "checkpoint": {"every_steps": 1, "keep_last": 1, "keep_best": True} | checkpoint,
    }
    return launch(from_dict(tables), reporter=SilentReporter(), resume=resume)


def kept(run_dir):
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())


def losses(run_dir):
    return {row["step"]: row["val_loss"] for row in read_json_lines(run_dir / "evaluations.jsonl") if row["step"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best") / "run"
    return folder, train(folder, num_steps=16)


def test_it_outlives_the_newest_and_can_be_named(run):
    folder, summary = run
    found = losses(folder)
    best = min(found, key=found.__getitem__)
    assert best < 16, "the run must end worse than it has been, or this shows nothing"
    assert kept(folder) == [best, 16]
    assert (summary["best_step"], summary["best_val_loss"]) == (best, found[best])
    assert open_trained(folder, checkpoint="best").step == best
    assert open_trained(folder, checkpoint=str(best)).step == best
    assert open_trained(folder).step == 16


@pytest.mark.parametrize("first", [2, 8, 14])
def test_resumed_it_is_the_same(run, tmp_path, first):
    folder, summary = run
    train(tmp_path, num_steps=first)
    assert train(tmp_path, num_steps=16, resume=True)["weights_sha256"] == summary["weights_sha256"]
    assert losses(tmp_path) == losses(folder)
    assert kept(tmp_path) == kept(folder)
    ours, theirs = (chosen_checkpoint(RunDir(each), "best").manifest for each in (tmp_path, folder))
    assert (ours["best"], ours["weights_sha256"]) == (theirs["best"], theirs["weights_sha256"])


def test_it_is_saved_although_no_checkpoint_was_due(tmp_path):
    train(tmp_path, num_steps=6, every_steps=0)
    found = losses(tmp_path)
    assert min(found, key=found.__getitem__) in kept(tmp_path)


def test_not_asked_for_it_is_not_kept(tmp_path):
    summary = train(tmp_path, num_steps=4, keep_best=False)
    assert kept(tmp_path) == [4]
    assert "best_step" not in summary
    with pytest.raises(CheckpointError, match=r"kept no best checkpoint\. Train with --checkpoint\.keep-best true"):
        open_trained(tmp_path, checkpoint="best")


def test_an_export_says_which_step_it_is(run, tmp_path):
    folder, summary = run
    export = export_hub(folder, tmp_path / "out", checkpoint="best")
    assert export.step == summary["best_step"]
    manifest = json.loads((folder / "checkpoints" / f"step-{export.step:08d}" / "manifest.json").read_text())
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"| steps | {export.step} |" in readme
    assert manifest["weights_sha256"] in readme


@pytest.mark.parametrize(
    ("choice", "error", "says"),
    [
        ("3", CheckpointError, r"no checkpoint of step 3\. There are: \d+, 16\."),
        ("first", ConfigError, "Give newest, best, or a step such as 200"),
        ("-1", ConfigError, "Give newest, best, or a step"),
    ],
)
def test_others_are_refused_with_what_there_is(run, choice, error, says):
    with pytest.raises(error, match=says):
        open_trained(run[0], checkpoint=choice)


def test_a_model_folder_has_none(run, tmp_path):
    export_hub(run[0], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has no checkpoints\. Leave --checkpoint out"):
        open_trained(tmp_path / "out", checkpoint="best")


def test_without_evaluations_that_is_said():
    config = from_dict({"checkpoint": {"keep_best": True}})
    assert [text for text in idle_settings(config) if "give evaluate.every_steps as well" in text]
    assert not idle_settings(from_dict({"checkpoint": {"keep_best": True}, "evaluate": {"every_steps": 5}}))
