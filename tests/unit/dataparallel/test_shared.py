"""Versions in shared memory: whoever reads one has it whole, or knows that he has not."""

import multiprocessing
import pickle

import pytest
import torch

from slipstream.dataparallel.shared import GradientSlots, HeldBoard, Layout, WeightBoard
from slipstream.errors import ConfigError

NAMES = ("a", "b", "c")


def weights(version):
    return {name: torch.full((5, 3), float(version)) for name in NAMES}


def board():
    return WeightBoard(Layout.of(weights(0)))


def read(board, version):
    """Return what was read, as the set of its values; ``None``: it was overtaken."""
    flat = board.layout.empty()
    if not board.read(version, flat):
        return None
    return {float(value) for view in board.layout.views(flat).values() for value in view.unique()}


def test_the_newest_two_versions_are_there():
    shared = board()
    assert read(shared, 0) is None
    for version in range(4):
        shared.publish(version, weights(version))
    assert [read(shared, version) for version in range(5)] == [None, None, {2.0}, {3.0}, None]


def test_a_reader_that_begins_during_a_write_is_overtaken():
    shared = board()
    shared.publish(0, weights(0))
    shared.publish(1, weights(1))
    seen = []

    class Watched(dict):
        def __getitem__(self, name):
            seen.append([read(shared, version) for version in (0, 1, 2)])
            return super().__getitem__(name)

    shared.publish(2, Watched(weights(2)))
    assert seen == [[None, {1.0}, None]] * len(NAMES)
    assert read(shared, 2) == {2.0}


@pytest.mark.parametrize("newer", [1, 2, 3, 4])
def test_a_reader_is_overtaken_by_the_next_version_in_its_buffer(newer):
    shared = board()
    shared.publish(0, weights(0))

    class Slow:
        def copy_(self, source):
            for version in range(1, newer + 1):
                shared.publish(version, weights(version))

    assert shared.read(0, Slow()) is (newer < 2)


def publish_many(board, count):
    torch.set_num_threads(1)
    for version in range(1, count):
        board.publish(version, {name: torch.full((300, 200), float(version)) for name in NAMES})


def test_no_torn_read_beside_a_process_that_writes():
    shared = WeightBoard(Layout(shapes=dict.fromkeys(NAMES, (300, 200)), dtype=torch.float32))
    shared.publish(0, dict.fromkeys(NAMES, torch.zeros(300, 200)))
    writer = multiprocessing.get_context("forkserver").Process(target=publish_many, args=(shared, 2000))
    writer.start()
    whole = 0
    while writer.is_alive() or not whole:
        newest = int(shared._stamps.max())
        found = read(shared, newest)
        if found is not None:
            assert found == {float(newest)}
            whole += 1
    writer.join()
    assert writer.exitcode == 0
    assert whole


def test_a_version_that_is_held_stays_whatever_is_published():
    shared = HeldBoard(Layout.of(weights(0)), num_readers=2)
    flat = shared.layout.empty()

    def found(version):
        return set(flat.tolist()) - {0.0} if shared.read(version, flat) else None

    for version in range(1, 4):
        shared.publish(version, weights(version), held=())
    held = [3]
    for version in range(4, 30):
        shared.publish(version, weights(version), held=held)
        assert found(3) == {3.0}
        assert found(version) == {float(version)}, "the newest"
        assert version == 4 or found(version - 1) == {version - 1.0}, "an order may be on its way"
        held = [3, 20] if version >= 20 else held
        assert version < 20 or found(20) == {20.0}
    assert found(10) is None
    shared.publish(20, weights(7), held=())
    assert (found(20), found(29)) == ({7.0}, None), "the server went on from an older state"


def test_a_gradient_is_read_by_reference_and_knows_its_idle_parameters():
    slots = GradientSlots(Layout.of(weights(0)))
    assert slots.write(1, {"a": torch.ones(5, 3), "b": None, "c": torch.full((5, 3), 2.0)}) == ("b",)
    found = slots.read(1, ("b",))
    assert found["b"] is None
    torch.testing.assert_close(found["c"], torch.full((5, 3), 2.0))
    found["a"].mul_(3.0)
    assert slots.write(2, weights(7)) == ()
    torch.testing.assert_close(slots.read(1, ())["a"], torch.full((5, 3), 3.0))
    torch.testing.assert_close(slots.read(2, ())["a"], torch.full((5, 3), 7.0))
    slots.write(3, weights(9))
    torch.testing.assert_close(found["a"], torch.full((5, 3), 9.0))


def test_parts_do_not_share_a_cache_line():
    layout = Layout(shapes={"a": (3,), "b": (), "c": (17,)}, dtype=torch.bfloat16)
    flat = layout.empty()
    starts = [view.data_ptr() - flat.data_ptr() for view in layout.views(flat).values()]
    assert [start % 64 for start in starts] == [0, 0, 0]
    assert starts == sorted(set(starts))
    assert pickle.loads(pickle.dumps(layout)).size == layout.size


def test_too_little_shared_memory_is_said_in_a_sentence(monkeypatch):
    def refuse(self):
        raise RuntimeError("unable to write to file: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    with pytest.raises(ConfigError, match=r"gives no 4 MiB of shared memory .* --shm-size"):
        Layout(shapes={"a": (1024, 1024)}, dtype=torch.float32).shared()
