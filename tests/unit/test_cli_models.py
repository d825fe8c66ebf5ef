"""export, eval, generate and --init-from as a user types them."""

import importlib.util
import json
import shutil
import signal

import pytest
from safetensors import SafetensorError

from slipstream.cli import main
from slipstream.models import huggingface

SMALL = "--data.sequence-length 32 --train.microbatch-size 2 --pipeline.num-microbatches 2 --evaluate.num-sequences 4"
SHAPE = "--model.num-layers 2 --model.dim 16 --model.num-heads 2 --model.num-kv-heads 1 --model.ffn-dim 24"
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def run(*words: object) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    assert run("train", *SMALL.split(), *SHAPE.split(), "--run-dir", folder / "run", "--train.num-steps", 3) == 0
    assert run("export", "hf", folder / "run", folder / "hub") == 0
    return folder


def test_export_says_whether_it_was_checked(trained, tmp_path, capsys):
    assert run("export", "hf", trained / "run", tmp_path / "a") == 0
    printed = capsys.readouterr().out
    assert ("largest logit difference" if HAS_TRANSFORMERS else "pip install 'slipstream[hf]'") in printed
    assert run("export", "hf", trained / "run", tmp_path / "b", "--weights", "y", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["max_abs_logit_difference"] is not None) == HAS_TRANSFORMERS
    assert "model.safetensors" in found["files"]
    assert run("export", "hf", trained / "run", tmp_path / "b") == 2
    assert "exists; nothing was written" in capsys.readouterr().err


def test_a_full_disk_under_an_export_is_a_sentence(trained, tmp_path, monkeypatch, capsys):
    def full(tensors, path, **_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(huggingface, "save_file", full)
    assert run("export", "hf", trained / "run", tmp_path / "out") == 2
    assert "out: I/O error: No space left on device (os error 28). Give another folder." in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing half written stays"


def test_an_export_that_is_told_to_end_leaves_nothing(trained, tmp_path, monkeypatch):
    def end(tensors, path, **_):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # which would end the tests
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(huggingface, "save_file", end)
    assert run("export", "hf", trained / "run", tmp_path / "out") == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_eval_of_a_run_and_of_its_export_agree(trained, tmp_path, capsys):
    pairs = [{"sentence_good": f"Cats {i} run.", "sentence_bad": f"Cats {i} runs."} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    found = []
    for model in ("run", "hub"):
        assert (
            run("eval", trained / model, "--task", "blimp", "--file", tmp_path / "p.jsonl", "--limit", 3, "--json") == 0
        )
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0].keys() == {"acc", "acc_norm", "num_items"}
    assert found[0]["num_items"] == 3
    (tmp_path / "t.txt").write_text("To be, or not to be\n" * 5)
    assert run("eval", trained / "run", "--task", "perplexity", "--file", tmp_path / "t.txt", "--weights", "y") == 0
    assert "bits_per_byte" in capsys.readouterr().out


def test_generate(trained, capsys):
    texts = []
    for model in ("run", "hub"):
        assert run("generate", trained / model, "--prompt", "To be", "--max-new-tokens", 8) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("To be")
    assert run("generate", trained / "run", "--temperature", 1, "--seed", 3, "--max-new-tokens", 8, "--json") == 0
    assert 1 <= len(json.loads(capsys.readouterr().out)["ids"]) <= 8


@pytest.mark.parametrize(("flag", "source"), [("--init-from", "run"), ("--init-from-hf", "hub")])
def test_train_begins_with_another_model(trained, tmp_path, capsys, flag, source):
    words = ["train", *SMALL.split(), "--run-dir", tmp_path / "new", "--train.num-steps", 2]
    assert run(*words, flag, trained / source) == 0
    assert "beginning with weights " in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "summary.json").read_text())["num_steps"] == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["train", "--init-from", "{hub}"], "is no run directory. Give one, or use --init-from-hf"),
        (["train", "--init-from-hf", "{run}"], "is no model folder. Give one, or use --init-from"),
        (["train", "--init-from-hf", "{hub}", "--init-from", "{run}"], "exclude each other"),
        (["eval", "{hub}", "--task", "blimp", "--file", "gone"], "cannot read gone"),
        (["eval", "nothing", "--task", "blimp", "--file", "gone"], "neither a run directory"),
        (["generate", "{hub}", "--weights", "y"], "one set of weights"),
        (["export", "hf", "{hub}", "out"], "is no run directory"),
    ],
)
def test_wrong_input(trained, tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("To be\n")
    places = {"hub": trained / "hub", "run": trained / "run"}
    assert run(*[word.format(**places) for word in words]) == 2
    assert error in capsys.readouterr().err


def test_data_with_the_tokenizer_of_a_model(trained, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("".join(f"To be {i}, or not to be\n" for i in range(200)))
    assert run("data", "prepare", tmp_path / "t.txt", "--out", tmp_path / "d", "--tokenizer-from", trained / "hub") == 0
    assert "tokenizer 'bytes' of 257 tokens" in capsys.readouterr().out
    assert run("data", "prepare", tmp_path / "t.txt", "--out", tmp_path / "e", "--tokenizer-from", trained / "run") == 0
    assert (tmp_path / "d" / "manifest.json").read_text() == (tmp_path / "e" / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("generate {run} --seed 3", "--seed has no effect at a --temperature of 0"),
        ("eval {run} --task blimp --file p --text-field x", "--text-field has no effect with"),
        ("eval {run} --task perplexity --file t.txt --text-field x", "--text-field has no effect on prepared data and"),
        ("data prepare t.txt --out d --text-field x", "--text-field has no effect on plain text"),
        ("data prepare t --out d --vocab-size 300", "--vocab-size has no effect without"),
        (
            "data prepare t --out d --tokenizer-from {hub} --tokenizer bpe --vocab-size 300",
            "--tokenizer and --vocab-size have no effect",
        ),
        ("compare grid.toml --run-dir d --num-seeds 3", "--num-seeds has no effect with a grid"),
        ("compare grid.toml --run-dir d --tolerance 0.005", "--tolerance has no effect with a grid"),
        ("stability --probe {run} --momentum 0.5", "--momentum has no effect with --probe"),
        ("stability --probe-batches 4", "--probe-batches has no effect without --probe"),
        ("train --run-dir d --allow-change optim.lr", "--allow-change has no effect without --resume"),
    ],
)
def test_a_flag_without_effect_is_refused_by_name(trained, tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("To be\n")
    places = {"hub": trained / "hub", "run": trained / "run"}
    assert run(*[word.format(**places) for word in words.split()]) == 2
    assert error in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


def test_a_default_that_was_asked_for_is_compared_with_the_model(trained, tmp_path, capsys):
    """--model.num-layers 4 is the default, and is not what the run has."""
    words = ["train", *SMALL.split(), "--train.num-steps", 1, "--init-from", trained / "run", "--run-dir"]
    assert run(*words, tmp_path / "a", "--model.num-layers", 4) == 2
    assert "model.num_layers is 4, but the model in" in capsys.readouterr().err
    (tmp_path / "c.toml").write_text("[model]\nnum_layers = 4\n")
    assert run(*words, tmp_path / "a", "--config", tmp_path / "c.toml") == 2
    assert "model.num_layers is 4, but the model in" in capsys.readouterr().err
    (tmp_path / "c.toml").write_text("[model]\nnum_layers = 2\nhead_dim = 8\nvocab_size = 0\ndropout = 0.0\n")
    assert run(*words, tmp_path / "a", "--config", tmp_path / "c.toml") == 0


def test_damaged_folders_are_sentences(trained, tmp_path, capsys):
    """Whatever is wrong with a model folder, every command that reads one says so with exit code 2."""
    (tmp_path / "t.txt").write_text("To be\n" * 40)
    for name, content in {"tokenizer.json": "garbage", "config.json": "[1]", "model.safetensors": "torn"}.items():
        folder = tmp_path / name.partition(".")[0]
        shutil.copytree(trained / "hub", folder)
        (folder / name).write_text(content)
        (folder / "slipstream_tokenizer.json").unlink()
        for words in (
            ["generate", folder],
            ["eval", folder, "--task", "perplexity", "--file", tmp_path / "t.txt"],
            ["train", *SMALL.split(), "--run-dir", tmp_path / "new", "--init-from-hf", folder],
        ):
            assert run(*words) == 2, words
            assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "new").exists()


def test_prompts_that_are_not_text_are_sentences(trained, capsys):
    assert run("generate", trained / "run", "--prompt", "caf\udce9") == 2
    assert "the prompt is not text" in capsys.readouterr().err


def test_perplexity_of_prepared_data(trained, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("".join(f"To be {i}, or not to be\n\n" for i in range(200)))
    assert run("data", "prepare", tmp_path / "t.txt", "--out", tmp_path / "d") == 0
    capsys.readouterr()
    assert run("eval", trained / "run", "--task", "perplexity", "--file", tmp_path / "d", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 0
