"""Roles follow from names alone."""

import dataclasses
from typing import get_args

import pytest

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.roles import Role, is_matrix_role, role
from slipstream.models.shapes import parameter_shapes
from slipstream.optim.build import MATRIX_ROLES

CFG = ModelConfig(num_layers=2, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=24, vocab_size=11, tie_embeddings=True)


def test_every_parameter_of_the_decoder_has_its_role():
    roles = {name.replace("blocks.1.", ""): role(name) for name in parameter_shapes(CFG) if "blocks.0." not in name}
    assert roles == {
        "embed.weight": "embedding",
        "attention_norm.weight": "norm",
        "attention.q.weight": "q",
        "attention.k.weight": "k",
        "attention.v.weight": "v",
        "attention.o.weight": "o",
        "ffn_norm.weight": "norm",
        "ffn.gate.weight": "ffn_gate",
        "ffn.up.weight": "ffn_up",
        "ffn.down.weight": "ffn_down",
        "head.weight": "head",
        "head.norm.weight": "norm",
    }


def test_every_parameter_of_a_mixture_of_experts_has_its_role():
    cfg = dataclasses.replace(CFG, num_experts=3, num_shared_experts=1)
    roles = {name.split(".ffn.")[1]: role(name) for name in parameter_shapes(cfg) if "blocks.1.ffn." in name}
    assert roles == {
        "router.weight": "router",
        "expert_gate.weight": "expert_gate",
        "expert_up.weight": "expert_up",
        "expert_down.weight": "expert_down",
        "shared.gate.weight": "ffn_gate",
        "shared.up.weight": "ffn_up",
        "shared.down.weight": "ffn_down",
    }
    assert [is_matrix_role(each) for each in roles.values()] == [False] + [True] * 6
    assert {each for each in get_args(Role) if is_matrix_role(each)} == MATRIX_ROLES - {"expert"} | {"matrix"}


def test_matrices_are_those_inside_blocks_and_never_embedding_head_or_router():
    chosen = {name for name in parameter_shapes(CFG) if is_matrix_role(role(name))}
    assert chosen == {name for name, shape in parameter_shapes(CFG).items() if "blocks." in name and len(shape) == 2}
    assert not is_matrix_role(role("blocks.0.ffn.router.weight"))
    assert not is_matrix_role(role("blocks.0.attention.q.bias"))


def test_prefixes_of_wrappers_do_not_matter():
    assert role("_orig_mod.module.blocks.3.ffn.up.weight") == "ffn_up"


@pytest.mark.parametrize("name", ["conv1.weight", "blocks.0.attention.q.scale", "weight", ""])
def test_an_unknown_name_is_an_error_that_says_what_to_do(name):
    with pytest.raises(ConfigError, match="role function of your own"):
        role(name)
