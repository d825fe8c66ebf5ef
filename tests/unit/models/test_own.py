"""What a module of one's own must be like, and what is said where it is not."""

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.models.own import OwnModel, OwnParts
from slipstream.models.partition import StageSpec, cut
from slipstream.train.own import OwnBatch, fit, open_own

INPUTS, TARGETS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 2)


def module(**changes):
    parts = {
        "embed": nn.Linear(3, 6),
        "blocks": nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), nn.Linear(6, 6)]),
        "head": nn.Linear(6, 2),
    }
    return nn.ModuleDict({name: each for name, each in {**parts, **changes}.items() if each is not None})


def squares(output, targets):
    return ((output - targets) ** 2).sum()


def parts(build=module, **changes):
    return OwnParts(OwnModel(build=build, **{"loss": squares, **changes}), INPUTS, TARGETS, seed=0)


def test_stages_hold_their_parts_under_the_names_of_the_whole():
    own = parts()
    stages = [own.build(spec, torch.device("cpu")) for spec in cut(own.costs(), 2)]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == list(own.names)
    whole = own.build(StageSpec(blocks=range(3), embed=True, head=True), torch.device("cpu"))
    for key in (None, (3, 1)):
        assert torch.equal(
            stages[1](stages[0](INPUTS, dropout_key=key), dropout_key=key), whole(INPUTS, dropout_key=key)
        )
    assert not torch.equal(whole(INPUTS, dropout_key=(3, 1)), whole(INPUTS, dropout_key=(3, 2)))


def test_nothing_is_left_of_other_peoples_random_state():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    own = parts()
    own.build(StageSpec(blocks=range(3), embed=True, head=True), torch.device("cpu"))(INPUTS, dropout_key=(0, 0))
    assert torch.equal(torch.rand(1), expected)
    again = parts()
    assert all(torch.equal(a, b) for a, b in zip(own._whole.parameters(), again._whole.parameters(), strict=True))


def test_roles_and_costs():
    own = parts()
    assert [own.role(name) for name in own.names[:4]] == ["embedding", "bias", "matrix", "bias"]
    assert own.role("head.weight") == "head"
    assert own.costs() == [43, 43, 43 + 14]
    assert parts(costs=(1.0, 2.0, 3.0)).costs() == (1.0, 2.0, 3.0)
    assert parts(role=lambda name: "other").role("blocks.0.weight") == "other"


class Mixed(nn.Module):
    """A block with more than linear layers: tables, filters, and a stack of matrices of its own."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(4, 6)
        self.bag = nn.EmbeddingBag(4, 6)
        self.depthwise = nn.Conv1d(6, 6, 3, groups=6)
        self.image = nn.Conv2d(1, 6, 3)
        self.linear = nn.Linear(6, 6)
        self.experts = nn.Parameter(torch.zeros(2, 6, 6))

    def forward(self, x):
        return self.linear(x)


def test_a_blocks_weights_are_matrices_by_what_owns_them():
    own = parts(lambda: module(blocks=nn.ModuleList([Mixed()])))
    assert {name.removeprefix("blocks.0."): own.role(name) for name in own.names if name.startswith("blocks.")} == {
        "experts": "matrix",
        "positions.weight": "embedding",
        "bag.weight": "embedding",
        "depthwise.weight": "other",
        "depthwise.bias": "bias",
        "image.weight": "other",
        "image.bias": "bias",
        "linear.weight": "matrix",
        "linear.bias": "bias",
    }


def tied():
    made = module(head=nn.Linear(6, 3, bias=False), embed=nn.Embedding(3, 6))
    made["head"].weight = made["embed"].weight
    return made


def test_a_tied_head_is_a_leaf_of_its_own():
    own = OwnParts(OwnModel(build=tied, loss=lambda out, _: out.sum()), torch.zeros(4, dtype=torch.long), None, seed=0)
    assert own.tied == {"head.weight": "embed.weight"}
    assert {"head.weight", "embed.weight"} <= set(own.names)


def shared_blocks():
    made = module()
    made["blocks"][2].weight = made["blocks"][0].weight
    return made


def frozen():
    made = module()
    made["head"].bias.requires_grad_(False)
    return made


@pytest.mark.parametrize(
    ("build", "changes", "words"),
    [
        (lambda: module(head=None), {}, "has no submodule 'head'"),
        (module, {"blocks": "layers"}, "has no submodule 'layers'"),
        (lambda: module(blocks=nn.ModuleList()), {}, "'blocks' holds no blocks"),
        (lambda: module(extra=nn.Linear(2, 2)), {}, "the parameter 'extra.weight' belongs to none of embed"),
        (shared_blocks, {}, "'blocks.0.weight' and 'blocks.2.weight' are one"),
        (frozen, {}, "'head.bias' is of the type torch.float32 with requires_grad False"),
        (lambda: module(blocks=nn.ModuleList([nn.BatchNorm1d(6)])), {}, "'blocks.0' (BatchNorm1d) keeps running"),
        (lambda: module(blocks=nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 6)])), {}, "'blocks.0' gives a tensor of"),
        (module, {"loss": lambda output, targets: output}, "loss gives a tensor of shape (4, 2)"),
        (module, {"loss": lambda output, targets: 1.0}, "loss gives float"),
        (module, {"call_block": lambda stage, block, x: (block(x),)}, "'blocks.0' gives tuple"),
    ],
)
def test_what_cannot_be_trained_is_named(build, changes, words):
    with pytest.raises(ConfigError) as raised:
        parts(build, **changes)
    assert words in str(raised.value)


class Table(nn.Module):
    """An embedding that adds a table of floats which is no parameter."""

    def __init__(self, cast=False):
        super().__init__()
        self.linear, self.cast = nn.Linear(3, 6), cast
        self.register_buffer("table", torch.ones(6))

    def forward(self, x):
        return self.linear(x) + (self.table.to(x.dtype) if self.cast else self.table)


def tried(dtype, **embed):
    model = OwnModel(build=lambda: module(embed=Table(**embed)), loss=squares)
    return OwnParts(model, INPUTS, TARGETS, seed=0, dtype=dtype)


def test_the_trial_computes_as_training_will():
    """On CUDA in bfloat16 by default: what fails there alone is to be said before, in a sentence."""
    with pytest.raises(ConfigError, match=r"but not in bfloat16 \(train\.compute_dtype\): .*x \+ self\.table\.to"):
        tried(torch.bfloat16)
    expected = tried(torch.float32).message_shape
    assert expected == tried(torch.bfloat16, cast=True).message_shape == (4, 6)
    with pytest.raises(ConfigError, match="but not in bfloat16"):
        fit_in("bfloat16")


def fit_in(dtype):
    from slipstream.config import from_dict

    tables = {"train": {"microbatch_size": 2, "compute_dtype": dtype}, "pipeline": {"num_microbatches": 4}}
    open_own(OwnModel(build=lambda: module(embed=Table()), loss=squares), Data(), from_dict(tables), 0, None)


def test_a_trial_in_bfloat16_leaves_weights_as_they_were_drawn():
    ours, theirs = (tried(dtype, cast=True) for dtype in (torch.bfloat16, torch.float32))
    spec = StageSpec(blocks=range(ours.num_blocks), embed=True, head=True)
    one, other = (each.build(spec, torch.device("cpu")).state_dict() for each in (ours, theirs))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_the_host_alone_cannot_compute_is_no_fault_of_the_model():
    def loss(output, targets):
        if output.dtype != torch.float32:
            raise NotImplementedError("'cross' not implemented for 'BFloat16'")
        return squares(output, targets)

    own = OwnParts(OwnModel(build=module, loss=loss), INPUTS, TARGETS, seed=0, dtype=torch.bfloat16)
    assert own.message_shape == (4, 6)


class Data:
    def __init__(self, rows=8, validation_rows=2, units=None):
        self.rows, self.validation_rows, self.units = rows, validation_rows, units

    def batch(self, index):
        return OwnBatch(inputs=torch.ones(self.rows, 3), targets=torch.zeros(self.rows, 2), num_units=self.units)

    def validation(self):
        return [OwnBatch(inputs=torch.ones(self.validation_rows, 3), targets=torch.zeros(self.validation_rows, 2))]


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (Data(rows=7), {}, "batch 0 has tensors of 7 rows"),
        (Data(validation_rows=3), {}, "validation batch 0 has tensors of 3 rows"),
        (Data(units=0), {}, "batch 0 has num_units 0"),
        (Data(), {"executor": "dataparallel"}, "not a model of your own"),
        (Data(), {"staleness": {"delay": 1, "delay_roles": ["q"]}}, "staleness.delay_roles goes by the names"),
        (Data(), {"staleness": {"delay": 1, "correction": "agc"}}, "'agc' groups the built-in decoder's parameters"),
        (Data(), {"executor": "pipeline", "pipeline": {"num_stages": 4}}, "4 pipeline stages were asked for"),
    ],
)
def test_settings_and_batches_that_do_not_fit(tmp_path, data, changes, words):
    from slipstream.config import from_dict

    tables = {"train": {"microbatch_size": 2, "num_steps": 1}, "pipeline": {"num_microbatches": 4}}
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    with pytest.raises(SlipstreamError) as raised:
        fit(OwnModel(build=module, loss=squares), data, from_dict(tables | {"run_dir": str(tmp_path / "run")}))
    assert words in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_rows_are_never_left_out():
    from slipstream.config import from_dict

    class RunsOut(Data):
        def batch(self, index):
            return Data(rows=8 if index < 2 else 6).batch(index)

    config = from_dict(
        {"train": {"microbatch_size": 2, "compute_dtype": "float32"}, "pipeline": {"num_microbatches": 4}}
    )
    source = open_own(OwnModel(build=module, loss=squares), RunsOut(), config, 0, None).source
    assert source(1).num_rows == 8
    with pytest.raises(ConfigError, match="batch 2 has tensors of 6 rows"):
        source(2)
    with pytest.raises(ConfigError, match="6 rows do not make 4 equal microbatches"):
        RunsOut().batch(2).microbatch(0, 4)


def test_a_stage_without_parameters_is_refused():
    own = parts(lambda: module(blocks=nn.ModuleList([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)])))
    own.check_cuts(cut(own.costs(), 2))
    with pytest.raises(ConfigError, match=r"stage 1 would hold blocks\.1, which have no parameters"):
        own.check_cuts(cut(own.costs(), 3))


def test_the_data_of_a_run_are_known_again():
    from slipstream.config import from_dict

    config = from_dict(
        {"train": {"microbatch_size": 2, "compute_dtype": "float32"}, "pipeline": {"num_microbatches": 4}}
    )
    model = OwnModel(build=module, loss=squares)
    one, same = (open_own(model, Data(), config, 0, None).data_sha256 for _ in range(2))

    class Other(Data):
        def batch(self, index):
            return OwnBatch(inputs=torch.ones(8, 3), targets=torch.ones(8, 2))

    assert one == same != open_own(model, Other(), config, 0, None).data_sha256
