"""Heads of their own width, and normed queries and keys: shapes, roles, a plain reference, any split."""

import math

import pytest
import torch

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.llama import Attention, build_stage, whole_model
from slipstream.models.roles import role
from slipstream.models.rotary import rotary_tables, rotate
from slipstream.models.shapes import block_flops, parameter_shapes

SIZES = {
    "num_layers": 4,
    "dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 24,
    "vocab_size": 19,
    "init_std": 0.3,
}
CFG = ModelConfig(**SIZES, head_dim=6, qk_norm=True)


def test_shapes_are_those_of_the_module():
    module = whole_model(CFG)
    assert {name: tuple(tensor.shape) for name, tensor in module.named_parameters()} == parameter_shapes(CFG)
    assert list(dict(module.named_parameters())) == list(parameter_shapes(CFG))
    assert parameter_shapes(CFG)["blocks.0.attention.q.weight"] == (24, 16)
    assert parameter_shapes(CFG)["blocks.0.attention.k_norm.weight"] == (6,)
    assert role("blocks.0.attention.q_norm.weight") == "norm"
    matrices = [
        math.prod(shape)
        for name, shape in parameter_shapes(CFG).items()
        if name.startswith("blocks.0") and len(shape) == 2
    ]
    assert block_flops(CFG, layer=0, sequence_length=0) == 2 * sum(matrices)
    assert block_flops(CFG, layer=0, sequence_length=5) - 2 * sum(matrices) == 4 * 5 * 24


def test_attention_head_by_head():
    torch.manual_seed(0)
    attention = Attention(CFG, device=torch.device("cpu"), dtype=torch.float64).requires_grad_(False)
    for parameter in attention.parameters():
        parameter.uniform_(-1.0, 2.0)
    x_BTD = torch.randn(1, 5, 16, dtype=torch.float64)
    rotary = rotary_tables(x_BTD, head_dim=6, theta=100.0)
    heads = []
    for head in range(4):
        rows, kv_rows = slice(6 * head, 6 * head + 6), slice(6 * (head // 2), 6 * (head // 2) + 6)
        q, k = x_BTD[0] @ attention.q.weight[rows].T, x_BTD[0] @ attention.k.weight[kv_rows].T
        for each, norm in ((q, attention.q_norm), (k, attention.k_norm)):
            each /= (each.square().mean(-1, keepdim=True) + CFG.norm_eps).sqrt()
            each *= norm.weight
        q, k = (rotate(each[None, :, None], rotary)[0, :, 0] for each in (q, k))
        scores = (q @ k.T / 6**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ (x_BTD[0] @ attention.v.weight[kv_rows].T))
    expected = torch.cat(heads, dim=-1) @ attention.o.weight.T
    torch.testing.assert_close(attention(x_BTD, rotary)[0], expected)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_any_split_computes_the_same(cut):
    tokens = torch.randint(19, (2, 7), generator=torch.Generator().manual_seed(0))
    first = build_stage(CFG, range(cut), embed=True, head=False)
    second = build_stage(CFG, range(cut, 4), embed=False, head=True)
    assert torch.equal(second(first(tokens)), whole_model(CFG)(tokens))


@pytest.mark.parametrize(
    ("head_dim", "words"), [(-2, "head_dim is -2"), (5, r"model\.head_dim 5 gives heads of odd width")]
)
def test_widths_that_cannot_be(head_dim, words):
    with pytest.raises(ConfigError, match=words):
        whole_model(ModelConfig(**SIZES, head_dim=head_dim))


def test_a_window_that_holds_everything_changes_no_bit():
    plain, wide = (whole_model(ModelConfig(**SIZES, sliding_window=window)) for window in (0, 6))
    ids = torch.randint(19, (2, 6), generator=torch.Generator().manual_seed(1))
    assert torch.equal(plain(ids), wide(ids))


def test_what_lies_before_the_window_of_all_layers_is_not_seen():
    narrow = whole_model(ModelConfig(**SIZES, sliding_window=2)).requires_grad_(False)
    ids = torch.randint(19, (1, 12), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % 19
    changed = (narrow(ids) != narrow(other)).any(-1)[0].tolist()
    # Each of the four layers reaches back by one position.
    assert changed == [False] * 3 + [True] * 5 + [False] * 4


def test_a_window_is_split_into_stages_like_anything_else():
    cfg = ModelConfig(**SIZES, sliding_window=3)
    ids = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(1))
    first = build_stage(cfg, range(2), embed=True, head=False)
    last = build_stage(cfg, range(2, 4), embed=False, head=True)
    assert torch.equal(last(first(ids)), whole_model(cfg)(ids))


def test_a_negative_window_is_refused():
    with pytest.raises(
        ConfigError, match=r"model\.sliding_window is -1\. Allowed: whole numbers from 1, or 0 for none"
    ):
        whole_model(ModelConfig(**SIZES, sliding_window=-1))
