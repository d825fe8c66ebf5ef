"""Which pairs of gradients tell the curvature, and what the obvious ones tell instead."""

import pytest
import torch
from torch import Tensor

from slipstream.staleness.agc import Agc
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.guards import Guards

CURVATURE = 2.15
SIZE = 20_000
NEVER = Guards(min_pairs=10**9)
"""Only measure."""


class NoisyQuadratic:
    """SGD on h |w|^2 / 2 with noisy gradients, each ``num_workers - 1`` updates stale, workers taking turns."""

    def __init__(self, *, lr: float, num_workers: int) -> None:
        self.lr = lr
        self.num_workers = num_workers
        self.generator = torch.Generator().manual_seed(0)
        self.versions = [torch.zeros(SIZE)]

    def gradient(self) -> tuple[Tensor, int]:
        """Return the next gradient and the version it read, and apply it."""
        batch = len(self.versions) - 1
        read = max(batch - self.num_workers + 1, 0)
        g = CURVATURE * self.versions[read] + torch.randn(SIZE, generator=self.generator)
        self.versions.append(self.versions[-1] - self.lr * g)
        return g, read


def correct(agc: Agc, g: Tensor, *, read: int, version: int, read_weights: Tensor, worker: int | None = None) -> None:
    given = Gradient(tensors={"w": g}, read_version=read, num_tokens=1, worker=worker)
    agc.correct(given, staleness=version - read, now={"w": read_weights}, read={"w": read_weights})


def pairs(agc: Agc) -> float:
    held = agc.slots["pairs"].get("w")
    return 0.0 if held is None else float(held)


@pytest.mark.parametrize(("num_workers", "lr"), [(4, 0.01), (4, 0.003), (2, 0.02)])
def test_consecutive_gradients_of_one_worker_measure_the_learning_rate(num_workers, lr):
    """Their displacement holds the first one's noise: 1 / (K lr) comes on top, ten times the curvature and more."""
    run, agc = NoisyQuadratic(lr=lr, num_workers=num_workers), Agc(guards=NEVER)
    last: dict[int, tuple[Tensor, int]] = {}
    for batch in range(400):
        g, read = run.gradient()
        worker = batch % num_workers
        if worker in last and last[worker][1] != read:
            earlier, earlier_read = last[worker]
            agc.probe({"w": earlier}, {"w": run.versions[earlier_read]}, {"w": g}, {"w": run.versions[read]})
        last[worker] = g, read
    biased = agc.curvature.scale(["w"])
    assert biased == pytest.approx(CURVATURE + 1 / (num_workers * lr), rel=0.1)
    assert biased > 5 * CURVATURE


@pytest.mark.parametrize("worker_names", [True, False], ids=["workers", "one process"])
@pytest.mark.parametrize(("num_workers", "lr"), [(4, 0.01), (4, 0.003), (2, 0.02)])
def test_concurrent_gradients_measure_the_curvature(num_workers, lr, worker_names):
    """In one process a delay of ``num_workers - 1`` is the same sequence, so the same pairs are good there."""
    run, agc = NoisyQuadratic(lr=lr, num_workers=num_workers), Agc(guards=NEVER)
    for batch in range(1000):
        g, read = run.gradient()
        worker = batch % num_workers if worker_names else None
        correct(agc, g, read=read, version=batch, read_weights=run.versions[read], worker=worker)
    # The spread over runs is about sqrt(2 / SIZE / 200) / lr: 0.07 to 0.24.
    assert agc.curvature.scale(["w"]) == pytest.approx(CURVATURE, abs=4 * (2 / SIZE / 200) ** 0.5 / lr)
    assert pairs(agc) > 900


def test_a_fast_worker_s_own_consecutive_gradients_are_left_out():
    """It pushes three times while the other computes once; paired with itself it would measure 1 / lr and more."""
    lr, generator, agc = 0.01, torch.Generator().manual_seed(0), Agc(guards=NEVER)
    versions, reads = [torch.zeros(SIZE)], {0: 0, 1: 0}
    for batch in range(1200):
        worker = int(batch % 4 == 3)
        read = reads[worker]
        g = CURVATURE * versions[read] + torch.randn(SIZE, generator=generator)
        correct(agc, g, read=read, version=batch, read_weights=versions[read], worker=worker)
        versions.append(versions[-1] - lr * g)
        reads[worker] = batch + 1
    assert agc.curvature.scale(["w"]) == pytest.approx(CURVATURE, abs=4 * (2 / SIZE / 200) ** 0.5 / lr)
    assert 0 < pairs(agc) < 700


def test_probes_measure_the_curvature_though_they_are_consecutive():
    run, agc = NoisyQuadratic(lr=0.01, num_workers=1), Agc(guards=NEVER)
    for batch in range(20):
        g, _ = run.gradient()
        old, new = run.versions[batch], run.versions[batch + 1]
        agc.probe({"w": g}, {"w": old}, {"w": g + CURVATURE * (new - old)}, {"w": new})
    assert agc.curvature.scale(["w"]) == pytest.approx(CURVATURE, rel=1e-3)


@pytest.mark.parametrize(
    ("why", "second", "is_pair"),
    [
        ("read before the first was applied", {"read": 4, "version": 6, "worker": 2}, True),
        ("from nobody in particular", {"read": 4, "version": 6, "worker": None}, True),
        ("late: read before the first did", {"read": 2, "version": 6, "worker": 2}, True),
        ("into the same update", {"read": 4, "version": 5, "worker": 2}, True),
        ("read what the first made", {"read": 6, "version": 6, "worker": 2}, False),
        ("the same worker", {"read": 4, "version": 6, "worker": 1}, False),
        ("no displacement", {"read": 3, "version": 6, "worker": 2}, False),
    ],
)
def test_the_rule(why, second, is_pair):
    """The first read version 3 and made version 6."""
    agc = Agc(guards=NEVER)
    weights = [torch.full((4,), float(version)) for version in range(8)]
    for given in ({"read": 3, "version": 5, "worker": 1}, second):
        g = torch.ones(4)
        correct(agc, g, **given, read_weights=weights[given["read"]])
    assert pairs(agc) == float(is_pair), why


def test_no_staleness_no_pairs():
    agc = Agc(guards=NEVER)
    for version in range(5):
        correct(agc, torch.ones(4), read=version, version=version, read_weights=torch.full((4,), float(version)))
    assert pairs(agc) == 0


def test_the_weights_read_are_copied_since_their_buffer_is_written_again():
    agc = Agc(guards=NEVER)
    buffer = torch.zeros(4)
    correct(agc, torch.zeros(4), read=0, version=1, read_weights=buffer)
    buffer.fill_(2.0)
    correct(agc, torch.full((4,), 6.0), read=1, version=2, read_weights=buffer)
    assert agc.curvature.scale(["w"]) == pytest.approx(3.0)
