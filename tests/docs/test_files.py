"""The page about files names every key that a run and prepared data really have."""

import json

import pytest
from blocks import ROOT

from slipstream.cli import main

PAGE = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    source = ROOT / "src" / "slipstream" / "data" / "texts" / "shakespeare.txt.gz"
    assert main(["data", "prepare", str(source), "--out", str(folder / "data")]) == 0
    flags = {
        "data.path": folder / "data",
        "data.sequence-length": 16,
        "model.num-layers": 1,
        "model.dim": 16,
        "model.num-experts": 2,
        "model.ffn-dim": 16,
        "staleness.delay": 1,
        "staleness.error-feedback": "auto",
        "log.every-steps": 1,
        "evaluate.every-steps": 1,
        "evaluate.num-sequences": 4,
        "checkpoint.keep-best": "true",
        "train.num-steps": 2,
        "run-dir": folder / "run",
    }
    assert main(["train", *(str(word) for name, value in flags.items() for word in (f"--{name}", value))]) == 0
    return folder / "run"


def named(keys):
    missing = [key for key in keys if f"`{key}`" not in PAGE]
    assert not missing, f"docs/files.md does not name {missing}"


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_rows(run_dir, name):
    named(json.loads((run_dir / name).read_text().splitlines()[-1]))


def test_summary(run_dir):
    named(json.loads((run_dir / "summary.json").read_text()))


def test_manifest_of_a_checkpoint(run_dir):
    named(json.loads((run_dir / "checkpoints" / "step-00000002" / "manifest.json").read_text()))


def test_manifest_of_data(run_dir):
    manifest = json.loads((run_dir.parent / "data" / "manifest.json").read_text())
    named([*manifest, *manifest["tokenizer"], *manifest["split_rule"], *manifest["sources"][0]])
    named([*manifest["splits"]["train"], *manifest["splits"]["train"]["shards"][0]])


def test_files_of_a_run(run_dir):
    for path in run_dir.iterdir():
        assert f"`{path.name}" in PAGE, path.name
