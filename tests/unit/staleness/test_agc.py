"""The compensator on quadratics, where the gradient that it should find is known."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from slipstream.config import AgcConfig
from slipstream.errors import ConfigError
from slipstream.models.roles import role
from slipstream.staleness.agc import Agc
from slipstream.staleness.curvature import Curvature
from slipstream.staleness.damping import AgcDamping
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.groups import check_cuts, grouping
from slipstream.staleness.guards import Guards

OPEN = Guards(min_pairs=2, ramp_steps=0, trust_radius=math.inf, min_cosine=-1.0)
"""Guards that never bite."""

Q, K, HEAD = "blocks.0.attention.q.weight", "blocks.1.attention.k.weight", "head.weight"
HESSIAN = {Q: 2.0, K: 0.5, HEAD: 7.0}
"""One curvature for each group, so that a group's number can be exact."""

Weights = dict[str, Tensor]


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start() -> Weights:
    return {name: seeded(i, 3, 4) for i, name in enumerate(HESSIAN)}


def slope(weights: Mapping[str, Tensor], hessian: Mapping[str, Tensor | float] = HESSIAN) -> Weights:
    return {name: hessian[name] * w for name, w in weights.items()}


def moved(weights: Mapping[str, Tensor], seed: int, *, by: float = 0.1) -> Weights:
    """Weights after a step in some direction, as an optimizer with a memory may take it."""
    return {name: w + by * seeded(1000 * seed + i, *w.shape) for i, (name, w) in enumerate(weights.items())}


def gradient(tensors: Mapping[str, Tensor | None], *, read: int, worker: int | None = None) -> Gradient:
    return Gradient(tensors=dict(tensors), read_version=read, num_tokens=1, worker=worker)


class Walk:
    """Weights that wander, and gradients of a quadratic that are ``tau`` steps old when they are corrected."""

    def __init__(self, correction: Agc | AgcDamping, *, tau: int = 1, noise: float = 0.0) -> None:
        self.correction = correction
        self.tau = tau
        self.noise = noise
        self.versions = [start()]

    def step(self) -> tuple[Gradient, Gradient, Weights]:
        """Return a gradient as it was read, as it was corrected, and as it would be now."""
        batch = len(self.versions) - 1
        read = max(batch - self.tau, 0)
        tensors = slope(self.versions[read])
        if self.noise:
            tensors = moved(tensors, 500 + batch, by=self.noise)
        given, now = gradient(tensors, read=read), self.versions[-1]
        corrected = self.correction.correct(given, staleness=batch - read, now=now, read=self.versions[read])
        self.versions.append(moved(now, batch + 1))
        return given, corrected, slope(now)

    def steps(self, count: int) -> tuple[Gradient, Gradient, Weights]:
        for _ in range(count - 1):
            self.step()
        return self.step()


def distance(found: Gradient, wanted: Mapping[str, Tensor]) -> float:
    return max(float((found.tensors[name] - wanted[name]).abs().max()) for name in wanted)


def same(first: Gradient, second: Gradient) -> bool:
    return all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


@pytest.mark.parametrize("tau", [1, 3])
def test_exact_where_the_curvature_is(tau):
    given, corrected, now = Walk(Agc(guards=OPEN), tau=tau).steps(12)
    assert distance(given, now) > 0.1
    assert distance(corrected, now) < 1e-6


def test_the_wrong_sign_doubles_the_error():
    """With read and now exchanged the displacement is that of a direction of descent taken for a displacement."""
    walk = Walk(Agc(guards=OPEN))
    walk.steps(12)
    read, now = walk.versions[-2], walk.versions[-1]
    given = gradient(slope(read), read=11)
    error = {}
    for sign, displaced in ((1, read), (-1, {name: 2 * now[name] - read[name] for name in now})):
        agc = Agc(guards=OPEN)
        for slot, held in walk.correction.slots.items():
            agc.slots[slot].update(held)
        error[sign] = distance(agc.correct(given, staleness=1, now=now, read=displaced), slope(now))
    assert error[1] < 1e-6
    assert error[-1] == pytest.approx(2 * distance(given, slope(now)))


def test_a_mean_displacement_is_exact_where_every_step_is_the_same():
    agc = Agc(guards=OPEN, displacement="ema", decay=0.5)
    direction = {name: 0.1 * seeded(9 + i, 3, 4) for i, name in enumerate(HESSIAN)}
    versions = [{name: w + t * direction[name] for name, w in start().items()} for t in range(40)]
    for batch, now in enumerate(versions):
        read = max(batch - 2, 0)
        given = gradient(slope(versions[read]), read=read)
        corrected = agc.correct(given, staleness=batch - read, now=now, read=versions[read])
    assert distance(given, slope(now)) > 0.1
    assert distance(corrected, slope(now)) < 1e-6


def test_elements_are_told_apart_by_probes_alone():
    hessian = {name: 1.0 + seeded(70 + i, 3, 4).abs() for i, name in enumerate(HESSIAN)}
    read, now = start(), moved(start(), 99)
    given = gradient(slope(read, hessian), read=0)
    errors = [distance(given, slope(now, hessian))]
    for kind in ("secant_group", "secant_diag"):
        agc = Agc(curvature=kind, guards=OPEN)
        for probe in range(8):
            old, new = moved(start(), probe), moved(start(), probe + 50)
            agc.probe(slope(old, hessian), old, slope(new, hessian), new)
        errors.append(distance(agc.correct(given, staleness=1, now=now, read=read), slope(now, hessian)))
    assert errors[1] < 0.5 * errors[0], "a number a group"
    assert errors[2] < 0.6 * errors[1], "and one an element, shrunk to it"
    walk = Walk(Agc(curvature="secant_diag", guards=OPEN))
    walk.steps(6)
    assert not walk.correction.slots["element_dot"], "pairs of different batches are too noisy for single elements"


def test_a_probe_tells_how_much_of_the_change_is_foretold():
    agc = Agc(curvature="secant_diag", guards=OPEN, concurrent_pairs=False)
    probes = [(moved(start(), seed), moved(start(), seed + 50)) for seed in range(9)]
    for number, (old, new) in enumerate(probes):
        agc.probe(slope(old), old, slope(new), new)
        metrics = agc.metrics()
        if number == 0:
            assert metrics["probe/explained"] == 0.0, "measured before anything is learnt"
            assert metrics["probe/cosine_corrected"] == pytest.approx(metrics["probe/cosine_stale"])
    assert metrics["probe/explained"] == pytest.approx(1.0)
    assert metrics["probe/cosine_corrected"] == pytest.approx(1.0)
    assert metrics["probe/cosine_stale"] < 0.999
    # With the displacement turned round, what is foretold is the opposite of the change.
    old, new = probes[0]
    agc.probe(slope(old), new, slope(new), old)
    assert agc.metrics()["probe/explained"] == pytest.approx(-3.0)


def test_shrinkage_draws_elements_to_the_group():
    """One probe: A_i = dg_i dw_i, B_i = dw_i^2; the prior weighs as much as the mean B does."""
    change, displacement = torch.tensor([3.0, 0.0]), torch.tensor([1.0, 2.0])
    curvature = Curvature("secant_diag", decay=0.0, keeps_mean_square=False)
    curvature.fit("w", *(float(dot) for dot in curvature.fit_dots("w", change, displacement)))
    curvature.fit_elements("w", change, displacement)
    group = 3.0 / 5.0
    assert curvature.scale(["w"]) == pytest.approx(group)
    h, _ = curvature.diagonals(["w"], {"w": change}, scale=group, lr=None)["w"]
    torch.testing.assert_close(h, torch.tensor([(3.0 + 2.5 * group) / 3.5, 2.5 * group / 6.5]))


def test_a_ratio_of_averages_not_an_average_of_ratios():
    curvature = Curvature("secant_group", decay=0.5, keeps_mean_square=False)
    for change, displacement in ((1.0, 1.0), (0.1, 0.001)):
        dot, square = curvature.fit_dots("w", torch.tensor([change]), torch.tensor([displacement]))
        curvature.fit("w", float(dot), float(square))
    assert curvature.scale(["w"]) == pytest.approx(1.0, abs=1e-3), "an average of ratios would be about 67"


@pytest.mark.parametrize(("kind", "power"), [("fisher", 1.0), ("fisher_root", 0.5)])
def test_fisher_is_the_mean_square_with_a_fitted_scale(kind, power):
    curvature = Curvature(kind)
    g = torch.tensor([1.0, 2.0, -3.0])
    curvature.observe({"w": g})
    shape, displacement = (g * g) ** power, torch.tensor([0.5, -1.0, 2.0])
    dots = curvature.fit_dots("w", 4.0 * shape * displacement, displacement)
    curvature.fit("w", *(float(dot) for dot in dots))
    assert curvature.scale(["w"]) == pytest.approx(4.0)
    h, _ = curvature.diagonals(["w"], {"w": g}, scale=4.0, lr=None)["w"]
    torch.testing.assert_close(h, 4.0 * shape)


@pytest.mark.parametrize("make", [lambda: Agc(guards=OPEN), lambda: AgcDamping(Agc(guards=OPEN))])
def test_without_staleness_the_very_gradient_given(make: Callable[[], Agc | AgcDamping]):
    walk = Walk(make(), noise=0.1)
    walk.steps(12)  # by now there is a curvature, and a stale gradient is changed
    given, corrected, _ = walk.step()
    assert not same(given, corrected)
    now = walk.versions[-1]
    fresh = gradient(slope(now), read=len(walk.versions) - 1)
    before = {name: tensor.clone() for name, tensor in fresh.tensors.items()}
    assert walk.correction.correct(fresh, staleness=0, now=now, read=now) is fresh
    assert all(torch.equal(fresh.tensors[name], tensor) for name, tensor in before.items())


def test_parameters_that_were_read_fresh_are_not_touched():
    walk = Walk(Agc(guards=OPEN))
    walk.steps(12)
    read, now = walk.versions[-2], walk.versions[-1]
    values = {name: read[name] if name == Q else now[name] for name in now}
    given = Gradient(tensors=slope(values), read_version=11, num_tokens=1, read_versions={Q: 11, K: 12, HEAD: 12})
    corrected = walk.correction.correct(given, staleness=1, now=now, read=values)
    assert distance(corrected, slope(now)) < 1e-6
    assert corrected.tensors[K] is given.tensors[K]
    assert corrected.tensors[HEAD] is given.tensors[HEAD]


@pytest.mark.parametrize("kind", ["secant_group", "secant_diag", "fisher", "fisher_root"])
@pytest.mark.parametrize("displacement", ["exact", "ema"])
def test_state_round_trips(kind, displacement):
    def make() -> Agc:
        return Agc(
            curvature=kind,
            displacement=displacement,
            lr=lambda name, update: 0.1 / update,
            guards=Guards(min_pairs=4, ramp_steps=6),
        )

    whole, first = Walk(make(), noise=0.05), Walk(make(), noise=0.05)
    first.steps(9)
    second = Walk(make(), noise=0.05)
    second.versions = first.versions
    for slot, held in second.correction.slots.items():
        held.update({name: tensor.clone() for name, tensor in first.correction.slots[slot].items()})
    whole.steps(9)
    for _ in range(6):
        given, expected, _ = whole.step()
        assert same(expected, second.step()[1])
    assert not same(given, expected)
    for slot, held in whole.correction.slots.items():
        assert all(torch.equal(held[name], second.correction.slots[slot][name]) for name in held), slot


def test_groups_by_role_and_depth():
    group_of = grouping(AgcConfig(), role=role)
    assert [group_of(name) for name in (Q, K, HEAD, "embed.weight", "blocks.1.ffn_norm.weight")] == [
        "q.0",
        "k.1",
        "head",
        "embedding",
        "norm.1",
    ]
    by_four = grouping(AgcConfig(blocks_per_group=4), role=role)
    assert by_four(Q) == "q.0-3"
    assert by_four("blocks.7.attention.q.weight") == "q.4-7"
    assert grouping(AgcConfig(groups="global"), role=role)(Q) == "all"


def test_a_group_is_the_same_on_any_number_of_stages():
    """Two holders of one stage each correct as the holder of both does, to the bit."""
    names = [Q, "blocks.0.attention_norm.weight", "blocks.0.ffn_norm.weight", K, "blocks.1.ffn_norm.weight", HEAD]
    parts = (names[:3], names[3:])
    holders = [Agc(group_of=grouping(AgcConfig(), role=role), guards=Guards(min_pairs=2, ramp_steps=3)) for _ in "abc"]
    versions = [{name: seeded(i, 3, 4) for i, name in enumerate(names)}]
    changed = False
    for batch in range(12):
        read = max(batch - 1, 0)
        tensors = moved({name: (1 + i) * versions[read][name] for i, name in enumerate(names)}, 500 + batch, by=0.05)
        outputs = []
        for agc, held in zip(holders, (names, *parts), strict=True):
            given = gradient({name: tensors[name] for name in held}, read=read)
            arguments = {name: versions[-1][name] for name in held}, {name: versions[read][name] for name in held}
            outputs.append(agc.correct(given, staleness=batch - read, now=arguments[0], read=arguments[1]).tensors)
        joined = outputs[1] | outputs[2]
        assert all(torch.equal(outputs[0][name], joined[name]) for name in names)
        changed |= not torch.equal(joined[Q], tensors[Q])
        versions.append(moved(versions[-1], batch + 1))
    assert changed


def test_groups_that_a_cut_would_divide_are_refused():
    check_cuts(AgcConfig(), [0, 1, 3])
    check_cuts(AgcConfig(blocks_per_group=2), [0, 2, 4])
    check_cuts(AgcConfig(groups="global"), [0])
    with pytest.raises(ConfigError, match=r"blocks_per_group is 2, but a stage begins at block 3"):
        check_cuts(AgcConfig(blocks_per_group=2), [0, 3])
    with pytest.raises(ConfigError, match=r"'global', but the model lies on 2 stages"):
        check_cuts(AgcConfig(groups="global"), [0, 2])


def test_the_control_has_the_norms_of_agc_and_the_direction_of_the_gradient():
    guards = Guards(min_pairs=2, ramp_steps=0)
    group_of = grouping(AgcConfig(), role=role)
    agc, control = Agc(group_of=group_of, guards=guards), AgcDamping(Agc(group_of=group_of, guards=guards))
    first, second = Walk(agc, noise=0.05), Walk(control, noise=0.05)
    for _ in range(12):
        given, corrected, _ = first.step()
        damped = second.step()[1]
        for name, g in given.tensors.items():
            torch.testing.assert_close(damped.tensors[name].norm(), corrected.tensors[name].norm())
            cosine = torch.nn.functional.cosine_similarity(damped.tensors[name].flatten(), g.flatten(), dim=0)
            assert float(cosine) == pytest.approx(1.0)
    assert not same(given, damped)
    assert not same(corrected, damped)
    assert control.metrics()["agc/q.0/damping"] != 1.0
