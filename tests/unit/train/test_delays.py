"""Delays other than a constant one, from the settings to what each batch reads."""

import dataclasses
import json

import pytest
import torch

from slipstream.assembly import llama_parts
from slipstream.config import Config, from_dict, resolve
from slipstream.data import Loader, open_data
from slipstream.errors import ConfigError
from slipstream.models.partition import cut
from slipstream.models.roles import role
from slipstream.models.shapes import parameter_names
from slipstream.train.delays import delay_line
from slipstream.train.single import SingleExecutor

STEPS = 7


def settings(staleness: dict, **changes) -> Config:
    tables = {
        "data": {"sequence_length": 8},
        "model": {"num_layers": 4, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
        "optim": {"lr": 0.02},
        "pipeline": {"num_microbatches": 1},
        "train": {"num_steps": STEPS, "microbatch_size": 2},
        "staleness": staleness,
    }
    return resolve(from_dict(tables | changes), vocab_size=257, cuda=False)


@pytest.fixture(scope="module")
def loader() -> Loader:
    return Loader(open_data("").train, sequence_length=8, batch_size=2)


def run(staleness: dict, loader, **changes):
    executor = SingleExecutor(settings(staleness, **changes), loader.batch, device=torch.device("cpu"))
    reports = [executor.run_step() for _ in range(STEPS)]
    return [r.loss for r in reports], [r.staleness for r in reports], executor


def test_a_distribution_with_one_value_is_a_constant_delay_bitwise(loader):
    assert run({"delay": 2}, loader)[:2] == run({"delay_weights": [0, 0, 3]}, loader)[:2]


def test_drawn_delays_follow_their_distribution_and_the_seed():
    line = delay_line(settings({"delay_weights": [1, 0, 3]}))
    drawn = [line.delay_of(batch) for batch in range(2000)]
    assert set(drawn) == {0, 2}
    assert 0.7 < drawn.count(2) / 2000 < 0.8
    assert drawn == [delay_line(settings({"delay_weights": [1, 0, 3]})).delay_of(batch) for batch in range(2000)]
    other = settings({"delay_weights": [1, 0, 3]}, data={"sequence_length": 8, "seed": 5})
    assert drawn != [delay_line(other).delay_of(batch) for batch in range(2000)]


def test_a_recorded_run_is_replayed(tmp_path, loader):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": i, "staleness_max": s}) + "\n" for i, s in enumerate([0, 1, 3])))
    assert run({"delay_replay": str(file)}, loader)[1] == [0, 1, 2, 0, 1, 3, 0]


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        '{"step": 1, "staleness_max": null}',
        '{"step": 1, "staleness_max": -1}',
        '{"step": 1, "staleness_max": 1e999}',
        '{"step": 1}',
        "no JSON",
    ],
)
def test_a_recording_that_is_none_is_a_sentence(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 0, "staleness_max": 0}}\n{line}\n{{"step": 2, "staleness_max": 0}}\n')
    with pytest.raises(ConfigError, match=r"delay_replay: .*metrics\.jsonl (is no metrics|has a staleness_max)"):
        delay_line(settings({"delay_replay": str(file)}))


def test_a_recording_of_a_run_that_was_killed_is_taken(tmp_path, loader):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "staleness_max": 0}\n{"step": 2, "staleness_max": 2}\n{"step": 3, "stal')
    assert run({"delay_replay": str(file)}, loader)[1][:4] == [0, 1, 0, 2]


def test_every_role_delayed_is_a_constant_delay_bitwise(loader):
    everything = ["embedding", "head", "norm", "q", "k", "v", "o", "ffn_gate", "ffn_up", "ffn_down"]
    plain = run({"delay": 1}, loader)[0]
    assert run({"delay": 1, "delay_roles": everything}, loader)[0] == plain
    assert run({"delay": 1, "delay_roles": ["not", "router"]}, loader)[0] == plain
    assert run({"delay": 1, "delay_blocks": [-1, 4]}, loader)[0] == plain


def test_no_role_delayed_is_synchronous_bitwise(loader):
    assert run({"delay": 1, "delay_roles": ["router"]}, loader)[:2] == run({"delay": 0}, loader)[:2]


def test_only_the_named_roles_read_old_weights(loader):
    line = delay_line(settings({"delay": 2, "delay_roles": ["q", "k"]}))
    names = parameter_names(settings({}).model)
    versions = line.read_versions(5, names)
    assert {name for name, version in versions.items() if version == 3} == {
        name for name in names if ".attention.q." in name or ".attention.k." in name
    }
    assert set(versions.values()) == {3, 5}
    losses = [run({"delay": 2, "delay_roles": roles}, loader)[0] for roles in (["q"], ["ffn_up"], ["not", "q"])]
    assert len({tuple(each) for each in losses}) == 3


def test_pipedream_delays_each_stage_by_its_distance_to_the_last():
    line = delay_line(settings({"delay_stages": 4}))
    versions = line.read_versions(9, parameter_names(settings({}).model))
    assert versions["embed.weight"] == 6
    assert [versions[f"blocks.{i}.attention.q.weight"] for i in range(4)] == [6, 7, 8, 9]
    assert versions["head.weight"] == 9


def test_pipedream_delays_are_those_of_the_stages_that_a_pipeline_would_have():
    """Of long sequences the head is a smaller part, so the model is cut elsewhere."""
    config = settings({"delay_stages": 2}, data={"sequence_length": 4096})
    cuts = cut(llama_parts(config).costs(), 2)
    assert cuts != cut(llama_parts(settings({"delay_stages": 2})).costs(), 2)
    versions = delay_line(config).read_versions(9, parameter_names(config.model))
    assert [i for i in range(4) if versions[f"blocks.{i}.attention.q.weight"] == 8] == list(cuts[0].blocks)


def test_mixed_reads_equal_a_loop_that_loads_each_leaf_by_hand(loader):
    config = settings({"delay": 1, "delay_roles": ["v", "o"]}, optim={"name": "torch.optim.SGD", "lr": 0.1})
    executor = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    from slipstream.models.llama import cross_entropy_sum, whole_model

    model = whole_model(config.model)
    old = [{n: p.detach().clone() for n, p in model.named_parameters()}]
    decay = {n: 0.1 if p.ndim > 1 else 0.0 for n, p in model.named_parameters()}
    for step in range(4):
        late = old[max(step - 1, 0)]
        with torch.no_grad():
            for name, param in model.named_parameters():
                is_late = ".attention.v." in name or ".attention.o." in name
                param.copy_(late[name] if is_late else old[-1][name])
        batch = loader.batch(step)
        loss = cross_entropy_sum(model(torch.from_numpy(batch.inputs)), torch.from_numpy(batch.targets)) / 16
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        report = executor.run_step()
        assert report.loss == loss.item()
        new = {n: old[-1][n] - report.lr * (p.grad + decay[n] * old[-1][n]) for n, p in model.named_parameters()}
        old.append(new)
        for param in model.parameters():
            param.grad = None
    state = executor.snapshot().tensors
    assert all(torch.allclose(state[f"y/{name}"], old[-1][name], atol=1e-6) for name in old[-1])


def test_synchronous_start_and_cool_down(loader):
    options = {"delay": 2, "sync_until_step": 2, "sync_from_step": 6, "error_feedback": 1.0}
    _, staleness, executor = run(options, loader)
    assert staleness == [0, 0, 2, 2, 2, 0, 0]
    weights = executor._parts.updater.weights
    masters = executor._parts.updater.masters
    assert all(torch.equal(weights.read(7)[name], masters[name]) for name in masters), "the last versions are y"


def test_the_version_read_by_the_first_batch_of_a_cool_down_is_y(loader):
    config = settings({"delay": 1, "sync_from_step": 5, "error_feedback": 1.0})
    executor = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    for step in range(1, 5):
        executor.run_step()
        weights, masters = executor._parts.updater.weights, executor._parts.updater.masters
        same = all(torch.equal(weights.read(step)[name], masters[name]) for name in masters)
        assert same == (step >= 4)


@pytest.mark.parametrize(
    ("staleness", "said"),
    [
        ({"delay_weights": [1, -1]}, "none negative"),
        ({"delay_weights": [1, 1], "delay_stages": 3}, "both given"),
        ({"delay": 1, "delay_roles": ["quarry"]}, "names 'quarry'.*Allowed"),
        ({"delay_replay": "nowhere.jsonl"}, "nowhere.jsonl is no metrics.jsonl"),
        ({"delay": 1, "delay_blocks": [1]}, "give two numbers"),
        ({"delay": 1, "error_feedback": 1.0, "prediction": "xpipe"}, "both say what is published"),
    ],
)
def test_settings_that_make_no_sense_are_refused(staleness, said, loader):
    with pytest.raises(ConfigError, match=said):
        run(staleness, loader)


@pytest.mark.parametrize(
    "staleness",
    [
        {"delay_weights": [1, 1, 1], "error_feedback": 1.0},
        {"delay_stages": 3},
        {"delay": 1, "correction": "dc_asgd", "correction_strength": 0.1},
        {"delay": 1, "correction": "dc_asgd_adaptive", "correction_strength": 0.1},
        {"delay": 1, "correction": "gap_aware"},
        {"delay": 1, "correction": "gradient_feedback", "correction_strength": 1.0},
        {"delay": 1, "prediction": "xpipe"},
        {"delay": 2, "error_feedback": "auto"},
        {"delay": 2, "backward_weights": "newest"},
        {"delay": 2, "backward_weights": "pipemare"},
        {"delay_stages": 3, "backward_weights": "pipemare", "lr_discount": "pipemare", "lr_discount_steps": 5},
        {"delay": 3, "lr_discount": "inverse_staleness"},
        {"delay": 3, "lr_discount": "pipemare", "lr_discount_steps": 5},
        {"delay": 2, "sync_until_step": 2, "sync_from_step": 6, "error_feedback": 1.0},
    ],
)
def test_every_remedy_changes_the_run_and_resumes_exactly(staleness, loader):
    config = settings(staleness)
    whole = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    losses = [whole.run_step().loss for _ in range(STEPS)]
    plain = settings({"delay": max(staleness.get("delay", 1), 1)})
    assert losses != [r.loss for r in _steps(plain, loader)]
    first = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    head = [first.run_step().loss for _ in range(4)]
    second = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    second.restore(_Saved(first))
    assert head + [second.run_step().loss for _ in range(STEPS - 4)] == losses
    assert second.snapshot().digests == whole.snapshot().digests


@pytest.mark.parametrize("kind", ["newest", "pipemare"])
def test_other_weights_in_the_backward_change_gradients_and_not_the_batch_that_is_fresh(kind, loader):
    plain, found = (run({"delay": 2, "backward_weights": each}, loader)[0] for each in ("read", kind))
    # Batch 0 is fresh; batches 1 and 2 read version 0, and only their backward can differ, seen from version 2 on.
    assert found[:4] == plain[:4]
    assert all(a != b for a, b in zip(found[4:], plain[4:], strict=True))
    assert run({"backward_weights": kind}, loader)[0] == run({}, loader)[0], "without delay there are no others"


def test_the_backward_reads_the_newest_weights_of_each_stage(loader):
    """Batch 1 is stale on the first stage alone, whose weights pass no gradient on to the second: update 2 differs on
    the first stage only, and batch 3 is the first to read that. (A clip would tell the second stage at once.)"""
    optim = {"lr": 0.02, "max_grad_norm": 0.0}
    kinds = [{"delay_stages": 2, "backward_weights": each} for each in ("read", "newest")]
    plain, found = (run(each, loader, optim=optim)[0] for each in kinds)
    assert plain[:3] == found[:3]
    assert all(a != b for a, b in zip(plain[3:], found[3:], strict=True))


@pytest.mark.parametrize(("staleness", "is_logged"), [({"delay": 1, "error_feedback": "auto"}, True), ({}, False)])
def test_the_coefficients_that_were_found_are_reported_by_role(staleness, is_logged, loader):
    config = settings(staleness)
    executor = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    for _ in range(STEPS):
        executor.run_step()
    found = executor.method_metrics()
    if not is_logged:
        assert not found
        return
    assert set(found) == {f"error_feedback/{role(name)}" for name in parameter_names(config.model)}
    assert all(0.0 <= c <= 2.0 for c in found.values())
    assert any(found.values())


def _steps(config, loader):
    executor = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    return [executor.run_step() for _ in range(STEPS)]


class _Saved:
    """A snapshot read back as if from files."""

    def __init__(self, executor: SingleExecutor) -> None:
        snapshot = executor.snapshot()
        self.step = executor.step
        self.scalars = json.loads(json.dumps(snapshot.scalars))
        self.tensor_names = frozenset(snapshot.tensors)
        self.tensor = lambda name: snapshot.tensors[name].clone()


def test_settings_read_back_from_toml_equal(tmp_path):
    from slipstream.config import load_toml, to_toml

    config = settings({"delay_weights": [1, 2], "delay_roles": ["q"], "delay_blocks": [0, 2]})
    file = tmp_path / "c.toml"
    file.write_text(to_toml(config))
    assert load_toml(file) == dataclasses.replace(config)
