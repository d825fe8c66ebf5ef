"""The sharpness of a run against matrices written out in full."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.assembly import StageParts
from slipstream.cli import main
from slipstream.config import ModelConfig, from_dict, load_toml
from slipstream.data import open_data
from slipstream.errors import CheckpointError, ConfigError, NonFiniteError
from slipstream.models.llama import cross_entropy_sum, whole_model
from slipstream.models.partition import whole
from slipstream.plan.stability import StabilityConfig, max_stable_product
from slipstream.train.checkpoint import newest_complete
from slipstream.train.curvature import (
    adaptive_sharpness,
    flat,
    hessian_vector,
    largest_eigenvalue,
    polar,
    spectral_sharpness,
    unflat,
)
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.probe import ProbeConfig, probe_text, run_probe
from slipstream.train.progress import SilentReporter
from slipstream.train.workload import training_loader


def small_model():
    """A decoder of some hundred float64 parameters, moved off its symmetric start, and its loss on two microbatches."""
    cfg = ModelConfig(num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12, vocab_size=7, init_std=0.4)
    model = whole_model(cfg, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (4, 6), generator=generator)
    parts = [(tokens[:2, :-1], tokens[:2, 1:]), (tokens[2:, :-1], tokens[2:, 1:])]

    def loss_of(inputs, targets):
        def loss():
            with sdpa_kernel(SDPBackend.MATH):
                return cross_entropy_sum(model(inputs), targets) / 20

        return loss

    return dict(model.named_parameters()), [loss_of(*part) for part in parts]


def dense_hessian(loss, leaves):
    """Every row by itself, from one graph."""
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    gradient = torch.cat([each.reshape(-1) for each in gradients])
    rows = torch.autograd.grad(
        gradient, leaves, torch.eye(len(gradient), dtype=gradient.dtype), is_grads_batched=True, materialize_grads=True
    )
    return torch.cat([row.flatten(1) for row in rows], dim=1)


def test_products_are_those_of_the_explicit_hessian():
    parameters, losses = small_model()
    with sdpa_kernel(SDPBackend.MATH):
        hessian = dense_hessian(losses[0]() + losses[1](), list(parameters.values()))
    vector = torch.randn(len(hessian), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(hessian_vector(losses, parameters, vector), hessian @ vector)


def test_sharpness_is_the_largest_eigenvalue_of_the_preconditioned_hessian():
    parameters, losses = small_model()
    with sdpa_kernel(SDPBackend.MATH):
        hessian = dense_hessian(losses[0]() + losses[1](), list(parameters.values()))
    generator = torch.Generator().manual_seed(3)
    root = {n: 0.1 + torch.rand(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}
    scale = flat(root)
    values = torch.linalg.eigvalsh(hessian / scale[:, None] / scale)
    found = adaptive_sharpness(losses, parameters, root=root, num_iterations=200, tolerance=1e-9)
    assert found.value == pytest.approx(float(values[-1]), rel=1e-8)
    rough = adaptive_sharpness(losses, parameters, root=root, num_iterations=6, tolerance=0.0)
    assert rough.num_products == 6
    assert rough.value <= float(values[-1])
    assert float((values - rough.value).abs().min()) <= rough.error


def test_the_largest_eigenvalue_is_not_the_largest_modulus():
    generator = torch.Generator().manual_seed(4)
    basis, _ = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64))
    matrix = basis @ torch.diag(torch.linspace(-9.0, 2.0, 40, dtype=torch.float64)) @ basis.T
    start = torch.randn(40, generator=generator, dtype=torch.float64)
    found = largest_eigenvalue(lambda v: matrix @ v, start, num_iterations=100, tolerance=1e-10)
    assert found.value == pytest.approx(2.0, rel=1e-9)


def test_an_eigenvector_to_start_with_ends_at_once():
    found = largest_eigenvalue(lambda v: 3 * v, torch.ones(5), num_iterations=10)
    assert (found.value, found.num_products) == (pytest.approx(3.0), 1)


def test_spectral_sharpness_is_the_known_one_of_a_quadratic():
    """For 1/2 <X, S X R> with S, R positive it is sum s_i r_i in order (von Neumann), at scale^2."""
    generator = torch.Generator().manual_seed(5)

    def positive(values):
        basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
        return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T

    left, right = positive([5.0, 2.0, 1.0, 0.1]), positive([3.0, 1.0, 0.5, 0.2])
    x = torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_()
    found = spectral_sharpness(
        [lambda: (x * (left @ x @ right)).sum() / 2], {"x": x}, scales={"x": 1.5}, num_iterations=200, tolerance=1e-12
    )
    assert found.value == pytest.approx(1.5**2 * (15 + 2 + 0.5 + 0.02), rel=1e-3)
    gradient = left @ x.detach() @ right
    assert found.gradient_dual_norm == pytest.approx(1.5 * float(torch.linalg.svdvals(gradient).sum()))


def test_polar_maximises_the_inner_product():
    x = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    assert float((x * polar(x)).sum()) == pytest.approx(float(torch.linalg.svdvals(x).sum()))
    torch.testing.assert_close(torch.linalg.svdvals(polar(x)), torch.ones(3, 2, dtype=torch.float64))


def test_flat_and_back():
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(2.0)}
    back = unflat(flat(tensors), tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def train(run_dir: Path, **changes) -> Path:
    tables = {
        "run_dir": str(run_dir),
        "data": {"sequence_length": 8},
        "model": {"num_layers": 1, "dim": 4, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 4, "tie_embeddings": True},
        "optim": {"lr": 0.02, "lr_warmup_steps": 2, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": 2},
        "staleness": {"delay": 1, "error_feedback": 1.0},
        "train": {"num_steps": 6, "microbatch_size": 2},
        "evaluate": {"num_sequences": 4},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change
    launch(from_dict(tables), reporter=SilentReporter())
    return run_dir


def explicit_sharpness(run_dir: Path, *, num_batches: int) -> float:
    """Rebuild the run with the parts that train it and write its preconditioned Hessian out."""
    config = load_toml(run_dir / "config.toml")
    checkpoint, _ = newest_complete(run_dir / "checkpoints")
    parts = StageParts(config, whole(config.model), num_versions=2, device=torch.device("cpu"))
    parts.restore(checkpoint)
    loader = training_loader(config, open_data(config.data.path))
    batches = [loader.batch(checkpoint.step + i) for i in range(num_batches)]
    inputs = torch.cat([torch.from_numpy(batch.inputs) for batch in batches])
    targets = torch.cat([torch.from_numpy(batch.targets) for batch in batches])
    published = parts.updater.weights.read(checkpoint.step)
    leaves = {name: published[name].double().requires_grad_() for name in parts.updater.masters}
    by_leaf = {leaf: leaves[name] for leaf, name in parts.parameter_of.items()}
    with sdpa_kernel(SDPBackend.MATH):
        logits = functional_call(parts.modules[0], by_leaf, (inputs,))
        hessian = dense_hessian(cross_entropy_sum(logits, targets) / targets.numel(), list(leaves.values()))
    (optimizer,) = parts.updater.optimizers.values()
    held = [optimizer.state[parts.updater.masters[name]] for name in leaves]
    moments = torch.cat([(each["exp_avg_sq"] / (1 - 0.95 ** int(each["step"]))).reshape(-1) for each in held])
    root = (moments.double().sqrt() + 1e-8).sqrt()
    return float(torch.linalg.eigvalsh(hessian / root[:, None] / root)[-1])


def test_a_run_is_measured_as_its_written_out_matrix(tmp_path):
    train(tmp_path)
    found = run_probe(ProbeConfig(run=str(tmp_path), num_batches=2, num_iterations=200, tolerance=1e-4))
    (row,) = found["rules"]
    assert row["sharpness"] == pytest.approx(explicit_sharpness(tmp_path, num_batches=2), rel=1e-3)
    assert row["lr"] == pytest.approx(read_json_lines(tmp_path / "metrics.jsonl")[-1]["lr"])
    assert row["lr_times_sharpness"] == pytest.approx(row["lr"] * row["sharpness"])
    assert (found["step"], found["delay"], found["num_tokens"]) == (6, 1, 2 * 4 * 8)
    assert row["num_parameters"] == 257 * 4 + 4 * 4 * 2 + 4 * 2 * 2 + 3 * 16 + 3 * 4
    assert row["limits"]["delay 0"] == pytest.approx(38)
    assert row["limits"]["delay 1"] == pytest.approx(1)
    assert row["limits"]["delay 1, error feedback 1"] == pytest.approx(2.7016, abs=1e-4)


def test_muon_is_measured_in_its_own_geometry_and_adamw_beside_it_in_its(tmp_path):
    train(tmp_path, optim={"name": "muon", "adamw_lr": 0.003}, model={"dropout": 0.1, "activation_checkpointing": True})
    muon, adamw = run_probe(ProbeConfig(run=str(tmp_path), num_batches=1, num_iterations=4))["rules"]
    assert (muon["rule"], adamw["rule"]) == ("muon", "adamw")
    assert muon["num_parameters"] == 4 * 4 * 2 + 4 * 2 * 2 + 3 * 16
    assert adamw["num_parameters"] == 257 * 4 + 3 * 4
    assert adamw["peak_lr"] == 0.003
    assert "limits" not in muon
    assert muon["share_of_gradient"] == pytest.approx(muon["lr"] * muon["sharpness"] / muon["gradient_dual_norm"])
    assert "spectral norm" in muon["measured"]


@pytest.mark.parametrize(
    ("args", "length"), [({"momentum": 0.9}, 10), ({"momentum": 0.9, "dampening": 0.9}, 1), ({}, 1)]
)
def test_sgd_counts_for_the_sum_of_its_momentum(tmp_path, args, length):
    train(tmp_path, optim={"name": "torch.optim.SGD", "args": args, "weight_decay": 0.0})
    (row,) = run_probe(ProbeConfig(run=str(tmp_path), num_batches=1, num_iterations=3))["rules"]
    assert row["lr_times_sharpness"] == pytest.approx(length * row["lr"] * row["sharpness"])
    expected = max_stable_product(StabilityConfig(momentum=args.get("momentum", 0.0), delay=0))
    assert row["limits"]["delay 0"] == pytest.approx(expected)
    assert row["lr_limits"]["delay 0"] == pytest.approx(expected / (length * row["sharpness"]))


def test_a_rate_that_has_ended_at_0_does_not_make_every_rate_stable(tmp_path):
    train(tmp_path, optim={"lr_schedule": "linear", "lr_final_fraction": 0.0, "lr_total_steps": 6})
    (row,) = (found := run_probe(ProbeConfig(run=str(tmp_path), num_batches=1)))["rules"]
    assert row["lr"] == row["lr_times_sharpness"] == 0
    assert row["lr_limits"]["delay 1"] == pytest.approx(row["limits"]["delay 1"] / row["sharpness"])
    assert "inf" not in probe_text(found)


def test_nadam_looks_ahead(tmp_path):
    train(tmp_path, optim={"name": "torch.optim.NAdam"})
    (row,) = run_probe(ProbeConfig(run=str(tmp_path), num_batches=1, num_iterations=3))["rules"]
    assert row["nesterov"]
    assert row["limits"]["delay 1"] == pytest.approx(2.5314, abs=1e-4)


def test_a_rule_without_a_known_preconditioner_is_named(tmp_path, capsys):
    train(tmp_path, optim={"name": "torch.optim.Adagrad"})
    (row,) = run_probe(ProbeConfig(run=str(tmp_path), num_batches=1))["rules"]
    assert "'torch.optim.Adagrad' is not known here" in row["measured"]
    assert "sharpness" not in row
    assert main(["stability", "--probe", str(tmp_path)]) == 0
    assert "is not known here" in capsys.readouterr().out


def test_the_command_says_where_a_run_stands(tmp_path, capsys):
    train(tmp_path)
    assert main(["stability", "--probe", str(tmp_path), "--probe-batches", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rules"][0]
    assert main(["stability", "--probe", str(tmp_path), "--probe-batches", "1"]) == 0
    text = capsys.readouterr().out
    assert f"lr x sharpness = {row['lr_times_sharpness']:.3g}" in text
    below = row["lr_times_sharpness"] <= 1
    (line,) = [line for line in text.splitlines() if line.split()[:4] == ["delay", "1", "up", "to"]]
    assert ("below it" in line) == below


def test_a_run_that_has_diverged_is_a_sentence(tmp_path, capsys):
    train(tmp_path, optim={"name": "sgd", "lr": 1e17, "lr_warmup_steps": 0}, train={"num_steps": 1})
    assert main(["stability", "--probe", str(tmp_path), "--json"]) == 2
    assert "there is no curvature to measure" in capsys.readouterr().err
    with pytest.raises(NonFiniteError, match="the weights of the run have diverged"):
        largest_eigenvalue(lambda v: v * math.nan, torch.ones(3), num_iterations=3)


def test_what_cannot_be_measured_is_a_sentence(tmp_path, capsys):
    assert main(["stability", "--probe", str(tmp_path / "none")]) == 2
    assert "there is no complete checkpoint in" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="num_batches is 0; it must be 1 or more"):
        run_probe(ProbeConfig(run=str(tmp_path), num_batches=0))
    train(tmp_path / "run")
    (manifest,) = (tmp_path / "run").glob("checkpoints/*/manifest.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"tokenizer": "", "data_sha256": "0" * 64}))  # as of a module of one's own
    with pytest.raises(ConfigError, match="trained a module of your own, which only your program can build"):
        run_probe(ProbeConfig(run=str(tmp_path / "run")))
    manifest.write_text(json.dumps(content | {"data_sha256": "0" * 64}))
    with pytest.raises(ConfigError, match="holds other data than the run was trained on"):
        run_probe(ProbeConfig(run=str(tmp_path / "run")))
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint(.|\n)*is incomplete"):
        run_probe(ProbeConfig(run=str(tmp_path / "run")))
