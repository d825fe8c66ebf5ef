import pytest
import torch

from slipstream.optim import export_state, import_state
from slipstream.optim.delayed_nesterov import DelayedNesterov

SIZE = 7


def gradients(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in range(count)]


def descend(optimizer_of, rows):
    weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    optimizer = optimizer_of([weight])
    path = []
    for row in rows:
        weight.grad = row.clone()
        optimizer.step()
        assert torch.equal(weight.grad, row)
        path.append(weight.detach().clone())
    return path


def literal(rows, *, lr, momentum, every, spread):
    """The rule line by line, as the paper numbers its steps."""
    theta, m, total = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64), 0.0
    path = []
    for t, g in enumerate(rows):
        total = total + g
        if (t + 1) % every == 0:
            m = momentum * m + total / every
            theta = theta - lr * ((1 - spread * every + spread) * momentum * m + g / every)
            total = 0.0
        else:
            theta = theta - lr * (spread * momentum * m + g / every)
        path.append(theta)
    return path


@pytest.mark.parametrize(("every", "spread"), [(1, 0.0), (1, 1.0), (3, 0.0), (4, 0.25), (4, 0.1)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_rule_as_written(every, spread, momentum):
    options = {"lr": 0.7, "momentum": momentum, "every": every, "spread": spread}
    ours = descend(lambda params: DelayedNesterov(params, **options), gradients(13))
    for found, expected in zip(ours, literal(gradients(13), **options), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_every_gradient_it_is_torchs_nesterov(momentum):
    ours = descend(lambda params: DelayedNesterov(params, lr=0.3, momentum=momentum), gradients(6))
    theirs = descend(lambda p: torch.optim.SGD(p, lr=0.3, momentum=momentum, nesterov=momentum > 0), gradients(6))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_a_round_of_gradients_makes_the_step_of_their_mean():
    """So that what does not wait moves like what does, where nothing is stale."""
    rows = gradients(12)
    means = [sum(rows[at : at + 4]) / 4 for at in range(0, 12, 4)]
    ours = descend(lambda params: DelayedNesterov(params, lr=0.3, momentum=0.9, every=4), rows)
    whole = descend(lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, nesterov=True), means)
    torch.testing.assert_close(ours[3::4], whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_saved_state_goes_on_bitwise(at):
    rows = gradients(9)

    def build(params):
        return DelayedNesterov([("w", params[0])], lr=0.3, momentum=0.9, every=3, spread=0.2)

    whole = descend(build, rows)
    weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    first = build([weight])
    for row in rows[:at]:
        weight.grad = row.clone()
        first.step()
    second = build([weight])
    import_state(second, export_state(first))
    for row in rows[at:]:
        weight.grad = row.clone()
        second.step()
    assert torch.equal(weight.detach(), whole[-1])


def test_fewer_workers_than_before_take_the_mean_of_what_has_come():
    """Seven gradients of a round of eight were saved; with one worker the next is due at once."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    many = DelayedNesterov([("w", weight)], lr=0.3, momentum=0.9, every=8)
    for _ in range(7):
        weight.grad = torch.ones_like(weight)
        many.step()
    alone = DelayedNesterov([("w", weight)], lr=0.3, momentum=0.9, every=1)
    import_state(alone, export_state(many))
    weight.grad = torch.ones_like(weight)
    alone.step()
    assert torch.equal(alone.state[weight]["momentum_buffer"], torch.ones_like(weight))


def test_a_parameter_without_a_gradient_stays():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = DelayedNesterov(weights, lr=0.5)
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(weights[1].detach(), torch.ones(2))
    assert not torch.equal(weights[0].detach(), torch.ones(2))


@pytest.mark.parametrize(
    "arguments", [{"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"every": 0}, {"every": 4, "spread": 0.3}]
)
def test_what_is_out_of_range_is_refused(arguments):
    with pytest.raises(ValueError, match=f"DelayedNesterov: {list(arguments)[-1]} must be"):
        DelayedNesterov([torch.nn.Parameter(torch.ones(1))], **arguments)
