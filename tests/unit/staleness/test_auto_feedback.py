"""Error feedback that finds its own coefficient: the regression, its limits, and what it needs to resume."""

import pytest
import torch
from torch import Tensor

from slipstream.staleness.auto_feedback import AutoErrorFeedback


def updates(count: int, size: int, *, beta: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Updates of an average of white gradients: their correlation over j steps is beta^j."""
    generator = torch.Generator().manual_seed(0)
    mean, found = torch.zeros(size, dtype=dtype), []
    for _ in range(count):
        mean = beta * mean + (1 - beta) * torch.randn(size, dtype=dtype, generator=generator)
        found.append(mean)
    return found


def publish(method: AutoErrorFeedback, steps: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Let y take the steps; return (x, y) after each."""
    y = {"w": torch.zeros_like(steps[0])}
    seen = []
    for step in steps:
        free = {"w": torch.full_like(steps[0], torch.nan)}
        method.before_step(y, free, update=1)
        y["w"].sub_(step)
        method.after_step(y, free)
        seen.append((free["w"], y["w"].clone()))
    return seen


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("delay", [1, 2, 4])
def test_the_coefficient_is_the_sum_of_the_correlations(delay, beta):
    method = AutoErrorFeedback(delay=delay, decay=0.99)
    publish(method, updates(600, 4000, beta=beta))
    expected = sum(beta**j for j in range(1, delay + 1))
    assert float(method.coefficients()["w"]) == pytest.approx(expected, abs=0.03 * delay)


def test_it_is_the_least_squares_guess_of_what_is_missing():
    """Against the same averages kept in full, with nothing sampled away."""
    delay, decay = 3, 0.9
    steps = updates(40, 50, beta=0.8)
    method = AutoErrorFeedback(delay=delay, decay=decay)
    publish(method, steps)
    product = square = torch.zeros((), dtype=torch.float64)
    for t in range(delay, len(steps)):
        last, missing = steps[t - delay], torch.stack(steps[t - delay + 1 : t + 1]).sum(0)
        product = decay * product + (1 - decay) * (last @ missing)
        square = decay * square + (1 - decay) * (last @ last)
    expected = (product / square).clamp(0, 2 * delay) * (1 - decay ** len(steps))
    torch.testing.assert_close(method.coefficients()["w"], expected, rtol=1e-9, atol=1e-9)


def test_what_is_published():
    method = AutoErrorFeedback(delay=1)
    steps = updates(30, 64, beta=0.9)
    seen = publish(method, steps)
    assert torch.equal(*seen[0]), "nothing is known after the first update"
    assert torch.equal(*seen[1]) is False
    x, y = seen[-1]
    replay = AutoErrorFeedback(delay=1)
    publish(replay, steps[:-1])
    # The same coefficient for every entry of a tensor.
    c = ((x - y) / -steps[-1]).double()
    torch.testing.assert_close(c, c[0].expand_as(c), rtol=1e-6, atol=1e-6)
    assert 0.3 < float(c[0]) < 1.0


@pytest.mark.parametrize(("steps", "expected"), [("straight", 2.0), ("alternating", 0.0), ("none", 0.0)])
def test_ends_of_the_range(steps, expected):
    one = torch.ones(8, dtype=torch.float64)
    path = {
        "straight": [one] * 300,
        "alternating": [one * (-1) ** i for i in range(300)],
        "none": [0 * one] * 300,
    }[steps]
    method = AutoErrorFeedback(delay=2)
    seen = publish(method, path)
    assert float(method.coefficients()["w"]) == pytest.approx(expected, abs=1e-5)
    assert all(bool(x.isfinite().all()) for x, _ in seen)
    if expected == 0.0:
        assert torch.equal(*seen[-1])


def test_large_tensors_are_sampled_over_all_rows_and_columns():
    method = AutoErrorFeedback(delay=1, max_sample=100)
    rows = torch.arange(64.0).repeat_interleave(64)
    columns = torch.arange(64.0).repeat(64)
    taken = method._sample(rows)
    assert 50 < len(taken) <= 100
    assert len(set(method._sample(columns).tolist())) > 50, "a stride of 64 would stay in one column"
    assert len(set(taken.tolist())) > 50


def test_the_sample_is_enough():
    steps = updates(200, 40_000, beta=0.9)
    sampled, whole = AutoErrorFeedback(delay=1), AutoErrorFeedback(delay=1, max_sample=10**9)
    publish(sampled, steps)
    publish(whole, steps)
    assert float(sampled.coefficients()["w"]) == pytest.approx(float(whole.coefficients()["w"]), abs=0.02)


@pytest.mark.parametrize("num_before", [1, 2, 5])
def test_resumes_to_the_bit(num_before):
    steps = updates(12, 30, beta=0.9, dtype=torch.float32)
    whole, first, second = (AutoErrorFeedback(delay=2) for _ in range(3))
    expected = publish(whole, steps)
    done = publish(first, steps[:num_before])
    for slot, held in first.slots.items():
        second.slots[slot].update({name: tensor.clone() for name, tensor in held.items()})
    second.load_state_dict(first.state_dict())
    y = {"w": done[-1][1].clone()}
    for step, (x, _) in zip(steps[num_before:], expected[num_before:], strict=True):
        free = {"w": torch.empty(30)}
        second.before_step(y, free, update=1)
        y["w"].sub_(step)
        second.after_step(y, free)
        assert torch.equal(free["w"], x)


@pytest.mark.parametrize("delays", [(1, 3), (3, 1)])
def test_resumed_with_another_delay_it_is_measured_for_that_one(delays):
    steps = updates(1200, 4000, beta=0.9)
    first, second = (AutoErrorFeedback(delay=delay, decay=0.99) for delay in delays)
    publish(first, steps[:20])
    for slot, held in first.slots.items():
        second.slots[slot].update(held)
    second.load_state_dict(first.state_dict())
    publish(second, steps[20:])
    expected = sum(0.9**j for j in range(1, delays[1] + 1))
    assert float(second.coefficients()["w"]) == pytest.approx(expected, abs=0.03 * delays[1])


def test_a_narrow_buffer_does_not_narrow_the_statistics():
    method = AutoErrorFeedback(delay=1)
    y = {"w": torch.ones(4)}
    for _ in range(5):
        free = {"w": torch.empty(4, dtype=torch.bfloat16)}
        method.before_step(y, free, update=1)
        y["w"].sub_(1e-4)
        method.after_step(y, free)
    assert method.slots["recent"]["w"].dtype == torch.float32
    assert float(method.slots["recent"]["w"].abs().min()) > 0, "1e-4 is nothing beside 1 in bfloat16"
