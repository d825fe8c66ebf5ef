"""The plug-in's state travels in the optimizer's own state_dict: resumed == continuous, to the bit."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from slipstream.errors import CheckpointError
from slipstream.optim.muon import Muon
from slipstream.optim.plugin import Delay, ErrorFeedback, attach, is_attached, remove

RULES = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,  # makes its state when it is built, unlike all others
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "muon": Muon,
    "muon-torch": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
METHODS = {
    "delay": (Delay(2),),
    "feedback": (ErrorFeedback(c=1.0),),
    "both": (Delay(2), ErrorFeedback(c=1.0)),
}
STEPS = 8


class Model(nn.Module):
    """Two matrices, of which one is idle in some steps, as an expert may be."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.always = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.expert = nn.Parameter(torch.randn(3, 4, generator=generator))

    def set_gradients(self, step: int, *, idle: bool) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for param in (self.always, self.expert):
            # A gradient that depends on the weights: so does everything that follows.
            param.grad = torch.randn(param.shape, generator=generator) + 0.1 * param.detach()
        if idle:
            self.expert.grad = None


def build(rule: str, methods=()) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = RULES[rule](model.parameters())
    return model, attach(optimizer, *methods) if methods else optimizer


def run(model: Model, optimizer: torch.optim.Optimizer, steps: range, *, idle=()) -> list[Tensor]:
    weights = []
    for step in steps:
        model.set_gradients(step, idle=step in idle)
        optimizer.step()
        optimizer.zero_grad()
        weights += [param.detach().clone() for param in model.parameters()]
    return weights


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    assert len(a) == len(b)
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("saved_after", [1, 2, 3, 5])
@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_resumed_is_continuous(rule, methods, saved_after):
    idle = (0, 4, 5)
    model, optimizer = build(rule, METHODS[methods])
    continuous = run(model, optimizer, range(STEPS), idle=idle)

    model, optimizer = build(rule, METHODS[methods])
    first = run(model, optimizer, range(saved_after), idle=idle)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = build(rule, METHODS[methods])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert same_bits(first + run(model, optimizer, range(saved_after, STEPS), idle=idle), continuous)


@pytest.mark.parametrize(("methods", "saved_after"), [("feedback", 1), ("delay", 3), ("both", 3)])
def test_loading_before_attaching_is_the_same(methods, saved_after):
    """A trainer's callback may attach after the trainer has resumed."""
    model, optimizer = build("adamw", METHODS[methods])
    continuous = run(model, optimizer, range(STEPS))
    model, optimizer = build("adamw", METHODS[methods])
    first = run(model, optimizer, range(saved_after))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = build("adamw")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    attach(optimizer, *METHODS[methods])
    assert same_bits(first + run(model, optimizer, range(saved_after, STEPS)), continuous)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_distributed_checkpoint_resumes_exactly(rule, methods, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build(rule, METHODS[methods])
    continuous = run(model, optimizer, range(STEPS))

    model, optimizer = build(rule, METHODS[methods])
    first = run(model, optimizer, range(4))
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    weights = copy.deepcopy(model.state_dict())
    model, optimizer = build(rule, METHODS[methods])
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert same_bits(first + run(model, optimizer, range(4, STEPS)), continuous)


@pytest.mark.parametrize("methods", METHODS)
def test_distributed_checkpoint_on_disk_resumes_exactly(methods, tmp_path):
    import torch.distributed.checkpoint as dcp

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = build("adamw", METHODS[methods])
    continuous = run(model, optimizer, range(STEPS))
    model, optimizer = build("adamw", METHODS[methods])
    first = run(model, optimizer, range(4))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    model, optimizer = build("adamw", METHODS[methods])
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    assert same_bits(first + run(model, optimizer, range(4, STEPS)), continuous)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_distributed_checkpoint_taken_before_the_first_update_loses_no_gradient(steps_before):
    """torch then makes its step on zero gradients in the middle of a run, with gradients waiting."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = build("sgd-momentum", METHODS["both"])
    continuous = run(model, optimizer, range(STEPS))
    model, optimizer = build("sgd-momentum", METHODS["both"])
    first = run(model, optimizer, range(steps_before))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    weights = copy.deepcopy(model.state_dict())
    assert same_bits(first + run(model, optimizer, range(steps_before, STEPS)), continuous), "saving changed the run"
    model, optimizer = build("sgd-momentum", METHODS["both"])
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert same_bits(first + run(model, optimizer, range(steps_before, STEPS)), continuous)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_checkpoint_without_the_plugin_loads_and_begins_anew(rule, flatten):
    """Also flattened, where torch makes an empty dict of each key that is missing."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build(rule)
    run(model, optimizer, range(3))
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    weights = copy.deepcopy(model.state_dict())
    attach(optimizer, *METHODS["both"])
    expected = run(model, optimizer, range(3, STEPS))

    model, optimizer = build(rule, METHODS["both"])
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert same_bits(run(model, optimizer, range(3, STEPS)), expected)


@pytest.mark.parametrize("flatten", [False, True])
def test_checkpoint_with_the_plugin_loads_without_it(flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build("adamw", METHODS["both"])
    run(model, optimizer, range(4))
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    moments = copy.deepcopy(optimizer.state[model.always]["exp_avg"])
    model, optimizer = build("adamw")
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert torch.equal(optimizer.state[model.always]["exp_avg"], moments)
    run(model, optimizer, range(2))


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(("saved_with", "loaded_with"), [(1, 2), (2, 1)])
def test_another_delay_is_refused_before_anything_is_replaced(saved_with, loaded_with, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build("adamw", (Delay(saved_with),))
    run(model, optimizer, range(4))
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    model, optimizer = build("adamw", (Delay(loaded_with),))
    run(model, optimizer, range(4))
    moments = copy.deepcopy(optimizer.state[model.always]["exp_avg"])
    with pytest.raises(CheckpointError, match=rf"Delay\({saved_with}\), attached is Delay\({loaded_with}\)"):
        set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert torch.equal(optimizer.state[model.always]["exp_avg"], moments)


def test_the_remedy_for_another_delay_works():
    model, optimizer = build("adamw", (Delay(2),))
    run(model, optimizer, range(4))
    saved = through_a_file(optimizer.state_dict())
    model, optimizer = build("adamw", (Delay(2),))
    optimizer.load_state_dict(saved)
    remove(optimizer)
    attach(optimizer, Delay(1))
    run(model, optimizer, range(3))


@pytest.mark.parametrize("steps", [1, 4])
def test_copies_lose_hooks_but_not_state(steps):
    """copy.deepcopy and pickle drop hooks: training would silently be synchronous. So ask, and attach again."""
    model, optimizer = build("adamw", (ErrorFeedback(c=1.0),))
    first = run(model, optimizer, range(steps))
    for duplicate in (lambda pair: copy.deepcopy(pair), lambda pair: pickle.loads(pickle.dumps(pair))):
        other_model, other = duplicate((model, optimizer))
        assert is_attached(optimizer)
        assert not is_attached(other)
        attach(other, ErrorFeedback(c=1.0))
        continued = run(other_model, other, range(steps, STEPS))
        reference_model, reference = build("adamw", (ErrorFeedback(c=1.0),))
        assert same_bits(first + continued, run(reference_model, reference, range(STEPS)))


def test_a_state_dict_is_not_aliased_by_the_optimizer_that_loaded_it():
    model, optimizer = build("sgd", METHODS["both"])
    run(model, optimizer, range(4))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    other_model, other = build("sgd", METHODS["both"])
    other.load_state_dict(saved)
    run(other_model, other, range(4))
    assert str(saved) == str(kept)


def test_an_entry_holds_only_what_checkpoints_can_carry():
    """Tensors of the parameter's shape, and whole numbers; nothing in param_groups or at the top."""
    model, plain = build("adamw")
    run(model, plain, range(4))
    model, optimizer = build("adamw", METHODS["both"])
    run(model, optimizer, range(4))
    state_dict = optimizer.state_dict()
    assert set(state_dict) == set(plain.state_dict())
    assert [set(group) for group in state_dict["param_groups"]] == [
        set(group) for group in plain.state_dict()["param_groups"]
    ]
    for param, entry in optimizer.state.items():
        ours = {key: value for key, value in entry.items() if key.startswith("slipstream_")}
        assert ours
        assert all(
            type(value) is int or (isinstance(value, Tensor) and value.shape == param.shape) for value in ours.values()
        )
