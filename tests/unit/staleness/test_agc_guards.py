"""What keeps a poor curvature from doing harm, one guard a test, and its metric."""

import math

import pytest
import torch
from torch import Tensor

from slipstream.staleness.agc import Agc
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.guards import Guards

SIZE = 50


def seeded(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def teach(agc: Agc, *, curvature: float = 2.0, held_out: float | None = None, num_pairs: int = 2) -> Agc:
    """Probe by turns for the curvature and for its gain, which may see another one."""
    for pair in range(num_pairs):
        move = seeded(pair)
        h = curvature if pair % 2 == 0 or held_out is None else held_out
        agc.probe({"w": torch.zeros(SIZE)}, {"w": torch.zeros(SIZE)}, {"w": h * move}, {"w": move})
    return agc


def correct(agc: Agc, g: Tensor, *, moved: Tensor, version: int = 1) -> Tensor:
    given = Gradient(tensors={"w": g}, read_version=version - 1, num_tokens=1)
    read = torch.zeros_like(moved)
    found = agc.correct(given, staleness=1, now={"w": moved}, read={"w": read}).tensors["w"]
    assert found is not None
    return found


def metric(agc: Agc, name: str) -> float:
    return agc.metrics()[f"agc/w/{name}"]


def test_the_first_pairs_only_teach():
    guards = Guards(min_pairs=6, ramp_steps=0)
    g, moved = 10 * seeded(90), seeded(91)
    agc = teach(Agc(guards=guards), num_pairs=5)
    assert torch.equal(correct(agc, g, moved=moved), g)
    assert (metric(agc, "pairs"), metric(agc, "ramp")) == (5, 0.0)
    agc = teach(Agc(guards=guards), num_pairs=6)
    torch.testing.assert_close(correct(agc, g, moved=moved), g + 2 * moved)
    assert (metric(agc, "pairs"), metric(agc, "ramp")) == (6, 1.0)


def test_nothing_during_the_warm_up():
    agc = teach(Agc(guards=Guards(warmup_steps=5, min_pairs=2, ramp_steps=0)))
    g = 10 * seeded(90)
    assert torch.equal(correct(agc, g, moved=seeded(91), version=4), g)  # makes update 5
    assert not torch.equal(correct(agc, g, moved=seeded(91), version=5), g)


def test_the_correction_rises_from_its_beginning():
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=4)))
    g, moved = 10 * seeded(90), 0.1 * seeded(91)
    for version, share in ((7, 0.25), (8, 0.5), (10, 1.0), (30, 1.0)):
        torch.testing.assert_close(correct(agc, g, moved=moved, version=version), g + share * 2 * moved)
        assert metric(agc, "ramp") == share
        # What the call itself has learnt from does not matter here.
        agc.slots["held_gradient"].clear()


@pytest.mark.parametrize(("held_out", "gain"), [(-3.0, 0.0), (0.0, 0.0), (0.5, 0.25), (2.0, 1.0), (9.0, 1.0)])
def test_the_gain_is_what_held_out_pairs_say(held_out, gain):
    """A curvature that predicts nothing, or the wrong way, switches itself off, bitwise; one too low is not raised."""
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=0)), curvature=2.0, held_out=held_out, num_pairs=40)
    g, moved = 10 * seeded(90), seeded(91)
    found = correct(agc, g, moved=moved)
    assert metric(agc, "gain") == pytest.approx(gain)
    torch.testing.assert_close(found, g + 2 * gain * moved)
    assert torch.equal(found, g) == (gain == 0.0)


def test_curvature_is_never_negative():
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=0)), curvature=-2.0, num_pairs=10)
    g = 10 * seeded(90)
    assert torch.equal(correct(agc, g, moved=seeded(91)), g)
    assert metric(agc, "curvature") == 0.0


def test_curvature_is_bounded_by_what_the_rate_allows():
    """(sqrt(v) + eps) / lr, element by element."""
    lr = 0.5
    agc = Agc(lr=lambda name, update: lr, guards=Guards(min_pairs=2, ramp_steps=0, trust_radius=math.inf))
    g, moved = seeded(90), 0.1 * seeded(91)
    correct(agc, g, moved=moved)  # v = g^2
    teach(agc, curvature=2.0, num_pairs=1)
    # The held-out pair agrees with the curvature as it is bounded, so that the gain is 1.
    h = torch.minimum((g.abs() + 1e-8) / lr, torch.tensor(2.0))
    agc.probe({"w": torch.zeros(SIZE)}, {"w": torch.zeros(SIZE)}, {"w": h * seeded(1)}, {"w": seeded(1)})
    torch.testing.assert_close(correct(agc, g, moved=moved), g + h * moved)
    assert metric(agc, "bounded") == pytest.approx(float((h < 2.0).double().mean()))
    assert 0.2 < metric(agc, "bounded") < 1.0


def test_a_correction_stays_within_its_trust_radius():
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=0, min_cosine=0.0)))
    g = seeded(90)
    orthogonal = seeded(91)
    orthogonal -= (orthogonal @ g) / (g @ g) * g
    orthogonal *= g.norm() / orthogonal.norm()
    found = correct(agc, g, moved=orthogonal)  # twice the gradient's norm
    torch.testing.assert_close(found, g + 0.5 * orthogonal)
    assert metric(agc, "trust") == pytest.approx(0.25)
    assert metric(agc, "relative_correction") == pytest.approx(0.5)


def test_a_correction_that_would_turn_the_gradient_round_is_thrown_away():
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=0)))
    g = seeded(90)
    assert torch.equal(correct(agc, g, moved=-g), g)
    assert metric(agc, "raw") == 1.0
    assert metric(agc, "cosine") == pytest.approx(-1.0)
    assert not torch.equal(correct(agc, g, moved=0.1 * seeded(91)), g)
    assert metric(agc, "raw") == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_correction_that_is_not_finite_is_thrown_away(value):
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=0)))
    g, moved = seeded(90), seeded(91)
    moved[3] = value
    assert torch.equal(correct(agc, g, moved=moved), g)
    assert metric(agc, "raw") == 1.0


def test_a_pair_that_is_not_finite_teaches_nothing():
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=0)))
    zero, broken = torch.zeros(SIZE), torch.full((SIZE,), math.nan)
    agc.probe({"w": zero}, {"w": zero}, {"w": broken}, {"w": torch.ones(SIZE)})
    assert float(agc.slots["pairs"]["w"]) == 2
    g, moved = 10 * seeded(90), seeded(91)
    torch.testing.assert_close(correct(agc, g, moved=moved), g + 2 * moved)


def test_a_zero_gradient_stays_zero():
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=0)))
    assert torch.equal(correct(agc, torch.zeros(SIZE), moved=seeded(91).float()), torch.zeros(SIZE))


def test_every_guard_has_a_metric():
    agc = teach(Agc(guards=Guards(min_pairs=2, ramp_steps=0)))
    correct(agc, seeded(90), moved=0.1 * seeded(91))
    names = ("pairs", "ramp", "gain", "curvature", "bounded", "cosine", "raw", "trust", "relative_correction")
    assert agc.metrics().keys() == {f"agc/w/{name}" for name in names}
    assert all(isinstance(value, float) and math.isfinite(value) for value in agc.metrics().values())
