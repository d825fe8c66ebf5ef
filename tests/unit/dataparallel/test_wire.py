import dataclasses
import math

import pytest
import torch

from slipstream.config import DataParallelConfig, from_dict, resolve
from slipstream.data import Loader, open_data
from slipstream.dataparallel.engine import build_engine
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.wire import BLOCK, PushSlots, WireTally, build_wire

CPU = torch.device("cpu")


def wire_of(name, seed=0):
    return build_wire(DataParallelConfig(wire=name, seed=seed))


def gradient(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(50, 100, generator=generator),
        "b": None,
        "c": 1e-4 * torch.randn(3, 5, generator=generator),
        "d": torch.zeros(7),
    }


def error(found, sent):
    pairs = [(found[name], tensor) for name, tensor in sent.items() if tensor is not None]
    lost = sum(float((x - y).double().square().sum()) for x, y in pairs)
    return math.sqrt(lost / sum(float(y.double().square().sum()) for _, y in pairs))


NUMBERS = 50 * 100 + 3 * 5 + 7
BYTES = {"float32": 4 * NUMBERS, "bfloat16": 2 * NUMBERS, "int8": NUMBERS + 4 * (3 + 1 + 1)}
assert -(-5000 // BLOCK) == 3


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_counted_and_the_error_is_what_is_lost(name):
    sent = gradient()
    found, told = wire_of(name).carry(sent, key=3)
    assert told.num_bytes == BYTES[name]
    assert told.idle == ("b",)
    assert found["b"] is None
    assert told.relative_error == pytest.approx(error(found, sent), rel=1e-5)
    assert {each.dtype for each in found.values() if each is not None} == {torch.float32}


def test_float32_hands_over_the_very_tensors():
    sent = gradient()
    found, told = wire_of("float32").carry(sent, key=3)
    assert all(found[name] is sent[name] for name in sent)
    assert told.relative_error == 0.0


def test_errors_are_of_the_size_that_the_formats_promise():
    """bfloat16 keeps 8 bits of each number; int8 steps by a / 127, uniformly rounded up or down."""
    sent = gradient()
    assert wire_of("bfloat16").carry(sent, key=0)[1].relative_error == pytest.approx(2**-8 / 12**0.5 / 0.75, rel=0.2)
    step = float(sent["a"].abs().max()) / 127
    told = wire_of("int8").carry(sent, key=0)[1].relative_error
    assert told == pytest.approx(step / 6**0.5, rel=0.1)


def test_a_small_tensor_and_a_quiet_block_keep_their_relative_precision():
    quiet = torch.cat([torch.full((BLOCK,), 1000.0), torch.full((BLOCK,), 1e-6)])
    found = wire_of("int8").carry({"a": quiet, "c": gradient()["c"]}, key=0)[0]
    torch.testing.assert_close(found["a"], quiet, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["c"], gradient()["c"], rtol=0, atol=float(gradient()["c"].abs().max()) / 127)


def test_int8_is_right_on_average_where_the_nearest_would_be_zero():
    small = torch.full((BLOCK,), 0.1)
    small[0] = 127.0
    wire = wire_of("int8")
    mean = sum(wire.carry({"a": small}, key=key)[0]["a"] for key in range(50)) / 50
    assert float(mean[1:].mean()) == pytest.approx(0.1, rel=0.02)
    assert float(mean[0]) == pytest.approx(127.0)


def test_int8_rounds_the_same_gradient_in_the_same_way_and_others_in_others():
    sent = {"a": gradient()["a"]}
    first, again, other = (wire_of("int8").carry(sent, key=key)[0]["a"] for key in (1, 1, 2))
    seeded = wire_of("int8", seed=5).carry(sent, key=1)[0]["a"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, seeded)


def test_extremes_stay_what_they_are():
    edges = torch.tensor([-3.0, 3.0, 0.0])
    for key in range(20):
        torch.testing.assert_close(wire_of("int8").carry({"a": edges}, key=key)[0]["a"], edges)
    tiny = torch.tensor([1e-40, -1e-33])
    assert torch.equal(wire_of("int8").carry({"a": tiny}, key=0)[0]["a"], torch.zeros(2))


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_as_such(name, value):
    """Synchronous workers are judged by what arrives."""
    found, _ = wire_of(name).carry({"a": torch.tensor([value, 1.0])}, key=0)
    assert not found["a"].isfinite().all()


@pytest.mark.parametrize("wire", BYTES)
def test_synchronous_workers_skip_a_step_that_is_not_finite(wire):
    executor = engine(wire=wire, mode="sync")
    executor.run_step()
    compute = executor._worker.compute

    def spoilt(*arguments, **options):
        work = compute(*arguments, **options)
        work.gradient.tensors["head.norm.weight"].fill_(math.nan)
        return work

    executor._worker.compute = spoilt
    assert executor.run_step().skipped
    executor._worker.compute = compute
    assert not executor.run_step().skipped


@pytest.mark.parametrize("name", BYTES)
def test_slots_give_the_server_what_the_wire_would(name):
    """Also of a gradient with a parameter that took no part, and after the buffers were used before."""
    wire = wire_of(name)
    shapes = {"a": (50, 100), "b": (2, 2), "c": (3, 5), "d": (7,)}
    slots = PushSlots(wire, Layout(shapes=shapes, dtype=torch.float32))
    for sequence in (1, 2, 3):
        sent = gradient(seed=sequence)
        told = slots.write(sequence, sent, key=sequence)
        found, expected = slots.read(sequence, told.idle), wire.carry(sent, key=sequence)
        assert told == expected[1]
        for key, tensor in expected[0].items():
            assert (found[key] is None) == (tensor is None)
            assert tensor is None or torch.equal(found[key], tensor)
    assert slots.is_reference == (name == "float32")


def test_slots_shrink_with_the_wire():
    layout = Layout(shapes={"a": (1000, 1000)}, dtype=torch.float32)

    def size(name):
        parts = wire_of(name).layouts(layout).values()
        return sum(part.size * part.dtype.itemsize for part in parts)

    assert size("bfloat16") == size("float32") / 2
    assert size("int8") < size("float32") / 3.9


def test_the_tally_is_a_mean_over_the_last_pushes():
    tally = WireTally()
    assert tally.figures() == {"wire_bytes_per_push": 0.0, "wire_relative_error": 0.0}
    for _ in range(200):
        tally.add(100, 1.0)
    for _ in range(99):
        tally.add(10, 0.0)
    tally.add(10, float("nan"))
    assert tally.figures() == {"wire_bytes_per_push": pytest.approx(10.9), "wire_relative_error": pytest.approx(0.01)}
    again = WireTally()
    again.load_state_dict(tally.state_dict())
    assert again.figures() == tally.figures()


def engine(**dataparallel):
    torch.set_num_threads(1)
    tables = {
        "executor": "dataparallel",
        "engine": "inline",
        "data": {"sequence_length": 8},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
        "optim": {"lr": 0.01, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": 4},
        "dataparallel": {"emulate_speeds": (1.0, 0.5)} | dataparallel,
        "train": {"microbatch_size": 1},
    }
    config = resolve(from_dict(tables), vocab_size=257, cuda=False)
    loader = Loader(open_data("").train, sequence_length=8, batch_size=1, seed=0)
    return build_engine(config, loader.batch, device=CPU)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_tells_its_bytes_and_its_error(mode):
    figures, losses = {}, {}
    for name in BYTES:
        executor = engine(wire=name, mode=mode)
        losses[name] = [executor.run_step().loss for _ in range(8)]
        figures[name] = executor.figures()
    size = {name: each["wire_bytes_per_push"] for name, each in figures.items()}
    lost = {name: each["wire_relative_error"] for name, each in figures.items()}
    assert size["bfloat16"] == size["float32"] / 2
    assert size["float32"] / 4 < size["int8"] < size["float32"] / 3.9
    assert lost["float32"] == 0 < lost["bfloat16"] < 0.003 < lost["int8"] < 0.05
    assert losses["float32"][0] == losses["int8"][0]
    assert losses["float32"][-1] != losses["bfloat16"][-1] != losses["int8"][-1]
    assert losses["int8"][-1] == pytest.approx(losses["float32"][-1], rel=0.02)


def test_the_norm_is_that_of_the_gradient_before_it_was_rounded():
    norms = [engine(wire=name).run_step().grad_norm for name in BYTES]
    assert norms[0] == norms[1] == norms[2]


def test_pushes_carry_their_figures():
    executor = engine(wire="int8")
    pushes = []
    push = executor.server.push

    def spy(each, *arguments, **options):
        pushes.append(each)
        return push(each, *arguments, **options)

    executor.server.push = spy
    executor.run_step()
    assert {each.wire_bytes for each in pushes} == {executor.figures()["wire_bytes_per_push"]}
    assert all(0 < each.wire_error < 0.05 for each in pushes)
    assert dataclasses.asdict(pushes[0])["wire_bytes"]
