"""A disk that takes no more, at whatever point of a run: a sentence, and nothing that was there is lost."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.train.test_resume import train, trajectory

from slipstream.errors import CheckpointError, ConfigError
from slipstream.train.rundir import RunDir
from slipstream.train.status import read_status


@contextlib.contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Let the system refuse to write further into any file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("room", "every_steps", "said"),
    [
        (200, 0, r"write .*config\.toml"),
        (4000, 0, r"write .*metrics\.jsonl"),
        (10000, 2, r"save a checkpoint in .*checkpoints"),
    ],
)
def test_a_run_says_where_it_got_no_further_and_goes_on(tmp_path, room, every_steps, said):
    saves = {"checkpoint": {"every_steps": every_steps}}
    train(tmp_path / "whole", num_steps=12, **saves)
    with no_file_beyond(room), pytest.raises(CheckpointError, match=f"cannot {said}.*File too large"):
        train(tmp_path / "full", num_steps=12, **saves)
    assert not list(tmp_path.rglob("*.tmp"))
    status = read_status(tmp_path / "full")
    assert status is None or (status.state == "failed" and "File too large" in status.message)
    train(tmp_path / "full", num_steps=12, resume=True, **saves)
    assert trajectory(tmp_path / "full") == trajectory(tmp_path / "whole")


def test_a_resume_that_finds_no_room_costs_nothing(tmp_path):
    train(tmp_path, num_steps=3)
    names = ("config.toml", "metrics.jsonl", "evaluations.jsonl", "summary.json")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    with no_file_beyond(1000), pytest.raises(CheckpointError, match="cannot write"):
        train(tmp_path, num_steps=4, resume=True)
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == "failed"


def test_a_folder_that_cannot_be_looked_into(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refused)
    with pytest.raises(ConfigError, match=r"cannot look into the run directory .*Permission denied"):
        RunDir(tmp_path).check(resume=False, overwrite=False)
