import dataclasses

import pytest
import torch

from slipstream.config import from_dict, resolve
from slipstream.data import Loader, open_data
from slipstream.dataparallel.faults import Fault
from slipstream.dataparallel.inline import InlineEngine
from slipstream.dataparallel.worker import Worker
from slipstream.digests import combined_digest
from slipstream.errors import StageError

CPU = torch.device("cpu")


class Memory:
    """A snapshot as a resumed run reads it."""

    def __init__(self, snapshot, step):
        import json

        self.snapshot, self.step = snapshot, step
        self.scalars = json.loads(json.dumps(dict(snapshot.scalars)))
        self.tensor_names = frozenset(snapshot.tensors)

    def tensor(self, name):
        return self.snapshot.tensors[name].clone()


def settings(**changes):
    tables = {
        "executor": "dataparallel",
        "data": {"sequence_length": 8},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
        "optim": {"lr": 0.01, "lr_warmup_steps": 2, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": 8},
        "dataparallel": {"emulate_speeds": (1.0, 1.0, 1.0, 0.25), "emulate_jitter": 0.2},
        "train": {"num_steps": 20, "microbatch_size": 1},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change
    return resolve(from_dict(tables), vocab_size=257, cuda=False)


def engine(*, faults=(), **changes) -> InlineEngine:
    torch.set_num_threads(1)
    config = settings(**changes)
    loader = Loader(open_data("").train, sequence_length=8, batch_size=1, seed=0)
    return InlineEngine(config, loader.batch, device=CPU, faults=faults)


def trajectory(executor, num_steps):
    rows = []
    for _ in range(num_steps):
        report = executor.run_step()
        rows.append(
            (report.step, report.loss, report.grad_norm, report.staleness, report.staleness_mean, report.step_s)
        )
    return rows


def digest(executor):
    return combined_digest(executor.snapshot().digests)


def test_the_same_run_twice_is_the_same_to_the_bit():
    first, second = engine(), engine()
    assert trajectory(first, 12) == trajectory(second, 12)
    assert digest(first) == digest(second)
    other = engine(dataparallel={"seed": 1})
    assert trajectory(other, 12) != trajectory(engine(), 12)


OPTIONS = {
    "plain": {},
    "error feedback and muon": {"optim": {"name": "muon"}, "staleness": {"error_feedback": 1.0}},
    "compensator and rate": {
        "staleness": {
            "correction": "agc",
            "lr_discount": "aalr",
            "agc": {"min_pairs": 1, "ramp_steps": 2, "displacement": "ema"},
        }
    },
    "probes": {
        "dataparallel": {"pushes_per_step": 1},
        "staleness": {
            "correction": "agc",
            "agc": {"curvature": "secant_diag", "probe_every": 2, "min_pairs": 1, "ramp_steps": 2},
        },
    },
    "every push a step": {"dataparallel": {"pushes_per_step": 1}},
    "bounded": {"dataparallel": {"max_staleness": 1}},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_resumed_is_continuous_bitwise(options):
    whole = engine(**OPTIONS[options])
    rows = trajectory(whole, 14)
    half = engine(**OPTIONS[options])
    assert trajectory(half, 7) == rows[:7]
    resumed = engine(**OPTIONS[options])
    resumed.restore(Memory(half.snapshot(), 7))
    assert resumed.step == 7
    assert trajectory(resumed, 7) == rows[7:]
    assert digest(resumed) == digest(whole)
    assert resumed.figures() == whole.figures()


def test_resume_goes_on_with_messages_on_their_way_and_faults_to_come():
    faults = [
        Fault(kind="late", worker=0, at_s=0.1),
        Fault(kind="duplicate", worker=1, at_s=0.1),
        Fault(kind="kill", worker=2, at_s=2.5),
        Fault(kind="join", worker=2, at_s=4.0),
        Fault(kind="join", worker=4, at_s=3.0),
    ]
    whole = engine(faults=faults)
    rows = trajectory(whole, 16)
    for cut in (1, 2, 5, 9):
        half = engine(faults=faults)
        trajectory(half, cut)
        resumed = engine(faults=faults)
        resumed.restore(Memory(half.snapshot(), cut))
        assert trajectory(resumed, 16 - cut) == rows[cut:]
        assert resumed.figures() == whole.figures()


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5, 1.0, 1.0, 2.0, 1.0)])
def test_resume_with_another_number_of_workers_loses_nothing(speeds):
    half = engine()
    trajectory(half, 6)
    committed = half.figures()["tokens_committed"]
    resumed = engine(dataparallel={"emulate_speeds": speeds})
    resumed.restore(Memory(half.snapshot(), 6))
    assert resumed.step == 6
    assert resumed.server.sequencer.ledger.balance().open == 0
    assert resumed.server.sequencer.ledger.balance().returned > 0, "what was in flight goes out again"
    rows = trajectory(resumed, 10)
    figures = resumed.figures()
    assert rows[-1][0] == 16
    assert figures["ledger_balanced"]
    assert figures["tokens_committed"] > committed
    assert figures["restarts"] == 0
    assert resumed.server.sequencer.ledger.lag < 8 * 6
    assert resumed.server.sequencer.epoch == 2


def test_nobody_waits():
    executor = engine(dataparallel={"emulate_jitter": 0.0})
    trajectory(executor, 60)
    assert executor.throughput_share() > 0.97
    assert executor.figures()["ledger_balanced"]


def test_a_killed_worker_costs_its_share_only():
    executor = engine(faults=[Fault(kind="kill", worker=0, at_s=3.0)], dataparallel={"emulate_jitter": 0.0})
    trajectory(executor, 40)
    sequencer = executor.server.sequencer
    assert sequencer.num_live == 3
    assert sequencer.ledger.balance().holds
    assert sequencer.ledger.lag < 8 * 4, "its microbatches went out again"
    assert executor.throughput_share() > 0.95
    assert sequencer.policy.plan.keys() == {1, 2, 3}
    assert sum(sequencer.policy.plan.values()) == 8


def test_a_worker_that_joins_is_calibrated_and_gets_its_share():
    executor = engine(faults=[Fault(kind="join", worker=4, at_s=3.0)], dataparallel={"emulate_jitter": 0.0})
    trajectory(executor, 40)
    figures = executor.figures()
    assert figures["microbatches_by_worker"]["4"] > figures["microbatches_by_worker"]["3"]
    assert executor.throughput_share() > 0.95
    assert figures["ledger_balanced"]


def test_a_worker_that_hangs_is_given_up_and_comes_back():
    executor = engine(faults=[Fault(kind="hang", worker=1, at_s=1.0, seconds=14.0)])
    while executor.now_s < 22.0:
        executor.run_step()
    figures = executor.figures()
    assert figures["pushes_rejected_by_reason"] == {"lease": 1}
    assert figures["restarts"] == 1
    assert executor.server.sequencer.num_live == 4
    assert figures["ledger_balanced"]
    assert figures["staleness_max"] < 12


def test_a_worker_ten_times_slower_keeps_staleness_within_three_rounds():
    executor = engine(
        faults=[Fault(kind="slow", worker=0, at_s=5.0, factor=10.0)],
        pipeline={"num_microbatches": 40},
        dataparallel={"emulate_speeds": (1.0, 1.0, 1.0, 1.0), "emulate_jitter": 0.1},
    )
    trajectory(executor, 30)
    assert executor.server.sequencer.policy.plan[0] <= 2
    assert executor.figures()["staleness_max"] <= 12


def test_messages_that_come_twice_late_or_out_of_order_count_once():
    clean = engine()
    faults = [Fault(kind=kind, worker=w, at_s=at) for w in range(4) for kind, at in (("duplicate", 0.2), ("late", 0.9))]
    noisy = engine(faults=faults)
    assert trajectory(noisy, 20) == trajectory(clean, 20)
    assert digest(noisy) == digest(clean)
    assert noisy.figures()["pushes_rejected_by_reason"] == {"duplicate": 8}
    assert noisy.figures()["ledger_balanced"]


def test_gradients_that_are_not_finite_are_dropped_and_their_worker_too():
    executor = engine(faults=[Fault(kind="nan", worker=1, at_s=1.0, count=5)])
    rows = trajectory(executor, 25)
    figures = executor.figures()
    assert figures["pushes_rejected_by_reason"] == {"non_finite": 3}
    assert executor.server.sequencer.members[1].state == "quarantined"
    assert all(row[1] == row[1] for row in rows)
    assert figures["ledger_balanced"]
    assert executor.server.sequencer.ledger.lag < 8 * 4


def test_a_slow_model_has_time_for_its_first_microbatch():
    """An hour each: known beforehand, or the worker would be given up again and again, for ever."""
    executor = engine(dataparallel={"num_workers": 1, "emulate_speeds": (1.0,), "emulate_microbatch_ms": 3.6e6})
    assert executor.server.sequencer.policy.deadline_s(0, 1) == pytest.approx(6 * 3600)
    executor._answer()
    executor._next()
    assert executor.server.sequencer.num_accepted == 1
    assert executor.figures()["restarts"] == 0


def test_a_bad_microbatch_is_dropped_and_the_run_goes_on(monkeypatch):
    compute = Worker.compute

    def poisoned(self, lease, **options):
        work = compute(self, lease, **options)
        bad = 20 in lease.microbatches()
        return dataclasses.replace(work, grad_norm=torch.full_like(work.grad_norm, float("nan"))) if bad else work

    monkeypatch.setattr(Worker, "compute", poisoned)
    executor = engine()
    trajectory(executor, 12)
    figures = executor.figures()
    assert (executor.server.sequencer.num_live, figures["pushes_rejected_by_reason"]) == (4, {"non_finite": 2})
    assert 8 <= figures["tokens_dropped"] <= 8 * 8
    assert figures["ledger_balanced"]
    assert figures["ledger_lag"] < 8 * 4
    resumed = engine()
    resumed.restore(Memory(executor.snapshot(), executor.step))
    assert resumed.figures()["tokens_dropped"] == figures["tokens_dropped"]
    assert resumed.figures()["ledger_balanced"]


def test_two_bad_gradients_are_forgiven():
    executor = engine(faults=[Fault(kind="nan", worker=1, at_s=1.0, count=2)])
    trajectory(executor, 25)
    assert executor.server.sequencer.members[1].state == "live"
    assert executor.server.sequencer.num_live == 4


def test_when_all_have_gone_the_run_says_so():
    executor = engine(faults=[Fault(kind="kill", worker=worker, at_s=1.0) for worker in range(4)])
    with pytest.raises(StageError, match="no worker is left at step"):
        trajectory(executor, 50)


def test_dynamic_batches_lower_the_largest_staleness():
    figures = {}
    for dynamic in (False, True):
        executor = engine(
            pipeline={"num_microbatches": 30},
            dataparallel={"emulate_speeds": (1.0, 2.0, 4.0, 8.0), "emulate_jitter": 0.0, "dynamic_batches": dynamic},
        )
        trajectory(executor, 15)
        figures[dynamic] = executor.figures()
    assert figures[False]["staleness_max"] >= 3 * figures[True]["staleness_max"]


def test_the_async_aware_rate_knows_how_many_there_are():
    executor = engine(
        staleness={"lr_discount": "aalr"},
        faults=[Fault(kind="kill", worker=0, at_s=2.0)],
        dataparallel={"pushes_per_step": 1},
    )
    step_size = executor.server.parts[0].step_size
    assert step_size.threshold == pytest.approx(1.5 * 3)
    trajectory(executor, 20)
    assert step_size.threshold == pytest.approx(1.5 * 2)
