"""Log-likelihoods against a plain sum, one token at a time; figures of tasks and perplexity."""

import dataclasses
import json
import math

import pytest
import torch

from slipstream.config import ModelConfig
from slipstream.data.tokenizer import ByteTokenizer
from slipstream.errors import ConfigError, DataError, NonFiniteError
from slipstream.evaluation import scoring
from slipstream.evaluation.questions import Question
from slipstream.evaluation.scoring import Score, Scorer
from slipstream.evaluation.tasks import answers, multiple_choice, run_task
from slipstream.models.llama import Head, whole_model
from slipstream.train.trained import TrainedModel

LENGTH = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    cfg = ModelConfig(num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=257, init_std=0.3)
    weights = {name: tensor.detach() for name, tensor in whole_model(cfg).named_parameters()}
    return TrainedModel(
        path=tmp_path_factory.mktemp("m"), cfg=cfg, weights=weights, tokenizer=ByteTokenizer(), context_length=LENGTH
    )


def one_by_one(model, before, after):
    """Sum the log-probabilities of ``after``, each token from what the window holds before it."""
    module, total, greedy = model.module(), 0.0, True
    tokens = [*before, *after]
    window = tokens[-(LENGTH + 1) :]
    start = len(window) - len(after)
    for at in range(start, len(window)):
        logs = torch.log_softmax(module(torch.tensor([window[:at]]))[0, -1].double(), -1)
        total += float(logs[window[at]])
        greedy &= int(logs.argmax()) == window[at]
    return total, greedy


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("ab", " cd"),
        ("", "abc"),
        ("a longer context", " xyz"),
        ("ab ", "c"),
        ("", "12345678"),
        ("abcdefgh", " 2345678"),
    ],
)
def test_score_is_the_sum_over_the_continuation(model, context, continuation):
    (score,) = Scorer(model).log_likelihoods([(context, continuation)])
    stripped = context.rstrip()
    before = list(stripped.encode()) or [256]
    expected, greedy = one_by_one(model, before, list((context[len(stripped) :] + continuation).encode()))
    assert score.log_likelihood == pytest.approx(expected, abs=1e-4)
    assert score.is_greedy == greedy


def test_greedy_continuation_is_seen(model):
    first = int(model.module()(torch.tensor([list(b"ab")]))[0, -1, :128].argmax())
    text = ByteTokenizer().decode([first])
    likeliest = int(model.module()(torch.tensor([list(b"ab")]))[0, -1].argmax())
    (score,) = Scorer(model).log_likelihoods([("ab", text)])
    assert score.is_greedy == (likeliest == first)


def test_order_and_batches_change_no_score(model, monkeypatch):
    requests = [("abc" * i, f" {i}x" + "y" * (i % 4)) for i in range(7)] + [("q", " A"), ("q", " B")]
    together = Scorer(model).log_likelihoods(requests)
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 1)
    alone = Scorer(model).log_likelihoods(requests)
    for one, other in zip(together, alone):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
    backwards = Scorer(model).log_likelihoods(requests[::-1])[::-1]
    assert [round(score.log_likelihood, 4) for score in backwards] == [round(s.log_likelihood, 4) for s in alone]


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_requests_are_scored_so_many_at_once_and_a_shared_context_encoded_once(model, monkeypatch, at_once):
    requests = [(f"{'abc' * i}", f" {letter}") for i in range(1, 4) for letter in "ABCD"]
    together = Scorer(model).log_likelihoods(requests)
    scored, encoded = [], []
    score, encode = Scorer._score, ByteTokenizer.encode
    monkeypatch.setattr(scoring, "REQUESTS_AT_ONCE", at_once)
    monkeypatch.setattr(Scorer, "_score", lambda self, some, count: scored.append(count) or score(self, some, count))
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    found = Scorer(model).log_likelihoods(requests)
    assert [each.log_likelihood for each in found] == pytest.approx([each.log_likelihood for each in together])
    assert (max(scored), sum(scored)) == (min(at_once, 12), 12)
    assert [encoded.count("abc" * i) for i in range(1, 4)] == [1, 1, 1]


def test_a_continuation_longer_than_the_context_is_scored_whole(model):
    text = "0123456789abcdefghij"
    (score,) = Scorer(model).log_likelihoods([("start", text)])
    ids, expected = list(b"start") + list(text.encode()), 0.0
    for start in range(5, len(ids), LENGTH // 2):
        end = min(start + LENGTH // 2, len(ids))
        expected += one_by_one(model, ids[:start], ids[start:end])[0]
    assert score.log_likelihood == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 3 * LENGTH, 3 * LENGTH + 3])
def test_rolling_predicts_every_token_once(model, length):
    text = ("to be or not to be, " * 3)[:length]
    ((score, num_tokens),) = Scorer(model).rolling([text])
    ids = [256, *text.encode()]
    expected = 0.0
    for start in range(0, length, LENGTH):
        end = min(start + LENGTH, length)
        seen = ids[max(0, end - LENGTH) : start + 1]
        expected += one_by_one(model, seen, ids[start + 1 : end + 1])[0]
    assert num_tokens == length
    assert score.log_likelihood == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("context", "continuation", "before", "after"),
    [
        ("ab", " c", [200, 97, 98], b" c"),
        ("ab ", "c", [200, 97, 98], b" c"),
        (" ", "c", [200], b" c"),
        ("", "c", [201], b"c"),
    ],
)
def test_what_begins_every_text_comes_before_a_context(model, context, continuation, before, after):
    scorer = Scorer(dataclasses.replace(model, begin_ids=(200,), prefix_id=201))
    assert scorer.encode_pair(context, continuation) == (before, list(after))
    (score,) = scorer.log_likelihoods([(context, continuation)])
    assert score.log_likelihood == pytest.approx(one_by_one(model, before, list(after))[0], abs=1e-4)


def test_rolling_begins_with_what_stands_before_a_text(model):
    scorer = Scorer(dataclasses.replace(model, begin_ids=(200,), prefix_id=201))
    ((score, num_tokens),) = scorer.rolling(["abc"])
    assert num_tokens == 3
    assert score.log_likelihood == pytest.approx(one_by_one(model, [201], list(b"abc"))[0], abs=1e-4)


@pytest.fixture
def made(monkeypatch):
    """Numbers of positions that logits were made of, a call each."""
    numbers, forward = [], Head.forward

    def counted(self, x):
        numbers.append(x.shape[:-1].numel())
        return forward(self, x)

    monkeypatch.setattr(Head, "forward", counted)
    return numbers


def test_logits_are_made_of_positions_that_are_read_and_of_few_at_once(model, made, monkeypatch):
    requests = [("abcd", " x"), ("abcd", " xyz"), ("abcd", " xyab")]
    expected, (rolled,) = Scorer(model).log_likelihoods(requests), Scorer(model).rolling(["abcdefgh"])
    made.clear()
    monkeypatch.setattr(scoring, "BATCH_LOGITS", 3 * 257 + 5)
    scorer = Scorer(model)
    found = scorer.log_likelihoods(requests)
    assert sorted(made) == [1, 2, 2, 3, 3]  # two, four and five tokens are predicted, from other inputs each
    made.clear()
    (again,) = scorer.rolling(["abcdefgh"])
    assert made == [3, 3, 2]
    for one, other in zip([*found, again[0]], [*expected, rolled[0]]):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
        assert one.is_greedy == other.is_greedy


def test_choices_of_one_input_share_its_logits(model, made):
    Scorer(model).log_likelihoods([("abc", "x"), ("abc", "y")])
    assert made == [1]


def test_normed_accuracy_divides_by_characters():
    question = Question(context="", choices=("\u00e9\u00e9", "abc"), gold=0)
    assert answers(question, [Score(-2.0, False), Score(-2.5, False)]) == (True, False)
    assert answers(question, [Score(-3.0, False), Score(-4.6, False)]) == (True, True)
    assert answers(question, [Score(-2.0, False), Score(-2.0, False)]) == (True, False)


def test_multiple_choice_counts(model):
    scorer = Scorer(model)
    questions = [Question(context="ab", choices=("x", "yy", "z"), gold=gold) for gold in range(3)]
    found = multiple_choice(scorer, questions)
    assert found == {"acc": pytest.approx(1 / 3), "acc_norm": pytest.approx(1 / 3), "num_items": 3}


def test_perplexity_of_a_text_and_of_records(model, tmp_path):
    texts = ["To be, or not to be", "caf\u00e9", "  "]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    scorer = Scorer(model)
    found = run_task(scorer, "perplexity", tmp_path / "t.jsonl", text_field="body")
    nats = -sum(score.log_likelihood for score, _ in scorer.rolling(texts[:2]))
    assert found["num_tokens"] == found["num_bytes"] == 19 + 5
    assert found["num_items"] == 2
    assert found["nats_per_token"] == pytest.approx(nats / 24)
    assert found["bits_per_byte"] == pytest.approx(nats / 24 / math.log(2))
    assert found["perplexity"] == pytest.approx(math.exp(nats / 24))
    assert run_task(scorer, "perplexity", tmp_path / "t.jsonl", limit=1, text_field="body")["num_tokens"] == 19
    assert run_task(scorer, "perplexity", tmp_path / "t.jsonl", limit=10**20, text_field="body")["num_items"] == 2
    (tmp_path / "t.txt").write_text(texts[0])
    assert run_task(scorer, "perplexity", tmp_path / "t.txt")["num_tokens"] == 19


def test_wrong_settings(model, tmp_path):
    scorer = Scorer(model)
    with pytest.raises(ConfigError, match="Did you mean 'hellaswag'"):
        run_task(scorer, "helaswag", tmp_path)
    with pytest.raises(ConfigError, match="the limit is 0"):
        run_task(scorer, "blimp", tmp_path, limit=0)
    with pytest.raises(ConfigError, match="max_length is 0"):
        Scorer(model, max_length=0)
    (tmp_path / "t.txt").write_text(" \n")
    with pytest.raises(DataError, match="holds no text"):
        run_task(scorer, "perplexity", tmp_path / "t.txt")


def test_ids_that_the_model_does_not_have(tmp_path):
    cfg = ModelConfig(num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=98)
    weights = {name: tensor.detach() for name, tensor in whole_model(cfg).named_parameters()}
    trained = TrainedModel(path=tmp_path, cfg=cfg, weights=weights, tokenizer=ByteTokenizer(), context_length=LENGTH)
    with pytest.raises(DataError, match="gives the id 98, the model has the ids 0 to 97"):
        Scorer(trained).log_likelihoods([("a", "a"), ("a", "b")])
    assert Scorer(trained).log_likelihoods([("a", "a")])[0].log_likelihood < 0


def test_a_model_that_diverged_is_not_scored(model):
    """The first choice, BLiMP's right one, would win against all that are NaN."""
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in model.weights.items()}
    with pytest.raises(NonFiniteError, match=r"not finite numbers.* earlier checkpoint"):
        Scorer(dataclasses.replace(model, weights=broken)).log_likelihoods([("a", " b")])
