"""Workers as Ray actors on a cluster of several nodes: the same numbers as in one process; workers go and come."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests.distributed import worker_mains
from tests.distributed.harness import run_config
from tests.distributed.pool import CPU
from tests.distributed.test_process_engine import ODD, committed, run_steps, run_until
from tests.distributed.test_process_engine import settings as process_settings
from tests.distributed.test_ray_command import TABLES
from tests.distributed.worker_mains import microbatch

from slipstream.cli import main
from slipstream.dataparallel import cycles
from slipstream.dataparallel.engine import build_engine
from slipstream.dataparallel.ray_cluster import private_environment
from slipstream.dataparallel.ray_engine import RayEngine, SynchronousRayEngine
from slipstream.errors import ConfigError
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter

NUM_WORKERS = 2
NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster():
    with private_environment() as folder:  # before Ray is imported
        ray = pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        Path("/tmp/ray").mkdir(exist_ok=True)  # Ray notes there which cluster came last
        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"temp_dir": str(folder)})
        try:
            cluster.add_node(**NODE)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def settings(**changes):
    changes["dataparallel"] = {"num_workers": NUM_WORKERS} | changes.get("dataparallel", {})
    return process_settings(engine="ray", **changes)


@contextlib.contextmanager
def running(config, main=worker_mains.plain):
    until_free()
    kind = SynchronousRayEngine if config.dataparallel.mode == "sync" else RayEngine
    with contextlib.closing(kind(config, device=CPU, main=main)) as engine:
        yield engine
        assert engine.server.sequencer.ledger.balance().holds


def until_free(*, timeout_s=60.0):
    """Wait until Ray has taken back what the workers of a run before had: only then it spreads the next ones."""
    import ray

    deadline = time.monotonic() + timeout_s
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)


def seats(engine):
    return {seat.worker: seat for seat in engine._crew.seats}


def inline(config, count):
    config = dataclasses.replace(config, engine="inline")
    return run_steps(build_engine(config, functools.partial(microbatch, config), device=CPU), count)


# --- the same numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"wire": "int8", "mode": "sync"},
        {"ray_transport": "c10d"},
        {"ray_transport": "c10d", "wire": "int8", "mode": "sync"},
    ],
)
def test_one_worker_is_one_process_bitwise(cluster, options):
    config = settings(
        dataparallel={"num_workers": 1, "emulate_microbatch_ms": 0.0} | options, staleness={"error_feedback": 0.5}
    )
    with running(config) as engine:
        assert run_steps(engine, 5) == inline(config, 5)
        assert engine.figures()["staleness_max"] == 0


# --- the failure matrix --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["object_store", "c10d"])
def test_a_worker_is_killed_and_one_joins_and_its_machine_dies(cluster, transport):
    """All four CPUs are taken, so that who comes where is not for Ray to choose."""
    tables = {"num_workers": 4, "ray_transport": transport}
    config = settings(pipeline={"num_microbatches": 18}, dataparallel=tables)
    with running(config) as engine:
        run_until(engine, lambda: engine.step >= 3 and all(committed(engine, each) for each in range(4)))
        assert len({seat.machine for seat in seats(engine).values()}) == 2
        os.kill(seats(engine)[ODD].process, signal.SIGKILL)
        run_until(engine, lambda: engine.server.sequencer.num_live == 3)
        before, step = committed(engine), engine.step
        run_until(engine, lambda: committed(engine) > before)
        assert engine.step > step + 1, "the others go on while it comes back"
        assert engine.figures()["restarts"] == 1
        assert engine.server.sequencer.members[ODD].incarnation == 2

        node = cluster.add_node(**NODE | {"num_cpus": 1, "resources": {"new": 1}})
        number = config.dataparallel.num_workers
        engine.start_workers([number])
        run_until(engine, lambda: committed(engine, number))
        history = engine.server.sequencer.policy.histories[number]
        run_until(engine, lambda: max(cycle["num_microbatches"] for cycle in history.state_dict()) > 1)
        assert history.state_dict()[0]["num_microbatches"] == 1, "one to find out how fast it is"
        assert seats(engine)[number].machine not in {seats(engine)[each].machine for each in range(4)}

        cluster.remove_node(node, allow_graceful=False)
        step = engine.step
        run_until(engine, lambda: engine.step >= step + 5)
        assert engine.server.sequencer.ledger.lag < 6 * 18, "no microbatch is left behind"
        assert engine.figures()["pushes_rejected"] == 0


def test_a_worker_hangs_in_a_session(cluster, monkeypatch, tmp_path):
    """It is ended at its deadline, while a gradient is expected of it. The other session goes on; it gets a new one."""
    monkeypatch.setattr(cycles, "DEADLINE_FLOOR_S", 4.0)
    config = settings(run_dir=str(tmp_path), dataparallel={"ray_transport": "c10d"})
    with running(config, worker_mains.stops_once) as engine:
        run_until(engine, lambda: committed(engine))
        sessions = {number: seat.gradient for number, seat in seats(engine).items()}
        run_until(engine, lambda: (tmp_path / "stopped").exists())
        step = engine.step
        run_until(engine, lambda: engine.server.sequencer.members[ODD].incarnation == 2)
        assert engine.step > step + 1, "nobody waits for it"
        before = committed(engine)
        run_until(engine, lambda: committed(engine) > before)
        assert {number: session.is_closed for number, session in sessions.items()} == {0: False, ODD: True}


def test_a_worker_that_is_never_ready_is_started_again_but_not_one_without_room(cluster, tmp_path):
    config = settings(run_dir=str(tmp_path), pipeline={"timeout_s": 4.0})
    with running(config, worker_mains.hangs_in_some_lives) as engine:
        run_until(engine, lambda: committed(engine))
        assert len((tmp_path / "lives").read_text().splitlines()) == 2
        engine.start_workers([2, 3, 4])  # there is room for four in all
        began_s = engine.now_s
        run_until(engine, lambda: committed(engine, 2) and committed(engine, 3) and engine.now_s > began_s + 6.0)
        (waits,) = [seat for seat in seats(engine).values() if not seat.incarnation]
        os.kill(seats(engine)[2].process, signal.SIGKILL)
        assert waits.worker == 4
        run_until(engine, lambda: committed(engine, 4))
        assert seats(engine)[4] is waits


def test_a_worker_becomes_ten_times_slower(cluster):
    config = settings(pipeline={"num_microbatches": 18}, dataparallel={"emulate_microbatch_ms": 10.0})
    with running(config, worker_mains.slows_down) as engine:
        policy = engine.server.sequencer.policy
        run_until(engine, lambda: engine.server.sequencer.ledger.frontier > 90)
        assert policy.plan[ODD] > 3
        # At 2 its cycle is the longer one by a quarter, at 1 the shorter one by two fifths: either is even.
        run_until(engine, lambda: policy.plan[ODD] <= 2)
        run_until(engine, lambda: len(policy.histories[ODD]) > 4)
        assert engine.figures()["staleness_max"] <= 3 * NUM_WORKERS


class Killer(SilentReporter):
    """Kills the server at a step, once."""

    def __init__(self, at_step):
        self.at_step = at_step
        self.notes = []
        self.processes = []

    def note(self, text):
        self.notes.append(text)
        if found := re.search(r"the server is process (\d+)", text):
            self.processes.append(int(found[1]))

    def on_step(self, row, *, eta_s):
        if row["step"] >= self.at_step and len(self.processes) == 1:
            os.kill(self.processes[0], signal.SIGKILL)


def test_the_server_is_killed(cluster, tmp_path):
    """It comes again by itself, with new lives of the workers, and goes on from its newest checkpoint."""
    config = run_config(tmp_path / "run", **TABLES, train={"num_steps": 40})
    reporter = Killer(at_step=9)
    summary = launch(config, reporter=reporter)
    (went_on,) = [int(found[1]) for note in reporter.notes if (found := re.search(r"goes on from step (\d+)", note))]
    # One save may have been under way, and another due.
    assert went_on >= 9 - 2 * 2
    assert len(set(reporter.processes)) == 2
    assert (summary["num_steps"], summary["ledger_balanced"], summary["restarts"]) == (40, True, 0)
    tokens = config.train.microbatch_size * config.data.sequence_length
    assert summary["tokens_committed"] == sum(summary["microbatches_by_worker"].values()) * tokens
    assert summary["tokens_committed"] // (6 * tokens) == 40
    steps = [row["step"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(1, 41))


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_cluster_that_is_too_small_says_so(cluster):
    with pytest.raises(ConfigError, match=r"offers \d CPUs; 9 workers of 1 .* the server need 10"):
        RayEngine(settings(dataparallel={"num_workers": 9}), device=CPU)


# --- how fast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["object_store", "c10d"])
def test_exchange_is_timed(cluster, capsys, transport):
    words = ["--engine", "ray", "--megabytes", "1", "--num-workers", "1", "--rounds", "2", "--cycles", "3", "--json"]
    assert main(["bench", "exchange", *words, "--ray-transport", transport]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["settings"]["engine"], result["settings"]["ray_transport"]) == ("ray", transport)
    for name in ("copy", "exchange", "summed"):
        assert len(result[f"{name}_rounds"]) == 2
        assert min(result[f"{name}_rounds"]) > 0
