"""Perplexity of files and of what `data prepare` held out."""

import dataclasses
import json
import math

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from slipstream.config import ModelConfig
from slipstream.data import open_data, prepare
from slipstream.data.hub_tokenizer import HubTokenizer
from slipstream.data.tokenizer import ByteTokenizer
from slipstream.errors import DataError
from slipstream.evaluation.perplexity import perplexity
from slipstream.evaluation.scoring import Scorer
from slipstream.models.llama import whole_model
from slipstream.train.trained import TrainedModel


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    cfg = ModelConfig(num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=257, init_std=0.3)
    weights = {name: tensor.detach() for name, tensor in whole_model(cfg).named_parameters()}
    return TrainedModel(
        path=tmp_path_factory.mktemp("m"), cfg=cfg, weights=weights, tokenizer=ByteTokenizer(), context_length=16
    )


@pytest.fixture(scope="module")
def scorer(model):
    return Scorer(model)


def test_held_out_documents_are_scored_as_their_text_is(scorer, tmp_path):
    texts = [f"Document {i}, caf\u00e9: to be or not to be." for i in range(60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(tmp_path / "t.jsonl")], tmp_path / "data", validation_fraction=0.2)
    split = open_data(tmp_path / "data").validation
    held = bytes(i for i in split.read(0, len(split)).tolist() if i != 256).decode()
    kept = [text for text in texts if text in held]
    assert 2 < len(kept) < 30
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    expected = perplexity(scorer, tmp_path / "held.jsonl", limit=None, text_field="text")
    found = perplexity(scorer, tmp_path / "data", limit=None, text_field="text")
    assert found == pytest.approx(expected, rel=1e-12)
    assert found["num_items"] == len(kept)
    assert found["num_bytes"] == sum(len(text.encode()) for text in kept)
    assert perplexity(scorer, tmp_path / "data", limit=2, text_field="text")["num_items"] == 2


def test_a_space_that_the_tokenizer_puts_first_is_no_byte_of_the_text(model, tmp_path):
    texts = [f"To be {sign} not to be" for sign in "abcdefghijklmnop"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pieces = ["</s>", "\u2581", *sorted({*"".join(texts)} - {" "})]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    theirs = HubTokenizer(backend.to_str(), 0)
    manifest = prepare([str(tmp_path / "t.jsonl")], tmp_path / "data", tokenizer=theirs, validation_fraction=0.4)
    scorer = Scorer(dataclasses.replace(model, tokenizer=theirs))
    found = perplexity(scorer, tmp_path / "data", limit=None, text_field="text")
    assert found["num_bytes"] == manifest.splits["validation"].num_bytes
    assert found["num_items"] == manifest.splits["validation"].documents


def test_data_of_another_tokenizer_is_refused(scorer, tmp_path):
    (tmp_path / "t.txt").write_text("To be, or not to be: that is the question.\n" * 200)
    prepare([str(tmp_path / "t.txt")], tmp_path / "data", tokenizer="bpe", vocab_size=280)
    with pytest.raises(DataError, match="prepared with the tokenizer 'bpe'"):
        perplexity(scorer, tmp_path / "data", limit=None, text_field="text")


def test_a_loss_beyond_all_floats_has_no_perplexity(scorer, tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("To be")
    scores = scorer.rolling_ids([[1]])
    monkeypatch.setattr(scorer, "rolling_ids", lambda texts: [scores[0]._replace(log_likelihood=-1e5)])
    found = perplexity(scorer, tmp_path / "t.txt", limit=None, text_field="text")
    assert found["perplexity"] is None
    assert math.isfinite(found["nats_per_token"])
    assert "null" in json.dumps(found, allow_nan=False)


def test_bytes_that_a_tokenizer_loses_are_counted(model, tmp_path):
    """Of all held-out documents they are the manifest's; of some they are not known, and no guess stands for them."""
    texts = [f"to be {i} unknowable not to be" for i in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = {"</s>": 0, "[UNK]": 1, "to": 2, "be": 3, "not": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>", "[UNK]"])
    theirs = HubTokenizer(backend.to_str(), 0)
    manifest = prepare([str(tmp_path / "t.jsonl")], tmp_path / "data", tokenizer=theirs, validation_fraction=0.4)
    scorer = Scorer(dataclasses.replace(model, tokenizer=theirs))
    found = perplexity(scorer, tmp_path / "data", limit=None, text_field="text")
    assert found["num_bytes"] == manifest.splits["validation"].num_bytes
    assert found["bits_per_byte"] == pytest.approx(
        found["nats_per_token"] * found["num_tokens"] / math.log(2) / found["num_bytes"]
    )
    some = perplexity(scorer, tmp_path / "data", limit=2, text_field="text")
    assert some["num_bytes"] is None
    assert some["bits_per_byte"] is None
    assert some["num_items"] == 2
