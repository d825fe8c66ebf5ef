"""The mixture of experts against a slow float64 pass written from the formulas, one position and expert at a time."""

import dataclasses
import math

import pytest
import torch

from slipstream.config import ModelConfig
from slipstream.models.llama import Block
from slipstream.models.moe import RouterLog, RouterReport, attach_log

torch.set_num_threads(1)

CFG = ModelConfig(
    num_layers=1,
    dim=12,
    num_heads=2,
    num_kv_heads=1,
    num_experts=5,
    experts_per_token=2,
    expert_ffn_dim=7,
    router_aux_loss=0.3,
    router_z_loss=0.05,
    vocab_size=3,
)
SHAPE = (2, 6)
SHARE = 0.25


def layer_of(cfg, dtype):
    """A block's feed-forward with weights far from the initial ones, so that gates saturate and routes are clear."""
    layer = Block(cfg, 0, device=torch.device("cpu"), dtype=dtype).ffn
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        drawn = 0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        parameter.data = drawn.float().to(dtype)
    return layer


def swiglu(row, gate, up, down):
    inner = gate @ row
    return down @ (inner / (1 + (-inner).exp()) * (up @ row))


def reference(rows, weights, cfg):
    """Return the output of each row, the auxiliary loss, and the report's fields."""
    outputs, chosen, probabilities = [], [], []
    z_loss = 0.0
    for row in rows:
        scores = [weights["router.weight"][e] @ row for e in range(cfg.num_experts)]
        total = sum(score.exp() for score in scores)
        z_loss += total.log() ** 2 / len(rows)
        own = [score.exp() / total for score in scores]
        best = sorted(range(cfg.num_experts), key=lambda e: -own[e].item())[: cfg.experts_per_token]
        scale = sum(own[e] for e in best) if cfg.router_renormalize else 1.0
        parts = [weights[f"expert_{name}.weight"] for name in ("gate", "up", "down")]
        output = sum(own[e] / scale * swiglu(row, *(part[e] for part in parts)) for e in best)
        if cfg.num_shared_experts:
            output = output + swiglu(row, *(weights[f"shared.{name}.weight"] for name in ("gate", "up", "down")))
        outputs.append(output)
        chosen += best
        probabilities.append(own)
    counts = [chosen.count(e) for e in range(cfg.num_experts)]
    means = [sum(own[e] for own in probabilities) / len(rows) for e in range(cfg.num_experts)]
    balance = cfg.num_experts * sum(count / len(chosen) * mean for count, mean in zip(counts, means, strict=True))
    loss = SHARE * (cfg.router_aux_loss * balance + cfg.router_z_loss * z_loss)
    entropies = [-sum(p.item() * math.log(p.item()) for p in own) for own in probabilities]
    mean = len(chosen) / cfg.num_experts
    report = (max(counts) / mean, min(counts) / mean, sum(entropies) / len(rows), loss.item())
    return torch.stack(outputs), loss, report


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 3e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"experts_per_token": 1, "router_renormalize": False},
        {"experts_per_token": 3, "router_renormalize": False, "num_shared_experts": 2},
        {"experts_per_token": 5, "num_shared_experts": 1, "router_z_loss": 0.0},
        {"router_aux_loss": 0.0},
    ],
    ids=["top 2", "top 1", "top 3, shared", "all", "z-loss alone"],
)
def test_outputs_gradients_and_report_are_those_of_the_formulas(change, dtype, tolerance):
    cfg = dataclasses.replace(CFG, **change)
    layer, log = layer_of(cfg, dtype), RouterLog(batch_share=SHARE)
    attach_log(layer, log)
    generator = torch.Generator().manual_seed(1)
    x, direction = torch.randn(2, *SHAPE, cfg.dim, dtype=torch.float64, generator=generator).float().double()

    weights = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    rows = x.flatten(0, 1).requires_grad_()
    expected, loss, report = reference(rows, weights, cfg)
    ((expected * direction.flatten(0, 1)).sum() + loss).backward()

    inputs = x.to(dtype).requires_grad_()
    output = layer(inputs, (3, 0))
    (output * direction.to(dtype)).sum().backward()

    def close(found, wanted):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * scale)

    close(output.flatten(0, 1), expected)
    close(inputs.grad.flatten(0, 1), rows.grad)
    for name, parameter in layer.named_parameters():
        assert weights[name].grad.abs().sum() > 0, name
        close(parameter.grad, weights[name].grad)
    found = RouterReport(*log.take(3)[0].tolist())
    assert found == pytest.approx(report, rel=tolerance)
    assert log.take(3) == {}
