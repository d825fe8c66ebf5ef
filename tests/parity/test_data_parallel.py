"""The executor `dataparallel` against `single`: one worker, or all workers in step, is one process, bitwise."""

import dataclasses

import pytest
import torch

from slipstream.config import Config, from_dict, resolve
from slipstream.data import Loader, open_data
from slipstream.dataparallel.engine import build_engine
from slipstream.digests import combined_digest
from slipstream.train.single import SingleExecutor

STEPS = 6
CPU = torch.device("cpu")


def settings(**changes) -> Config:
    tables = {
        "executor": "dataparallel",
        "engine": "inline",
        "data": {"sequence_length": 16},
        "model": {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "dropout": 0.1},
        "optim": {"lr": 0.01, "lr_warmup_steps": 2, "lr_total_steps": 10, "max_grad_norm": 1.0},
        "pipeline": {"num_microbatches": 4},
        "dataparallel": {"num_workers": 1},
        "train": {"num_steps": STEPS, "microbatch_size": 2},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change
    return resolve(from_dict(tables), vocab_size=257, cuda=False)


def run(config: Config):
    torch.set_num_threads(1)
    tokens = open_data("").train
    if config.executor == "single":
        source = Loader(tokens, sequence_length=16, batch_size=config.batch_size, seed=0)
        executor = SingleExecutor(config, source.batch, device=CPU)
    else:
        source = Loader(tokens, sequence_length=16, batch_size=config.train.microbatch_size, seed=0)
        executor = build_engine(config, source.batch, device=CPU)
    reports = [executor.run_step() for _ in range(STEPS)]
    figures = [(report.step, report.loss, report.grad_norm, report.lr, report.num_tokens) for report in reports]
    return figures, combined_digest(executor.snapshot().digests), executor


RULES = {
    "adamw": {},
    "muon": {"optim": {"name": "muon"}},
    "adamw, error feedback": {"staleness": {"error_feedback": 1.0}},
    "muon, error feedback": {"optim": {"name": "muon"}, "staleness": {"error_feedback": 0.5}},
    "compensator": {"staleness": {"correction": "agc"}},
    "tied": {"model": {"tie_embeddings": True}},
    "experts": {"model": {"num_experts": 4, "experts_per_token": 2}},
}


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("rule", RULES)
def test_one_worker_is_one_process_bitwise(rule, mode):
    figures, digest, _ = run(settings(**RULES[rule] | {"dataparallel": {"num_workers": 1, "mode": mode}}))
    alone, alone_digest, _ = run(dataclasses.replace(settings(**RULES[rule]), executor="single"))
    assert figures == alone
    assert digest == alone_digest


def test_synchronous_workers_with_a_microbatch_each_are_one_process_bitwise():
    """The order of additions is then the same, whoever made the gradients."""
    config = settings(dataparallel={"num_workers": 4, "mode": "sync", "emulate_speeds": (1.0, 1.0, 1.0, 0.25)})
    figures, digest, executor = run(config)
    alone, alone_digest, _ = run(dataclasses.replace(config, executor="single"))
    assert [row[0] for row in figures] == [row[0] for row in alone]
    assert [row[2:] for row in figures] == [row[2:] for row in alone]
    assert [row[1] for row in figures] == pytest.approx([row[1] for row in alone], rel=1e-12)
    assert digest == alone_digest
    assert executor.throughput_share() == pytest.approx(4 * 0.25 / 3.25)


def test_synchronous_workers_with_more_are_one_process_to_rounding():
    config = settings(dataparallel={"num_workers": 2, "mode": "sync"})
    figures, _, executor = run(config)
    alone, _, single = run(dataclasses.replace(config, executor="single"))
    for ours, theirs in zip(figures, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    weights, expected = executor.snapshot().tensors, single.snapshot().tensors
    for name in expected:
        if name.startswith("y/"):
            torch.testing.assert_close(weights[name], expected[name], rtol=2e-3, atol=2e-5)
    assert executor.throughput_share() == pytest.approx(1.0)


def test_asynchronous_workers_without_a_barrier_are_not_one_process():
    """Otherwise the tests above could not tell staleness that is ignored."""
    _, digest, executor = run(settings(dataparallel={"num_workers": 2}))
    _, alone_digest, _ = run(dataclasses.replace(settings(), executor="single"))
    assert digest != alone_digest
    assert executor.figures()["staleness_max"] >= 1


def test_a_bound_that_allows_no_staleness_beyond_a_step_waits_but_loses_nothing():
    figures = run(settings(dataparallel={"emulate_speeds": (1.0, 0.5), "num_workers": 2, "max_staleness": 1}))[
        2
    ].figures()
    assert figures["staleness_max"] == 1
    assert figures["ledger_balanced"]
