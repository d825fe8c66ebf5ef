"""What the plug-in computes, against slow references in float64."""

from collections import deque

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.optim.muon import Muon
from slipstream.optim.plugin import Delay, ErrorFeedback, attach, is_attached, remove
from slipstream.staleness.gradient import Gradient, global_norm
from slipstream.staleness.publish import build_publish_method
from slipstream.staleness.updater import Updater
from slipstream.staleness.versions import VersionedWeights

# Rules whose update does not depend on the weights (no decay), so that the literal rule can be written beside them.
RULES = {
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.0),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.02),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05, lambd=0.0),
    "muon": lambda params: Muon(params, lr=0.02, weight_decay=0.0),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.02),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.02),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "sgd-nesterov": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True),
}
STEPS = 12


def initial_weights() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def loss_gradient(weights: Tensor, batch: int) -> Tensor:
    data = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + batch))
    leaf = weights.detach().clone().requires_grad_()
    torch.tanh(data @ leaf).square().mean().backward()
    assert leaf.grad is not None
    return leaf.grad


def falling(step: int) -> float:
    return 1.0 / (1 + 0.3 * step)


def train(make_optimizer, *methods, steps=STEPS, lr_factor=falling) -> list[Tensor]:
    """Weights after each step of an ordinary loop."""
    weight = nn.Parameter(initial_weights())
    optimizer = make_optimizer([weight])
    peak = optimizer.param_groups[0]["lr"]
    if methods:
        attach(optimizer, *methods)
    versions = [weight.detach().clone()]
    for step in range(steps):
        weight.grad = loss_gradient(weight, step)
        optimizer.param_groups[0]["lr"] = peak * lr_factor(step)
        optimizer.step()
        optimizer.zero_grad()
        versions.append(weight.detach().clone())
    return versions


def literal(make_optimizer, *, tau: int, c: float, steps=STEPS, lr_factor=falling) -> list[Tensor]:
    """x <- x - u - c (u - u_prev) on gradients tau steps old, u from an optimizer on a shadow that starts at zero."""
    shadow = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    optimizer = make_optimizer([shadow])
    peak = optimizer.param_groups[0]["lr"]
    held: deque[Tensor] = deque()
    previous = None
    versions = [initial_weights()]
    for step in range(steps):
        held.append(loss_gradient(versions[-1], step))
        if len(held) <= tau:
            versions.append(versions[-1])
            continue
        shadow.grad = held.popleft()
        optimizer.param_groups[0]["lr"] = peak * lr_factor(step)
        before = shadow.detach().clone()
        optimizer.step()
        update = before - shadow.detach()
        correction = c * (update - previous) if previous is not None else torch.zeros(())
        versions.append(versions[-1] - update - correction)
        previous = update
    return versions


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("c", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_error_feedback_is_the_literal_rule(rule, c):
    assert largest_difference(train(RULES[rule], ErrorFeedback(c)), literal(RULES[rule], tau=0, c=c)) < 1e-12


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_with_a_delay_it_is_the_literal_rule_on_old_gradients(rule, tau):
    ours = train(RULES[rule], Delay(tau), ErrorFeedback(c=1.0))
    assert largest_difference(ours, literal(RULES[rule], tau=tau, c=1.0)) < 1e-12


@pytest.mark.parametrize("tau", [1, 2, 5])
@pytest.mark.parametrize("rule", RULES)
def test_delay_is_a_queue_of_gradients_bitwise(rule, tau):
    weight = nn.Parameter(initial_weights())
    optimizer = RULES[rule]([weight])
    peak = optimizer.param_groups[0]["lr"]
    held: deque[Tensor] = deque()
    versions = [weight.detach().clone()]
    for step in range(STEPS):
        held.append(loss_gradient(weight, step))
        if len(held) > tau:
            weight.grad = held.popleft()
            optimizer.param_groups[0]["lr"] = peak * falling(step)
            optimizer.step()
        versions.append(weight.detach().clone())
    assert same_bits(train(RULES[rule], Delay(tau)), versions)


@pytest.mark.parametrize("rule", RULES)
def test_coefficient_zero_is_plain_delay_bitwise(rule):
    assert same_bits(train(RULES[rule], Delay(2), ErrorFeedback(0)), train(RULES[rule], Delay(2)))


@pytest.mark.parametrize("rule", RULES)
def test_without_delay_and_coefficient_nothing_is_touched(rule):
    assert same_bits(train(RULES[rule], Delay(0), ErrorFeedback(0.0)), train(RULES[rule]))
    weight = nn.Parameter(initial_weights())
    optimizer = attach(RULES[rule]([weight]), Delay(0), ErrorFeedback(0.0))
    weight.grad = loss_gradient(weight, 0)
    gradient = weight.grad
    optimizer.step()
    assert weight.grad is gradient
    assert not any("slipstream" in key for key in optimizer.state.get(weight, {}))


def test_first_update_is_ordinary_and_the_second_is_not():
    plain, ours = train(RULES["adamw"]), train(RULES["adamw"], ErrorFeedback(c=1.0))
    assert largest_difference(plain[:2], ours[:2]) == 0
    assert float((plain[2] - ours[2]).abs().max()) > 1e-4


def test_it_is_not_the_persistent_accumulator():
    """e += u_t - u_{t-1} telescopes to u_t - u_0, which agrees for two updates only."""
    plain_update = literal(RULES["adamw"], tau=0, c=1.0)
    shadow_updates: list[Tensor] = []
    shadow = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    optimizer = RULES["adamw"]([shadow])
    versions = [initial_weights()]
    for step in range(4):
        shadow.grad = loss_gradient(versions[-1], step)
        optimizer.param_groups[0]["lr"] = 0.02 * falling(step)
        before = shadow.detach().clone()
        optimizer.step()
        shadow_updates.append(before - shadow.detach())
        versions.append(versions[-1] - shadow_updates[-1] - (shadow_updates[-1] - shadow_updates[0]))
    ours = train(RULES["adamw"], ErrorFeedback(c=1.0), steps=4)
    assert largest_difference(ours, plain_update[:5]) < 1e-12
    assert largest_difference(ours[:3], versions[:3]) < 1e-12
    assert largest_difference(ours, versions) > 1e-4


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", [torch.optim.AdamW, Muon])
def test_it_is_the_update_path_of_the_package(rule, weight_decay):
    """Weights, decay included, are those that a pipeline with one step of delay publishes."""
    y = nn.Parameter(initial_weights())
    optimizer = rule([y], lr=0.02, weight_decay=weight_decay)
    optimizer.param_groups[0]["initial_lr"] = 0.02
    weights = VersionedWeights({"w": y}, num_buffers=2, dtype=torch.float64)
    updater = Updater(
        {"w": y},
        {"rule": optimizer},
        weights=weights,
        publish=build_publish_method(1.5),
        lr_factor=lambda update: 1.0,
    )
    published = [initial_weights()]
    for batch in range(STEPS):
        version = max(batch - 1, 0)
        gradient = loss_gradient(weights.read(version)["w"], batch)
        gradient_ = Gradient(tensors={"w": gradient}, read_version=version, num_tokens=1)
        updater.step(gradient_, global_norm(gradient_.norms(["w"])))
        published.append(weights.read(batch + 1)["w"].clone())

    ours = train(
        lambda params: rule(params, lr=0.02, weight_decay=weight_decay),
        Delay(1),
        ErrorFeedback(c=1.5),
        steps=STEPS + 1,
        lr_factor=lambda step: 1.0,
    )
    assert torch.equal(ours[0], ours[1]), "the first step only holds its gradient"
    assert largest_difference(ours[1:], published) < 1e-12


def test_plain_sgd_at_a_constant_rate_corrects_gradients_as_well():
    """u = lr g, so the update-level rule is the gradient-level one."""
    versions, gradients = [initial_weights()], []
    for step in range(STEPS):
        gradients.append(loss_gradient(versions[-1], step))
        difference = gradients[-1] - gradients[-2] if step else torch.zeros(())
        versions.append(versions[-1] - 0.05 * (gradients[-1] + difference))
    ours = train(RULES["sgd"], ErrorFeedback(c=1.0), lr_factor=lambda step: 1.0)
    assert largest_difference(ours, versions) < 1e-12


@pytest.mark.parametrize("c", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizers_own_weights_do_not_drift_by_rounding(dtype, c):
    """Taking the offset off gives back the y that it was added to, in narrow types too."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 16, generator=generator).to(dtype))
    own = nn.Parameter(weight.detach().clone())
    optimizer = attach(torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.0), ErrorFeedback(c))
    shadow = torch.optim.AdamW([own], lr=1e-2, weight_decay=0.0)
    for step in range(50):
        gradient = torch.randn(64, 16, generator=generator).to(dtype)
        weight.grad, own.grad = gradient.clone(), gradient.clone()
        before = own.detach().clone()
        optimizer.step()
        shadow.step()
        if step == 0:  # the first update moves y by c u_0
            with torch.no_grad():
                own.sub_((before - own).mul_(-c))
    remove(optimizer)
    same = (weight.detach() == own.detach()).double().mean()
    assert same > 0.99, f"{same:.4f} of the weights are to the bit what an optimizer on y alone has"


def test_an_idle_parameter_counts_as_an_update_of_zero():
    """x - 0 - c (0 - u_prev); and its next update has a previous one of zero."""
    weight, other = nn.Parameter(initial_weights()), nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = attach(torch.optim.SGD([weight, other], lr=0.1), ErrorFeedback(c=1.0))
    x, previous = initial_weights(), None
    for step in range(9):
        idle = step in (0, 3, 4, 7)
        gradient = torch.zeros_like(x) if idle else loss_gradient(x, step)
        weight.grad = None if idle else gradient.clone()
        other.grad = torch.ones_like(other)
        optimizer.step()
        update = 0.1 * gradient
        x = x - update - (0 if previous is None else update - previous)
        previous = update
        assert float((weight.detach() - x).abs().max()) < 1e-12, f"step {step}"


def test_weights_that_others_change_between_steps_keep_the_change():
    """A clamp, an average swapped in, another checkpoint: the parameters are the truth, an offset is remembered."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = attach(torch.optim.SGD([weight], lr=1.0), ErrorFeedback(c=1.0))
    for _ in range(3):
        weight.grad = torch.ones(3, dtype=torch.float64)
        optimizer.step()
    with torch.no_grad():
        weight.fill_(100.0)
    weight.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((3,), 99.0, dtype=torch.float64)), "literal: 100 - u - c (u - u)"


def test_remove_moves_to_the_optimizers_own_weights():
    """y = x + c u_{t-1}, where u = lr g; what follows is an ordinary step from there."""
    weight = nn.Parameter(initial_weights())
    optimizer = attach(torch.optim.SGD([weight], lr=0.1), ErrorFeedback(c=2.0))
    for step in range(STEPS):
        gradient = loss_gradient(weight, step)
        weight.grad = gradient.clone()
        optimizer.step()
    y = weight.detach() + 2.0 * 0.1 * gradient
    remove(optimizer)
    assert float((weight.detach() - y).abs().max()) < 1e-12
    assert not is_attached(optimizer)
    assert dict(optimizer.state) == {}, "no trace is left"
    before = weight.detach().clone()
    weight.grad = gradient.clone()
    optimizer.step()
    assert torch.equal(weight.detach(), before - 0.1 * gradient)


@pytest.mark.parametrize("tau", [-1, 1.0, True, "1"])
def test_a_delay_that_is_none_is_refused(tau):
    with pytest.raises(ConfigError, match="Delay: tau is"):
        Delay(tau)


@pytest.mark.parametrize("c", [-1.0, float("nan"), float("inf")])
def test_a_coefficient_that_is_none_is_refused(c):
    with pytest.raises(ConfigError, match="ErrorFeedback: c is"):
        ErrorFeedback(c)


def test_attaching_wrongly_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match="give one Delay"):
        attach(optimizer)
    with pytest.raises(ConfigError, match="give one Delay"):
        attach(optimizer, Delay(1), Delay(2))
    with pytest.raises(ConfigError, match=r"a method is Delay\(tau\) or ErrorFeedback\(c\)"):
        attach(optimizer, 1.0)
    with pytest.raises(ConfigError, match=r"attaches to a torch\.optim\.Optimizer"):
        attach(nn.Linear(1, 1), Delay(1))
    assert not is_attached(optimizer)
    attach(optimizer, Delay(1))
    with pytest.raises(ConfigError, match="has a plug-in already"):
        attach(optimizer, ErrorFeedback())
    remove(optimizer)
    with pytest.raises(ConfigError, match="nothing is attached"):
        remove(optimizer)
