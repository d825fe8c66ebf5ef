"""What is compiled, and what is refused; that all executors agree to the bit: tests/distributed/test_compiled.py."""

import dataclasses
import functools
import shutil

import pytest
import torch
from torch import nn

from slipstream import compiled
from slipstream.compiled import check_compile, while_training
from slipstream.config import from_dict, resolve
from slipstream.doctor import Finding, examine
from slipstream.errors import ConfigError
from slipstream.models.own import OwnModel, OwnParts
from slipstream.models.partition import uncut
from slipstream.models.parts import LlamaParts
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter

CPU = torch.device("cpu")
MODEL = {"num_layers": 2, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24}


def settings(**tables):
    return from_dict({"model": MODEL, "data": {"sequence_length": 16}} | tables)


@pytest.fixture
def graphs(monkeypatch):
    """Compile with a backend that takes no time, and note for which function of ours."""
    seen = []

    def compile_quickly(function):
        seen.append(function.__name__)
        return torch.compile(function, dynamic=False, backend="aot_eager")

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "_compiled", functools.cache(compile_quickly))
    yield seen
    torch._dynamo.reset()


def build_own():
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    return nn.ModuleDict({"embed": nn.Linear(4, 8), "blocks": blocks, "head": nn.Linear(8, 2)})


def own_loss(output, targets):
    return (output - targets).square().sum()


def parts_of(kind, **changes):
    if kind == "own":
        inputs, targets = torch.ones(3, 4), torch.ones(3, 2)
        return OwnParts(OwnModel(build=build_own, loss=own_loss), inputs, targets, seed=0, **changes), inputs, targets
    experts = {"num_experts": 3, "expert_ffn_dim": 8, "num_dense_layers": 1} if kind == "experts" else {}
    cfg = resolve(settings(model=MODEL | experts), vocab_size=7, cuda=False).model
    ids = torch.arange(10).view(2, 5) % 7
    return LlamaParts(cfg=cfg, microbatch_size=2, sequence_length=5, **changes), ids, ids


@pytest.mark.parametrize(
    ("kind", "functions"),
    [
        ("dense", ["attend", "feed", "cross_entropy_sum"]),
        ("experts", ["attend", "feed", "cross_entropy_sum"]),
        ("own", ["call_alone", "own_loss"]),
    ],
)
def test_blocks_and_loss_are_compiled_once_and_only_while_training(graphs, kind, functions):
    found = []
    for changes in ({}, {"compile": True}):
        parts, inputs, targets = parts_of(kind, **changes)
        module = parts.build(uncut(parts.num_blocks), CPU)
        with torch.no_grad():
            parts.loss_sum(module(inputs), targets)
        assert graphs == []
        loss = parts.loss_sum(module(inputs, dropout_key=(0, 0)), targets)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in module.parameters())])
    assert graphs == functions
    torch.testing.assert_close(*found)


WORKERS = {"executor": "dataparallel", "engine": "inline", "dataparallel": {"emulate_speeds": [1.0, 1.0]}}


@pytest.mark.parametrize("executor", [{}, WORKERS], ids=["single", "workers"])
def test_a_run_is_compiled_where_it_says_so(graphs, tmp_path, executor):
    losses = []
    for name, train in (("plain", {}), ("compiled", {"compile": True})):
        config = settings(
            run_dir=str(tmp_path / name),
            train={"num_steps": 3, "microbatch_size": 2, **train},
            pipeline={"num_microbatches": 2},
            evaluate={"num_sequences": 4},
            **executor,
        )
        launch(config, reporter=SilentReporter())
        assert bool(graphs) == (name == "compiled")
        losses.append([row["loss"] for row in read_json_lines(tmp_path / name / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"model": MODEL | {"dropout": 0.1}}, r"train\.compile cannot be used with model\.dropout \(0\.1\)"),
        ({"staleness": {"delay": 1, "backward_weights": "newest"}}, r"with staleness\.backward_weights 'newest'"),
    ],
)
def test_what_compiled_code_cannot_do_is_refused(tables, sentence):
    config = settings(train={"compile": True}, **tables)
    with pytest.raises(ConfigError, match=sentence):
        check_compile(config, device=CPU)
    check_compile(dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False)), device=CPU)


def test_a_machine_without_a_compiler_is_told(monkeypatch):
    config = settings(train={"compile": True})
    check_compile(config, device=CPU)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"there is no C\+\+ compiler: install g\+\+, or .* CXX, or leave train.compile out"
    ):
        check_compile(config, device=CPU)
    (finding,) = [each for each in examine() if each.name == "compiler"]
    assert finding == Finding(
        "compiler", "none, so train.compile cannot be used; install g++, or name one in the environment variable CXX"
    )


def test_a_function_is_compiled_once():
    assert while_training(own_loss, compile=False) is own_loss
    assert while_training(own_loss, compile=True) is while_training(own_loss, compile=True) is not own_loss
    with torch.no_grad():
        assert while_training(own_loss, compile=True) is own_loss
