"""Workers that are pipelines: the same numbers as one process, whoever dies, and never two versions in one gradient."""

import contextlib
import dataclasses
import functools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import worker_mains
from tests.distributed.pool import CPU
from tests.distributed.test_process_engine import Saved, inline, processes, run_steps, run_until
from tests.distributed.worker_mains import ODD, VOCAB_SIZE, microbatch

from slipstream.assembly import StageParts
from slipstream.config import Config, from_dict, resolve
from slipstream.data.loader import Batch
from slipstream.dataparallel import cycles
from slipstream.dataparallel.engine import build_engine
from slipstream.dataparallel.hybrid_engine import HybridEngine
from slipstream.dataparallel.server import Server
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.worker import Replica, Worker
from slipstream.digests import combined_digest
from slipstream.models.partition import whole
from slipstream.staleness.words import one_delay
from slipstream.train.single import SingleExecutor

STEP_MICROBATCHES = 6
MICROBATCH_TOKENS = 2 * 7


def settings(**changes) -> Config:
    tables = {
        "executor": "dataparallel",
        "engine": "process",
        "data": {"sequence_length": 7},
        "model": {
            "num_layers": 4,
            "dim": 16,
            "num_heads": 2,
            "num_kv_heads": 1,
            "ffn_dim": 24,
            "dropout": 0.1,
            "tie_embeddings": True,
            "init_std": 0.3,
        },
        "optim": {"lr": 0.01, "max_grad_norm": 5.0, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": STEP_MICROBATCHES},
        "dataparallel": {"num_workers": 2, "num_stages": 2, "emulate_microbatch_ms": 4.0},
        "train": {"microbatch_size": 2},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    return resolve(from_dict(tables), vocab_size=VOCAB_SIZE, cuda=False)


@contextlib.contextmanager
def running(config, main=worker_mains.plain_stage):
    """An engine, of which nothing may be left afterwards."""
    engine = HybridEngine(config, device=CPU, main=main)
    try:
        yield engine
        assert engine.server.sequencer.ledger.balance().holds
    finally:
        engine.close()
    assert not processes(), "stages outlived the run"
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    assert not [name for name in names if name.startswith(f"torch_{os.getpid()}_")], "shared memory was left behind"


def batch_of(config, index) -> Batch:
    """The batch that the microbatches of a step make."""
    parts = [microbatch(config, index * STEP_MICROBATCHES + i) for i in range(STEP_MICROBATCHES)]
    inputs, targets = (np.concatenate([getattr(part, name) for part in parts]) for name in ("inputs", "targets"))
    return Batch(index=index, inputs=inputs, targets=targets)


def single(config, count, *, delay):
    staleness = dataclasses.replace(config.staleness, delay=delay)
    alone = dataclasses.replace(config, executor="single", staleness=staleness)
    return run_steps(SingleExecutor(alone, functools.partial(batch_of, alone), device=CPU), count)


# --- the same numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "num_stages", "delay"),
    [
        ({"staleness": {"error_feedback": 0.5}}, 2, 1),
        (
            {
                "optim": {"name": "muon"},
                "model": {
                    "activation_checkpointing": True,
                    "num_experts": 4,
                    "experts_per_token": 1,
                    "router_renormalize": False,
                },
                "pipeline": {"num_extra_in_flight": 1},
                "dataparallel": {"min_microbatches": 3, "emulate_microbatch_ms": 0.0},
            },
            3,
            1,
        ),
        ({"pipeline": {"pipeline_schedule": "one_f_one_b"}}, 2, 0),
        ({}, 1, 0),
    ],
    ids=["two_bw", "experts", "drained", "one-stage"],
)
def test_one_worker_is_one_process_with_the_delay_of_its_schedule_bitwise(changes, num_stages, delay):
    """Losses, norms, rates and weights: what a pipeline of two versions computes is the same, whoever updates them."""
    own = changes.get("dataparallel", {}) | {"num_workers": 1, "num_stages": num_stages}
    config = settings(**changes | {"dataparallel": own})
    with running(config) as engine:
        found = run_steps(engine, 6)
        assert found == single(config, 6, delay=delay)
        assert engine.figures()["staleness_histogram"] == ({"0": 1, "1": 5} if delay else {"0": 6})
    assert one_delay(config) == delay
    if num_stages == 1:
        plain = dataclasses.replace(config.dataparallel, num_stages=1)
        assert found == inline(dataclasses.replace(config, dataparallel=plain), 6)


class Recorder:
    """Notes what the server counts: leases, versions, gradients, norms."""

    def __init__(self, server: Server) -> None:
        self.rows = []
        self._leases = {}
        self._server, self._judge, self._add = server, server.judge, server.add
        server.judge, server.add = self.judge, self.add

    def judge(self, push):
        order = self._server.sequencer.in_flight.get(push.lease_id)
        if order is not None:
            self._leases[push.lease_id] = order.lease
        return self._judge(push)

    def add(self, push, verdict, gradients, grad_norm, *, loss, **options):
        tensors = {name: each.clone() for gradient in gradients for name, each in gradient.tensors.items()}
        self.rows.append((self._leases[push.lease_id], push, verdict, tensors, grad_norm.clone(), loss))
        return self._add(push, verdict, gradients, grad_norm, loss=loss, **options)


def replay(config, rows) -> str:
    """Compute everything again in one process, on one shard; compare each gradient, and return the weights' digest."""
    parts = StageParts(config, whole(config.model), num_versions=1, device=CPU)
    server = Server(config, [parts])
    weights = parts.updater.weights
    layout = Layout.of(weights.read(0))
    flat = layout.empty()
    worker = Worker(
        config, Replica.over(config, layout.views(flat), device=CPU), functools.partial(microbatch, config), device=CPU
    )
    held = {0: {name: tensor.clone() for name, tensor in weights.read(0).items()}}
    for lease, push, verdict, tensors, grad_norm, loss in rows:
        for name, view in layout.views(flat).items():
            view.copy_(held[push.read_version][name])
        work = worker.compute(lease, version=push.read_version, worker=push.worker)
        assert (work.loss, float(work.grad_norm)) == (loss, float(grad_norm))
        assert work.gradient.tensors.keys() == tensors.keys()
        assert all(torch.equal(work.gradient.tensors[name], tensors[name]) for name in tensors)
        server.sequencer.version += verdict.makes_step
        if server.add(push, verdict, [work.gradient], work.grad_norm, loss=work.loss) is not None:
            version = server.sequencer.version
            held[version] = {name: tensor.clone() for name, tensor in weights.read(version).items()}
    return combined_digest(parts.snapshot().digests)


def test_two_workers_replayed_in_one_process_bitwise():
    """No gradient has weights of two versions in it, whichever steps were made while it was under way."""
    config = settings(dataparallel={"emulate_speeds": [1.0, 0.5]})
    with running(config) as engine:
        recorder = Recorder(engine.server)
        run_until(engine, lambda: engine.step >= 12 and engine.server.sequencer.staleness.largest >= 2)
        digest = combined_digest(engine.snapshot().digests)
        batches = [microbatch(config, 1000 + i) for i in range(3)]
        assert engine.evaluate(batches, "y") == pytest.approx(whole_loss(config, engine, batches), rel=1e-6)
        figures = engine.figures()
    assert replay(config, recorder.rows) == digest
    assert len(recorder.rows) == figures["pushes_accepted"]
    assert {row[1].worker for row in recorder.rows} == {0, 1}
    committed = sum(row[0].num_microbatches for row in recorder.rows)
    assert figures["tokens_committed"] == committed * MICROBATCH_TOKENS
    assert len({number for row in recorder.rows for number in row[0].microbatches()}) == committed
    assert 0 < figures["throughput_share"] < 1.05
    assert figures["num_stages"] == 2


def whole_loss(config, engine, batches) -> float:
    """Of the same weights on one shard."""
    alone = build_engine(dataclasses.replace(config, engine="inline", dataparallel=one_stage(config)), None, device=CPU)
    alone.server.restore(Saved(engine.snapshot(), engine.step))
    return alone.evaluate(batches, "y")


def one_stage(config):
    return dataclasses.replace(config.dataparallel, num_stages=1)


def test_a_bound_on_staleness_makes_pipelines_drain_and_go_on():
    config = settings(dataparallel={"pushes_per_step": 1, "max_staleness": 2, "emulate_speeds": [1.0, 0.3]})
    with running(config) as engine:
        run_until(engine, lambda: engine.step >= 15)
        assert engine.figures()["staleness_max"] == 2
        assert min(engine.figures()["microbatches_by_worker"].values()) > 0


# --- the failure matrix --------------------------------------------------------------------------------------------


def committed(engine, worker=ODD) -> int:
    member = engine.server.sequencer.members.get(worker)
    return member.microbatches if member else 0


def test_a_stage_is_killed():
    """Its worker ends with it and comes back as a whole; the other one goes on, and what it had goes out again."""
    config = settings(dataparallel={"wire": "int8"})
    with running(config, worker_mains.late_stage) as engine:
        run_until(engine, lambda: engine.step >= 3 and committed(engine))
        others = set(processes(0))
        for restarts, stage in ((1, 1), (2, 0)):
            before, old = committed(engine), processes(ODD)
            victim = next(each for each in old.values() if each.name.endswith(f"stage-{stage}"))
            os.kill(victim.pid, signal.SIGKILL)
            victim.join(5)
            step = engine.step
            run_until(engine, lambda step=step: engine.step >= step + 4)
            assert engine.server.sequencer.num_live == 1, "it needs a second to come back"
            run_until(engine, lambda before=before: committed(engine) > before + 5)
            assert engine.figures()["restarts"] == restarts
            assert len(processes(ODD)) == 2
            assert not old.keys() & processes(ODD).keys(), "all its stages are new"
        assert engine.server.sequencer.members[ODD].incarnation == 3
        assert set(processes(0)) == others
        assert engine.server.sequencer.ledger.lag < 8 * STEP_MICROBATCHES, "no microbatch is left behind"
        assert 0 < engine.figures()["wire_relative_error"] < 0.1


def test_a_stage_hangs(monkeypatch, tmp_path):
    """Its worker is ended after the deadline, and another takes its place."""
    monkeypatch.setattr(cycles, "DEADLINE_FLOOR_S", 1.5)
    with running(settings(run_dir=str(tmp_path)), worker_mains.stops_in_the_middle) as engine:
        run_until(engine, lambda: engine.server.sequencer.num_restarts == 1)
        before = committed(engine)
        run_until(engine, lambda: committed(engine) > before)
        assert int((tmp_path / "stopped").read_text()) not in processes()
        assert engine.figures()["pushes_rejected"] == 0


def test_messages_come_twice():
    with running(settings(), worker_mains.repeats_parts) as engine:
        run_until(engine, lambda: engine.server.sequencer.rejected["duplicate"] > 3)
        figures = engine.figures()
    assert set(figures["pushes_rejected_by_reason"]) == {"duplicate"}
    assert figures["tokens_committed"] == sum(figures["microbatches_by_worker"].values()) * MICROBATCH_TOKENS


def test_a_gradient_that_is_not_finite_on_one_stage_is_dropped_on_all():
    with running(settings(), worker_mains.spoils_a_stage) as engine:
        run_until(engine, lambda: committed(engine))
        assert engine.figures()["pushes_rejected_by_reason"] == {"non_finite": 1}
        for parts in engine.server.parts:
            assert all(torch.isfinite(y).all() for y in parts.updater.masters.values())


# --- snapshots -----------------------------------------------------------------------------------------------------


def test_resumed_by_pipelines_and_by_workers_of_one_process():
    """Not more and not less than once, whoever goes on."""
    with running(settings()) as engine:
        run_until(engine, lambda: engine.step >= 4)
        saved = Saved(engine.snapshot(), engine.step)
        ledger = engine.server.sequencer.ledger
        in_flight, tokens = engine.server.sequencer.in_flight.num_microbatches, ledger.tokens_committed
    assert in_flight > 0
    with running(settings(dataparallel={"num_workers": 1, "num_stages": 3, "min_microbatches": 2})) as other:
        other.restore(saved)
        balance = other.server.sequencer.ledger.balance()
        assert (balance.committed, balance.returned, balance.open) == (tokens, in_flight * MICROBATCH_TOKENS, 0)
        assert combined_digest(other.snapshot().digests) == combined_digest(saved.digests)
        run_until(other, lambda: other.step >= 7)
        assert other.server.sequencer.ledger.tokens_committed >= 7 * STEP_MICROBATCHES * MICROBATCH_TOKENS
        assert (other.server.sequencer.epoch, other.figures()["restarts"]) == (2, 0)
    config = settings(engine="inline", dataparallel={"num_workers": 3, "num_stages": 1})
    third = build_engine(config, functools.partial(microbatch, config), device=CPU)
    third.restore(saved)
    assert third.run_step().step == saved.step + 1
    assert third.server.sequencer.ledger.balance().holds
