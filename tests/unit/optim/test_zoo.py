"""What every short name promises: same bits alone and together, resumed and continued; gaps in gradients; types."""

import inspect
import json
import sys

import pytest
import torch
from torch import nn

from slipstream.config import ModelConfig, OptimConfig
from slipstream.errors import ConfigError
from slipstream.models.llama import whole_model
from slipstream.models.roles import role
from slipstream.optim import (
    build_optimizers,
    check_optim,
    export_state,
    find_rule,
    import_state,
    join_tensors,
    split_tensors,
)
from slipstream.optim.build import MATRIX_ROLES
from slipstream.optim.rules import RULES

MODEL = ModelConfig(num_layers=2, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=24, vocab_size=11)
NUM_STEPS = 25
"""Enough for two refreshes of every basis."""
IDLE, LATE, PATCHY = "blocks.0.ffn.up.weight", "blocks.1.ffn.up.weight", "blocks.1.ffn.down.weight"

every_rule = pytest.mark.parametrize("name", RULES)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shapes():
    return {name: param.shape for name, param in whole_model(MODEL).named_parameters()}


def settings(name, **changes):
    return OptimConfig(**{"name": name, "lr": 0.02, "weight_decay": 0.1} | changes)


def parameters(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def copied(params):
    return {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}


def train(built, params, steps):
    """One parameter never has a gradient, one late, one at times; the rate follows a schedule."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, param in params.items():
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            absent = name == IDLE or (name == LATE and step < 12) or (name == PATCHY and step % 3 == 0)
            param.grad = None if absent or step == 7 else grad
        for optimizer in built:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / 100)
            optimizer.step()


def built_in_parts(params, cfg):
    """As four pipeline stages would; the first and the last hold no matrices of blocks."""
    names = list(params)
    cuts = (names[:1], names[1:5], names[5:-1], names[-1:])
    return [each for cut in cuts for each in build_optimizers({n: params[n] for n in cut}, cfg, role=role).values()]


def through_files(states):
    """What a checkpoint does: contiguous tensors to one file, the rest to JSON."""
    tensors, tree = split_tensors(states)
    kept = {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    return join_tensors(json.loads(json.dumps(tree)), kept.__getitem__)


def merged_state(built):
    return {name: state for optimizer in built for name, state in export_state(optimizer).items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@every_rule
def test_is_built_from_its_row(name, shapes):
    assert check_optim(settings(name)) == []
    params = parameters(shapes)
    built = build_optimizers(params, settings(name, adamw_lr=0.003), role=role)
    if RULES[name].for_matrices:
        assert list(built) == [name, "adamw"]
        held = {each for group in built[name].param_groups for each in group["param_names"]}
        assert held == {each for each in params if role(each) in MATRIX_ROLES}
        assert built["adamw"].param_groups[0]["initial_lr"] == 0.003
    else:
        assert list(built) == [name]
    for group in built[name].param_groups:
        assert group["lr"] == group["initial_lr"] == 0.02
        assert not group.get("foreach")
        matrices = group["params"][0].ndim >= 2
        assert group["weight_decay"] == (0.1 if matrices else 0.0)


@every_rule
def test_same_bits_twice_and_in_parts(name, shapes):
    runs = []
    for build in (lambda params, cfg: build_optimizers(params, cfg, role=role).values(), built_in_parts):
        params = parameters(shapes)
        train(build(params, settings(name)), params, range(NUM_STEPS))
        runs.append(params)
    assert same(*runs)
    assert not torch.equal(runs[0][PATCHY], parameters(shapes)[PATCHY])


@every_rule
@pytest.mark.parametrize("num_before", [0, 1, 8, 13])
def test_resumed_in_other_parts_equals_continuous_to_the_bit(name, num_before, shapes):
    straight, cfg = parameters(shapes), settings(name)
    built = list(build_optimizers(straight, cfg, role=role).values())
    train(built, straight, range(num_before))
    resumed, saved = copied(straight), through_files(merged_state(built))
    parts = built_in_parts(resumed, cfg)
    for part in parts:
        import_state(part, saved)
    train(built, straight, range(num_before, NUM_STEPS))
    train(parts, resumed, range(num_before, NUM_STEPS))
    assert same(straight, resumed)
    ours, theirs = (split_tensors(merged_state(each)) for each in (built, parts))
    assert same(ours[0], {key: theirs[0][key] for key in ours[0]})


@every_rule
def test_vectors_do_not_decay_and_zero_gradients_move_nothing_else(name, shapes):
    params, cfg = parameters(shapes), settings(name, weight_decay=0.5)
    before = copied(params)
    for _ in range(3):
        for param in params.values():
            param.grad = torch.zeros_like(param)
        for optimizer in build_optimizers(params, cfg, role=role).values():
            optimizer.step()
            optimizer.step()  # SOAP and its like only look at a first gradient
    for each, param in params.items():
        if param.ndim == 1:
            assert torch.equal(param, before[each])
        else:
            assert bool((param.abs() < before[each].abs()).all())
            assert torch.allclose(param / before[each], (param / before[each]).flatten()[0], rtol=1e-5)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_dtype(name, dtype, shapes):
    params = parameters(shapes, dtype)
    built = list(build_optimizers(params, settings(name), role=role).values())
    train(built, params, range(12))
    held = split_tensors(merged_state(built))[0]
    assert {tensor.dtype for tensor in held.values() if tensor.ndim > 0} == {dtype}
    assert all(bool(tensor.isfinite().all()) for tensor in (*held.values(), *params.values()))


@every_rule
def test_leaves_the_gradient_as_it_was(name, shapes):
    """A correction may keep a gradient to compare the next one with."""
    params = parameters(shapes)
    built = build_optimizers(params, settings(name), role=role).values()
    for _ in range(3):
        for param in params.values():
            param.grad = torch.ones_like(param)
        handed = {each: param.grad for each, param in params.items()}
        for optimizer in built:
            optimizer.step()
        assert all(bool((grad == 1).all()) for grad in handed.values())


def test_the_mark_of_rules_that_overwrite_gradients_is_true():
    overwriting = set()
    for name in RULES:
        weight = nn.Parameter(torch.ones(2, 3))
        cls = find_rule(name)
        one_by_one = {"foreach": False} if "foreach" in inspect.signature(cls.__init__).parameters else {}
        optimizer = cls([weight], lr=0.1, **one_by_one)
        for _ in range(2):
            weight.grad = torch.ones(2, 3)
            optimizer.step()
            if not bool((weight.grad == 1).all()):
                overwriting.add(name)
    assert overwriting == {name for name, rule in RULES.items() if rule.overwrites_grad}


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.extra])
def test_a_missing_extra_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, RULES[name].path.partition(".")[0], None)
    with pytest.raises(ConfigError, match=rf"'{name}' needs the extra 'zoo'.*pip install 'slipstream\[zoo\]'"):
        check_optim(settings(name))


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        (settings("mars", args={"gama": 0.1}), r"'mars' has no argument 'gama'\. Did you mean 'gamma'\?"),
        (settings("soap", args={"precond_frequency": 5}), r"Did you mean 'precondition_frequency'\?"),
        (settings("shampoo", args={"momentum": 0.9}), r"'momentum' cannot be set for 'shampoo': the package averages"),
        (settings("mars", args={"lr_1d": 0.9}), r"'lr_1d' cannot be set for 'mars'.*Leave it out"),
        (settings("soap", args={"lr": 0.9}), r"set optim\.lr"),
        (settings("lion", lr=0.0), r"'lion' refuses its arguments or parameters: \S.*optim\.lr"),
        (settings("normuon", args={"beta2": 1.0}), "NorMuon: beta2 must be from 0 to below 1, given 1.0"),
        (settings("normuon", args={"momentum": 1.0}), "momentum must be from 0 to below 1, given 1.0"),
        (settings("basis_rotation", args={"sides": "left"}), "sides must be one of both, rows, columns, shorter"),
        (settings("basis_rotation", args={"frequency": 0}), "frequency must be a whole number of at least 1, given 0"),
        (settings("basis_rotation", args={"betas": [0.9, 1.0]}), "betas must be two numbers from 0 to below 1"),
        (settings("basis_rotation", args={"basis_beta": -0.1}), "basis_beta must be none, or from 0"),
        (settings("basis_rotation", args={"eps": 0.0}), "eps must be above 0"),
        (settings("muonn"), r"Did you mean 'muon'\?"),
        (settings("basis-rotation"), r"Did you mean 'basis_rotation'\?"),
    ],
)
def test_bad_settings_are_refused(cfg, says):
    with pytest.raises(ConfigError, match=says):
        check_optim(cfg)


def test_arguments_of_a_row_can_be_overridden():
    cfg = settings("mars", args={"weight_decay_1d": 0.2, "lr_1d_factor": 0.5})
    (optimizer,) = build_optimizers({"norm.weight": nn.Parameter(torch.ones(2))}, cfg, role=lambda _: "norm").values()
    assert optimizer.param_groups[0]["weight_decay_1d"] == 0.2
    (optimizer,) = build_optimizers(
        {"norm.weight": nn.Parameter(torch.ones(2))}, settings("nadamw", args={"betas": [0.99, 0.999]}), role=role
    ).values()
    assert optimizer.param_groups[0]["betas"] == (0.99, 0.999)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.two_dimensional])
def test_rules_that_would_mix_experts_refuse_them(name):
    with pytest.raises(ConfigError, match=rf"'{name}' takes single matrices.*experts.*\(3, 4, 5\).*Use muon, normuon"):
        build_optimizers({"experts": nn.Parameter(torch.ones(3, 4, 5))}, settings(name), role=lambda _: "expert")


@pytest.mark.parametrize("name", ["muon", "normuon", "basis_rotation"])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_packed_experts_step_as_matrices_of_their_own(name, shape):
    packed = {"experts": nn.Parameter(torch.randn(3, *shape, generator=torch.Generator().manual_seed(5)))}
    single = {f"expert{i}": nn.Parameter(matrix.clone()) for i, matrix in enumerate(packed["experts"].detach())}
    built = [
        optimizer
        for params in (packed, single)
        for optimizer in build_optimizers(params, settings(name), role=lambda _: "expert").values()
    ]
    for step in range(NUM_STEPS):
        packed["experts"].grad = torch.randn(3, *shape, generator=torch.Generator().manual_seed(step))
        for i, param in enumerate(single.values()):
            param.grad = packed["experts"].grad[i].clone()
        for optimizer in built:
            optimizer.step()
    assert torch.equal(packed["experts"], torch.stack([param.detach() for param in single.values()]))
