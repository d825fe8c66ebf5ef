import pytest
import torch

from slipstream.errors import StalenessError
from slipstream.staleness.versions import VersionedWeights


def ring(num_buffers: int) -> VersionedWeights:
    return VersionedWeights({"w": torch.zeros(2)}, num_buffers=num_buffers, dtype=torch.float32)


def publish(weights: VersionedWeights) -> None:
    version = weights.latest + 1
    weights.buffer(version)["w"].fill_(version)
    weights.advance()


def test_each_live_version_reads_back_as_it_was_published():
    weights = ring(3)
    for _ in range(7):
        publish(weights)
        assert [float(weights.read(v)["w"][0]) for v in weights.live] == list(weights.live)
    assert weights.live == range(5, 8)


@pytest.mark.parametrize("version", [4, 8])
def test_a_version_that_is_not_held_is_refused_with_what_is_held(version):
    weights = ring(3)
    for _ in range(7):
        publish(weights)
    with pytest.raises(StalenessError, match=f"version {version} .* held are 5 to 7"):
        weights.read(version)


def test_restore_gives_back_the_same_versions():
    saved = ring(2)
    for _ in range(5):
        publish(saved)
    fresh = ring(2)
    fresh.restore({version: saved.read(version) for version in saved.live})
    assert fresh.live == saved.live
    assert all(torch.equal(fresh.read(v)["w"], saved.read(v)["w"]) for v in saved.live)


def test_restore_into_more_buffers_repeats_the_oldest_version():
    fresh = ring(3)
    fresh.restore({5: {"w": torch.full((2,), 5.0)}})
    assert [float(fresh.read(v)["w"][0]) for v in fresh.live] == [5.0, 5.0, 5.0]
    assert fresh.live == range(3, 6)


def test_restore_refuses_a_gap():
    with pytest.raises(StalenessError, match="not consecutive"):
        ring(2).restore({3: {"w": torch.zeros(2)}, 5: {"w": torch.zeros(2)}})


def test_the_buffers_do_not_share_memory_with_the_initial_weights():
    initial = torch.zeros(2)
    weights = VersionedWeights({"w": initial}, num_buffers=2, dtype=torch.float32)
    publish(weights)
    assert float(initial[0]) == 0.0
    assert float(weights.read(0)["w"][0]) == 0.0
