"""Same-batch probes: one microbatch at two points of the weights, and nothing else is changed by them."""

import pytest
import torch
from torch.func import functional_call

from slipstream.config import from_dict, resolve
from slipstream.data import Loader, open_data
from slipstream.dataparallel.inline import InlineEngine
from slipstream.errors import ConfigError
from slipstream.models.llama import cross_entropy_sum
from slipstream.staleness.checks import check_staleness
from slipstream.staleness.damping import agc_of
from slipstream.train.single import SingleExecutor

CPU = torch.device("cpu")
AGC = {"curvature": "secant_diag", "probe_every": 2, "min_pairs": 2, "ramp_steps": 2, "decay": 0.9}


def settings(executor="dataparallel", **changes):
    tables = {
        "executor": executor,
        "engine": "inline",
        "data": {"sequence_length": 8},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
        "optim": {"lr": 0.01, "lr_total_steps": 40, "max_grad_norm": 0.5},
        "pipeline": {"num_microbatches": 4},
        "staleness": {"correction": "agc", "agc": AGC},
        "train": {"num_steps": 20, "microbatch_size": 1},
    }
    if executor == "dataparallel":
        tables["dataparallel"] = {"emulate_speeds": (1.0, 1.0, 0.25), "pushes_per_step": 1}
    else:
        tables["staleness"] = tables["staleness"] | {"delay": 2}
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change
    return resolve(from_dict(tables), vocab_size=257, cuda=False)


def build(config):
    torch.set_num_threads(1)
    size = 1 if config.executor == "dataparallel" else 4
    loader = Loader(open_data("").train, sequence_length=8, batch_size=size, seed=0)
    kind = InlineEngine if config.executor == "dataparallel" else SingleExecutor
    return kind(config, loader.batch, device=CPU), loader


def parts_of(executor):
    return executor.server.parts[0] if isinstance(executor, InlineEngine) else executor._parts


def slope(parts, weights, batch):
    """The gradient of a microbatch's mean loss at given weights."""
    leaves = {leaf: weights[name].clone().requires_grad_() for leaf, name in parts.parameter_of.items()}
    logits = functional_call(parts.modules[0], leaves, (torch.from_numpy(batch.inputs),))
    loss = cross_entropy_sum(logits, torch.from_numpy(batch.targets)) / batch.num_tokens
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


@pytest.mark.parametrize("executor", ["dataparallel", "single"])
def test_a_probe_is_one_microbatch_at_two_points(executor, monkeypatch):
    trained, loader = build(settings(executor))
    parts, seen = parts_of(trained), []
    agc = agc_of(parts.updater.corrections)
    probe = agc.probe

    def watch(*given):
        seen.append([{name: tensor.clone() for name, tensor in each.items()} for each in given])
        probe(*given)

    monkeypatch.setattr(agc, "probe", watch)
    for _ in range(12):
        trained.run_step()
    assert len(seen) >= 3
    batches = [loader.batch(number) for number in range(12 if executor == "single" else 80)]
    parts_of_batches = [each.microbatch(3, 4) for each in batches] if executor == "single" else batches
    for old, read, new, newest in seen[-2:]:
        assert any(not torch.equal(read[name], newest[name]) for name in read)
        found = []
        for batch in parts_of_batches:
            stale, fresh = slope(parts, read, batch), slope(parts, newest, batch)
            ratios = [float(old[name].norm() / stale[name].norm()) for name in old]
            if all(torch.allclose(old[name], ratios[0] * stale[name], atol=1e-6) for name in old):
                assert ratios[0] <= 1.0 + 1e-5, "clipped as the gradient itself"
                found.append(all(torch.allclose(new[name], ratios[0] * fresh[name], atol=1e-6) for name in new))
        assert found == [True], "both gradients are of one microbatch, scaled alike"


def test_probes_change_nothing_but_what_is_learnt():
    idle = {"correction": "agc", "agc": AGC | {"min_pairs": 10**6}, "delay": 2}
    probed, _ = build(settings("single", staleness=idle))
    plain, _ = build(settings("single", staleness={"correction": "none", "delay": 2}))
    for _ in range(8):
        assert probed.run_step().loss == plain.run_step().loss
    assert parts_of(probed).snapshot().digests == parts_of(plain).snapshot().digests


def test_a_worker_pays_for_its_probes_with_time():
    with_probes, _ = build(settings(staleness={"agc": AGC | {"probe_every": 1, "min_pairs": 10**6}}))
    without, _ = build(settings(staleness={"correction": "none", "agc": {}}))
    for executor in (with_probes, without):
        for _ in range(20):
            executor.run_step()
    assert with_probes.now_s > 1.1 * without.now_s
    assert with_probes.throughput_share() < 0.9 < without.throughput_share()


def test_elements_learn_from_probes_alone_and_tell_how_well():
    trained, _ = build(settings())
    for _ in range(20):
        trained.run_step()
    agc = agc_of(parts_of(trained).updater.corrections)
    assert agc.slots["element_square"], "single elements were fitted"
    assert "held_gradient" not in agc.slots, "no pairs of different batches are kept"
    metrics = trained.method_metrics()
    assert 0 < metrics["probe/change"] < 10
    assert metrics["probe/explained"] <= 1
    assert -1 <= metrics["probe/cosine_stale"] <= 1
    assert {name.rpartition("/")[2] for name in metrics if name.startswith("agc/")} >= {"gain", "trust", "raw"}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"executor": "single", "agc": {"curvature": "secant_diag"}}, r"Give staleness\.agc\.probe_every, such as 4"),
        ({"executor": "pipeline", "agc": {"probe_every": 4}}, "the executor 'pipeline' makes no probes"),
        ({"executor": "dataparallel", "agc": {"probe_every": 4}}, "with the engine 'process' makes no probes"),
        ({"executor": "single", "agc": {"probe_every": -1}}, "probe_every is -1; give 0 for no probes"),
    ],
)
def test_where_nobody_makes_probes_they_are_refused(tables, said):
    config = from_dict({"executor": tables["executor"], "staleness": {"correction": "agc", "agc": tables["agc"]}})
    with pytest.raises(ConfigError, match=said):
        check_staleness(config, delay=1)
