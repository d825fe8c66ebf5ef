"""Runs with worker processes as they are typed: the server dies, is asked to stop, and goes on with other workers."""

import json
import os
import signal
from pathlib import Path

from tests.distributed.test_command import Command

from slipstream.train.checkpoint import newest_complete
from slipstream.train.metrics import read_json_lines

INTERVAL = 2
NUM_WORKERS = 3
TABLES = {
    "executor": "dataparallel",
    "engine": "process",
    "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
    "optim": {"lr": 0.01, "lr_total_steps": 40},
    "staleness": {},
    "pipeline": {"num_microbatches": 6},
    "dataparallel": {"num_workers": NUM_WORKERS, "emulate_microbatch_ms": 8.0},
    "checkpoint": {"every_steps": INTERVAL, "keep_last": 2},
}


def shared_memory_of(pid) -> list[str]:
    """What a process has left behind; its name is part of what torch calls it."""
    folder = Path("/dev/shm")
    return [path.name for path in folder.iterdir() if path.name.startswith(f"torch_{pid}_")] if folder.is_dir() else []


def steps_written(command):
    return read_json_lines(command.run_dir / "metrics.jsonl")[-1]["step"]


def saved_step(command):
    checkpoint, passed_over = newest_complete(command.run_dir / "checkpoints")
    assert not passed_over
    return checkpoint.step


def test_the_server_is_killed_then_asked_to_stop_then_ends(tmp_path):
    with Command(tmp_path, **TABLES) as command:
        command.wait_for_step(9)
        assert len(command.ranks()) == NUM_WORKERS
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.ends() == -signal.SIGKILL, "workers do not outlive their server"
        assert not shared_memory_of(command.process.pid)
    killed_at, saved = steps_written(command), saved_step(command)
    # One save may have been under way, and another due.
    assert killed_at - saved <= 2 * INTERVAL

    with Command(tmp_path, "--resume", **TABLES) as command:
        command.wait_until(lambda: steps_written(command) >= saved + 4)
        # As a scheduler does it: to every process of the run.
        os.killpg(command.process.pid, signal.SIGTERM)
        assert command.ends() == 0, command.output
    assert "state saved" in command.output
    stopped_at = saved_step(command)
    assert stopped_at == steps_written(command) >= saved + 4, "nothing is lost where the server could save"

    tables = TABLES | {"dataparallel": TABLES["dataparallel"] | {"num_workers": 2}}
    tables |= {"train": {"num_steps": stopped_at + 4}}
    with Command(tmp_path, "--resume", **tables) as command:
        command.wait_until(lambda: (command.run_dir / "summary.json").exists())
        assert command.ends() == 0, command.output
    summary = json.loads((command.run_dir / "summary.json").read_text())
    assert (summary["num_workers"], summary["num_steps"]) == (2, stopped_at + 4)
    assert (summary["ledger_balanced"], summary["restarts"]) == (True, 0)
    assert summary["pushes_rejected_by_reason"] == {}
    steps = [row["step"] for row in read_json_lines(command.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, stopped_at + 5))


def test_ctrl_c_saves_and_leaves(tmp_path):
    with Command(tmp_path, **TABLES) as command:
        command.wait_for_step(3)
        os.killpg(command.process.pid, signal.SIGINT)
        assert command.ends() == 0, command.output
    assert saved_step(command) == steps_written(command)
    assert "Traceback" not in command.output
