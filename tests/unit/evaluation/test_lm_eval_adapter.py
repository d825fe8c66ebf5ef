"""The adapter without lm-eval: what it says, and what it would answer. Agreement: benchmarks/lm_eval_agreement.py."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from slipstream.config import ModelConfig
from slipstream.data.hub_tokenizer import write_hub_tokenizer
from slipstream.data.tokenizer import ByteTokenizer
from slipstream.errors import ConfigError
from slipstream.evaluation import lm_eval_adapter
from slipstream.evaluation.lm_eval_adapter import SlipstreamLM
from slipstream.evaluation.scoring import Scorer
from slipstream.models.huggingface import write_hub_model
from slipstream.models.llama import whole_model
from slipstream.train.trained import open_trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    cfg = ModelConfig(num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=257, init_std=0.3)
    weights = {name: tensor.detach() for name, tensor in whole_model(cfg).named_parameters()}
    write_hub_model(folder, cfg, weights, context_length=16, eos_id=256)
    write_hub_tokenizer(ByteTokenizer(), folder, context_length=16)
    return folder


WORDS = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
BEGINNINGS = {"llama": ("<s>", "<s> $A"), "qwen": (None, "$A"), "named only": ("<s>", "$A")}


@pytest.fixture(params=BEGINNINGS)
def imported(request, tmp_path):
    """A model folder as others write it: the token that begins a text is not the one that ends a document."""
    cfg = ModelConfig(num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=30, init_std=0.3)
    weights = {name: tensor.detach() for name, tensor in whole_model(cfg).named_parameters()}
    write_hub_model(tmp_path, cfg, weights, context_length=64, eos_id=2)
    begin, around = BEGINNINGS[request.param]
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return request.param, tmp_path


PAIRS = [("to be", " or not"), ("to be ", "or"), ("", "to be"), ("", "a")]


def test_imported_folders_begin_texts_as_they_were_trained(imported):
    kind, folder = imported
    scorer = Scorer(open_trained(folder))
    begin, first = {"llama": ([1], 1), "qwen": ([], 2), "named only": ([], 1)}[kind]
    to_be = [WORDS.index(sign) for sign in "\u2581to\u2581be"]
    assert scorer.encode_pair("to be", " or")[0] == [*begin, *to_be]
    assert scorer.encode_pair("", "to be") == ([first], to_be)


def test_the_same_ids_and_scores_as_lm_evals_own_model(imported):
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    kind, folder = imported
    theirs, ours = HFLM(pretrained=str(folder), device="cpu", dtype="float32"), SlipstreamLM(folder)
    scorer = Scorer(open_trained(folder))
    for context, continuation in PAIRS:
        if context:
            assert scorer.encode_pair(context, continuation) == theirs._encode_pair(context, continuation)
    assert scorer.encode_pair("", "a")[0] == [theirs.prefix_token_id]
    requests = [SimpleNamespace(args=pair) for pair in PAIRS]
    for one, two in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True)):
        assert one == pytest.approx(two, abs=1e-4)
    text = SimpleNamespace(args=("to be or not",))
    (mine,), (rolled,) = ours.loglikelihood_rolling([text]), theirs.loglikelihood_rolling([text], disable_tqdm=True)
    # Theirs scores the token that it puts before the text, too.
    assert (mine == pytest.approx(rolled, abs=1e-4)) == (kind != "llama")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_the_extra_is_named(folder):
    with pytest.raises(ConfigError, match=r"slipstream\[eval\]"):
        SlipstreamLM(folder)


def test_answers_are_the_scorers(folder, monkeypatch):
    if importlib.util.find_spec("lm_eval") is None:
        monkeypatch.setattr(lm_eval_adapter, "LM", None)  # any base but the one that stands for its absence
    adapter, scorer = SlipstreamLM(folder), Scorer(open_trained(folder))
    pairs = [("to be", " or not"), ("", "x")]
    requests = [SimpleNamespace(args=pair) for pair in pairs]
    assert adapter.loglikelihood(requests) == scorer.log_likelihoods(pairs)
    (rolled,) = adapter.loglikelihood_rolling([SimpleNamespace(args=("to be or not to be",))])
    assert rolled == scorer.rolling(["to be or not to be"])[0][0].log_likelihood
    asked = SimpleNamespace(args=("to be", {"until": ["\n"], "max_gen_toks": 5}))
    (text,) = adapter.generate_until([asked])
    assert "\n" not in text
    torch.manual_seed(0)
    assert adapter.generate_until([asked]) == [text]


def test_a_request_that_is_repeated_is_drawn_anew(folder, monkeypatch):
    """Votes among many answers would be those of one."""
    if importlib.util.find_spec("lm_eval") is None:
        monkeypatch.setattr(lm_eval_adapter, "LM", None)
    asked = SimpleNamespace(args=("to be", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8}))
    texts = SlipstreamLM(folder).generate_until([asked] * 4)
    assert len(set(texts)) == 4
    assert SlipstreamLM(folder).generate_until([asked] * 4) == texts  # a second evaluation gives the same
