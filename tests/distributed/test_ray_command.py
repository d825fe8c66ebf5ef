"""A run on a Ray cluster of its own as it is typed: who can reach it, how it stops, and what is left."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest
from tests.distributed.test_command import Command
from tests.distributed.test_process_command import saved_step, steps_written

from slipstream.dataparallel.ray_cluster import LOOPBACK

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at processes as Linux shows them"),
]

NUM_WORKERS = 2
TABLES = {
    "executor": "dataparallel",
    "engine": "ray",
    "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
    "optim": {"lr": 0.01, "lr_total_steps": 40},
    "staleness": {},
    "pipeline": {"num_microbatches": 6},
    "dataparallel": {"num_workers": NUM_WORKERS, "emulate_microbatch_ms": 8.0},
    "checkpoint": {"every_steps": 2, "keep_last": 2},
}


def descendants(pid) -> set[int]:
    """Processes that one has started, and those that they have."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    rows = [[int(word) for word in line.split()] for line in listing.splitlines()]
    found, new = set(), {pid}
    while new:
        found |= new
        new = {child for child, parent in rows if parent in new} - found
    return found - {pid}


def is_alive(pid) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "zombie" not in status.read_text()
    except OSError:
        return False


def command_line(pid) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def listening(pids) -> set[str]:
    """Addresses on which processes can be reached from somewhere."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                digits = bytes.fromhex(words[1].split(":")[0])
                packed = b"".join(
                    struct.pack(">I", *struct.unpack("<I", digits[i : i + 4])) for i in range(0, len(digits), 4)
                )
                found.add(socket.inet_ntop(family, packed))
    return found


def wait_until_gone(pids):
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def folder_of(pids) -> Path:
    """Where a cluster has its files."""
    (name,) = {found for pid in pids for found in re.findall(r"/tmp/slipstream-[a-z0-9_]+", command_line(pid))}
    return Path(name)


def test_nobody_else_reaches_the_cluster_which_ends_with_the_run(tmp_path):
    # Sessions listen as well, on ports of their own.
    tables = TABLES | {"dataparallel": TABLES["dataparallel"] | {"ray_transport": "c10d"}}
    with Command(tmp_path, **tables) as command:
        command.wait_for_step(4)
        pids = descendants(command.process.pid)
        folder = folder_of(pids)
        assert folder.is_dir()
        assert listening(pids | {command.process.pid}) <= {LOOPBACK, f"::ffff:{LOOPBACK}", "::1"}
        # As a scheduler does it: to every process of the run.
        os.killpg(command.process.pid, signal.SIGTERM)
        assert command.process.wait(timeout=60) == 0, command.output
        wait_until_gone(pids)
    assert "state saved" in command.output
    assert saved_step(command) == steps_written(command) >= 4, "nothing is lost where the server could save"
    assert not folder.exists()


@pytest.mark.slow
def test_nothing_outlives_a_command_that_is_killed(tmp_path):
    with Command(tmp_path, **TABLES) as command:
        command.wait_for_step(2)
        pids = descendants(command.process.pid)
        folder = folder_of(pids)
        # Agents of Ray's own, which compute nothing, look for their machine for up to a minute before they give up.
        pids -= {pid for pid in pids if "Agent" in command_line(pid)}
        assert len(pids) >= NUM_WORKERS + 3, "workers, their server, and Ray's programs"
        os.kill(command.process.pid, signal.SIGKILL)
        wait_until_gone(pids)
    shutil.rmtree(folder, ignore_errors=True)  # nobody was left who could
