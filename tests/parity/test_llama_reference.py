"""The decoder against a slow float64 pass written from the papers' formulas, one head and position at a time."""

import cmath
import dataclasses
import math

import pytest
import torch

from slipstream.config import ModelConfig
from slipstream.models.llama import cross_entropy_sum, whole_model

torch.set_num_threads(1)

CFG = ModelConfig(
    num_layers=2, dim=24, num_heads=6, num_kv_heads=2, ffn_dim=20, vocab_size=11, rope_theta=50.0, norm_eps=1e-3
)
LENGTH = 7
TOKENS = torch.randint(CFG.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def weights_far_from_the_initial_ones():
    """Large matrices, so that attention is sharp and the gates saturate; norms that differ by channel."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in whole_model(CFG).named_parameters():
        noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        weights[name] = (1 + 0.3 * noise if parameter.dim() == 1 else 0.4 * noise).float().double()
    return weights


def rms_norm(x, weight):
    return x / (sum(value * value for value in x) / len(x) + CFG.norm_eps).sqrt() * weight


def turned(vector, position):
    """Channel pair (i, i + C/2) as a complex number, turned by position * theta^(-2i/C)."""
    half = len(vector) // 2
    pairs = torch.complex(vector[:half], vector[half:])
    turns = [cmath.exp(1j * position * CFG.rope_theta ** (-2 * i / len(vector))) for i in range(half)]
    pairs = pairs * torch.tensor(turns, dtype=torch.complex128)
    return torch.cat((pairs.real, pairs.imag))


def attention(rows, weights, prefix, window):
    channels, group = CFG.dim // CFG.num_heads, CFG.num_heads // CFG.num_kv_heads
    queries, keys, values = ([weights[f"{prefix}.{letter}.weight"] @ row for row in rows] for letter in "qkv")
    out = []
    for t in range(len(rows)):
        heads = []
        for head in range(CFG.num_heads):
            own = slice(head * channels, (head + 1) * channels)
            shared = slice(head // group * channels, (head // group + 1) * channels)
            query = turned(queries[t][own], t)
            seen = range(max(0, t + 1 - window) if window else 0, t + 1)
            exponentials = {s: (query @ turned(keys[s][shared], s) / math.sqrt(channels)).exp() for s in seen}
            heads.append(sum(e * values[s][shared] for s, e in exponentials.items()) / sum(exponentials.values()))
        out.append(weights[f"{prefix}.o.weight"] @ torch.cat(heads))
    return out


def feed_forward(row, weights, prefix):
    gate = weights[f"{prefix}.gate.weight"] @ row
    return weights[f"{prefix}.down.weight"] @ (gate / (1 + (-gate).exp()) * (weights[f"{prefix}.up.weight"] @ row))


def reference(tokens, weights, window):
    """Return the logits of one sequence (T, V)."""
    rows = [weights["embed.weight"][token] for token in tokens]
    for layer in range(CFG.num_layers):
        block = f"blocks.{layer}"
        normed = [rms_norm(row, weights[f"{block}.attention_norm.weight"]) for row in rows]
        rows = [row + out for row, out in zip(rows, attention(normed, weights, f"{block}.attention", window))]
        normed = [rms_norm(row, weights[f"{block}.ffn_norm.weight"]) for row in rows]
        rows = [row + feed_forward(n, weights, f"{block}.ffn") for row, n in zip(rows, normed)]
    return torch.stack([weights["head.weight"] @ rms_norm(row, weights["head.norm.weight"]) for row in rows])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("window", [0, 1, 3, LENGTH])
def test_logits_loss_and_gradients_are_those_of_the_formulas(dtype, tolerance, window):
    weights = {name: weight.requires_grad_() for name, weight in weights_far_from_the_initial_ones().items()}
    expected = torch.stack([reference(row.tolist(), weights, window) for row in INPUTS])
    probabilities = expected.exp() / expected.exp().sum(-1, keepdim=True)
    expected_loss = -sum(
        probabilities[b, t, TARGETS[b, t]].log() for b in range(len(TARGETS)) for t in range(TARGETS.shape[1])
    )
    expected_loss.backward()

    model = whole_model(dataclasses.replace(CFG, sliding_window=window), dtype=dtype)
    model.load_state_dict(weights)
    logits = model(INPUTS)
    loss = cross_entropy_sum(logits, TARGETS)
    loss.backward()

    def close(found, wanted):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * scale)

    close(logits, expected)
    close(loss, expected_loss)
    for name, parameter in model.named_parameters():
        if window == 1 and name.split(".")[-2] in ("q", "k"):
            # Alone with itself a position has nothing to weigh: what is left is rounding.
            assert max(parameter.grad.abs().max(), weights[name].grad.abs().max()) < tolerance
        else:
            close(parameter.grad, weights[name].grad)
