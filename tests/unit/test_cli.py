"""The command line as a user types it: what works, and what a wrong input says."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from slipstream.cli import COMMANDS, main
from slipstream.train.metrics import read_json_lines

SMALL = [
    "--data.sequence-length=16",
    "--model.num-layers=2",
    "--model.dim=16",
    "--model.num-heads=2",
    "--model.num-kv-heads=1",
    "--model.ffn-dim=24",
    "--train.microbatch-size=2",
    "--pipeline.num-microbatches=2",
    "--evaluate.num-sequences=4",
]


def run(*words: object) -> int:
    """Run a command; tyro leaves through SystemExit."""
    try:
        return main([str(word) for word in words])
    except SystemExit as leaving:
        return int(leaving.code or 0)


def train(run_dir: Path, *words: object, steps: int = 3) -> int:
    return run("train", *SMALL, "--run-dir", run_dir, "--train.num-steps", steps, *words)


def test_a_run_directory_holds_what_is_promised(tmp_path, capsys):
    assert train(tmp_path, "--staleness.delay", 1, "--optim.name", "muon") == 0
    assert {"config.toml", "metrics.jsonl", "evaluations.jsonl", "summary.json", "checkpoints"} <= set(
        os.listdir(tmp_path)
    )
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    promised = "step loss grad_norm lr tokens_per_s staleness_mean staleness_max bubble_fraction"
    assert all(set(promised.split()) <= row.keys() for row in rows)
    assert [row["staleness_max"] for row in rows] == [0, 1, 1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    promised = (
        "num_steps executor pipeline_schedule num_stages num_microbatches optimizer error_feedback val_loss val_loss_y "
        "val_bits_per_byte tokens_per_s bubble_fraction staleness_mean staleness_max weights_sha256"
    )
    assert set(promised.split()) <= summary.keys()
    assert summary["staleness_mean"] == pytest.approx(2 / 3)
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    resolved = tomllib.loads((tmp_path / "config.toml").read_text())
    assert resolved["model"]["vocab_size"] == 257
    assert resolved["staleness"]["delay"] == 1
    out = capsys.readouterr().out
    assert re.search(
        r"step 3/3 \| loss \d\.\d{3} \| lr .* \| gnorm .* \| tok/s .* \| mfu n/a \| mem .* \| "
        r"staleness 1\.0/1 \| bubble 0% \| data .*% \| eta 0s",
        out,
    )
    assert "validation loss, before" in out


def test_metrics_keep_full_precision(tmp_path):
    train(tmp_path)
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert any(len(repr(row["loss"])) > 12 for row in rows)


def test_the_same_settings_give_the_same_run(tmp_path):
    for name in ("a", "b"):
        train(tmp_path / name, "--staleness.delay", 1, "--staleness.error-feedback", 1)
    a, b = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("a", "b"))
    assert a["weights_sha256"] == b["weights_sha256"]
    assert a["config_hash"] == b["config_hash"]


def test_bits_per_byte_of_bytes_are_nats_over_ln2(tmp_path):
    """Each byte is a token; only the marks between documents have no byte, and none lies in the first sequences."""
    train(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / math.log(2))


def test_flags_come_before_the_file_and_the_file_before_the_defaults(tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text("[train]\nnum_steps = 5\nmicrobatch_size = 7\n[model]\ntie_embeddings = true\n")
    assert run("config", "show", "--config", file, "--train.num-steps", 9, "--model.tie-embeddings", "false") == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert (shown["train"]["num_steps"], shown["train"]["microbatch_size"]) == (9, 7)
    assert shown["model"]["tie_embeddings"] is False
    assert shown["model"]["num_layers"] == 4


def test_the_coefficient_may_be_a_word_as_flag_and_in_a_file(tmp_path, capsys):
    assert run("config", "show", "--staleness.error-feedback", "auto") == 0
    file = tmp_path / "auto.toml"
    file.write_text(capsys.readouterr().out)
    assert run("config", "show", "--config", file) == 0
    assert tomllib.loads(capsys.readouterr().out)["staleness"]["error_feedback"] == "auto"
    assert run("config", "show", "--config", file, "--staleness.error-feedback", "1.5") == 0
    assert tomllib.loads(capsys.readouterr().out)["staleness"]["error_feedback"] == 1.5


def test_a_run_that_finds_its_coefficient_logs_it_and_resumes(tmp_path):
    options = ("--staleness.delay", 1, "--staleness.error-feedback", "auto", "--log.every-steps", 1)
    for name, steps in (("whole", 4), ("parts", 2)):
        assert train(tmp_path / name, *options, "--optim.lr-total-steps", 4, steps=steps) == 0
    assert run("train", "--run-dir", tmp_path / "parts", "--resume", "--train.num-steps", 4) == 0
    whole, parts = (read_json_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [row["method_metrics"] for row in whole] == [row["method_metrics"] for row in parts]
    found = whole[-1]["method_metrics"]
    assert set(found) >= {f"error_feedback/{role}" for role in ("embedding", "q", "ffn_down", "norm", "head")}
    assert any(found.values())


def test_what_has_no_effect_is_said_before_training(tmp_path, capsys):
    assert train(tmp_path, "--staleness.correction", "gap_aware") == 0
    said = capsys.readouterr().out
    assert said.count("warning: staleness.correction 'gap_aware' has no effect at a delay of 0") == 1


def test_resume_needs_no_config_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[optim]\nlr = 0.004\nlr_total_steps = 20\n")
    assert train(tmp_path / "run", "--config", file, steps=2) == 0
    assert run("train", "--run-dir", tmp_path / "run", "--resume", "--train.num-steps", 4) == 0
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 4


def test_resume_needs_no_config_file_in_the_default_run_directory_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("train", *SMALL, "--train.num-steps", 1) == 0
    assert run("train", "--resume", "--train.num-steps", 2) == 0
    assert len(read_json_lines(Path("runs/default/metrics.jsonl"))) == 2


@pytest.mark.parametrize("command", ["", "train", "data", "data prepare", "data inspect", "config show", "doctor"])
def test_every_command_explains_itself(command, capsys):
    assert run(*command.split(), "--help") == 0
    assert len(capsys.readouterr().out) > 100


def test_ctrl_c_ends_a_command_without_a_traceback(capsys, monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


LONG = "a" * 300
"""No file system takes such a name."""


@pytest.mark.parametrize(
    "words",
    [
        "data prepare LONG --out o",
        "data prepare a.txt --out LONG",
        "data inspect LONG",
        "watch LONG",
        "report LONG",
        "generate LONG",
        "eval LONG --task perplexity --file a.txt",
        "export hf LONG o",
        "stability --probe LONG",
        "train --init-from LONG",
        "train --resume --run-dir LONG",
        "train --run-dir LONG",
        "compare grid.toml --run-dir LONG",
    ],
)
def test_what_the_system_refuses_is_a_sentence(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a text\n")
    Path("grid.toml").write_text("[grid]\n[[grid.rules]]\nname = 'adamw'\n")
    assert run(*words.replace("LONG", LONG).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert LONG in line
    assert sorted(os.listdir()) == ["a.txt", "grid.toml"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "there"), "cannot use there: Permission denied."),
        (OSError(28, "No space left on device"), "cannot write the output: No space left on device."),
        (FileNotFoundError(2, "No such file or directory", "there"), None),
        (OSError(9, "Bad file descriptor"), None),
        (OSError("what a library says"), None),
    ],
)
def test_what_may_be_our_mistake_keeps_its_traceback(error, said, capsys, monkeypatch):
    def refused(argv):
        raise error

    monkeypatch.setitem(COMMANDS, "doctor", refused)
    monkeypatch.setattr("slipstream.cli.silence", lambda: None)
    if said is None:
        with pytest.raises(OSError):  # noqa: PT011
            main(["doctor"])
    else:
        assert main(["doctor"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    "words",
    [
        "train --run-dir r\udcff",
        "train --data.path d\udcff --run-dir r",
        "config show --run-dir r\udcff",
        "compare grid.toml --run-dir r\udcff",
    ],
)
def test_names_that_are_no_text_are_refused_before_anything_is_written(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*words.split()) == 2
    assert re.search(r"error: .*\\udcff.* is not UTF-8 text", capsys.readouterr().err)
    assert not os.listdir()


def test_doctor_finds_this_machine_fit(capsys):
    assert run("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["gradient check"] == "right"


WRONG = {
    "unknown command": (["trian"], r"no command 'trian'\. Did you mean 'train'\?"),
    "unknown option": (["train", "--train.num-step", "3"], r"--train\.num-steps"),
    "no such config file": (["train", "--config", "nope.toml"], r"cannot read the config file nope\.toml"),
    "not a choice": (["train", "--executor", "singel"], r"'singel'(.|\n)*'single'"),
    "heads": (["train", *SMALL, "--model.num-heads", "3"], r"num_heads is 3.*model\.dim 16.*Allowed: 1, 2, 4, 8, 16"),
    "warm-up": (
        ["train", *SMALL, "--optim.lr-warmup-steps", "9", "--optim.lr-total-steps", "8"],
        r"lr_warmup_steps 9 is longer than .*8 updates",
    ),
    "optimizer": (["train", *SMALL, "--optim.name", "torch.optim.AdamV"], r"no 'AdamV'.*Did you mean"),
    "optimizer module": (["train", *SMALL, "--optim.name", "no_such.Rule"], r"cannot import 'no_such'"),
    "closure": (["train", *SMALL, "--optim.name", "torch.optim.LBFGS"], r"closure"),
    "too little data": (
        ["train", *SMALL, "--train.microbatch-size", "90000"],
        r"train split is too small: \d+ tokens make \d+ sequences of 16, a batch needs 180000",
    ),
    "out of range": (["train", *SMALL, "--train.num-steps", "0"], r"train\.num_steps is 0; it must be 1 or more"),
    "negative delay": (["train", *SMALL, "--staleness.delay", "-1"], r"staleness\.delay is -1"),
    "conflict": (
        ["train", *SMALL, "--executor", "pipeline", "--staleness.delay", "2"],
        r"staleness\.delay is 2.*'two_bw' gives a delay of 1",
    ),
    "no data": (["train", *SMALL, "--data.path", "nowhere"], r"nowhere is not prepared data|nowhere"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_input_is_a_sentence_and_exit_code_2(fault, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, said = WRONG[fault]
    assert run(*words, *(["--run-dir", "r"] if words[0] == "train" else [])) == 2
    captured = capsys.readouterr()
    assert re.search(said, captured.out + captured.err), captured
    assert "Traceback" not in captured.err
    assert not (tmp_path / "r" / "config.toml").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nnum_step = 3\n", r"unknown key 'train\.num_step'\. Did you mean 'num_steps'\?"),
        ("[trane]\nnum_steps = 3\n", r"unknown key 'trane'\. Did you mean 'train'\?"),
        ("[train]\nnum_steps = 'x'\n", r"'train\.num_steps' must be a whole number, given 'x'"),
        ("[train]\nnum_steps = true\n", r"'train\.num_steps' must be a whole number, given True"),
        ("executor = 'singel'\n", r"'executor' is 'singel'\. Did you mean 'single'\?"),
        ("train = 3\n", r"'train' must be a table"),
        ("[train\n", r"not valid TOML"),
    ],
)
def test_a_wrong_config_file_is_named(text, said, tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text(text)
    assert run("train", "--config", file, "--run-dir", tmp_path / "r") == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert str(file) in error


def test_a_run_directory_in_use_is_refused_and_left_alone(tmp_path, capsys):
    train(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert train(tmp_path) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert train(tmp_path, "--overwrite", "--resume") == 2
    assert train(tmp_path, "--overwrite", "--model.num-heads", 3) == 2, "a wrong setting must not cost the old run"
    predicted = ("--optim.name", "muon", "--staleness.delay", 1, "--staleness.prediction", "xpipe")
    assert train(tmp_path, "--overwrite", *predicted) == 2
    assert "momentum" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_rule_that_cannot_take_the_models_parameters_does_not_cost_the_old_run(tmp_path, capsys):
    pytest.importorskip("pytorch_optimizer")
    train(tmp_path, steps=1)
    assert train(tmp_path, "--overwrite", "--optim.name", "soap", "--model.num-experts", 2) == 2
    assert "takes single matrices" in capsys.readouterr().err
    assert (tmp_path / "summary.json").exists()


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    train(tmp_path, "--checkpoint.every-steps", 1)
    (tmp_path / "notes.txt").write_text("mine")
    assert train(tmp_path, "--overwrite", steps=2) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 2


def test_a_loss_that_is_not_finite_stops_before_saving(tmp_path, capsys):
    overflow = ["--optim.lr", "1e34", "--staleness.error-feedback", "1e6"]
    assert train(tmp_path, *overflow, "--checkpoint.every-steps", 1, steps=6) == 2
    said = re.search(r"batch (\d+) has a loss of (nan|inf) at step (\d+)", capsys.readouterr().err)
    assert said is not None
    assert int(said[3]) == int(said[1]) + 1
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved
    assert max(int(name.removeprefix("step-")) for name in saved) < int(said[3])
    assert not (tmp_path / "summary.json").exists()


def test_weights_that_the_last_update_has_spoilt_are_no_success(tmp_path, capsys):
    spoilt = ["--optim.name", "sgd", "--optim.lr", "1e17", "--optim.lr-warmup-steps", 0]
    assert train(tmp_path, *spoilt, steps=1) == 2
    assert "the validation loss is nan: the last update has spoilt the weights" in capsys.readouterr().err
    assert (tmp_path / "summary.json").exists()


def test_gradients_that_are_not_finite_are_skipped_then_stop_the_run(tmp_path, capsys):
    assert train(tmp_path, "--optim.lr", "1e30", "--train.max-skipped-steps", 2, steps=9) == 2
    captured = capsys.readouterr()
    assert "SKIPPED" in captured.out
    assert re.search(r"last 3 batches, up to batch \d+ at step \d+; train\.max_skipped_steps allows 2", captured.err)
    assert not (tmp_path / "summary.json").exists()


def test_a_changed_tokenizer_is_refused(tmp_path, capsys):
    text = tmp_path / "t.txt"
    text.write_text("".join(f"line {i} of a text\n" for i in range(200)))
    for name, kind in (("bytes", "bytes"), ("bpe", "bpe")):
        extra = ["--vocab-size", 300] if kind == "bpe" else []
        assert run("data", "prepare", text, "--out", tmp_path / name, "--tokenizer", kind, *extra) == 0
    assert train(tmp_path / "run", "--data.path", tmp_path / "bytes", steps=2) == 0
    capsys.readouterr()
    assert train(tmp_path / "run", "--data.path", tmp_path / "bpe", "--resume", steps=4) == 2
    assert "model.vocab_size is 257, the data's tokenizer has" in capsys.readouterr().err
    for file in (tmp_path / "bpe").glob("*tokenizer*"):
        (tmp_path / "bytes" / file.name).write_bytes(file.read_bytes())
    assert train(tmp_path / "run2", "--data.path", tmp_path / "bytes") == 2
    assert "does not match the shards" in capsys.readouterr().err


def test_text_that_is_not_utf8_is_named_with_its_offset(tmp_path, capsys):
    text = tmp_path / "t.txt"
    text.write_bytes(b"good text\n" * 10 + b"\xff\xfe")
    assert run("data", "prepare", text, "--out", tmp_path / "d") == 2
    error = capsys.readouterr().err
    assert "t.txt" in error
    assert "100" in error
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_cleanly_and_the_run_resumes(tmp_path, number):
    command = [sys.executable, "-m", "slipstream.cli", "train", *SMALL, "--run-dir", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--train.num-steps", "100000", "--optim.lr-total-steps", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    step = int(re.search(r"stopped at step (\d+), state saved; continue with: slipstream train .* --resume", out)[1])
    assert (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
    assert not (tmp_path / "summary.json").exists()
    assert run("train", "--run-dir", tmp_path, "--resume", "--train.num-steps", step + 2) == 0
    assert [row["step"] for row in read_json_lines(metrics)] == list(range(1, step + 3))


@pytest.mark.parametrize(
    ("words", "meant"),
    [("simulate async-dpp", "simulate async-dp"), ("simulat", "simulate"), ("bench pipelin", "bench pipeline")],
)
def test_a_misspelt_command_is_told_the_nearest(words, meant, capsys):
    assert main(words.split()) == 2
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err
