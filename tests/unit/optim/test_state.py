import json

import pytest
import torch
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.optim import Muon, export_state, import_state, join_tensors, split_tensors

RULES = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 2}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    (torch.optim.Muon, {"lr": 0.02}),
    (Muon, {"lr": 0.02}),
]
SHAPES = {"a.weight": (4, 5), "b.weight": (6, 3), "c.weight": (3, 2), "idle.weight": (2, 2)}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def named_weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def copied(weights):
    return {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}


def train(optimizers, weights, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, weight in weights.items():
            grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            # "idle" has no gradient until late, "b" has none at times: lazily begun states differ in age.
            absent = (name.startswith("idle") and step < 5) or (name.startswith("b") and step % 3 == 0)
            weight.grad = None if absent else grad
        for optimizer in optimizers:
            optimizer.step()


def through_files(state):
    """What a checkpoint does: tensors to one file, the rest to JSON."""
    tensors, tree = split_tensors(state)
    kept = {key: tensor.clone() for key, tensor in tensors.items()}
    return join_tensors(json.loads(json.dumps(tree)), kept.__getitem__)


def build(rule, settings, weights):
    return rule(list(weights.items()), **settings)


@pytest.mark.parametrize("num_before", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rule", "settings"), RULES)
def test_resumed_equals_continuous_to_the_bit(rule, settings, dtype, num_before):
    straight = named_weights(dtype)
    optimizer = build(rule, settings, straight)
    train([optimizer], straight, range(num_before))
    resumed = copied(straight)
    state = through_files(export_state(optimizer))
    assert list(state) == list(SHAPES)
    fresh = build(rule, settings, resumed)
    import_state(fresh, state)
    assert_same(export_state(fresh), export_state(optimizer))
    train([optimizer], straight, range(num_before, num_before + 4))
    train([fresh], resumed, range(num_before, num_before + 4))
    for name in SHAPES:
        assert torch.equal(straight[name], resumed[name]), name
    assert_same(export_state(fresh), export_state(optimizer))


def assert_same(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second or (first != first and second != second)


@pytest.mark.parametrize(("rule", "settings"), [(torch.optim.AdamW, {}), (Muon, {"lr": 0.02})])
def test_state_moves_to_another_grouping(rule, settings):
    straight = named_weights()
    optimizer = build(rule, settings, straight)
    train([optimizer], straight, range(3))
    split = copied(straight)
    names = list(SHAPES)
    parts = [build(rule, settings, {name: split[name] for name in part}) for part in (names[2:], names[:2])]
    state = through_files(export_state(optimizer))
    for part in parts:
        import_state(part, state)
    train([optimizer], straight, range(3, 6))
    train(parts, split, range(3, 6))
    merged = export_state(parts[1]) | export_state(parts[0])
    assert_same(merged, export_state(optimizer))
    assert all(torch.equal(straight[name], split[name]) for name in names)


def test_a_parameter_without_gradients_has_an_empty_entry_and_begins_lazily():
    weights = named_weights()
    optimizer = build(torch.optim.AdamW, {}, weights)
    train([optimizer], weights, range(1))
    state = export_state(optimizer)
    assert state["idle.weight"] == {}
    assert weights["idle.weight"] not in optimizer.state  # looking must not begin it
    fresh = build(torch.optim.AdamW, {}, copied(weights))
    import_state(fresh, state)
    assert fresh.param_groups[0]["params"][3] not in fresh.state


def test_copies_on_import_and_keeps_the_memory_layout():
    weight = nn.Parameter(torch.randn(5, 3).T)
    optimizer = build(torch.optim.AdamW, {}, {"w": weight})
    weight.grad = torch.ones(3, 5)
    optimizer.step()
    state = export_state(optimizer)
    other = nn.Parameter(torch.randn(5, 3).T)
    fresh = build(torch.optim.AdamW, {}, {"w": other})
    import_state(fresh, {"w": {key: value.contiguous() for key, value in state["w"].items()}})
    for key, value in fresh.state[other].items():
        assert value.data_ptr() != state["w"][key].data_ptr()
    assert fresh.state[other]["exp_avg"].stride() == weight.stride()


def test_settings_of_the_new_run_win():
    weights = named_weights()
    first = torch.optim.AdamW([{"params": list(weights.items()), "weight_decay": 0.5, "initial_lr": 0.3}], lr=0.3)
    train([first], weights, range(2))
    assert not any(key.startswith("group.") for entry in export_state(first).values() for key in entry)
    second = torch.optim.AdamW([{"params": list(copied(weights).items()), "weight_decay": 0.1}], lr=0.1)
    import_state(second, export_state(first))
    assert second.param_groups[0]["lr"] == 0.1
    assert second.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"])
def test_restored_state_lies_where_the_rule_would_have_made_it(name):
    """The device meta stands for CUDA: a scalar that a rule reads on the host must not be moved there."""

    def begun(device):
        weight = nn.Parameter(torch.ones(3, 2, device=device))
        optimizer = build(getattr(torch.optim, name), {}, {"w": weight})
        weight.grad = torch.ones(3, 2, device=device)
        optimizer.step()
        return optimizer

    expected = export_state(begun("meta"))["w"]
    resumed = build(getattr(torch.optim, name), {}, {"w": nn.Parameter(torch.ones(3, 2, device="meta"))})
    import_state(resumed, export_state(begun("cpu")))
    found = export_state(resumed)["w"]
    assert {key: value.device.type for key, value in found.items()} == {
        key: value.device.type for key, value in expected.items()
    }


class Elaborate(torch.optim.Optimizer):
    """Keeps state in every place and form that rules outside torch use."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "d": 1.0, "k": 0})
        self.total = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.total += 1
        shared = self.state["shared"]
        shared["sum"] = shared.get("sum", torch.zeros(1, dtype=torch.float64)) + 1
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if len(state) == 0:
                    precise = torch.zeros(param.shape, dtype=torch.float32)
                    state |= {"precise": precise, "factors": [None, (torch.ones(2), 2)], "by_dim": {0: torch.ones(())}}
                state["precise"] += param.grad.float() / 3
                state["by_dim"][0] += 1
                state["nan"] = float("nan")
                scale = group["lr"] * group["d"] / (group["k"] + self.total) / state["by_dim"][0] / shared["sum"].item()
                param.add_(-scale * state["precise"].to(param.dtype))

    def state_dict(self):
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict):
        self.total = state_dict["total"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "total"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rule_with_state_everywhere_resumes_exactly(dtype):
    straight = named_weights(dtype)
    optimizer = build(Elaborate, {}, straight)
    train([optimizer], straight, range(4))
    resumed = copied(straight)
    exported = export_state(optimizer)
    assert exported["a.weight"]["group.k"] == 4
    assert exported[""]["extra"] == {"total": 4}
    fresh = build(Elaborate, {}, resumed)
    import_state(fresh, through_files(exported))
    assert_same(export_state(fresh), exported)
    assert fresh.state[resumed["a.weight"]]["precise"].dtype == torch.float32  # torch's own loading would cast it
    train([optimizer], straight, range(4, 8))
    train([fresh], resumed, range(4, 8))
    assert_same(export_state(fresh), export_state(optimizer))
    assert all(torch.equal(straight[name], resumed[name]) for name in SHAPES)


def test_groups_that_were_merged_must_agree():
    state = {"a": {"group.d": 1.5}, "b": {"group.d": 2.5}}
    params = {"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.ones(1))}
    with pytest.raises(CheckpointError, match=r"'group\.d' is 1\.5 for a and 2\.5 for b, which are now in one group"):
        import_state(Elaborate(list(params.items())), state)
    nan = {"a": {"group.d": float("nan")}, "b": {"group.d": float("nan")}}
    import_state(Elaborate(list(params.items())), nan)


def test_errors_name_what_is_missing_or_cannot_be_stored():
    weights = named_weights()
    with pytest.raises(CheckpointError, match="have no names"):
        export_state(torch.optim.SGD(weights.values()))
    with pytest.raises(CheckpointError, match=r"no entry for 3 of 4 parameters \(b\.weight, c\.weight, idle\.weight\)"):
        import_state(build(torch.optim.SGD, {}, weights), {"a.weight": {}})
    optimizer = build(torch.optim.SGD, {}, weights)
    optimizer.state[weights["a.weight"]]["history"] = {1, 2}
    with pytest.raises(CheckpointError, match=r"SGD, parameter 'a\.weight', 'history': .* type set"):
        export_state(optimizer)
    optimizer.state[weights["a.weight"]] = {(1, 2): 3}
    with pytest.raises(CheckpointError, match=r"under the key \(1, 2\)"):
        export_state(optimizer)
    with pytest.raises(CheckpointError, match="cannot read a node"):
        join_tensors({"neither": 1}, {}.__getitem__)
    with pytest.raises(KeyError, match="w"):
        join_tensors({"tensor": "w"}, {}.__getitem__)


def test_floats_survive_json_exactly():
    state = {"w": {"values": [0.1 + 0.2, 1e-320, float("inf"), 2**60 + 1, True, None, "text"], "pair": (1, 2.0)}}
    assert_same(through_files(state), state)
