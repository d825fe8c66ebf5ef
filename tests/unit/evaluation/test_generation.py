"""A model continues a text."""

import dataclasses

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from slipstream.config import ModelConfig
from slipstream.data.hub_tokenizer import HubTokenizer
from slipstream.data.tokenizer import ByteTokenizer
from slipstream.errors import ConfigError, DataError, NonFiniteError
from slipstream.evaluation.generation import generate
from slipstream.models.llama import Head, whole_model
from slipstream.train.trained import TrainedModel


def model(tmp_path, *, vocab_size=257, favoured=None):
    cfg = ModelConfig(
        num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=vocab_size, init_std=0.3
    )
    weights = {name: tensor.detach() for name, tensor in whole_model(cfg).named_parameters()}
    if favoured is not None:  # its row points along every normed activation
        weights["embed.weight"] = torch.ones_like(weights["embed.weight"])
        weights["head.weight"] = torch.zeros_like(weights["head.weight"])
        weights["blocks.0.attention.o.weight"].zero_()
        weights["blocks.0.ffn.down.weight"].zero_()
        weights["head.weight"][favoured] = 1
    return TrainedModel(path=tmp_path, cfg=cfg, weights=weights, tokenizer=ByteTokenizer(), context_length=8)


def test_greedy_takes_the_likeliest_token_of_what_fits(tmp_path):
    trained = model(tmp_path)
    module, ids = trained.module(), list(b"to be or")
    written = generate(trained, "to be or", max_new_tokens=12)
    for _ in range(len(written.ids)):
        ids.append(int(module(torch.tensor([ids[-8:]]))[0, -1].argmax()))
    assert written.ids == ids[8:]
    assert written.text == ByteTokenizer().decode(written.ids)


def test_logits_are_made_of_the_last_position_alone(tmp_path, monkeypatch):
    made, forward = [], Head.forward
    monkeypatch.setattr(Head, "forward", lambda self, x: made.append(x.shape[:-1].numel()) or forward(self, x))
    written = generate(model(tmp_path), "to be or", max_new_tokens=3)
    assert made == [1] * len(written.ids)


def test_a_seed_decides_the_draws(tmp_path):
    trained = model(tmp_path)
    first, again, other = (generate(trained, "a", max_new_tokens=20, temperature=1.0, seed=s).ids for s in (1, 1, 2))
    assert first == again != other
    assert generate(trained, "a", max_new_tokens=20, temperature=1e-6, seed=3) == generate(
        trained, "a", max_new_tokens=20
    )


def test_it_ends_where_the_model_ends_and_begins_where_a_document_begins(tmp_path):
    assert generate(model(tmp_path, favoured=256), "a", max_new_tokens=9) == ("", [256])
    assert generate(model(tmp_path, favoured=65), "", max_new_tokens=3) == ("AAA", [65, 65, 65])


def test_what_begins_every_text_comes_before_a_prompt(tmp_path):
    trained = dataclasses.replace(model(tmp_path), begin_ids=(200,), prefix_id=201)
    module = trained.module()
    for prompt, seen in (("ab", [200, 97, 98]), ("", [200])):
        first = int(module(torch.tensor([seen]))[0, -1].argmax())
        written = generate(trained, prompt, max_new_tokens=1)
        assert written == (ByteTokenizer().decode([first]), [first])
    alone = dataclasses.replace(trained, begin_ids=())
    assert generate(alone, "", max_new_tokens=1).ids == [int(module(torch.tensor([[201]]))[0, -1].argmax())]


def test_rows_without_a_token_are_never_written(tmp_path):
    written = generate(model(tmp_path, vocab_size=300, favoured=299), "a", max_new_tokens=3)
    assert all(i < 257 for i in written.ids)


def test_the_space_after_the_prompt_is_kept(tmp_path):
    """Tokenizers that write a space as a low line drop it at the beginning of what they decode."""
    words = {"\u2581" + word: i for i, word in enumerate(["the", "king", "of"])} | {"</s>": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="</s>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    trained = dataclasses.replace(
        model(tmp_path, vocab_size=4, favoured=1), tokenizer=HubTokenizer(backend.to_str(), 3)
    )
    assert generate(trained, "the", max_new_tokens=2) == (" king king", [1, 1])
    assert generate(trained, "", max_new_tokens=2).text == "king king"


def test_ids_that_the_model_does_not_have(tmp_path):
    with pytest.raises(DataError, match="gives the id 98, the model has the ids 0 to 97"):
        generate(model(tmp_path, vocab_size=98), "ab", max_new_tokens=1)
    assert len(generate(model(tmp_path, vocab_size=98), "aa", max_new_tokens=3).ids) == 3


def test_numbers_out_of_range(tmp_path):
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        generate(model(tmp_path), "a", max_new_tokens=0)
    with pytest.raises(ConfigError, match="temperature is -1"):
        generate(model(tmp_path), "a", max_new_tokens=1, temperature=-1)


@pytest.mark.parametrize("temperature", [1e-320, 5e-324, 1e-30])
def test_the_smallest_temperatures_take_the_likeliest_token(tmp_path, temperature):
    trained = model(tmp_path)
    assert generate(trained, "a", max_new_tokens=9, temperature=temperature) == generate(trained, "a", max_new_tokens=9)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30])
def test_a_seed_that_no_generator_takes(tmp_path, seed):
    with pytest.raises(ConfigError, match=f"the seed is {seed}"):
        generate(model(tmp_path), "a", max_new_tokens=1, temperature=1.0, seed=seed)
    generate(model(tmp_path), "a", max_new_tokens=1, temperature=1.0, seed=2**64 - 1)


@pytest.mark.parametrize("prompt", ["a\ud800b", b"caf\xe9".decode("utf-8", errors="surrogateescape")])
def test_a_prompt_that_is_not_text(tmp_path, prompt):
    with pytest.raises(DataError, match=r"the prompt is not text: character [13]"):
        generate(model(tmp_path), prompt, max_new_tokens=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_gives_no_numbers_does_not_write(tmp_path, temperature):
    trained = model(tmp_path)
    trained.weights["head.norm.weight"].fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="cannot write"):
        generate(trained, "a", max_new_tokens=1, temperature=temperature)
