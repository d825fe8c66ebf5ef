"""Muon against torch.optim.Muon, which iterates in bfloat16 always, and against a float64 reference of both."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Muon as TorchMuon

from slipstream.optim import Muon, newton_schulz

SETTINGS = [
    {},
    {"nesterov": False},
    {"momentum": 0.0},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"adjust_lr_fn": "original", "weight_decay": 0.0, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
]
SHAPES = [(24, 24), (16, 40), (40, 16)]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights():
    return [nn.Parameter(randn(*shape, seed=i)) for i, shape in enumerate(SHAPES)]


def step(optimizer, params, *, seed):
    for i, param in enumerate(params):
        param.grad = randn(*param.shape, seed=100 * seed + i)
    optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS)
def test_weights_agree_within_the_bfloat16_error_of_torchs(settings):
    ours, theirs = weights(), weights()
    settings = {"lr": 0.02, **settings}
    mine, reference = Muon(ours, **settings), TorchMuon(theirs, **settings)
    num_steps = 10
    for seed in range(1, num_steps + 1):
        step(mine, ours, seed=seed)
        step(reference, theirs, seed=seed)
    for start, our, their in zip(weights(), ours, theirs, strict=True):
        moved = (their - start).norm()
        # bfloat16 keeps 8 bits: single products are off by 2**-9, and the iteration stretches the error of small
        # singular values by a factor of a few.
        assert (our - their).norm() < 0.03 * moved
        assert moved > 0.1
        assert torch.equal(mine.state[our]["momentum_buffer"], reference.state[their]["momentum_buffer"])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_difference_is_torchs_rounding_not_ours(shape):
    grad = randn(*shape, seed=7)
    exact = newton_schulz(grad.double())
    weight = nn.Parameter(torch.zeros(shape))
    reference = TorchMuon([weight], lr=1.0, weight_decay=0.0, momentum=0.0)
    weight.grad = grad
    reference.step()
    ratio = max(1, shape[0] / shape[1]) ** 0.5
    error_theirs = (-weight.detach().double() / ratio - exact).abs().max()
    error_ours = (newton_schulz(grad).double() - exact).abs().max()
    assert error_ours < 1e-5
    assert 1e-4 < error_theirs < 0.05


def test_in_bfloat16_ours_is_as_near_to_exact_as_torchs():
    x = randn(48, 32, seed=3)
    exact = newton_schulz(x.double())
    assert (newton_schulz(x, dtype=torch.bfloat16).double() - exact).abs().max() < 0.05


def test_constructor_groups_and_state_have_torchs_names():
    ours, theirs = weights(), weights()
    mine, reference = Muon(ours), TorchMuon(theirs)
    step(mine, ours, seed=1)
    step(reference, theirs, seed=1)
    assert mine.defaults == reference.defaults
    assert mine.param_groups[0].keys() == reference.param_groups[0].keys()
    assert mine.state[ours[0]].keys() == reference.state[theirs[0]].keys()
    assert mine.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


@pytest.mark.parametrize(("source", "target"), [(TorchMuon, Muon), (Muon, TorchMuon), (Muon, Muon)])
def test_either_loads_the_others_state(source, target):
    first = weights()
    saved = source(first, lr=0.03, weight_decay=0.0, nesterov=False)
    step(saved, first, seed=1)
    second = [nn.Parameter(param.detach().clone()) for param in first]
    loaded = target(second)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for before, after in zip(first, second, strict=True):
        assert torch.equal(saved.state[before]["momentum_buffer"], loaded.state[after]["momentum_buffer"])
    assert loaded.param_groups[0]["lr"] == 0.03
    step(saved, first, seed=2)
    step(loaded, second, seed=2)
    for before, after in zip(first, second, strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0.03 * 0.1)
