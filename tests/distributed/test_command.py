"""The command as it is typed, in processes of its own: signals, deaths, and ranks that torchrun started."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

from tests.distributed.harness import run_config
from tests.distributed.pool import ROOT

from slipstream.config import to_toml
from slipstream.pipeline.runtime import pipeline_spec
from slipstream.pipeline.schedules import stream
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter

NUM_STAGES = 3


def settings(run_dir, **changes):
    tables = {
        "executor": "pipeline",
        "pipeline": {"num_stages": NUM_STAGES},
        "staleness": {"error_feedback": 1.0},
        "train": {"num_steps": 5000},
        "evaluate": {"every_steps": 0},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
    }
    return run_config(run_dir, **{name: changes.get(name, tables.get(name)) for name in tables | changes})


class Command:
    """`slipstream train` in a process group of its own, which ends with the test."""

    def __init__(self, tmp_path, *flags, launcher=(), **changes):
        self.run_dir = tmp_path / "run"
        file = tmp_path / "settings.toml"
        file.write_text(to_toml(settings(self.run_dir, **changes)))
        words = [sys.executable, *launcher, "-m", "slipstream.cli", "train", "--config", str(file), *flags]
        with (tmp_path / "output").open("w") as self._output:
            self.process = subprocess.Popen(
                words, stdout=self._output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )
        self._path = tmp_path / "output"

    @property
    def output(self) -> str:
        return self._path.read_text()

    def group(self) -> dict[int, int]:
        """Parents of all living processes of the group, by number, the command's own left out."""
        listing = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid=,stat="], capture_output=True, text=True, check=True)
        rows = [line.split() for line in listing.stdout.splitlines()]
        pid = self.process.pid
        return {int(row[0]): int(row[1]) for row in rows if int(row[2]) == pid != int(row[0]) and row[3][0] != "Z"}

    def ranks(self) -> list[int]:
        """Processes of the ranks, in order: the children of the forkserver, which is a child of the command."""
        group = self.group()
        return sorted(pid for pid, parent in group.items() if group.get(parent) == self.process.pid)

    def wait_for_step(self, step):
        metrics = self.run_dir / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= step)

    def wait_until(self, is_so):
        deadline = time.monotonic() + 90
        while not is_so():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def ends(self) -> int:
        """Return the exit code; nothing of the group may be left half a minute from now."""
        deadline = time.monotonic() + 30
        code = self.process.wait(timeout=30)
        while self.group():
            assert time.monotonic() < deadline, f"still there: {self.group()}"
            time.sleep(0.05)
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def test_a_rank_is_killed_then_the_command_then_all_goes_on(tmp_path):
    with Command(tmp_path) as command:
        command.wait_for_step(5)
        os.kill(command.ranks()[1], signal.SIGKILL)
        assert command.ends() == 1
        said = command.output
    assert re.search(r"^error: rank 1 \(stage 1\) was killed by SIGKILL; its last action was '.+' \(row", said, re.M)
    assert "Continue from the last checkpoint with --resume" in said
    assert "Traceback" not in said

    with Command(tmp_path, "--resume") as command:
        command.wait_for_step(len(read_json_lines(command.run_dir / "metrics.jsonl")) + 3)
        assert len(command.ranks()) == NUM_STAGES
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.ends() == -signal.SIGKILL, "ranks whose results nobody will read do not go on"

    saved = max(int(path.name[5:]) for path in (command.run_dir / "checkpoints").glob("step-*"))
    table = {"train": {"num_steps": saved + 2}, "checkpoint": {"every_steps": 0}}
    found = launch(settings(command.run_dir, **table), reporter=SilentReporter(), resume=True)
    alone = {"executor": "single", "staleness": {"delay": 1, "error_feedback": 1.0}}
    expected = launch(settings(tmp_path / "whole", **table, **alone), reporter=SilentReporter())
    assert found["num_steps"] == saved + 2
    assert found["weights_sha256"] == expected["weights_sha256"]


def test_torchrun_starts_the_same_run(tmp_path):
    """The command is unchanged, and so are the weights."""
    table = {"pipeline": {"num_stages": 2}, "train": {"num_steps": 4}, "checkpoint": {"every_steps": 1}}
    table |= {"log": {"trace_steps": 2}}
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    with Command(tmp_path, launcher=launcher, **table) as command:
        command.wait_until(lambda: (command.run_dir / "summary.json").exists())
        assert command.ends() == 0, command.output
    found = json.loads((command.run_dir / "summary.json").read_text())
    expected = launch(settings(tmp_path / "own", **table), reporter=SilentReporter())
    for key in ("weights_sha256", "val_loss", "val_loss_y", "train_loss"):
        assert found[key] == expected[key], key
    assert len(read_json_lines(command.run_dir / "metrics.jsonl")) == 4
    assert command.output.count("validation loss, after") == 1, "only rank 0 speaks"
    spec = pipeline_spec(settings(tmp_path, **table))
    for rank in range(2):
        whole = [str(action) for action in stream(spec, rank=rank, first_batch=0, num_batches=4)]
        second_step = [place for place, text in enumerate(whole) if text.startswith(f"{rank}O")][1]
        assert traced(command.run_dir / "trace.json", rank) == whole[: second_step + 1]


def traced(path, rank):
    """Return a rank's actions by their begin, none of which lies within another."""
    events = [each for each in json.loads(path.read_text())["traceEvents"] if (each["ph"], each["pid"]) == ("X", rank)]
    events.sort(key=lambda event: event["ts"])
    for earlier, later in itertools.pairwise(events):
        assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1.0
    return [event["name"] for event in events]
