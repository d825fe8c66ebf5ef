"""Weights out of a run, and into a new one."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from slipstream.config import from_dict
from slipstream.data import prepare
from slipstream.data.hub_tokenizer import open_hub_tokenizer
from slipstream.errors import CheckpointError, ConfigError, DataError
from slipstream.train.export import export_hub
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter
from slipstream.train.rundir import RunDir
from slipstream.train.trained import newest_checkpoint, open_trained

MODEL = {"num_layers": 2, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24}


class Notes(SilentReporter):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def train(run_dir, *, num_steps=3, init_from="", resume=False, overwrite=False, reporter=None, **changes):
    tables = {
        "run_dir": str(run_dir),
        "data": {"sequence_length": 16},
        "optim": {"lr": 0.01, "name": "muon"},
        "pipeline": {"num_microbatches": 2},
        "train": {"num_steps": num_steps, "microbatch_size": 2},
        "evaluate": {"num_sequences": 4},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change
    return launch(
        from_dict(tables),
        reporter=reporter or SilentReporter(),
        init_from=str(init_from) if init_from else "",
        resume=resume,
        overwrite=overwrite,
    )


def test_another_model_to_begin_with_leaves_the_rate_alone(run, tmp_path):
    """The async-aware rate cuts above the staleness that the delay gives: the executor's, not the model's."""
    for name, source in (("anew", ""), ("from", run)):
        train(
            tmp_path / name,
            init_from=source,
            num_steps=6,
            model={**MODEL, "tie_embeddings": True},
            staleness={"delay": 1, "lr_discount": "aalr"},
        )
    anew, begun = (read_json_lines(tmp_path / name / "metrics.jsonl") for name in ("anew", "from"))
    assert [row["lr"] for row in anew] == [row["lr"] for row in begun]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one step of delay and error feedback, so that x and y differ."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run") / "run"
    train(folder, model={**MODEL, "tie_embeddings": True}, staleness={"delay": 1, "error_feedback": 1.0})
    return folder


def validation(run_dir: Path, at: int):
    return read_json_lines(run_dir / "evaluations.jsonl")[at]


def test_weights_are_those_that_were_evaluated(run):
    from slipstream.data import open_data
    from slipstream.models.llama import cross_entropy_sum
    from slipstream.train.trained import run_config
    from slipstream.train.workload import validation_batches

    config = run_config(newest_checkpoint(RunDir(run)))
    (batch, *others) = validation_batches(config, open_data(""))
    for point, key in (("x", "val_loss"), ("y", "val_loss_y")):
        module = open_trained(run, weights=point).module()
        total = sum(
            float(cross_entropy_sum(module(torch.from_numpy(each.inputs)), torch.from_numpy(each.targets)))
            for each in (batch, *others)
        )
        assert total / validation(run, -1)["num_tokens"] == pytest.approx(validation(run, -1)[key], abs=1e-6)
    assert validation(run, -1)["val_loss"] != validation(run, -1)["val_loss_y"]


@pytest.mark.parametrize("executor", [{}, {"staleness": {"delay": 2}}])
def test_a_run_begins_with_the_weights_of_another(run, tmp_path, executor):
    summary = train(tmp_path / "new", init_from=run, data={"sequence_length": 16}, **executor)
    assert validation(tmp_path / "new", 0)["val_loss"] == pytest.approx(validation(run, -1)["val_loss_y"], abs=1e-6)
    assert summary["num_steps"] == 3
    assert summary["val_loss"] < summary["val_loss_before"]


def test_a_run_begins_with_an_exported_model(run, tmp_path):
    export_hub(run, tmp_path / "hub", weights="y")
    one = train(tmp_path / "one", init_from=run)
    other = train(tmp_path / "other", init_from=tmp_path / "hub")
    assert one["weights_sha256"] == other["weights_sha256"]


def test_a_model_without_steps_begins_as_it_begins_alone(tmp_path):
    """Weights taken over from the initial ones change nothing: momenta, schedule and data begin anew."""
    alone = train(tmp_path / "alone", model=MODEL)
    train(tmp_path / "short", num_steps=1, model=MODEL, optim={"lr": 0.0, "weight_decay": 0.0})
    taken = train(tmp_path / "taken", init_from=tmp_path / "short")
    assert alone["weights_sha256"] == taken["weights_sha256"]


def test_a_run_that_began_elsewhere_resumes_without_its_origin(run, tmp_path):
    shutil.copytree(run, tmp_path / "origin")
    whole = train(tmp_path / "whole", num_steps=4, init_from=run)
    train(tmp_path / "halves", num_steps=2, init_from=tmp_path / "origin", optim={"lr_total_steps": 4})
    shutil.rmtree(tmp_path / "origin")
    halves = train(tmp_path / "halves", num_steps=4, resume=True, model={**MODEL, "tie_embeddings": True})
    assert whole["weights_sha256"] == halves["weights_sha256"]


def test_step_0_is_a_checkpoint_that_says_where_it_came_from(run, tmp_path):
    train(tmp_path / "new", num_steps=1, init_from=run, checkpoint={"keep_last": 9})
    manifest = json.loads((tmp_path / "new" / "checkpoints" / "step-00000000" / "manifest.json").read_text())
    assert manifest["initialised_from"] == {"path": str(run), "step": 3}
    source = newest_checkpoint(RunDir(run)).manifest
    assert manifest["weights_sha256"] == source["weights_sha256"]


def test_padded_vocabulary(run, tmp_path):
    """Rows beyond the tokenizer's are kept: models of the hub have them."""
    train(tmp_path / "padded", model={**MODEL, "vocab_size": 264})
    summary = train(tmp_path / "new", init_from=tmp_path / "padded")
    assert summary["num_steps"] == 3
    assert open_trained(tmp_path / "new").cfg.vocab_size == 264


def test_settings_that_the_weights_contradict_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.dim is 32, but the model in .* has 16"):
        train(tmp_path / "new", init_from=run, model={"dim": 32})
    with pytest.raises(ConfigError, match="--resume goes on with a run's own weights"):
        train(run, init_from=run, resume=True)
    with pytest.raises(ConfigError, match="neither a run directory"):
        train(tmp_path / "new", init_from=tmp_path)
    assert not (tmp_path / "new").exists()


def test_other_ids_are_refused_and_the_remedy_works(run, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("".join(f"line {i} of a text that is to be\n" for i in range(300)))
    prepare([str(text)], tmp_path / "bpe", tokenizer="bpe", vocab_size=257)
    with pytest.raises(ConfigError, match=r"gives a text other ids .* --tokenizer-from") as raised:
        train(tmp_path / "new", init_from=run, data={"path": str(tmp_path / "bpe")})
    assert str(run) in str(raised.value)
    prepare([str(text)], tmp_path / "large", tokenizer="bpe", vocab_size=300)
    with pytest.raises(ConfigError, match=r"has 257 ids, the data's tokenizer 'bpe' has"):
        train(tmp_path / "new", init_from=run, data={"path": str(tmp_path / "large")})
    export_hub(run, tmp_path / "hub")
    (tmp_path / "hub" / "slipstream_tokenizer.json").unlink()
    prepare([str(text)], tmp_path / "hub-ids", tokenizer=open_hub_tokenizer(tmp_path / "hub"))
    train(tmp_path / "new", init_from=tmp_path / "hub", data={"path": str(tmp_path / "hub-ids")})
    assert open_trained(tmp_path / "new").need_tokenizer().name == "hub"


def test_a_folder_without_tokenizer_can_be_begun_with_but_warns(run, tmp_path):
    export_hub(run, tmp_path / "hub")
    for file in (tmp_path / "hub").glob("*tokenizer*"):
        file.unlink()
    notes = Notes()
    train(tmp_path / "new", init_from=tmp_path / "hub", reporter=notes)
    assert any("has no tokenizer.json" in text for text in notes.texts)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        open_trained(tmp_path / "hub").need_tokenizer()


def test_the_run_keeps_its_tokenizer(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    assert open_trained(tmp_path / "run").need_tokenizer().name == "bytes"  # an older run, on the built-in text
    config = dataclasses.asdict(open_trained(run).cfg)
    assert config["vocab_size"] == 257
    identity = tmp_path / "run" / "tokenizer"
    identity.mkdir()
    text = tmp_path / "t.txt"
    text.write_text("".join(f"to be {i} or not to be, that is\n" for i in range(300)))
    prepare([str(text)], tmp_path / "bpe", tokenizer="bpe", vocab_size=300)
    for file in (tmp_path / "bpe").glob("*tokenizer*"):
        shutil.copy(file, identity)
    with pytest.raises(DataError, match="ids would mean other text"):
        open_trained(tmp_path / "run")


def test_y_of_a_model_folder_is_refused(run, tmp_path):
    export_hub(run, tmp_path / "hub")
    with pytest.raises(ConfigError, match="holds one set of weights"):
        open_trained(tmp_path / "hub", weights="y")


def test_an_export_is_whole_or_not_there(run, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.train.export.logit_difference", lambda folder, model: 0.5)
    with pytest.raises(Exception, match=r"differ by 0\.5"):
        export_hub(run, tmp_path / "hub")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "hub").mkdir()
    with pytest.raises(ConfigError, match="exists; nothing was written"):
        export_hub(run, tmp_path / "hub")
    with pytest.raises(ConfigError, match="is no run directory"):
        export_hub(tmp_path / "hub", tmp_path / "other")


def test_without_its_tokenizer_a_run_is_not_exported(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "tokenizer" / "slipstream_tokenizer.json").write_text('{"name": "bpe"}')
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        export_hub(tmp_path / "run", tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_files_of_an_export(run, tmp_path):
    export = export_hub(run, tmp_path / "hub")
    assert {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(export.files)
    readme = (tmp_path / "hub" / "README.md").read_text()
    assert "| architecture | LlamaForCausalLM |" in readme
    assert "| gradients | delay 1 |" in readme


def test_a_run_that_lost_its_first_checkpoint_does_not_go_on_at_random(run, tmp_path):
    """Also where it was never finished: the settings are there before the checkpoint is."""
    begun = tmp_path / "begun"
    train(begun, num_steps=2, init_from=run)
    shutil.rmtree(begun / "checkpoints")
    with pytest.raises(CheckpointError, match=rf"begins with the weights of {run}.*--overwrite, with --init-from"):
        train(begun, num_steps=2, resume=True, model=open_trained(run).cfg.__dict__)
    train(begun, num_steps=2, init_from=run, overwrite=True)
    assert json.loads((begun / "summary.json").read_text())["num_steps"] == 2
    fresh = tmp_path / "fresh"
    train(fresh, num_steps=1)
    train(begun, num_steps=1, overwrite=True)
    assert not RunDir(begun).origin.exists()


def test_where_a_run_began_is_in_every_checkpoint_and_in_the_summary(run, tmp_path):
    begun = tmp_path / "begun"
    every = {"every_steps": 1, "keep_last": 9}
    train(begun, num_steps=2, init_from=run, checkpoint=every)
    train(begun, num_steps=3, resume=True, checkpoint=every, model=open_trained(run).cfg.__dict__)
    expected = {"path": str(run), "step": 3}
    manifests = [json.loads(path.read_text()) for path in sorted(begun.glob("checkpoints/*/manifest.json"))]
    assert [each["step"] for each in manifests] == [0, 1, 2, 3]
    assert all(each["initialised_from"] == expected for each in manifests)
    assert json.loads((begun / "summary.json").read_text())["initialised_from"] == expected
