"""The adapter without lm-eval: what it says, and what it would answer. Agreement: benchmarks/lm_eval_agreement.py."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

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
