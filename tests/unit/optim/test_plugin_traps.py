"""Traps of torch's optimizer hooks, each of which has caught somebody; a test for each."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from slipstream.errors import ConfigError, StalenessError
from slipstream.optim.plugin import Delay, ErrorFeedback, attach, remove

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAZY_RULES = {  # rules that begin a parameter's state where len(state) == 0, or keep none
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
}


class Model(nn.Module):
    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=dtype))
        self.expert = nn.Parameter(torch.ones(2, 2, dtype=dtype))

    def set_gradients(self, value: float = 1.0) -> None:
        for param in self.parameters():
            param.grad = torch.full_like(param, value)


def own_keys(entry) -> set[str]:
    return {key for key in entry if key.startswith("slipstream_")}


def rule_keys(entry) -> set[str]:
    return set(entry) - own_keys(entry)


@pytest.mark.parametrize("methods", [(Delay(2),), (ErrorFeedback(),), (Delay(2), ErrorFeedback())])
@pytest.mark.parametrize("rule", LAZY_RULES)
def test_state_is_never_written_before_the_rule_has_begun_its_own(rule, methods):
    """Else AdamW takes the entry for one that it has begun, and fails on its missing step count."""
    plain = Model()
    optimizer = LAZY_RULES[rule](plain.parameters())
    plain.set_gradients()
    optimizer.step()
    expected = set(optimizer.state.get(plain.weight, {}))

    model = Model()
    optimizer = attach(LAZY_RULES[rule](model.parameters()), *methods)
    for step in range(6):
        model.set_gradients()
        if step < 3:
            model.expert.grad = None  # its state begins later than the other's
        optimizer.step()
        for param in model.parameters():
            entry = optimizer.state.get(param, {})
            assert rule_keys(entry) in (set(), expected)
            assert rule_keys(entry) == expected or not expected or not own_keys(entry)
    assert all(rule_keys(optimizer.state[param]) == expected for param in model.parameters())


def test_step_on_zero_gradients_by_distributed_checkpoint_passes_through_and_creates_state():
    model = Model()
    optimizer = attach(torch.optim.AdamW(model.parameters(), lr=0.1), Delay(2), ErrorFeedback())
    get_optimizer_state_dict(model, optimizer, options=FLAT)
    for param in model.parameters():
        entry = optimizer.state[param]
        assert {"exp_avg", "slipstream_offset", "slipstream_gradient_1"} <= set(entry)
        assert entry["slipstream_held"] == 0, "the zero gradient is not held"
        assert entry["slipstream_has_history"] == 0, "no update was made"
    assert torch.equal(model.weight.detach(), torch.ones(2, 2))
    model.set_gradients()
    optimizer.step()
    assert optimizer.state[model.weight]["slipstream_held"] == 0b10, "the first real gradient is held"


def test_a_first_step_at_learning_rate_zero_is_a_real_one():
    """Warm-up may begin at 0; only zero gradients tell torch's own step from it."""
    model = Model()
    optimizer = attach(torch.optim.SGD(model.parameters(), lr=0.0), Delay(1))
    model.set_gradients(5.0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    model.set_gradients(7.0)
    optimizer.step()
    assert torch.equal(model.weight.detach(), torch.full((2, 2), 1.0 - 5.0))


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_moments_are_not_lost_because_state_was_begun_by_the_plugin(steps):
    """torch initialises only an optimizer whose state is empty, and loads only keys that are there."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model.set_gradients()
        optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FLAT))
    model = Model()
    optimizer = attach(torch.optim.AdamW(model.parameters()), Delay(2), ErrorFeedback())
    for _ in range(steps):
        model.set_gradients()
        optimizer.step()
    set_optimizer_state_dict(model, optimizer, saved, options=FLAT)
    for name, param in model.named_parameters():
        assert torch.equal(optimizer.state[param]["exp_avg"], saved[f"state.{name}.exp_avg"])
        assert optimizer.state[param]["step"] == 3


def test_flattened_checkpoint_keeps_every_key():
    model = Model()
    optimizer = attach(torch.optim.AdamW(model.parameters()), Delay(2), ErrorFeedback())
    for _ in range(5):
        model.set_gradients()
        optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FLAT))
    model = Model()
    optimizer = attach(torch.optim.AdamW(model.parameters()), Delay(2), ErrorFeedback())
    set_optimizer_state_dict(model, optimizer, saved, options=FLAT)
    loaded = get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert loaded.keys() == saved.keys()
    for key, value in saved.items():
        assert torch.equal(loaded[key], value) if isinstance(value, Tensor) else loaded[key] == value, key


def test_a_rule_with_state_from_the_start_has_room_for_a_flattened_checkpoint():
    """Adagrad is never initialised by torch, as its state is not empty."""
    model = Model()
    optimizer = attach(torch.optim.Adagrad(model.parameters()), Delay(1), ErrorFeedback())
    assert {"sum", "slipstream_offset", "slipstream_gradient_0"} <= set(optimizer.state[model.weight])


def test_param_groups_stay_as_they_are():
    """A new key there would be missing from every older flattened checkpoint."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    keys = set(optimizer.param_groups[0])
    attach(optimizer, Delay(1), ErrorFeedback())
    for _ in range(3):
        model.set_gradients()
        optimizer.step()
    assert set(optimizer.param_groups[0]) == keys


@pytest.mark.parametrize("steps", [1, 3])
def test_float32_gradients_of_bfloat16_weights_stay_float32(steps):
    """load_state_dict casts floating state to the parameter's type: what is held would lose 16 bits."""

    def build():
        model = Model(dtype=torch.bfloat16)
        for param in model.parameters():
            param.grad_dtype = torch.float32
        return model, attach(torch.optim.SGD(model.parameters(), lr=1.0, foreach=False), Delay(2))

    model, optimizer = build()
    exact = torch.tensor([[1.0 + 2**-20, 2.0], [3.0, 4.0]])
    for _ in range(steps):
        for param in model.parameters():
            param.grad = exact.clone()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    model, optimizer = build()
    optimizer.load_state_dict(saved)
    for param in model.parameters():
        param.grad = exact.clone()
    optimizer.step()
    held = optimizer.state_dict()["state"][0]
    assert held["slipstream_gradient_0"].dtype == torch.float32
    assert torch.equal(held["slipstream_gradient_0"], exact)
    assert torch.equal(held["slipstream_gradient_1"], exact)


def test_float32_gradients_are_held_as_such_when_attached_in_mid_run():
    """The room that is made for a checkpoint has the parameter's type; the first gradient brings its own."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    optimizer = torch.optim.Adagrad([weight], foreach=False)
    optimizer.state[weight]["sum"] = torch.zeros(2)
    attach(optimizer, Delay(2))
    exact = torch.tensor([1.0 + 2**-20, 2.0])
    for _ in range(2):
        weight.grad = exact.clone()
        optimizer.step()
    assert torch.equal(optimizer.state[weight]["slipstream_gradient_0"], exact)


def test_history_of_a_rule_without_state_survives_an_idle_step_and_a_flattened_checkpoint():
    """The entry is all the state there is, and stays in optimizer.state, where torch looks for keys to load."""
    results = []
    for resumed in (False, True):
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        optimizer = attach(torch.optim.SGD(model.parameters(), lr=0.1), ErrorFeedback(c=1.0))
        for step in range(6):
            if resumed and step == 4:
                saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FLAT))
                set_optimizer_state_dict(model, optimizer, saved, options=FLAT)
            model.weight.grad = None if step == 3 else torch.full((2, 2), step + 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.weight.detach().clone())
    assert torch.equal(results[0], results[1])


def test_a_gradient_that_is_a_view_is_exchanged_in_place():
    """DDP and Megatron own the buffer behind it; a reference into it would change with the next backward."""
    buffer = torch.zeros(4)
    weight = nn.Parameter(torch.zeros(4))
    optimizer = attach(torch.optim.SGD([weight], lr=1.0), Delay(1))
    applied = []
    for step in range(1, 5):
        buffer.fill_(float(step))  # backward writes into the buffer
        weight.grad = buffer.view(4)
        before = weight.detach().clone()
        optimizer.step()
        applied.append(float((before - weight.detach())[0]))
        if step > 1:
            assert weight.grad is not None
            assert weight.grad.data_ptr() == buffer.data_ptr()
    assert applied == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_does_not_reach_what_is_held(set_to_none):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = attach(torch.optim.SGD([weight], lr=1.0), Delay(2))
    for step in range(1, 6):
        if weight.grad is None:
            weight.grad = torch.zeros(2)
        weight.grad += step  # backward accumulates
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert weight.tolist() == [-6.0, -6.0], "1 + 2 + 3 are applied"


def test_closures_are_refused_before_anything_changes():
    """They compute gradients inside the step, on weights that the forward pass should not read."""
    model = Model()
    optimizer = attach(torch.optim.SGD(model.parameters(), lr=0.1), Delay(1), ErrorFeedback())
    for call in (lambda: optimizer.step(lambda: 0.0), lambda: optimizer.step(closure=lambda: 0.0)):
        with pytest.raises(ConfigError, match="given a closure"):
            call()
    optimizer.step(None)
    model.set_gradients()
    optimizer.step(closure=None)


def test_sparse_gradients_are_refused_by_a_delay():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = attach(torch.optim.SparseAdam(table.parameters()), Delay(1))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="dense gradients only"):
        optimizer.step()


def test_sparse_gradients_are_fine_for_error_feedback():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = attach(torch.optim.SGD(table.parameters(), lr=1.0), ErrorFeedback(c=1.0))
    start = table.weight.detach().clone()
    for _ in range(2):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = start - table.weight.detach()
    assert torch.allclose(moved, torch.tensor([0.0, 2.0, 0.0, 0.0])[:, None].expand(4, 2))


def test_an_idle_expert_has_no_gradient_a_delay_later():
    """Neither its old gradient, which was applied once, nor a zero, which would decay its weights and its moments."""
    model = Model()
    optimizer = attach(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), Delay(1))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(None if model.expert.grad is None else True))
    for step in range(6):
        model.set_gradients()
        if step in (0, 2, 3):
            model.expert.grad = None
        optimizer.step()
    assert seen == [None, None, True, None, None, True], "that of the step before, or none"
    assert optimizer.state[model.expert]["step"] == 2
    assert optimizer.state[model.weight]["step"] == 5


def test_a_subclass_that_calls_its_bases_step_is_counted_once():
    """torch runs the hooks twice then, if the base class was ever used by itself."""

    class Logged(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    weight = nn.Parameter(torch.zeros(1))
    calls = []
    optimizer = Logged([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    attach(optimizer, Delay(1), ErrorFeedback(c=1.0))
    positions = []
    for gradient in (1.0, 2.0, 4.0):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        positions.append(weight.item())
    assert len(calls) == 6, "the trap is set"
    assert positions == [0.0, -1.0, -1.0 - 2.0 - (2.0 - 1.0)]


def test_a_step_that_failed_half_way_is_not_taken_for_a_whole_one():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = Model()
    optimizer = attach(Failing(model.parameters(), lr=0.1), Delay(1), ErrorFeedback(c=1.0))
    for step in range(4):
        model.set_gradients(step + 1.0)
        optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.set_gradients(5.0)
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.fails = False
    assert all("slipstream_offset" not in entry for entry in optimizer.state.values()), "no y is left as an offset"
    with pytest.raises(StalenessError, match="ended in an error half-way"):
        optimizer.step()

    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    model.set_gradients(5.0)
    optimizer.step()
    # y_5 = 1 - 0.1 (1 + 2 + 3 + 4) + c u_0, and x_5 = y_5 - c u_4.
    assert torch.allclose(model.weight.detach(), torch.full((2, 2), 1.0 - 1.0 + 0.1 - 0.4))

    optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.fails = False
    remove(optimizer)
    attach(optimizer, Delay(1), ErrorFeedback(c=1.0))
    model.set_gradients()
    optimizer.step()


def test_the_plugin_does_not_keep_an_optimizer_alive():
    import gc
    import weakref

    gc.disable()
    try:
        model = Model()
        optimizer = attach(torch.optim.AdamW(model.parameters()), Delay(1), ErrorFeedback())
        for _ in range(3):
            model.set_gradients()
            optimizer.step()
        watch = weakref.ref(optimizer)
        del optimizer
        assert watch() is None, "freed at once, not when the collector comes by"
    finally:
        gc.enable()


def test_a_compiled_step_does_the_same():
    """The hooks are kept from the compiler, which warns where it cannot trace."""
    results = []
    for compiled in (False, True):
        model = Model()
        optimizer = attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Delay(1), ErrorFeedback())
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        with warnings.catch_warnings(action="error"):
            for value in (1.0, 2.0, 3.0, 4.0):
                model.set_gradients(value)
                step()
        results.append(model.weight.detach().clone())
    assert torch.equal(results[0], results[1])
