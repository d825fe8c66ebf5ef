import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import StalenessError
from slipstream.staleness.corrections import DcAsgd, GapAware, GradientFeedback
from slipstream.staleness.delay import DelayLine
from slipstream.staleness.gradient import Gradient, GradientAccumulator, global_norm
from slipstream.staleness.publish import build_publish_method
from slipstream.staleness.step_size import InverseStaleness, PipeMareDiscount
from slipstream.staleness.updater import Updater
from slipstream.staleness.versions import VersionedWeights

NAMES = ("a", "b")


def make_updater(*, delay: int = 1, error_feedback: float = 0.0, max_grad_norm: float = 0.0, **seams) -> Updater:
    masters = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.full((2, 2), 2.0))}
    optimizer = torch.optim.SGD(masters.values(), lr=0.5, momentum=0.9)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return Updater(
        masters,
        {"sgd": optimizer},
        weights=VersionedWeights(masters, num_buffers=delay + 1, dtype=torch.float32),
        publish=build_publish_method(error_feedback),
        lr_factor=lambda update: 1.0 / update,
        max_grad_norm=max_grad_norm,
        **seams,
    )


def gradient(value: float, *, read_version: int) -> Gradient:
    tensors = {"a": torch.full((3,), value), "b": torch.full((2, 2), -value)}
    return Gradient(tensors=tensors, read_version=read_version, num_tokens=1)


def apply(updater: Updater, g: Gradient):
    return updater.step(g, global_norm(g.norms(NAMES)))


def test_staleness_with_a_delay_line():
    line = DelayLine(2)
    updater = make_updater(delay=2)
    seen = [apply(updater, gradient(0.1, read_version=line.read_version(batch))).staleness for batch in range(6)]
    assert seen == [0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("step_size", [InverseStaleness(), PipeMareDiscount(100)])
def test_a_discount_is_the_mean_of_all_gradients_whatever_their_order(step_size):
    def factor(stalenesses):
        updater = make_updater(delay=0, step_size=step_size)
        return updater.apply(gradient(0.1, read_version=0), stalenesses=stalenesses, grad_norm=1.0).lr_factor

    found = {factor(order) for order in itertools.permutations((5, 2, 3, 0))}
    assert len(found) == 1
    alone = [factor((staleness,)) for staleness in (5, 2, 3, 0)]
    assert alone == [step_size.factor(update=1, stalenesses=[staleness]) for staleness in (5, 2, 3, 0)]
    assert found.pop() == pytest.approx(sum(alone) / 4)


def test_learning_rate_counts_updates_from_one():
    updater = make_updater()
    factors = [apply(updater, gradient(0.1, read_version=max(b - 1, 0))).lr_factor for b in range(4)]
    assert factors == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert updater.optimizers["sgd"].param_groups[0]["lr"] == 0.5 / 4


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_clip_is_torchs_to_the_bit(scale):
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale
        for name, shape in (("a", (3,)), ("b", (2, 2)))
    }
    params = [nn.Parameter(torch.zeros_like(t)) for t in tensors.values()]
    for param, tensor in zip(params, tensors.values(), strict=True):
        param.grad = tensor.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    updater = make_updater(delay=0, max_grad_norm=1.0)
    g = Gradient(tensors=tensors, read_version=0, num_tokens=1)
    norm = global_norm(g.norms(NAMES))
    assert torch.equal(norm, expected_norm)
    updater.step(g, norm)
    assert all(torch.equal(tensors[name], param.grad) for name, param in zip(NAMES, params, strict=True))


def test_norms_of_parts_add_up_to_the_whole_bitwise():
    g = gradient(0.37, read_version=0)
    parts = [Gradient(tensors={name: g.tensors[name]}, read_version=0, num_tokens=1) for name in NAMES]
    assert torch.equal(sum(part.norms(NAMES) for part in parts), g.norms(NAMES))


@pytest.mark.parametrize("error_feedback", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_moves_the_version_but_not_the_weights(error_feedback):
    updater = make_updater(error_feedback=error_feedback)
    for batch in range(3):
        apply(updater, gradient(0.1, read_version=max(batch - 1, 0)))
    masters = {name: master.detach().clone() for name, master in updater.masters.items()}
    momentum = updater.optimizers["sgd"].state[updater.masters["a"]]["momentum_buffer"].clone()
    report = apply(updater, gradient(math.nan, read_version=2))
    assert report.skipped
    assert (report.version, updater.num_skipped) == (4, 1)
    assert all(torch.equal(updater.masters[name], masters[name]) for name in NAMES)
    assert torch.equal(updater.weights.read(4)["a"], masters["a"]), "an update of zero publishes y itself"
    assert torch.equal(updater.optimizers["sgd"].state[updater.masters["a"]]["momentum_buffer"], momentum)
    assert apply(updater, gradient(0.1, read_version=3)).lr_factor == 1 / 5, "the schedule goes on with the version"


def test_a_missing_gradient_leaves_its_parameter_alone():
    updater = make_updater()
    g = Gradient(tensors={"a": torch.ones(3), "b": None}, read_version=0, num_tokens=1)
    apply(updater, g)
    assert torch.equal(updater.masters["b"], torch.full((2, 2), 2.0))
    assert not torch.equal(updater.masters["a"], torch.ones(3))


def test_a_gradient_from_the_future_or_the_far_past_is_refused():
    updater = make_updater()
    for batch in range(4):
        apply(updater, gradient(0.1, read_version=max(batch - 1, 0)))
    with pytest.raises(StalenessError, match="read version 5, the newest is 4"):
        apply(updater, gradient(0.1, read_version=5))
    with pytest.raises(StalenessError, match=r"version 1 .* held are 3 to 4"):
        apply(updater, gradient(0.1, read_version=1))


def test_corrections_see_the_weights_read_and_the_newest_and_come_after_the_clip():
    seen: dict[str, Tensor] = {}

    class Spy:
        def correct(self, gradient, *, staleness, now, read):
            seen["now"], seen["read"] = now["a"].detach().clone(), read["a"].clone()
            seen["norm"] = global_norm(gradient.norms(NAMES))
            return gradient

    updater = make_updater(max_grad_norm=0.5, error_feedback=1.0, corrections=[Spy()])
    for batch in range(3):
        version = max(batch - 1, 0)
        read = updater.weights.read(version)["a"].clone()
        now = updater.masters["a"].detach().clone()
        apply(updater, gradient(4.0, read_version=version))
        assert torch.equal(seen["read"], read)
        assert torch.equal(seen["now"], now)
        assert float(seen["norm"]) == pytest.approx(0.5, rel=1e-5)


def test_dc_asgd_is_the_formula_and_the_identity_without_staleness():
    g = gradient(0.5, read_version=0)
    now = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.zeros(2, 2)}
    read = {"a": torch.tensor([0.5, 2.0, 4.0]), "b": torch.ones(2, 2)}
    corrected = DcAsgd(0.04).correct(g, staleness=1, now=now, read=read)
    for name in NAMES:
        expected = g.tensors[name] + 0.04 * g.tensors[name] ** 2 * (now[name] - read[name])
        torch.testing.assert_close(corrected.tensors[name], expected)
    assert DcAsgd(0.04).correct(g, staleness=0, now=now, read=read) is g


@pytest.mark.parametrize(
    "correction",
    [DcAsgd(0.04), DcAsgd(0.04, adaptive=True), GapAware(), GradientFeedback(1.0)],
    ids=lambda c: type(c).__name__,
)
def test_a_parameter_that_is_not_stale_is_left_as_it_is(correction):
    """Also where what was published is not quite the master, as with error feedback or in bfloat16."""
    for version in range(5, 8):
        now = {"a": torch.full((3,), float(version)), "b": torch.full((2, 2), 2.0 * version)}
        read = {name: tensor - 0.1 for name, tensor in now.items()}
        g = dataclasses.replace(
            gradient(0.1 * version, read_version=version - 2), read_versions={"a": version - 2, "b": version}
        )
        corrected = correction.correct(g, staleness=2, now=now, read=read)
    assert not torch.equal(corrected.tensors["a"], g.tensors["a"])
    assert corrected.tensors["b"] is g.tensors["b"]


def test_accumulator_adds_in_order_and_begins_anew_after_take():
    leaf, accumulator = nn.Parameter(torch.zeros(2)), GradientAccumulator()
    for value in (1.0, 2.0):
        leaf.grad = torch.full((2,), value)
        accumulator.add({"w": leaf, "idle": nn.Parameter(torch.zeros(1))})
        assert leaf.grad is None
    assert accumulator.take().keys() == {"w"}
    leaf.grad = torch.full((2,), 5.0)
    accumulator.add({"w": leaf})
    assert torch.equal(accumulator.take()["w"], torch.full((2,), 5.0))


def test_accumulator_widens_narrow_gradients_before_adding():
    leaf, accumulator = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)), GradientAccumulator()
    for value in (256.0, 1.0):
        leaf.grad = torch.tensor([value], dtype=torch.bfloat16)
        accumulator.add({"w": leaf})
    assert float(accumulator.take()["w"]) == 257.0, "bfloat16 alone would give 256"


def test_prepare_then_apply_is_a_step_and_several_prepared_make_one():
    whole, halves = make_updater(max_grad_norm=0.5), make_updater(max_grad_norm=0.5)
    for batch in range(3):
        g = gradient(0.7, read_version=max(batch - 1, 0))
        norm = global_norm(g.norms(NAMES))
        apply(whole, gradient(0.7, read_version=max(batch - 1, 0)))
        prepared = halves.prepare(g, norm)
        report = halves.apply(prepared, stalenesses=(halves.staleness_of(g),), grad_norm=float(norm))
    assert (report.version, report.staleness, report.lr_factor) == (3, 1, 1 / 3)
    assert all(torch.equal(whole.masters[name], halves.masters[name]) for name in NAMES)
    assert halves.prepare(gradient(math.nan, read_version=3), torch.tensor(math.nan)) is None
    assert halves.weights.latest == 3, "preparing changes nothing"
    report = halves.apply(gradient(0.1, read_version=3), stalenesses=(2, 0, 1), grad_norm=1.0)
    assert (report.version, report.staleness) == (4, 2)


def test_weights_read_may_come_from_elsewhere():
    seen = []

    class Spy:
        def correct(self, gradient, *, staleness, now, read):
            seen.append((staleness, float(read["a"][0])))
            return gradient

    updater = make_updater(delay=0, corrections=[Spy()])
    for _ in range(2):
        apply(updater, gradient(0.1, read_version=updater.weights.latest))
    old = {"a": torch.full((3,), 7.0), "b": torch.zeros(2, 2)}
    updater.prepare(gradient(0.1, read_version=0), torch.tensor(1.0), read=old)
    assert seen[-1] == (2, 7.0)
