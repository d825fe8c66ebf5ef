"""What is known of a model before it is built agrees with the model once built."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.llama import cross_entropy_sum, whole_model
from slipstream.models.shapes import (
    check_complete,
    check_model,
    flops_per_token,
    num_active_parameters,
    num_parameters,
    parameter_names,
    parameter_shapes,
    tied_names,
)

SMALL = ModelConfig(num_layers=2, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=24, vocab_size=11)
EXPERTS = {
    "num_layers": 3,
    "num_experts": 5,
    "experts_per_token": 2,
    "expert_ffn_dim": 10,
    "num_shared_experts": 2,
    "num_dense_layers": 1,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 100, "num_heads": 3}, ["num_heads is 3", "dim 100", "1, 2, 4, 5, 10"]),
        ({"num_heads": 4, "num_kv_heads": 3}, ["num_kv_heads is 3", "num_heads 4", "1, 2, 4"]),
        ({"dim": 12, "num_heads": 4, "num_kv_heads": 4}, ["dim 12", "odd width 3"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "below 1"]),
        ({"dropout": -0.1}, ["dropout is -0.1"]),
        ({"dropout": math.nan}, ["dropout is nan"]),
        ({"num_layers": 0}, ["num_layers is 0"]),
        ({"dim": -16}, ["dim is -16"]),
        ({"num_heads": 0}, ["num_heads is 0"]),
        ({"num_kv_heads": 0}, ["num_kv_heads is 0"]),
        ({"ffn_dim": 0}, ["ffn_dim is 0"]),
        ({"vocab_size": -1}, ["vocab_size is -1"]),
        ({"rope_theta": 0.0}, ["rope_theta is 0.0"]),
        ({"norm_eps": 0.0}, ["norm_eps is 0.0"]),
        ({"init_std": math.inf}, ["init_std is inf"]),
        ({"num_experts": -1}, ["num_experts is -1"]),
        ({"num_experts": 4, "experts_per_token": 5}, ["experts_per_token is 5", "from 1 to", "num_experts 4"]),
        ({"num_experts": 4, "experts_per_token": 0}, ["experts_per_token is 0"]),
        ({"num_experts": 4, "experts_per_token": 1}, ["router_renormalize", "would not learn", "false"]),
        ({"num_experts": 4, "num_dense_layers": 2}, ["num_dense_layers is 2", "none of the 2 layers", "0 to 1"]),
        ({"num_shared_experts": 1}, ["num_shared_experts is 1", "num_experts is 0"]),
        ({"num_dense_layers": 1}, ["num_dense_layers is 1", "num_experts is 0"]),
        ({"num_experts": 4, "expert_ffn_dim": -1}, ["expert_ffn_dim is -1"]),
        ({"num_experts": 4, "router_aux_loss": -0.1}, ["router_aux_loss is -0.1"]),
        ({"num_experts": 4, "router_z_loss": math.nan}, ["router_z_loss is nan"]),
    ],
)
def test_settings_that_describe_no_model_are_refused_with_what_is_allowed(change, words):
    with pytest.raises(ConfigError) as caught:
        check_model(dataclasses.replace(SMALL, **change))
    for word in words:
        assert word in str(caught.value)


def test_a_vocabulary_not_yet_known_passes_the_check_but_cannot_be_built_or_counted():
    unknown = dataclasses.replace(SMALL, vocab_size=0)
    check_model(unknown)
    for use in (check_complete, whole_model, parameter_names, num_parameters, lambda cfg: flops_per_token(cfg, 8)):
        with pytest.raises(ConfigError, match="vocab_size is 0"):
            use(unknown)


@pytest.mark.parametrize(
    "change",
    [{}, {"tie_embeddings": True}, EXPERTS, {"num_experts": 2}],
    ids=["plain", "tied", "experts", "experts alone"],
)
def test_names_and_shapes_are_those_of_the_built_model_in_its_order(change):
    cfg = dataclasses.replace(SMALL, **{"num_layers": 12} | change)
    model = whole_model(cfg, device="meta")
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(parameter_shapes(cfg).items()) == list(built.items())
    assert parameter_names(cfg) == list(built)
    assert not list(model.named_buffers())


def test_a_tied_pair_is_two_leaves_and_counts_once():
    tied = dataclasses.replace(SMALL, tie_embeddings=True)
    assert tied_names(SMALL) == {}
    assert tied_names(tied) == {"head.weight": "embed.weight"}
    assert num_parameters(SMALL) - num_parameters(tied) == 11 * 16
    assert num_parameters(SMALL) == sum(p.numel() for p in whole_model(SMALL).parameters())


def test_of_experts_only_the_chosen_are_active():
    cfg = dataclasses.replace(SMALL, **EXPERTS)
    everyone = dataclasses.replace(cfg, experts_per_token=cfg.num_experts)
    assert num_active_parameters(everyone) == num_parameters(everyone) == num_parameters(cfg)
    assert num_parameters(cfg) - num_active_parameters(cfg) == 2 * 3 * 3 * 16 * 10  # layers, experts, matrices
    assert num_active_parameters(SMALL) == num_parameters(SMALL)


@pytest.mark.parametrize("change", [{}, EXPERTS], ids=["dense", "experts"])
def test_flops_are_those_of_the_matrix_products_that_torch_counts_and_of_the_attention_scores(change):
    batch, length = 3, 8
    cfg = dataclasses.replace(SMALL, **change)
    model = whole_model(cfg)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        cross_entropy_sum(model(tokens), tokens).backward()
    products = sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.bmm))
    scores = 3 * 2 * (2 * length * cfg.dim) * cfg.num_layers  # 3 passes, 2 products, T x D each, per token
    assert flops_per_token(cfg, length) * batch * length == products + scores * batch * length


def test_what_a_sliding_window_leaves_out_is_no_work_that_the_model_needs():
    windowed = dataclasses.replace(SMALL, sliding_window=8)
    assert flops_per_token(windowed, 32) == flops_per_token(SMALL, 8)
    assert flops_per_token(windowed, 4) == flops_per_token(SMALL, 4)


def test_what_plans_a_model_imports_no_torch():
    code = "import sys, slipstream.models.shapes, slipstream.models.partition, slipstream.models.roles as r; "
    code += "assert r.role('head.weight') == 'head'; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
