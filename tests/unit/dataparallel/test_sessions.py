"""Sessions of two ranks, many in one process; on a cluster they are tested in tests/distributed/test_ray_engine.py."""

import contextlib
import threading

import pytest
import torch

from slipstream.config import DataParallelConfig
from slipstream.dataparallel import sessions
from slipstream.dataparallel.sessions import Session, Sessions
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.wire import PushSlots, build_wire
from slipstream.errors import StageError

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2)}
GRADIENT = Layout(shapes=SHAPES, dtype=torch.float32)
WEIGHTS = Layout(shapes=SHAPES, dtype=torch.bfloat16)
LOOPBACK = "127.0.0.1"


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def build(name="float32", *, host=LOOPBACK, timeout_s=20.0):
    return Sessions(WEIGHTS, GRADIENT, wire=build_wire(DataParallelConfig(wire=name)), host=host, timeout_s=timeout_s)


class Far(threading.Thread):
    """A worker: reads a version and pushes, so many times."""

    def __init__(self, session, *, count=1):
        super().__init__(daemon=True)
        self.end = session.far_end()
        self.count = count
        self.read = []
        self.said = []
        self.error = None
        self.start()

    def run(self):
        try:
            for number in range(1, self.count + 1):
                flat = WEIGHTS.empty()
                assert self.end.read(0, flat)
                self.read.append(flat)
                self.said.append(self.end.write(number, tensors(number) | {"b": None}, key=number))
        except RuntimeError as error:
            self.error = error


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_weights_and_gradients_arrive_as_the_wire_carries_them(name):
    lines = build(name)
    with contextlib.closing(lines.open()) as session:
        far = Far(session, count=3)
        for number in (1, 2, 3):
            lines.publish(number, tensors(10 + number, torch.bfloat16))
            assert session.offer(number) is None
            # What is published meanwhile must not reach a worker that was told to read another version.
            lines.publish(number + 1, tensors(0, torch.bfloat16))
            while len(far.said) < number:
                assert far.is_alive() or len(far.said) == number, far.error
            session.arrive(number, far.end.take(number))
            session.arrive(number, None)  # said twice
            expected, said = build_wire(DataParallelConfig(wire=name)).carry(tensors(number) | {"b": None}, key=number)
            assert far.said[-1] == said
            found = session.read(number, said.idle)
            assert found["b"] is None
            for parameter in ("a", "c"):
                assert torch.equal(found[parameter], expected[parameter])
            views = WEIGHTS.views(far.read[-1])
            assert all(torch.equal(views[each], value) for each, value in tensors(10 + number, torch.bfloat16).items())
        far.join()


def test_who_hangs_or_goes_breaks_its_own_session_alone():
    lines = build()
    lines.publish(0, tensors(0, torch.bfloat16))
    hangs, goes, goes_on = (lines.open() for _ in range(3))
    quick, gone = Far(goes_on, count=2), Far(goes)
    for session in (hangs, goes, goes_on):
        session.offer(0)  # the first is never looked for
    gone.join()
    goes.arrive(1, None)
    gone.end.__dict__.pop("_group")  # as the system does it to one that was killed
    goes.offer(0)
    with pytest.raises(StageError, match="does not arrive"):
        goes.arrive(2, None)
    hangs.close()
    lines.publish(1, tensors(1, torch.bfloat16))
    goes_on.arrive(1, None)
    goes_on.offer(1)
    quick.join()
    goes_on.arrive(2, None)
    assert torch.equal(goes_on.read(2, ("b",))["a"], tensors(2)["a"])
    with contextlib.closing(lines.open()) as again:  # another life
        back = Far(again)
        again.offer(1)
        back.join()
        again.arrive(1, None)
    goes_on.close()


def test_weights_are_copied_to_where_nobody_reads():
    """Of one that is gone, nothing is held."""
    lines = build()
    lines.publish(0, tensors(0, torch.bfloat16))
    slow = lines.open()
    slow.offer(0)
    for version in range(1, 5):
        lines.publish(version, tensors(version, torch.bfloat16))
    assert len(lines._flats) == 2
    read = WEIGHTS.views(slow.reading)
    assert all(torch.equal(read[name], value) for name, value in tensors(0, torch.bfloat16).items())
    slow.close()
    lines.publish(5, tensors(5, torch.bfloat16))
    lines.publish(6, tensors(6, torch.bfloat16))
    assert len(lines._flats) == 2


def test_a_worker_may_compute_for_longer_than_ends_look_for_each_other():
    lines = build(timeout_s=1.0)
    lines.publish(0, tensors(0, torch.bfloat16))
    with contextlib.closing(lines.open()) as session:
        session.offer(0)
        end = session.far_end()
        assert end.read(0, WEIGHTS.empty())
        threading.Event().wait(1.2)
        end.write(1, tensors(1), key=1)
        session.arrive(1, None)
        assert torch.equal(session.read(1, ())["a"], tensors(1)["a"])


def test_a_session_may_be_closed_at_the_moment_in_which_it_is_connected():
    class Closing(Session):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_group" and value is not None:
                self.close()  # what the other thread may do

    slots = PushSlots(build_wire(DataParallelConfig()), GRADIENT, is_shared=False)
    session = Closing(slots, weights=lambda version: WEIGHTS.empty(), connect=object, far_end=object)
    session._begin(object, WEIGHTS.empty())
    assert session.is_closed
    assert session._group is None


def test_where_the_server_cannot_listen_is_said():
    with pytest.raises(StageError, match=r"cannot listen on 192\.0\.2\.1, where workers"):
        build(host="192.0.2.1").open()


def test_a_push_that_left_and_does_not_come_is_lost(monkeypatch):
    monkeypatch.setattr(sessions, "DEADLINE_FLOOR_S", 0.05)
    lines = build()
    lines.publish(0, tensors(0, torch.bfloat16))
    with contextlib.closing(lines.open()) as session:
        session.offer(0)
        session.far_end().read(0, WEIGHTS.empty())
        with pytest.raises(StageError, match="does not arrive"):
            session.arrive(1, None)
        assert session.is_closed
