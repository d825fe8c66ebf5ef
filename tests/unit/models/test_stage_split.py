"""Any split into stages computes the bits that one process computes: losses, gradients and initial weights."""

import dataclasses
import itertools

import pytest
import torch

from slipstream.config import ModelConfig
from slipstream.models.llama import build_stage, cross_entropy_sum, whole_model
from slipstream.models.partition import StageSpec, stages
from slipstream.models.shapes import parameter_names

torch.set_num_threads(1)

# A large init_std, so that attention is far from uniform and every term moves the loss.
CFG = ModelConfig(
    num_layers=4, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=40, vocab_size=13, init_std=0.3, dropout=0.2, seed=3
)
NUM_MICROBATCHES, ROWS, LENGTH = 3, 2, 9

VARIANTS = [
    pytest.param({"tie_embeddings": tied, "activation_checkpointing": again, "dropout": dropout}, id=name)
    for tied, again, dropout, name in [
        (False, False, 0.0, "untied"),
        (False, True, 0.2, "untied-checkpointing-dropout"),
        (True, False, 0.2, "tied-dropout"),
        (True, True, 0.2, "tied-checkpointing-dropout"),
    ]
]
EXPERTS = {
    "num_experts": 3,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "expert_ffn_dim": 10,
    "router_aux_loss": 0.2,
    "router_z_loss": 0.1,
}
VARIANTS += [
    pytest.param(EXPERTS, id="experts-dropout"),
    pytest.param(EXPERTS | {"activation_checkpointing": True}, id="experts-checkpointing-dropout"),
]


def microbatches():
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_MICROBATCHES, ROWS, LENGTH + 1)
    tokens = torch.randint(CFG.vocab_size, shape, generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def in_one_process(cfg):
    model = whole_model(cfg)
    losses = []
    for index, (inputs, targets) in enumerate(microbatches()):
        loss = cross_entropy_sum(model(inputs, dropout_key=(5, index)), targets) / (NUM_MICROBATCHES * ROWS * LENGTH)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def in_stages(cfg, specs):
    """Forwards of all microbatches first, then the backwards, with copies passed over each cut by hand."""
    parts = [build_stage(cfg, spec.blocks, embed=spec.embed, head=spec.head) for spec in specs]
    losses, journeys = [], []
    for index, (inputs, targets) in enumerate(microbatches()):
        x, journey = inputs, []
        for part in parts:
            out = part(x, dropout_key=(5, index))
            journey.append((x, out))
            x = out.detach().clone().requires_grad_()
        loss = cross_entropy_sum(journey[-1][1], targets) / (NUM_MICROBATCHES * ROWS * LENGTH)
        losses.append(loss.item())
        journey[-1] = (journey[-1][0], loss)
        journeys.append(journey)
    for journey in journeys:
        gradient = None
        for x, out in reversed(journey):
            out.backward(gradient)
            gradient = None if x.grad is None else x.grad.clone()
    gradients = {}
    for part in parts:
        gradients |= {name: parameter.grad for name, parameter in part.named_parameters()}
    return losses, gradients


def assert_same_bits(first, second):
    assert first[0] == second[0]
    assert list(first[1]) == list(second[1])
    for name, gradient in first[1].items():
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradient, second[1][name]), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_stages", range(1, CFG.num_layers + 1))
def test_balanced_stages_give_the_bits_of_one_process(num_stages, variant):
    cfg = dataclasses.replace(CFG, **variant)
    assert_same_bits(in_one_process(cfg), in_stages(cfg, stages(cfg, num_stages)))


@pytest.mark.parametrize("cuts", [cuts for n in (1, 2, 3) for cuts in itertools.combinations(range(0, 5), n)])
def test_any_cut_gives_the_bits_of_one_process(cuts):
    """Also cuts next to the embedding or the head, which the partition never makes."""
    bounds = [*itertools.pairwise((0, *cuts, CFG.num_layers))]
    specs = [
        StageSpec(blocks=range(start, stop), embed=index == 0, head=index == len(bounds) - 1)
        for index, (start, stop) in enumerate(bounds)
    ]
    assert_same_bits(in_one_process(CFG), in_stages(CFG, specs))


@pytest.mark.parametrize("change", [{}, {"tie_embeddings": True}, EXPERTS], ids=["plain", "tied", "experts"])
@pytest.mark.parametrize("num_stages", range(1, CFG.num_layers + 1))
def test_initial_weights_do_not_depend_on_the_split(num_stages, change):
    cfg = dataclasses.replace(CFG, **change)
    expected = dict(whole_model(cfg).named_parameters())
    found = {}
    for spec in reversed(stages(cfg, num_stages)):
        found |= dict(build_stage(cfg, spec.blocks, embed=spec.embed, head=spec.head).named_parameters())
    assert sorted(found) == sorted(parameter_names(cfg))
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name
