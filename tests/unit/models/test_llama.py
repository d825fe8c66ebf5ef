"""Weights by name, dropout by key, exact recomputation, leaves swapped by reference, types, compilation."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.llama import build_stage, cross_entropy_sum, rotary_tables, rotate, whole_model

torch.set_num_threads(1)

CFG = ModelConfig(num_layers=3, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=40, vocab_size=13, init_std=0.3, seed=3)
DROPPED = dataclasses.replace(CFG, dropout=0.2)
TOKENS = torch.randint(CFG.vocab_size, (2, 10), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def gradients(model, *, dropout_key=(0, 0)):
    model.zero_grad()
    cross_entropy_sum(model(INPUTS, dropout_key=dropout_key), TARGETS).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal(first, second):
    assert list(first) == list(second)
    for name in first:
        assert torch.equal(first[name], second[name]), name


# -- weights


def test_weights_follow_from_seed_and_name_and_leave_the_global_random_state_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = whole_model(CFG)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert_equal(dict(first.named_parameters()), dict(whole_model(CFG).named_parameters()))
    other = dict(whole_model(dataclasses.replace(CFG, seed=4)).named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, other[name]) == name.endswith("norm.weight"), name


def test_no_two_matrices_are_alike_and_each_has_its_spread():
    cfg = dataclasses.replace(CFG, dim=96, ffn_dim=96, num_kv_heads=4, vocab_size=96, init_std=0.02)
    matrices = {name: p for name, p in whole_model(cfg).named_parameters() if p.dim() == 2}
    assert len({p.detach().numpy().tobytes() for p in matrices.values()}) == len(matrices) == 2 + 3 * 7
    for name, matrix in matrices.items():
        expected = 0.02 / 6**0.5 if ".o." in name or ".down." in name else 0.02
        assert matrix.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(matrix.mean().item()) < 0.05 * expected, name


def test_tied_leaves_start_equal_and_are_two():
    model = whole_model(dataclasses.replace(CFG, tie_embeddings=True))
    assert torch.equal(model.embed.weight, model.head.weight)
    assert model.embed.weight is not model.head.weight
    assert model.embed.weight.data_ptr() != model.head.weight.data_ptr()
    untied = whole_model(CFG)
    assert torch.equal(untied.embed.weight, model.embed.weight)
    assert not torch.equal(untied.embed.weight, untied.head.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_type_are_the_same_ones_cast(dtype):
    cast = dict(whole_model(CFG, dtype=dtype).named_parameters())
    assert_equal({name: p.to(dtype) for name, p in whole_model(CFG).named_parameters()}, cast)


def test_memory_is_allocated_once():
    class CountEmpty(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.namespace == "aten" and func.__name__.startswith(("empty", "zeros", "ones", "clone", "randn")):
                self.num_bytes += out.nbytes
            return out

    with CountEmpty() as counter:
        model = whole_model(CFG)
    assert counter.num_bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_blocks_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match=r"range\(2, 4\).*num_layers is 3.*0 to 2"):
        build_stage(CFG, range(2, 4), embed=False, head=True)


# -- forward


def test_no_position_sees_a_later_one():
    model = whole_model(CFG)
    changed = INPUTS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % CFG.vocab_size
    before, after = model(INPUTS), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert all(not torch.equal(before[:, t], after[:, t]) for t in range(5, INPUTS.shape[1]))


def test_rotary_scores_depend_on_distance_alone_and_keep_lengths():
    rotary = rotary_tables(torch.zeros(1, 50, 1, dtype=torch.float64), head_dim=8, theta=100.0)
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = [rotate(vector.expand(1, 50, 1, 8), rotary)[0, :, 0] for vector in (query, key)]
    scores = turned[0] @ turned[1].T
    for distance in (0, 1, 30):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert scores.diagonal(-1)[0] != pytest.approx(scores.diagonal(1)[0].item())
    torch.testing.assert_close(turned[0].norm(dim=-1), query.norm().expand(50), rtol=1e-12, atol=1e-12)


def test_loss_is_a_sum_over_the_targets_that_count():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 4], [0, 2, -100]])
    log_probability = logits.log_softmax(-1)
    expected = -sum(log_probability[b, t, targets[b, t]] for b, t in [(0, 0), (0, 2), (1, 0), (1, 1)])
    assert cross_entropy_sum(logits, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert cross_entropy_sum(logits, torch.full_like(targets, -100)).item() == 0
    rounded = logits.bfloat16()
    assert torch.equal(cross_entropy_sum(rounded, targets), cross_entropy_sum(rounded.float(), targets))
    assert cross_entropy_sum(logits.double(), targets).dtype == torch.float64


# -- dropout and recomputation


def test_dropout_follows_from_its_key_alone():
    model = whole_model(DROPPED)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = model(INPUTS, dropout_key=(4, 1))
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()  # a mode of the module must not matter
    assert torch.equal(first, model(INPUTS, dropout_key=(4, 1)))
    for other in ((1, 4), (4, 2), (5, 1), None):
        assert not torch.equal(first, model(INPUTS, dropout_key=other))
    assert not torch.equal(first, whole_model(dataclasses.replace(DROPPED, seed=9)).eval()(INPUTS, dropout_key=(4, 1)))


def test_evaluation_drops_nothing():
    assert torch.equal(whole_model(DROPPED)(INPUTS), whole_model(CFG)(INPUTS))
    assert torch.equal(whole_model(CFG)(INPUTS), whole_model(CFG)(INPUTS, dropout_key=(0, 0)))


def test_dropped_values_are_zero_the_rest_is_scaled_and_every_site_has_its_own_mask():
    model = whole_model(dataclasses.replace(DROPPED, dropout=0.25))
    ones = torch.ones(8, 50, CFG.dim)
    masks = [
        block._dropped(ones, site, key)
        for block in model.blocks.values()
        for site in ("attention", "ffn")
        for key in ((0, 0), (0, 1), (1, 0))
    ]
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0, 4 / 3])
        assert mask.mean().item() == pytest.approx(1, abs=0.03)
    assert len({mask.numpy().tobytes() for mask in masks}) == len(masks)


def test_recomputation_gives_the_bits_of_keeping_and_keeps_less():
    def kept_bytes(model):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(INPUTS, dropout_key=(0, 0))
        return total

    keeping = whole_model(DROPPED)
    again = whole_model(dataclasses.replace(DROPPED, activation_checkpointing=True))
    assert_equal(gradients(keeping), gradients(again))
    assert kept_bytes(again) < kept_bytes(keeping) / 3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_backward_uses_the_leaves_its_forward_read_though_others_have_taken_their_place(checkpointing):
    cfg = dataclasses.replace(DROPPED, activation_checkpointing=checkpointing)
    model = whole_model(cfg)
    expected = gradients(copy.deepcopy(model))
    old = dict(model.named_parameters())
    new = {name: nn.Parameter(torch.randn_like(parameter)) for name, parameter in old.items()}

    loss = cross_entropy_sum(model(INPUTS, dropout_key=(0, 0)), TARGETS)
    for name, leaf in new.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._parameters[last] = leaf
    second = cross_entropy_sum(model(INPUTS, dropout_key=(0, 0)), TARGETS)
    assert second.item() != loss.item()
    loss.backward()

    assert_equal(expected, {name: leaf.grad for name, leaf in old.items()})
    assert all(leaf.grad is None for leaf in new.values())
    assert dict(model.named_parameters()) == new
    second.backward()
    assert all(leaf.grad is not None for leaf in new.values())


# -- narrow types


def test_rotary_angles_are_exact_where_activations_are_narrow():
    rotary = rotary_tables(torch.zeros(1, 5000, 1, dtype=torch.bfloat16), head_dim=64, theta=10000.0)
    exact = rotary_tables(torch.zeros(1, 5000, 1, dtype=torch.float64), head_dim=64, theta=10000.0)
    for table, reference in zip(rotary, exact):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table.double(), reference, rtol=0, atol=1e-7)


def test_norms_are_computed_wide_where_activations_are_narrow():
    norm = whole_model(dataclasses.replace(CFG, dim=512), dtype=torch.bfloat16).head.norm
    x = (1 + 0.01 * torch.randn(64, 512, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + CFG.norm_eps).sqrt()
    assert torch.equal(norm(x), exact.bfloat16())


def test_bfloat16_trains_near_float32():
    wide, narrow = gradients(whole_model(DROPPED)), gradients(whole_model(DROPPED, dtype=torch.bfloat16))
    for name, gradient in narrow.items():
        assert gradient.dtype == torch.bfloat16
        cosine = torch.cosine_similarity(gradient.double().flatten(), wide[name].double().flatten(), dim=0)
        assert cosine > 0.98, (name, cosine)


# -- compilation


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiles_to_one_graph_that_serves_every_key_and_other_leaves(checkpointing):
    model = whole_model(dataclasses.replace(CFG, activation_checkpointing=checkpointing))
    expected = gradients(model)
    num_graphs = 0

    def backend(graph, _inputs):
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for key in ((0, 0), (0, 1), (1, 0), (2, 1)):
        found = gradients(compiled, dropout_key=key)
        assert_equal(expected, {name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()})
    old = model.embed.weight
    model.embed._parameters["weight"] = nn.Parameter(old.detach() * 2)
    assert not torch.equal(gradients(compiled)["_orig_mod.head.weight"], expected["head.weight"])
    assert num_graphs == 1
    torch._dynamo.reset()
