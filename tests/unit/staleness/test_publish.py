"""Error feedback in publish form against the literal rule, in float64."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.optim.muon import Muon
from slipstream.staleness.gradient import Gradient, global_norm
from slipstream.staleness.publish import (
    ErrorFeedback,
    PublishMasters,
    PublishMethod,
    Windowed,
    build_publish_method,
)
from slipstream.staleness.updater import Updater
from slipstream.staleness.versions import VersionedWeights

RULES = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.0),
    "muon": lambda params: Muon(params, lr=0.02, weight_decay=0.0),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
}
STEPS = 12


def falling(update: int) -> float:
    return 1.0 / (1 + 0.3 * update)


def constant(update: int) -> float:
    return 1.0


def initial_weights() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def loss_gradient(weights: Tensor, batch: int) -> Tensor:
    """Gradient of a small non-quadratic loss of one batch."""
    data = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + batch))
    leaf = weights.detach().clone().requires_grad_()
    torch.tanh(data @ leaf).square().mean().backward()
    assert leaf.grad is not None
    return leaf.grad


def stepped(updater: Updater, batch: int) -> Tensor:
    """Make a batch's update, one step late, and return the version that it makes."""
    weights, version = updater.weights, max(batch - 1, 0)
    gradient = Gradient(
        tensors={"w": loss_gradient(weights.read(version)["w"], batch)}, read_version=version, num_tokens=1
    )
    updater.step(gradient, global_norm(gradient.norms(["w"])))
    return weights.read(batch + 1)["w"].clone()


def published_weights(
    make_optimizer, coefficient: float, *, lr_factor=falling, has_history: bool = False
) -> list[Tensor]:
    """Every published version, made by the update path."""
    y = nn.Parameter(initial_weights())
    optimizer = make_optimizer([y])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    weights = VersionedWeights({"w": y}, num_buffers=2, dtype=torch.float64)
    updater = Updater(
        {"w": y},
        {"rule": optimizer},
        weights=weights,
        publish=build_publish_method(coefficient),
        lr_factor=lr_factor,
    )
    updater.publish.load_state_dict({"has_history": has_history})
    versions = [weights.read(0)["w"].clone()]
    for batch in range(STEPS):
        versions.append(stepped(updater, batch))
    return versions


def literal_weights(make_optimizer, correction, *, lr_factor=falling) -> list[Tensor]:
    """x <- x - u - correction(history of u), with u from an optimizer that steps a shadow parameter from zero."""
    shadow = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    optimizer = make_optimizer([shadow])
    peak = optimizer.param_groups[0]["lr"]
    versions = [initial_weights()]
    updates: list[Tensor] = []
    for batch in range(STEPS):
        shadow.grad = loss_gradient(versions[max(batch - 1, 0)], batch)
        optimizer.param_groups[0]["lr"] = peak * lr_factor(batch + 1)
        before = shadow.detach().clone()
        optimizer.step()
        updates.append(before - shadow.detach())
        versions.append(versions[-1] - updates[-1] - correction(updates))
    return versions


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("coefficient", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_publish_form_is_the_literal_rule(rule, coefficient):
    def literal(updates):
        return coefficient * (updates[-1] - updates[-2]) if len(updates) > 1 else torch.zeros(())

    ours = published_weights(RULES[rule], coefficient)
    assert largest_difference(ours, literal_weights(RULES[rule], literal)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_publish_form_is_not_the_persistent_accumulator(rule):
    """e += u_t - u_{t-1} telescopes to u_t - u_0; a reading of the method that must be ruled out."""

    def accumulator(updates):
        return updates[-1] - updates[0]

    ours = published_weights(RULES[rule], 1.0)
    wrong = literal_weights(RULES[rule], accumulator)
    assert largest_difference(ours[:3], wrong[:3]) < 1e-12, "the two readings agree on the first two updates"
    assert largest_difference(ours, wrong) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_bootstrap_matters(rule):
    """Leaving out the shift of y after the first update would be seen."""
    coefficient = 1.0
    ours = published_weights(RULES[rule], coefficient)

    def no_bootstrap(updates):
        return coefficient * (updates[-1] - (updates[-2] if len(updates) > 1 else 0 * updates[-1]))

    assert largest_difference(ours, literal_weights(RULES[rule], no_bootstrap)) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_coefficient_zero_is_plain_delay_bitwise(rule):
    plain = literal_weights(RULES[rule], lambda updates: torch.zeros(()))
    y = nn.Parameter(initial_weights())
    optimizer = RULES[rule]([y])
    peak = optimizer.param_groups[0]["lr"]
    versions = [initial_weights()]
    for batch in range(STEPS):
        y.grad = loss_gradient(versions[max(batch - 1, 0)], batch)
        optimizer.param_groups[0]["lr"] = peak * falling(batch + 1)
        optimizer.step()
        versions.append(y.detach().clone())
    ours = published_weights(RULES[rule], 0.0)
    assert all(torch.equal(a, b) for a, b in zip(ours, versions, strict=True))
    assert largest_difference(ours, plain) < 1e-12


def test_plain_sgd_update_level_equals_gradient_level():
    """Without momentum and at a constant rate, u = lr g, so correcting either is the same."""
    lr = 0.05
    versions = [initial_weights()]
    gradients: list[Tensor] = []
    for batch in range(STEPS):
        gradients.append(loss_gradient(versions[max(batch - 1, 0)], batch))
        step = gradients[-1] + ((gradients[-1] - gradients[-2]) if len(gradients) > 1 else 0)
        versions.append(versions[-1] - lr * step)

    def literal(updates):
        return updates[-1] - updates[-2] if len(updates) > 1 else torch.zeros(())

    def sgd(params):
        return torch.optim.SGD(params, lr=lr)

    assert largest_difference(versions, literal_weights(sgd, literal, lr_factor=constant)) < 1e-12
    assert largest_difference(versions, published_weights(sgd, 1.0, lr_factor=constant)) < 1e-12


@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.99])
def test_delayed_nesterov_with_a_discounted_gradient_is_momentum_with_error_feedback(gamma):
    """AsyncPP's method on a plain rule: w <- w + d - lr (1 - gamma) g(w + d, one step old), d = gamma (w - w_prev).

    Its look-ahead points are what error feedback with c = gamma publishes, its discount is dampening. Torch does not
    dampen the first gradient, and the look-ahead starts from there: no bootstrap.
    """
    lr, w, d = 0.3, initial_weights(), torch.zeros(6, 4, dtype=torch.float64)
    ahead = [w]
    for batch in range(STEPS):
        discount = 1.0 if batch == 0 else 1 - gamma
        moved = w + d - lr * discount * loss_gradient(ahead[max(batch - 1, 0)], batch)
        d, w = gamma * (moved - w), moved
        ahead.append(w + d)

    def sgd(params):
        return torch.optim.SGD(params, lr=lr, momentum=gamma, dampening=gamma)

    assert largest_difference(ahead, published_weights(sgd, gamma, lr_factor=constant, has_history=True)) < 1e-12


def test_narrow_published_dtype_extrapolates_in_the_masters_dtype():
    y = {"w": torch.tensor([1.0, 2.0, 3.0])}
    free = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    method = ErrorFeedback(1.0)
    method.load_state_dict({"has_history": True})
    method.before_step(y, free, update=1)
    y["w"] += torch.tensor([1e-3, -2e-3, 0.5])
    method.after_step(y, free)
    expected = y["w"] + torch.tensor([1e-3, -2e-3, 0.5])
    assert torch.equal(free["w"], expected.bfloat16())


def test_zero_coefficient_takes_no_part():
    assert isinstance(build_publish_method(0.0), PublishMasters)
    assert isinstance(build_publish_method(0.5), ErrorFeedback)


def test_history_flag_survives_a_round_trip():
    method = ErrorFeedback(1.0)
    assert method.state_dict() == {"has_history": False}
    y, free = {"w": torch.zeros(2)}, {"w": torch.zeros(2)}
    method.before_step(y, free, update=1)
    method.after_step(y, free)
    fresh = ErrorFeedback(1.0)
    fresh.load_state_dict(method.state_dict())
    assert fresh.state_dict() == {"has_history": True}


WINDOWS = {
    "none": lambda: ErrorFeedback(1.0),
    "late": lambda: Windowed(ErrorFeedback(1.0), first=3, last=None),
    "to 6": lambda: Windowed(ErrorFeedback(1.0), first=1, last=6),
    "to 9": lambda: Windowed(ErrorFeedback(1.0), first=1, last=9),
}


def as_saved(method: PublishMethod, update: int) -> dict[str, Any]:
    return method.state_dict()


def as_saved_before(method: PublishMethod, update: int) -> dict[str, Any]:
    """What older versions wrote of a method within a window."""
    return {"update": update, "method": method.state_dict()} if isinstance(method, Windowed) else method.state_dict()


def weights_when_resumed(before: str, after: str, save=as_saved, *, at: int = 4) -> list[Tensor]:
    """Every published version of a run that is resumed with another window."""
    y = nn.Parameter(initial_weights())
    optimizer = RULES["adamw"]([y])
    optimizer.param_groups[0]["initial_lr"] = 0.02
    weights = VersionedWeights({"w": y}, num_buffers=2, dtype=torch.float64)
    updater = Updater({"w": y}, {"rule": optimizer}, weights=weights, publish=WINDOWS[before](), lr_factor=constant)
    versions = []
    for batch in range(STEPS):
        if batch == at:
            saved: Mapping[str, Any] = updater.state_dict() | {"publish": save(updater.publish, batch)}
            updater.publish = WINDOWS[after]()
            updater.load_state_dict(json.loads(json.dumps(saved)))
        versions.append(stepped(updater, batch))
    return versions


@pytest.mark.parametrize("save", [as_saved, as_saved_before])
@pytest.mark.parametrize("after", ["none", "to 6", "to 9"])
@pytest.mark.parametrize("before", ["none", "to 6", "to 9"])
def test_a_run_resumed_with_another_window_is_as_if_it_always_had_it(before, after, save):
    """All windows are open where the run was stopped, so nothing of the method's state may differ."""
    resumed = weights_when_resumed(before, after, save)
    assert all(torch.equal(a, b) for a, b in zip(resumed, weights_when_resumed(after, after), strict=True))


def test_windows_are_told_apart():
    runs = [weights_when_resumed(window, window) for window in WINDOWS]
    assert [largest_difference(run, runs[0]) > 0 for run in runs] == [False, True, True, True]
    assert largest_difference(runs[2][:6], runs[3][:6]) == 0 < largest_difference(runs[2], runs[3])
