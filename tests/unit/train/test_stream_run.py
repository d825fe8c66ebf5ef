"""Runs that read their text as they go: continued exactly, by one process or by a pipeline."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import StalenessConfig, from_dict
from slipstream.data import prepare
from slipstream.errors import ConfigError, DataError
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter
from slipstream.train.workload import _reads_tokens, _untold


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two files to stream, and data prepared from the first."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(2):
        texts = [f"file {i} document {j}: {'word ' * (j % 7)}" for j in range(40)]
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / "0.jsonl"], folder / "data", tokenizer="bpe", vocab_size=300)
    return folder


def settings(run_dir: Path, corpus: Path, *, num_steps: int, **changes):
    tables = {
        "run_dir": str(run_dir),
        "data": {"path": str(corpus / "data"), "stream": [str(corpus / f"{i}.jsonl") for i in range(2)]},
        "model": {"num_layers": 3, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "dropout": 0.1},
        "optim": {"lr": 0.01, "lr_total_steps": 40},
        "staleness": {"delay": 1, "error_feedback": 1.0},
        "pipeline": {"num_microbatches": 3},
        "train": {"num_steps": num_steps, "microbatch_size": 2},
        "evaluate": {"num_sequences": 4},
    }
    tables["data"]["sequence_length"] = 16
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    return from_dict(tables)


class Notes(SilentReporter):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def train(*args, resume=False, reporter=None, allow_change=(), **changes):
    config = settings(*args, **changes)
    return launch(config, reporter=reporter or SilentReporter(), resume=resume, allow_change=allow_change)


def trajectory(run_dir: Path):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_json_lines(run_dir / "metrics.jsonl")]


def test_resumed_equals_continuous_in_one_process_and_in_a_pipeline(tmp_path, corpus):
    notes = Notes()
    whole = train(tmp_path / "whole", corpus, num_steps=12, reporter=notes)
    assert any("read from a stream of 2 files, 0.0 MB as stored" in text for text in notes.texts)
    train(tmp_path / "parts", corpus, num_steps=5)
    manifest = json.loads((tmp_path / "parts" / "checkpoints" / "step-00000005" / "manifest.json").read_text())
    assert manifest["data_state"]["next_batch"] == 5
    assert manifest["data_state"]["file_name"] in ("0.jsonl", "1.jsonl")
    train(tmp_path / "parts", corpus, num_steps=7, resume=True)
    pipeline = {"executor": "pipeline", "pipeline": {"num_stages": 3, "num_microbatches": 3}, "staleness": {}}
    config = settings(tmp_path / "parts", corpus, num_steps=12, **pipeline)
    parts = launch(config, reporter=SilentReporter(), resume=True)
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
    assert parts["weights_sha256"] == whole["weights_sha256"]


def test_only_first_and_last_rank_read_text(tmp_path, corpus):
    pipeline = {"executor": "pipeline", "pipeline": {"num_stages": 3, "num_microbatches": 3}}
    config = settings(tmp_path, corpus, num_steps=1, **pipeline)
    assert [_reads_tokens(config, rank) for rank in range(3)] == [True, False, True]
    batch = _untold(config, 4)
    assert (batch.index, batch.num_tokens) == (4, config.batch_tokens)
    assert np.shape(batch.inputs) == (config.batch_size, 16)


def test_a_stream_that_changed_is_refused_or_begun_anew(tmp_path, corpus):
    train(tmp_path, corpus, num_steps=2)
    other = {"data": {"stream": [str(corpus / "1.jsonl")]}}
    with pytest.raises(ConfigError, match=r"other settings that change what is trained:\n  data: '\w+' -> '\w+'\n"):
        train(tmp_path, corpus, num_steps=3, resume=True, **other)
    train(tmp_path, corpus, num_steps=3, resume=True, allow_change=["data"], **other)
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000003" / "manifest.json").read_text())
    state = manifest["data_state"]
    assert (state["next_batch"], state["file_name"], state["place"]["epoch"]) == (3, "1.jsonl", 0)


def test_refused_before_anything_is_written(tmp_path, corpus):
    config = settings(tmp_path / "run", corpus, num_steps=1, executor="dataparallel", engine="inline")
    config = dataclasses.replace(config, staleness=StalenessConfig())
    with pytest.raises(ConfigError, match=r"data\.stream is read in order, .* Pack the text"):
        launch(config, reporter=SilentReporter())
    with pytest.raises(DataError, match="Prepare some of the stream's files"):
        train(tmp_path / "run", corpus, num_steps=1, data={"path": ""})
    with pytest.raises(DataError, match="the field 'body' is missing"):
        train(tmp_path / "run", corpus, num_steps=1, data={"text_field": "body"})
    assert not (tmp_path / "run").exists()
