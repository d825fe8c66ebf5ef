"""Routing, the auxiliary losses and what is noted of them, idle experts, and packed experts under Muon."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from slipstream.config import ModelConfig, OptimConfig
from slipstream.models.llama import Block, cross_entropy_sum, whole_model
from slipstream.models.moe import RouterLog, RouterReport, attach_log, auxiliary_loss, route, with_added_loss
from slipstream.models.roles import role
from slipstream.optim.build import build_optimizers
from slipstream.staleness.gradient import Gradient, global_norm
from slipstream.staleness.publish import build_publish_method
from slipstream.staleness.updater import Updater
from slipstream.staleness.versions import VersionedWeights

torch.set_num_threads(1)

CFG = ModelConfig(
    num_layers=3,
    dim=16,
    num_heads=2,
    num_kv_heads=1,
    ffn_dim=24,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_dim=10,
    num_shared_experts=1,
    num_dense_layers=1,
    router_aux_loss=0.2,
    router_z_loss=0.1,
    vocab_size=13,
    init_std=0.3,
)
TOKENS = torch.randint(CFG.vocab_size, (4, 10), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]
NUM_TOKENS = TARGETS.numel()


def layer_of(cfg=CFG, *, dtype=torch.float32, seed=0):
    layer = Block(cfg, cfg.num_dense_layers, device=torch.device("cpu"), dtype=dtype).ffn
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer


def inputs_of(num_positions=20, *, seed=0, dim=CFG.dim):
    """Activations whose first channel is 1, so that the router's first column adds to its scores."""
    x = torch.randn(1, num_positions, dim, generator=torch.Generator().manual_seed(seed))
    x[..., 0] = 1
    return x


def favour(layer, *biases):
    """Add to the scores of the experts, for inputs of :func:`inputs_of`."""
    layer.router.weight.data[:, 0] = torch.tensor(biases)


def gradients(cfg, *, parts=1, key=True, coefficients=None):
    """Return the summed gradients of one batch cut into so many microbatches, in float64."""
    model = whole_model(dataclasses.replace(cfg, **(coefficients or {})), dtype=torch.float64)
    attach_log(model, RouterLog(batch_share=1 / parts))
    for index, (inputs, targets) in enumerate(zip(INPUTS.chunk(parts), TARGETS.chunk(parts), strict=True)):
        logits = model(inputs, dropout_key=(0, index) if key else None)
        (cross_entropy_sum(logits, targets) / NUM_TOKENS).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_difference(first, second):
    return max((first[name] - second[name]).abs().max().item() for name in first)


# -- routing


def test_no_token_is_dropped_even_where_all_want_the_same_experts():
    layer = layer_of(dataclasses.replace(CFG, num_shared_experts=0))
    favour(layer, 0.0, 60.0, 0.0, 60.0)
    x = inputs_of()
    routes = route(x[0], layer.router.weight, cfg=layer.cfg)
    assert set(routes.experts.flatten().tolist()) == {1, 3}
    experts = [
        nn.functional.linear(nn.functional.silu(x @ gate.T) * (x @ up.T), down)
        for gate, up, down in zip(
            layer.expert_gate.weight, layer.expert_up.weight, layer.expert_down.weight, strict=True
        )
    ]
    share = (routes.logits[:, 1] - routes.logits[:, 3]).sigmoid()[None, :, None]
    torch.testing.assert_close(layer(x, None), share * experts[1] + (1 - share) * experts[3])


def test_an_output_depends_on_its_own_position_alone():
    layer, x = layer_of(), inputs_of(30)
    shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x[:, shuffled], None), layer(x, None)[:, shuffled])


def test_the_router_computes_wide_where_activations_are_narrow():
    layer, x = layer_of(dtype=torch.bfloat16), inputs_of(3000).bfloat16()[0]
    wide = route(x.float(), layer.router.weight.float(), cfg=CFG)
    found = route(x, layer.router.weight, cfg=CFG)
    assert found.logits.dtype == found.weights.dtype == torch.float32
    assert torch.equal(found.experts, wide.experts)
    assert layer(x[None], (0, 0)).dtype == torch.bfloat16
    narrow = nn.functional.linear(x, layer.router.weight).float().topk(2).indices
    assert not torch.equal(found.experts, narrow)


def test_weights_add_up_to_one_or_to_the_chosen_probabilities():
    layer, x = layer_of(), inputs_of()[0]
    ones = route(x, layer.router.weight, cfg=CFG).weights.sum(-1)
    torch.testing.assert_close(ones, torch.ones_like(ones))
    plain = route(x, layer.router.weight, cfg=dataclasses.replace(CFG, router_renormalize=False))
    torch.testing.assert_close(plain.weights, plain.probabilities.gather(1, plain.experts))
    assert (plain.weights.sum(-1) < 1).all()


def test_the_same_bits_every_time():
    first, second = (gradients(CFG) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# -- auxiliary losses


def test_an_added_loss_brings_its_gradient_and_changes_no_value():
    a, b = (torch.tensor([2.0, 3.0], requires_grad=True) for _ in range(2))
    carrier = with_added_loss(a * a, (b**3).sum())
    assert torch.equal(carrier, a * a)
    (5 * carrier).sum().backward()
    assert a.grad.tolist() == [20.0, 30.0]
    assert b.grad.tolist() == [12.0, 27.0]


def test_evaluation_has_no_auxiliary_loss_and_coefficients_of_zero_are_as_good():
    none = {"router_aux_loss": 0.0, "router_z_loss": 0.0}
    plain = gradients(CFG, coefficients=none)
    assert largest_difference(plain, gradients(CFG, key=False)) == 0
    for name in none:
        moved = gradients(CFG, coefficients={**none, name: getattr(CFG, name)})
        assert largest_difference(plain, moved) > 1e-3, name


@pytest.mark.parametrize("parts", [2, 4])
def test_how_a_batch_is_cut_matters_to_the_balance_alone(parts):
    without = {"router_aux_loss": 0.0}
    difference = largest_difference(
        gradients(CFG, coefficients=without), gradients(CFG, parts=parts, coefficients=without)
    )
    assert difference < 1e-14
    balance = largest_difference(gradients(CFG), gradients(CFG, parts=parts))
    scale = largest_difference(gradients(CFG), gradients(CFG, coefficients=without))
    assert 1e-6 < balance < scale


def test_the_balance_loss_is_one_for_even_loads_and_up_to_e_over_k_for_uneven_ones():
    cfg = dataclasses.replace(CFG, router_aux_loss=1.0, router_z_loss=0.0)
    x = torch.eye(4)
    even = route(10 * x + 10 * x.roll(1, 1), x, cfg=cfg)
    assert auxiliary_loss(even, cfg=cfg).item() == pytest.approx(1.0)
    uneven = route(torch.tensor([[50.0, 50.0, 0.0, 0.0]]).repeat(9, 1), x, cfg=cfg)
    assert auxiliary_loss(uneven, cfg=cfg).item() == pytest.approx(2.0)


def test_descent_on_the_balance_loss_evens_loads_out():
    cfg = dataclasses.replace(CFG, router_aux_loss=1.0, router_z_loss=0.0)
    layer, x = layer_of(cfg), inputs_of(200)
    favour(layer, 2.0, 0.0, 0.0, 0.0)
    log = RouterLog()
    attach_log(layer, log)
    for step in range(60):
        (0.0 * layer(x, (step, 0))).sum().backward()
        layer.router.weight.data -= 0.5 * layer.router.weight.grad
        layer.zero_grad()
    first, last = (RouterReport(*log.take(step)[1].tolist()) for step in (0, 59))
    assert first.load_max > 1.8
    assert last.load_max < 1.25
    assert last.load_min > 0.75


# -- what is noted


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_batch_is_noted_once_whatever_is_computed_again(checkpointing):
    cfg = dataclasses.replace(CFG, activation_checkpointing=checkpointing)
    model, log = whole_model(cfg), RouterLog(batch_share=0.5)
    attach_log(model, log)
    second = copy.deepcopy(model)
    cross_entropy_sum(model(INPUTS[:2], dropout_key=(0, 0)), TARGETS[:2]).backward()
    second(INPUTS, dropout_key=(1, 0))  # the next batch has begun, on another version of the weights
    cross_entropy_sum(model(INPUTS[2:], dropout_key=(0, 1)), TARGETS[2:]).backward()
    second(INPUTS)
    taken = {layer: RouterReport(*each.tolist()) for layer, each in log.take(0).items()}
    assert list(taken) == [1, 2]

    inputs = {}
    hooks = [
        model.blocks[str(layer)].ffn.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.update({module.layer: args[0]}), with_kwargs=True
        )
        for layer in (1, 2)
    ]
    model(INPUTS)
    for hook in hooks:
        hook.remove()
    for layer, report in taken.items():
        router = model.blocks[str(layer)].ffn.router.weight
        halves = [route(each.flatten(0, 1), router, cfg=cfg) for each in inputs[layer].chunk(2)]
        counts = torch.cat([each.experts.flatten() for each in halves]).bincount(minlength=4).tolist()
        assert sum(counts) == 2 * NUM_TOKENS
        assert report.load_max == pytest.approx(max(counts) / (NUM_TOKENS / 2))
        assert report.load_min == pytest.approx(min(counts) / (NUM_TOKENS / 2))
        assert report.aux_loss == pytest.approx(sum(0.5 * auxiliary_loss(each, cfg=cfg).item() for each in halves))
    assert list(log.take(1)) == [1, 2]
    assert log.take(0) == log.take(1) == log.take(2) == {}


def test_an_indifferent_router_has_the_largest_entropy():
    layer, log = layer_of(), RouterLog()
    attach_log(layer, log)
    layer.router.weight.data.zero_()
    layer(inputs_of(), (0, 0))
    assert RouterReport(*log.take(0)[1].tolist()).entropy == pytest.approx(math.log(4))


# -- idle experts


def updater_of(layer, rule, *, error_feedback):
    masters = {f"blocks.1.ffn.{name}": nn.Parameter(p.detach().clone()) for name, p in layer.named_parameters()}
    cfg = OptimConfig(name=rule, lr=0.01, weight_decay=0.5)
    return Updater(
        masters,
        build_optimizers(masters, cfg, role=role),
        weights=VersionedWeights(masters, num_buffers=2, dtype=torch.float32),
        publish=build_publish_method(error_feedback),
        lr_factor=lambda update: 1.0,
        max_grad_norm=0.5,
    )


def step(updater, layer, x, *, seed):
    """Make one update on the layer's weights x; return its gradients."""
    weights = updater.weights.read(updater.weights.latest)
    for name, parameter in layer.named_parameters():
        parameter.data = weights[f"blocks.1.ffn.{name}"].clone()
        parameter.grad = None
    layer(x, (0, 0)).mul(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))).sum().backward()
    tensors = {f"blocks.1.ffn.{name}": parameter.grad for name, parameter in layer.named_parameters()}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    gradient = Gradient(tensors=tensors, read_version=updater.weights.latest, num_tokens=1)
    updater.step(gradient, global_norm(gradient.norms(tensors)))
    return kept


EXPERTS = [f"blocks.1.ffn.expert_{name}.weight" for name in ("gate", "up", "down")]


@pytest.mark.parametrize("error_feedback", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_an_expert_that_is_never_chosen_only_decays(rule, error_feedback):
    layer = layer_of()
    favour(layer, 50.0, 50.0, 50.0, -1000.0)
    updater = updater_of(layer, rule, error_feedback=error_feedback)
    initial = {name: updater.masters[name].detach().clone() for name in EXPERTS}
    expected = [initial]
    for number in range(4):
        found = step(updater, layer, inputs_of(seed=number), seed=number)
        expected.append({name: each.clone().mul_(1 - 0.01 * 0.5) for name, each in expected[-1].items()})
        for name in EXPERTS:
            assert not found[name][3].any()
            assert found[name][:3].any()
            assert torch.linalg.vector_norm(found[name]) == torch.linalg.vector_norm(found[name][:3])
            assert not torch.equal(updater.masters[name][:3], expected[-1][name][:3])
    for name in EXPERTS:
        y = [each[name][3] for each in expected]
        if error_feedback:
            # Error feedback takes its first update, here a decay, back in y.
            torch.testing.assert_close(updater.masters[name][3], y[4], rtol=0.006, atol=0)
        else:
            assert torch.equal(updater.masters[name][3], y[4])
        published = updater.weights.read(updater.weights.latest)[name][3]
        assert torch.isfinite(published).all()
        torch.testing.assert_close(published, y[4], rtol=0.011, atol=0)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_an_expert_without_tokens_in_one_step_goes_on_by_its_momentum(rule):
    layer = layer_of()
    updater = updater_of(layer, rule, error_feedback=0.0)
    favour(layer, 0.0, 0.0, 0.0, 50.0)
    updater.masters["blocks.1.ffn.router.weight"].data.copy_(layer.router.weight.data)
    updater.weights.read(0)["blocks.1.ffn.router.weight"].copy_(layer.router.weight.data)
    assert step(updater, layer, inputs_of(), seed=0)[EXPERTS[0]][3].any()
    x = inputs_of()
    x[..., 0] = -1
    before = updater.masters[EXPERTS[0]].detach()[3].clone()
    assert not step(updater, layer, x, seed=1)[EXPERTS[0]][3].any()
    after = updater.masters[EXPERTS[0]].detach()[3]
    assert (after - before * (1 - 0.01 * 0.5)).abs().max() > 1e-4


# -- packed experts


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_packed_experts_step_as_experts_of_their_own(rule):
    """Of a whole model's gradients, over steps in which experts are idle; under Muon to the last bit."""
    model = whole_model(dataclasses.replace(CFG, num_experts=8))
    packed = {name: p for name, p in model.named_parameters() if p.ndim == 3}
    apart = {(name, e): nn.Parameter(p.detach()[e].clone()) for name, p in packed.items() for e in range(8)}
    names = {f"{name}/{e}": leaf for (name, e), leaf in apart.items()}
    cfg = OptimConfig(name=rule, lr=0.02, weight_decay=0.1)
    whole = build_optimizers(packed, cfg, role=role)
    separate = build_optimizers(names, cfg, role=lambda name: role(name.split("/")[0]))
    assert list(whole) == list(separate) == [rule]
    num_idle = 0
    for number in range(4):
        model.zero_grad()
        inputs, targets = (each[number : number + 1, :4] for each in (INPUTS, TARGETS))
        cross_entropy_sum(model(inputs, dropout_key=(number, 0)), targets).backward()
        for (name, e), leaf in apart.items():
            leaf.grad = packed[name].grad[e].clone()
            num_idle += not leaf.grad.any()
        whole[rule].step()
        separate[rule].step()
    assert num_idle > 0
    for name, p in packed.items():
        expected = torch.stack([apart[name, e].detach() for e in range(8)])
        if rule == "muon":
            assert torch.equal(p, expected), name
        else:
            torch.testing.assert_close(p, expected)


def test_routers_are_adamws_beside_muon():
    model = whole_model(CFG)
    built = build_optimizers(dict(model.named_parameters()), OptimConfig(name="muon"), role=role)
    taken = {rule: {role(n) for g in each.param_groups for n in g["param_names"]} for rule, each in built.items()}
    assert taken["adamw"] == {"embedding", "head", "norm", "router"}
    assert taken["muon"] >= {"expert_gate", "expert_up", "expert_down", "ffn_gate", "ffn_down", "q"}
