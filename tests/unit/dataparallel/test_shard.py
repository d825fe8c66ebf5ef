import pytest
import torch
from torch import nn

from slipstream.dataparallel.shard import Shard
from slipstream.staleness.corrections import DcAsgd
from slipstream.staleness.gradient import Gradient, global_norm
from slipstream.staleness.publish import build_publish_method
from slipstream.staleness.updater import Updater
from slipstream.staleness.versions import VersionedWeights


def make_shard(*, size=4, error_feedback=0.0, corrections=(), max_grad_norm=0.0) -> Shard:
    masters = {"w": nn.Parameter(torch.zeros(size))}
    optimizer = torch.optim.SGD(masters.values(), lr=1.0)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    updater = Updater(
        masters,
        {"sgd": optimizer},
        weights=VersionedWeights(masters, num_buffers=1, dtype=torch.float32),
        publish=build_publish_method(error_feedback),
        lr_factor=lambda update: 1.0,
        corrections=corrections,
        max_grad_norm=max_grad_norm,
    )
    return Shard(updater)


def push(shard: Shard, tensor, *, weight, read_version=0, **options):
    gradient = Gradient(tensors={"w": tensor}, read_version=read_version, num_tokens=1)
    shard.accumulate(gradient, global_norm(gradient.norms(["w"])), weight=weight, **options)


def coefficients(weights) -> torch.Tensor:
    """What a step makes of gradients that each point in a direction of their own."""
    shard = make_shard(size=len(weights))
    for i, weight in enumerate(weights):
        push(shard, torch.eye(len(weights))[i], weight=weight)
    shard.apply()
    return -shard.updater.masters["w"].detach().double()


def test_equal_weight_per_token_has_the_least_variance():
    """Gradients that are means over B tokens have a variance of 1 / B each; a step is their weighted mean."""
    tokens = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    best = 1 / tokens.sum()

    def variance(weights):
        shares = coefficients(weights.tolist())
        assert float(shares.sum()) == pytest.approx(1.0)
        return float((shares**2 / tokens).sum() / best)

    assert variance(tokens / tokens.sum()) == pytest.approx(1.00, abs=0.005), "what the sequencer gives"
    assert variance(torch.ones(4)) == pytest.approx(1.76, abs=0.005), "equal weight per push"
    assert variance(1 / tokens) == pytest.approx(4.875, abs=0.005), "weights for sums, on means"


@pytest.mark.parametrize("weight", [1.0, 0.3, 0.7])
def test_a_step_of_one_gradient_is_that_gradient_bitwise(weight):
    shard = make_shard(size=50)
    g = torch.randn(50, generator=torch.Generator().manual_seed(0))
    push(shard, g.clone(), weight=weight)
    shard.apply()
    assert torch.equal(shard.updater.masters["w"], -g)


def test_each_gradient_is_clipped_by_its_own_norm_before_it_is_weighted():
    shard = make_shard(max_grad_norm=1.0)
    push(shard, torch.tensor([10.0, 0, 0, 0]), weight=0.5)
    push(shard, torch.tensor([0, 0.5, 0, 0]), weight=0.5)
    report = shard.apply()
    torch.testing.assert_close(shard.updater.masters["w"].detach(), -torch.tensor([0.5, 0.25, 0, 0]))
    assert report.grad_norm == pytest.approx(5.25)


def test_borrowed_memory_is_not_kept():
    shard = make_shard()
    buffer = torch.ones(4)
    push(shard, buffer, weight=0.5, is_borrowed=True)
    buffer.fill_(9.0)
    push(shard, buffer, weight=0.5, is_borrowed=True)
    buffer.fill_(0.0)
    shard.apply()
    assert torch.equal(shard.updater.masters["w"].detach(), -torch.full((4,), 5.0))


def test_a_parameter_that_some_gradients_lack():
    shard = make_shard()
    push(shard, None, weight=0.5)
    push(shard, torch.ones(4), weight=0.5)
    shard.apply()
    assert torch.equal(shard.updater.masters["w"].detach(), -torch.full((4,), 0.5))
    push(shard, None, weight=1.0)
    assert shard.apply().version == 2


def test_corrections_see_the_very_weights_that_were_read():
    seen = []

    class Spy(DcAsgd):
        def correct(self, gradient, *, staleness, now, read):
            seen.append((staleness, float(now["w"][0]), float(read["w"][0])))
            return gradient

    shard = make_shard(corrections=[Spy(1.0)])
    shard.hold(0)
    for version in range(3):
        shard.hold(version)
        push(shard, torch.full((4,), -1.0), weight=1.0, read_version=version)
        shard.apply()
        shard.retain({0, version + 1})
    push(shard, torch.full((4,), -1.0), weight=1.0, read_version=0)
    assert seen == [(0, 0.0, 0.0), (0, 1.0, 1.0), (0, 2.0, 2.0), (3, 3.0, 0.0)]
    shard.retain(())
    assert not any(name.startswith("held") for name in shard.tensors())


def test_nothing_is_held_where_nobody_looks():
    shard = make_shard()
    shard.hold(0)
    assert shard.tensors() == {}


def test_the_update_path_hears_of_every_staleness():
    heard = []

    class Ear:
        def factor(self, *, update, stalenesses):
            heard.append((update, list(stalenesses)))
            return 1.0

    shard = make_shard()
    shard.updater._step_size = Ear()
    push(shard, torch.ones(4), weight=1.0)
    shard.apply()
    for version in (0, 1, 0):
        push(shard, torch.ones(4), weight=1.0, read_version=version)
    assert shard.apply().staleness == 1
    assert heard == [(1, [0]), (2, [1, 0, 1])]
