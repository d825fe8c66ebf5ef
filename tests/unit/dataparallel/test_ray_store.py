"""Gradients and weights as bytes; what needs a cluster is tested in tests/distributed/test_ray_engine.py."""

import pytest
import torch

from slipstream.config import DataParallelConfig
from slipstream.dataparallel.ray_store import StoreEnd, StoreLine, as_bytes, copy_bytes
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.wire import build_wire

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2)}
LAYOUT = Layout(shapes=SHAPES, dtype=torch.float32)


def gradient(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def ends(wire):
    end = StoreEnd(LAYOUT, wire=wire)
    return end, StoreLine(wire, LAYOUT, reference=lambda version: None, far_end=lambda: end)


def frozen(parcel):
    """As Ray gives it: memory that must not be written."""
    for arrays in parcel.values():
        for array in arrays.values():
            array.setflags(write=False)
    return parcel


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_a_gradient_arrives_as_the_wire_carries_it_and_may_be_changed(name):
    wire = build_wire(DataParallelConfig(wire=name))
    sent = gradient() | {"b": None}
    written, arrived = ends(wire)
    said = written.write(4, sent, key=9)
    arrived.arrive(4, frozen(written.take(4)))
    found = arrived.read(4, said.idle)
    expected, expected_said = wire.carry(sent, key=9)
    assert said == expected_said
    assert found["b"] is None
    for parameter in ("a", "c"):
        assert torch.equal(found[parameter], expected[parameter])
        found[parameter].mul_(2)
    assert arrived.is_reference == (name == "float32")
    assert written.take(4) is None, "a parcel is sent once"


def test_what_the_server_rejects_is_not_kept():
    wire = build_wire(DataParallelConfig())
    written, arrived = ends(wire)
    for sequence in range(1, 6):
        written.write(sequence, gradient(sequence), key=sequence)
        arrived.arrive(sequence, written.take(sequence))
    assert torch.equal(arrived.read(5, ())["a"], gradient(5)["a"])
    with pytest.raises(KeyError):
        arrived.read(3, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_bytes_of_a_tensor(dtype):
    tensor = torch.arange(-8, 7).to(dtype).view(3, 5)
    into = torch.zeros(3, 5, dtype=dtype)
    copy_bytes(as_bytes(tensor.t()), into.view(5, 3))
    assert torch.equal(into.view(5, 3), tensor.t())
