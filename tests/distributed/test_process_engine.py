"""Workers as processes: the same numbers as in one process, and every fault of the failure matrix."""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.distributed import worker_mains
from tests.distributed.pool import CPU
from tests.distributed.worker_mains import ODD, VOCAB_SIZE, microbatch

from slipstream.config import Config, config_hash, from_dict, resolve
from slipstream.dataparallel import cycles
from slipstream.dataparallel.crew import ProcessCrew
from slipstream.dataparallel.engine import build_engine
from slipstream.dataparallel.process_engine import MAX_DEATHS, ProcessEngine
from slipstream.dataparallel.process_synchronous import SynchronousProcessEngine
from slipstream.digests import combined_digest
from slipstream.errors import ConfigError, StageError

NUM_WORKERS = 3
STEP_MICROBATCHES = 9
MICROBATCH_TOKENS = 2 * 7


def settings(**changes) -> Config:
    tables = {
        "executor": "dataparallel",
        "engine": "process",
        "data": {"sequence_length": 7},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "dropout": 0.1},
        "optim": {"lr": 0.01, "max_grad_norm": 1.0, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": STEP_MICROBATCHES},
        "dataparallel": {"num_workers": NUM_WORKERS, "emulate_microbatch_ms": 4.0},
        "train": {"microbatch_size": 2},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    return resolve(from_dict(tables), vocab_size=VOCAB_SIZE, cuda=False)


@contextlib.contextmanager
def running(config, main=worker_mains.plain):
    """An engine, of which nothing may be left afterwards."""
    kind = SynchronousProcessEngine if config.dataparallel.mode == "sync" else ProcessEngine
    engine = kind(config, device=CPU, main=main)
    try:
        yield engine
        assert engine.server.sequencer.ledger.balance().holds
    finally:
        engine.close()
    assert not processes(), "workers outlived the run"
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    assert not [name for name in names if name.startswith(f"torch_{os.getpid()}_")], "shared memory was left behind"


def processes(worker=None) -> dict[int, multiprocessing.Process]:
    names = ("worker-",) if worker is None else (f"worker-{worker}",)
    return {each.pid: each for each in multiprocessing.active_children() if each.name.startswith(names)}


def run_until(engine, is_so, *, timeout_s=150.0):
    """Make steps until something is so."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, engine.figures()
        engine.run_step()


def run_steps(engine, count):
    reports = [engine.run_step() for _ in range(count)]
    figures = [(report.step, report.loss, report.grad_norm, report.lr, report.num_tokens) for report in reports]
    return figures, combined_digest(engine.snapshot().digests)


def inline(config, count):
    config = dataclasses.replace(config, engine="inline")
    return run_steps(build_engine(config, functools.partial(microbatch, config), device=CPU), count)


def committed(engine, worker=ODD) -> int:
    member = engine.server.sequencer.members.get(worker)
    return member.microbatches if member else 0


# --- the same numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_one_worker_is_one_process_bitwise(rule):
    config = settings(
        dataparallel={"num_workers": 1, "emulate_microbatch_ms": 0.0},
        optim={"name": rule},
        staleness={"error_feedback": 0.5},
    )
    with running(config) as engine:
        assert run_steps(engine, 5) == inline(config, 5)
        assert engine.figures()["staleness_max"] == 0


def test_synchronous_workers_are_the_inline_ones_bitwise_even_if_one_dies():
    config = settings(dataparallel={"mode": "sync"}, model={"tie_embeddings": True})
    expected = inline(config, 8)
    with running(config) as engine:
        assert run_steps(engine, 8) == expected
    with running(config) as engine:
        reports = [engine.run_step() for _ in range(4)]
        (pid,) = processes(ODD)
        os.kill(pid, signal.SIGKILL)
        reports += [engine.run_step() for _ in range(4)]
        assert [report.loss for report in reports] == [row[1] for row in expected[0]]
        assert combined_digest(engine.snapshot().digests) == expected[1]
        assert engine.figures()["restarts"] == 1


def test_a_synchronous_worker_that_dies_while_it_waits_changes_nothing(tmp_path):
    """Its gradient is here already. Who is left is given no share of its before it is back: a step is one batch."""
    config = settings(
        run_dir=str(tmp_path),
        dataparallel={"mode": "sync", "emulate_microbatch_ms": 10.0, "emulate_speeds": [0.1, 1.0, 1.0]},
    )
    with running(config, worker_mains.dies_while_it_waits) as engine:
        assert run_steps(engine, 6) == inline(config, 6)
        assert (tmp_path / "died").exists()
        assert engine.figures()["restarts"] == 1


def test_asynchronous_workers_are_not_in_step():
    """Otherwise nothing here could tell whether staleness is noticed."""
    with running(settings()) as engine:
        run_until(engine, lambda: engine.server.sequencer.staleness.largest >= 1)
        figures = engine.figures()
    assert sum(figures["staleness_histogram"].values()) == figures["pushes_accepted"]
    assert figures["pushes_rejected"] == 0
    assert 0 < figures["throughput_share"] < 1.05


@pytest.mark.parametrize("correction", ["dc_asgd", "agc"])
def test_a_correction_finds_the_weights_that_were_read(correction):
    config = settings(staleness={"correction": correction, "correction_strength": 0.1 * (correction == "dc_asgd")})
    with running(config) as engine:
        run_until(engine, lambda: engine.step >= 6 and engine.server.sequencer.staleness.largest >= 1)
        shard = engine.server.shards[0]
        held = {int(name.split("@")[1].split("/")[0]) for name in shard.tensors() if name.startswith("held@")}
        assert held >= engine.server.sequencer.in_flight.readers.keys() > set()


def test_experts_without_tokens_have_no_gradient():
    config = settings(
        model={"num_experts": 8, "experts_per_token": 1, "router_renormalize": False},
        dataparallel={"num_workers": 1},
        pipeline={"num_microbatches": 1},
        train={"microbatch_size": 1},
    )
    with running(config) as engine:
        assert run_steps(engine, 6) == inline(config, 6)


# --- the failure matrix --------------------------------------------------------------------------------------------


def test_a_worker_is_killed():
    """Others go on without a pause, its lease goes out again, and it comes back as another incarnation."""
    with running(settings(), worker_mains.comes_late) as engine:
        run_until(engine, lambda: engine.step >= 3 and committed(engine))
        before = committed(engine)
        (pid,) = processes(ODD)
        os.kill(pid, signal.SIGKILL)
        processes()[pid].join(5)
        step = engine.step
        run_until(engine, lambda: engine.step >= step + 5)
        assert engine.server.sequencer.num_live == NUM_WORKERS - 1, "it needs a second to come back"
        assert engine._live_tokens_per_s == engine.own_tokens_per_s([0, 2])
        run_until(engine, lambda: committed(engine) > before + 5)
        figures = engine.figures()
        assert figures["restarts"] == 1
        assert engine.server.sequencer.members[ODD].incarnation == 2
        assert engine.server.sequencer.ledger.lag < 6 * STEP_MICROBATCHES, "no microbatch is left behind"


def test_a_worker_is_killed_in_mid_message(tmp_path):
    with running(settings(run_dir=str(tmp_path)), worker_mains.is_killed_in_mid_message) as engine:
        run_until(engine, lambda: committed(engine))
        assert (tmp_path / "killed").exists()


def test_a_worker_joins():
    """One microbatch to find out how fast it is, then its share."""
    with running(settings(pipeline={"num_microbatches": 18})) as engine:
        run_until(engine, lambda: engine.step >= 3)
        engine.start_workers([NUM_WORKERS])
        run_until(engine, lambda: committed(engine, NUM_WORKERS))
        history = engine.server.sequencer.policy.histories[NUM_WORKERS]
        run_until(engine, lambda: max(cycle["num_microbatches"] for cycle in history.state_dict()) > 1)
        assert history.state_dict()[0]["num_microbatches"] == 1
        assert engine.figures()["restarts"] == 0


def test_a_worker_becomes_ten_times_slower():
    config = settings(pipeline={"num_microbatches": 18}, dataparallel={"emulate_microbatch_ms": 10.0})
    with running(config, worker_mains.slows_down) as engine:
        policy = engine.server.sequencer.policy
        run_until(engine, lambda: engine.server.sequencer.ledger.frontier > 90)
        assert policy.plan[ODD] > 3
        run_until(engine, lambda: policy.plan[ODD] == 1)
        run_until(engine, lambda: len(policy.histories[ODD]) > 4)
        assert engine.figures()["staleness_max"] <= 3 * NUM_WORKERS


def test_messages_come_twice_and_late_and_out_of_order():
    with running(settings(), worker_mains.repeats) as engine:
        run_until(engine, lambda: engine.server.sequencer.rejected["duplicate"] > 10)
        figures = engine.figures()
    assert set(figures["pushes_rejected_by_reason"]) == {"duplicate"}
    by_worker = figures["microbatches_by_worker"].values()
    assert figures["tokens_committed"] == sum(by_worker) * MICROBATCH_TOKENS


def test_a_gradient_that_is_not_finite_is_dropped():
    with running(settings(), worker_mains.spoils_once) as engine:
        run_until(engine, lambda: committed(engine))
        figures = engine.figures()
        assert figures["pushes_rejected_by_reason"] == {"non_finite": 1}
        assert len(processes()) == NUM_WORKERS
        assert all(torch.isfinite(y).all() for y in engine.server.parts[0].updater.masters.values())


def test_a_worker_of_three_such_gradients_is_quarantined():
    with running(settings(), worker_mains.spoils_always) as engine:
        engine.run_step()
        run_until(engine, lambda: engine.server.sequencer.members[ODD].state == "quarantined")
        run_until(engine, lambda: not processes(ODD))
        step = engine.step
        run_until(engine, lambda: engine.step > step + 3)
        figures = engine.figures()
        assert figures["pushes_rejected_by_reason"] == {"non_finite": 3}
        assert (committed(engine), figures["restarts"]) == (0, 0)


def test_a_worker_hangs(monkeypatch, tmp_path):
    """Another takes its place after the deadline; what it pushes when it wakes up is too late."""
    monkeypatch.setattr(cycles, "DEADLINE_FLOOR_S", 1.5)
    with running(settings(run_dir=str(tmp_path)), worker_mains.stops_once) as engine:
        run_until(engine, lambda: engine.server.sequencer.num_restarts == 1)
        before = committed(engine)
        run_until(engine, lambda: committed(engine) > before)
        pid = int((tmp_path / "stopped").read_text())
        assert pid in processes(ODD)
        assert len(processes(ODD)) == 2
        os.kill(pid, signal.SIGCONT)
        run_until(engine, lambda: pid not in processes(ODD))
        assert engine.server.sequencer.rejected == {"incarnation": 1}
        assert len(processes(ODD)) == 1


def test_workers_that_are_never_ready_are_started_again(tmp_path):
    """At the beginning, and in the midst of a run in which all others wait for the one that does not come back."""
    config = settings(run_dir=str(tmp_path), dataparallel={"mode": "sync"}, pipeline={"timeout_s": 3.0})
    expected = inline(config, 4)
    with running(config, worker_mains.hangs_in_some_lives) as engine:
        losses = [engine.run_step().loss for _ in range(2)]
        (pid,) = processes(ODD)
        os.kill(pid, signal.SIGKILL)
        losses += [engine.run_step().loss for _ in range(2)]
        assert losses == [row[1] for row in expected[0]]
        assert len((tmp_path / "lives").read_text().splitlines()) == 4


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_where_no_worker_is_ever_ready_the_run_ends_and_says_so(mode):
    config = settings(dataparallel={"mode": mode, "num_workers": 2}, pipeline={"timeout_s": 0.3})
    said = r"worker \d was ended: for 0.3 s it did not say that it is ready.* pipeline.timeout_s .*\n.*3 times in a row"
    with running(config, worker_mains.all_hang) as engine, pytest.raises(StageError, match=said):
        engine.run_step()


def test_a_worker_that_does_not_answer_a_calibration_is_started_again():
    config = settings(dataparallel={"emulate_microbatch_ms": 0.0}, pipeline={"timeout_s": 3.0})
    with running(config, worker_mains.is_not_timed) as engine:
        run_until(engine, lambda: committed(engine))
        assert engine.figures()["restarts"] == 1


def test_a_worker_is_overtaken_while_it_reads():
    with running(settings(), worker_mains.is_overtaken) as engine:
        run_until(engine, lambda: committed(engine) > 3)
        assert engine.figures()["pushes_rejected"] == 0


def test_a_worker_is_overtaken_while_all_others_wait_for_it():
    config = settings(
        pipeline={"num_microbatches": 3},
        dataparallel={"num_workers": 2, "pushes_per_step": 1, "max_staleness": 2, "dynamic_batches": False},
    )
    with running(config, worker_mains.is_overtaken_once) as engine:
        run_until(engine, lambda: committed(engine) > 10)


def test_a_worker_that_only_fails_is_given_up():
    with running(settings(), worker_mains.one_raises) as engine:
        run_until(engine, lambda: engine.step >= 5)
        assert not processes(ODD)
        assert engine.server.sequencer.num_live == NUM_WORKERS - 1


@pytest.mark.parametrize(("mode", "main"), [("async", worker_mains.all_raise), ("sync", worker_mains.one_raises)])
def test_where_none_is_left_the_run_ends_with_the_cause(mode, main):
    said = f"died {MAX_DEATHS} times in a row .*--resume"
    with (
        running(settings(dataparallel={"mode": mode}), main) as engine,
        pytest.raises(StageError, match=said) as caught,
    ):
        engine.run_step()
    assert str(caught.value).startswith("Traceback")
    assert "ZeroDivisionError: no first step for" in str(caught.value)


def test_a_worker_with_other_settings_is_turned_away():
    config = settings()
    with running(config, worker_mains.has_other_settings) as engine:
        with pytest.raises(ConfigError, match="Start the worker with the server's own config") as caught:
            engine.run_step()
        other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=1.0))
        assert config_hash(config) in str(caught.value)
        assert config_hash(other) in str(caught.value)


def test_a_word_costs_no_walk_along_all_workers(monkeypatch):
    def walk(crew):
        raise AssertionError("with thousands of workers this takes longer than what they say")

    with running(settings(dataparallel={"max_staleness": 4})) as engine:
        engine.run_step()
        monkeypatch.setattr(ProcessCrew, "seats", property(walk))
        run_until(engine, lambda: engine.step >= 8)


# --- snapshots, evaluations, time ----------------------------------------------------------------------------------


class Saved:
    """A snapshot as a reader of states."""

    def __init__(self, snapshot, step):
        self.step, self.scalars, self._tensors = step, snapshot.scalars, snapshot.tensors
        self.digests = snapshot.digests
        self.tensor_names = frozenset(snapshot.tensors)

    def tensor(self, name):
        return self._tensors[name]


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_resumed_with_another_number_of_workers(num_workers):
    """What was in flight goes out again, what was half a step goes on, and nothing counts twice."""
    with running(settings()) as engine:
        run_until(engine, lambda: engine.step >= 4)
        saved = Saved(engine.snapshot(), engine.step)
        in_flight = engine.server.sequencer.in_flight.num_microbatches
        assert in_flight > 0
        tokens = engine.server.sequencer.ledger.tokens_committed
    with running(settings(dataparallel={"num_workers": num_workers})) as other:
        other.restore(saved)
        balance = other.server.sequencer.ledger.balance()
        assert (balance.committed, balance.returned, balance.open) == (tokens, in_flight * MICROBATCH_TOKENS, 0)
        assert other.snapshot().digests == saved.digests
        run_until(other, lambda: other.step >= 8)
        done = other.server.sequencer.ledger.tokens_committed
        assert done >= 8 * STEP_MICROBATCHES * MICROBATCH_TOKENS
        assert other.server.sequencer.epoch == 2
        assert other.figures()["restarts"] == 0
    with running(settings(dataparallel={"mode": "sync"})) as third:
        third.restore(saved)
        assert third.run_step().step == saved.step + 1


def test_throughput_counts_what_was_committed_by_its_own_clock():
    """Of what another engine had done nothing, of what this one had done all; also where no step follows."""
    config = dataclasses.replace(settings(), engine="inline")
    other = build_engine(config, functools.partial(microbatch, config), device=CPU)
    for _ in range(3):
        other.run_step()
    before = other.server.sequencer.ledger.tokens_committed
    with running(settings()) as engine:
        engine.restore(Saved(other.snapshot(), other.step))
        assert engine.snapshot().scalars["engine"]["tokens"] == 0
        engine.run_step()
        saved = Saved(engine.snapshot(), engine.step)
    own = saved.scalars["engine"]["tokens"]
    assert own > 0
    assert saved.scalars["dataparallel"]["sequencer"]["ledger"]["tokens_committed"] == before + own
    with running(settings()) as engine:
        engine.restore(saved)
        assert engine.snapshot().scalars["engine"]["tokens"] == own


def test_workers_go_on_while_the_server_evaluates():
    """Up to the gradient that would make the next step: the weights that are evaluated stay as they are."""
    with running(settings()) as engine:
        run_until(engine, lambda: engine.step >= 2)
        step, pushes = engine.step, engine.server.sequencer.num_accepted
        before = engine.snapshot().digests

        def batches():
            for number in range(40):
                time.sleep(0.01)
                yield microbatch(engine.config, 1000 + number)

        engine.evaluate(batches(), "x")
        assert engine.step == step
        assert engine.snapshot().digests == before
        assert engine.server.sequencer.num_accepted > pushes
        assert engine.run_step().step == step + 1


def test_who_waits_for_an_evaluation_longer_than_its_deadline_is_not_late(monkeypatch):
    """Its gradient has arrived; only nobody has listened since one that makes a step was put aside."""
    monkeypatch.setattr(cycles, "DEADLINE_FLOOR_S", 1.5)
    own = {"pushes_per_step": 1, "dynamic_batches": False, "emulate_microbatch_ms": 40.0}
    config = settings(dataparallel=own | {"emulate_speeds": [1.0, 0.8, 0.6]}, pipeline={"num_microbatches": 3})
    with running(config) as engine:
        run_until(engine, lambda: engine.step >= 6)

        def batches():
            for number in range(40):
                time.sleep(0.1)
                yield microbatch(engine.config, 1000 + number)

        engine.evaluate(batches(), "x")
        run_until(engine, lambda: engine.step >= 9)
        assert engine.figures()["pushes_rejected"] == 0
        assert engine.figures()["restarts"] == 0


def test_own_speed_is_measured_alone_where_none_is_given():
    with running(settings(dataparallel={"emulate_microbatch_ms": 0.0})) as engine:
        engine.run_step()
        speeds = [engine.own_tokens_per_s([worker]) for worker in range(NUM_WORKERS)]
        assert min(speeds) > 0
        assert engine._live_tokens_per_s == pytest.approx(sum(speeds))
        assert engine.own_tokens_per_s([7]) == pytest.approx(NUM_WORKERS / sum(1 / speed for speed in speeds))


def test_speeds_without_a_time_are_refused():
    from slipstream.dataparallel.checks import check_dataparallel

    config = settings(dataparallel={"emulate_speeds": [1.0, 1.0, 0.5], "emulate_microbatch_ms": 0.0})
    with pytest.raises(ConfigError, match=r"emulate_speeds is given without dataparallel\.emulate_microb"):
        check_dataparallel(config)
