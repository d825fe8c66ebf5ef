"""A backward pass on other weights than its forward's, against gradients written by hand."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from slipstream.config import ModelConfig
from slipstream.models.llama import cross_entropy_sum, whole_model
from slipstream.staleness.backward import DECAY, BackwardWeights, backward_on, build_backward


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


FORWARD = {"first": drawn(1, 5, 4), "norm": drawn(2, 5), "second": drawn(3, 3, 5)}
BACKWARD = {name: tensor + 0.3 * drawn(10 + i, *tensor.shape) for i, (name, tensor) in enumerate(FORWARD.items())}
X, SEED = drawn(4, 2, 6, 4), drawn(5, 2, 6, 3)


def by_hand(x: Tensor, backward: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two layers with a gain between them: activations of FORWARD, weights of ``backward`` where gradients pass."""
    h = torch.tanh(x @ FORWARD["first"].T)
    scaled = h * FORWARD["norm"]
    d_scaled = SEED @ backward["second"]
    d_h = d_scaled * backward["norm"] * (1 - h**2)
    return {
        "first": d_h.flatten(0, -2).T @ x.flatten(0, -2),
        "norm": (d_scaled * h).flatten(0, -2).sum(0),
        "second": SEED.flatten(0, -2).T @ scaled.flatten(0, -2),
        "x": d_h @ backward["first"],
    }


def by_autograd(x: Tensor, backward: dict[str, Tensor] | None) -> dict[str, Tensor]:
    leaves = {name: nn.Parameter(tensor.clone()) for name, tensor in FORWARD.items()}
    x = x.clone().requires_grad_()
    with backward_on(leaves, leaves if backward is None else backward):
        h = torch.tanh(nn.functional.linear(x, leaves["first"]))
        output = nn.functional.linear(h * leaves["norm"], leaves["second"])
    output.backward(SEED)
    return {name: leaf.grad for name, leaf in leaves.items()} | {"x": x.grad}


@pytest.mark.parametrize("x", [X, X[0]], ids=["batches of sequences", "a matrix"])
def test_gradients_are_those_written_by_hand(x, monkeypatch):
    monkeypatch.setitem(globals(), "SEED", SEED[: x.shape[0]] if x.ndim == 3 else SEED[0])
    found, expected = by_autograd(x, BACKWARD), by_hand(x, BACKWARD)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
    stale = by_hand(x, FORWARD)
    assert not torch.allclose(stale["x"], expected["x"]), "the other weights matter"


def test_with_the_same_weights_it_is_an_ordinary_backward_bitwise():
    leaves = {name: nn.Parameter(tensor.clone()) for name, tensor in FORWARD.items()}
    h = torch.tanh(nn.functional.linear(X, leaves["first"]))
    nn.functional.linear(h * leaves["norm"], leaves["second"]).backward(SEED)
    found = by_autograd(X, None)
    assert all(torch.equal(found[name], leaf.grad) for name, leaf in leaves.items())


def test_every_weight_of_a_decoder_is_replaced():
    """No operation of the model keeps the forward's weights in a form that is not recognised."""
    config = ModelConfig(num_layers=2, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=11)
    tokens = torch.arange(12).reshape(2, 6) % 11

    def gradients(others: dict[str, Tensor] | None) -> dict[str, Tensor]:
        model = whole_model(config, dtype=torch.float64)
        leaves = dict(model.named_parameters())
        with backward_on(leaves, others or leaves):
            logits = model(tokens)
        cross_entropy_sum(logits, tokens).backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    plain = gradients(None)
    scaled = gradients({n: 2.0 * p.detach() for n, p in whole_model(config, dtype=torch.float64).named_parameters()})
    # The head hands twice the gradient to what lies before it, whose own weights are doubled as well.
    assert torch.equal(scaled["head.weight"], plain["head.weight"]), "activations are the forward's"
    assert torch.allclose(scaled["head.norm.weight"], 2.0 * plain["head.norm.weight"])
    # Through head (2), its norm (2): the last residual stream's gradient is four times as large.
    assert torch.allclose(scaled["blocks.1.ffn.down.weight"], 4.0 * plain["blocks.1.ffn.down.weight"])
    assert torch.allclose(scaled["blocks.1.ffn.up.weight"], 8.0 * plain["blocks.1.ffn.up.weight"])


def test_the_running_mean_is_that_of_the_paper():
    method = build_backward("pipemare", delays={"w": 2, "fresh": 0})
    assert isinstance(method, BackwardWeights)
    versions = [{"w": drawn(20 + i, 3), "fresh": drawn(40 + i, 2)} for i in range(6)]
    gamma, delta = DECAY**0.5, torch.zeros(3, dtype=torch.float64)
    for before, after in itertools.pairwise(versions):
        method.observe(before, after)
        delta = gamma * delta + (1 - gamma) * (after["w"] - before["w"])
    torch.testing.assert_close(method.slots["drift"]["w"], delta, rtol=1e-12, atol=1e-12)
    newest = versions[-1]
    torch.testing.assert_close(method.of("w", newest["w"], steps=2), newest["w"] - 2 * delta, rtol=1e-12, atol=1e-12)
    assert method.of("w", newest["w"], steps=0) is newest["w"]
    assert set(method.slots["drift"]) == {"w"}, "what has no delay needs no mean"


def test_on_a_straight_path_the_correction_finds_the_weights_read():
    method = BackwardWeights("pipemare", delays={"w": 3})
    path = [{"w": torch.full((2,), 0.5 * step, dtype=torch.float64)} for step in range(60)]
    for before, after in itertools.pairwise(path):
        method.observe(before, after)
    torch.testing.assert_close(method.of("w", path[-1]["w"], steps=3), path[-4]["w"])


def test_narrow_weights_have_a_wide_mean():
    method = BackwardWeights("pipemare", delays={"w": 1})
    method.observe({"w": torch.zeros(2, dtype=torch.bfloat16)}, {"w": torch.ones(2, dtype=torch.bfloat16)})
    assert method.slots["drift"]["w"].dtype == torch.float32
    assert method.of("w", torch.ones(2, dtype=torch.bfloat16), steps=1).dtype == torch.bfloat16


def test_nothing_is_built_where_nothing_is_to_be_done():
    assert build_backward("read", delays={"w": 3}) is None
    assert build_backward("pipemare", delays={"w": 0}) is None
    newest = build_backward("newest", delays={"w": 3})
    assert newest is not None
    weights = torch.ones(2)
    assert newest.of("w", weights, steps=3) is weights
