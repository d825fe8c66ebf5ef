import hashlib

import pytest
import torch

from slipstream import executor as executors
from slipstream.executor import Snapshot
from slipstream.train import checkpoint
from slipstream.train.checkpoint import (
    CheckpointWriter,
    checkpoint_steps,
    newest_complete,
    open_checkpoint,
    step_folder,
)

TENSORS = {f"y/{number}": torch.full((2, number), float(number)) for number in range(1, 30)}
SAFE_OPEN = checkpoint.safe_open
MANIFEST = {"config": {}, "tokenizer": "", "data_sha256": ""}


def saved(folder):
    writer = CheckpointWriter(folder)
    writer.save(1, Snapshot(tensors=TENSORS, scalars={"optim": {}}), MANIFEST)
    writer.wait()
    return step_folder(folder, 1)


def test_each_file_is_opened_once_however_many_tensors_are_read(tmp_path, monkeypatch):
    folder = saved(tmp_path)
    opened = []
    monkeypatch.setattr(checkpoint, "safe_open", lambda path, **how: opened.append(path) or SAFE_OPEN(path, **how))
    found = open_checkpoint(folder)
    assert found.tensor_names == set(TENSORS)
    assert found.tensor_names is found.tensor_names
    assert all(torch.equal(found.tensor(name), TENSORS[name]) for name in TENSORS)
    assert opened == [folder / "rank-0.safetensors"]


def test_training_does_not_wait_for_digests(tmp_path, monkeypatch):
    """They were taken in the snapshot, of weights copied to the host once more: seconds a save for a large stage."""
    taken = []
    monkeypatch.setattr(executors, "tensor_digest", lambda tensor: taken.append(tensor) or "digest")
    snapshot = Snapshot(tensors=TENSORS | {"x@1/1": torch.ones(2, 1)}, scalars={})
    assert not taken
    assert snapshot.digests == {name[2:]: "digest" for name in TENSORS}


def test_a_digest_is_that_of_the_bytes_in_order():
    tensor = torch.arange(6.0).reshape(2, 3)
    expected = {"w": hashlib.sha256(tensor.T.contiguous().numpy().tobytes()).hexdigest()}
    assert Snapshot(tensors={"y/w": tensor.T}, scalars={}).digests == expected


# --- which are kept ----------------------------------------------------------------------------------------------


def save(folder, *steps, best=None, **writer):
    """Save steps one after the other, as one run does."""
    writer = CheckpointWriter(folder, **writer)
    manifest = MANIFEST | ({} if best is None else {"best": {"step": best, "val_loss": 1.0}})
    for step in steps:
        writer.save(step, Snapshot(tensors={"y/w": torch.zeros(2)}, scalars={"optim": {}}), manifest)
        writer.wait()


def spoil(folder, step):
    (step_folder(folder, step) / "rank-0.safetensors").write_bytes(b"x")


@pytest.mark.parametrize("keep_last", [1, 2])
def test_what_was_passed_over_on_resume_takes_no_place(tmp_path, keep_last):
    save(tmp_path, 80, 100, 200)
    spoil(tmp_path, 200)
    found, passed_over = newest_complete(tmp_path)
    assert found.step == 100
    assert len(passed_over) == 1
    own = []
    for step in (120, 140):
        own.append(step)
        save(tmp_path, *own, keep_last=keep_last, resume_step=100)
        kept = [120, 100] if step == 120 else [140, 120]
        assert checkpoint_steps(tmp_path) == [200, *kept[:keep_last]]
        assert newest_complete(tmp_path)[0].step == step
    save(tmp_path, *own, 210, keep_last=keep_last, resume_step=100)
    assert checkpoint_steps(tmp_path) == [210, 140][:keep_last], "overtaken, it goes"


def test_the_best_outlives_what_was_passed_over(tmp_path):
    save(tmp_path, 100, 200, best=100)
    spoil(tmp_path, 200)
    save(tmp_path, 120, 140, best=100, keep_last=1, resume_step=100)
    assert checkpoint_steps(tmp_path) == [200, 140, 100]


def test_other_names_are_neither_counted_nor_touched(tmp_path):
    save(tmp_path, 5)
    (tmp_path / "step-notes.txt").write_text("mine")
    (tmp_path / "step-00000099.tar").write_text("mine")
    for name in ("step-00000098-backup", "step-97", "step-", "step-x"):
        (tmp_path / name).mkdir()
    before = {path.name for path in tmp_path.iterdir()} - {"step-00000005"}
    save(tmp_path, 10, 15, keep_last=1, resume_step=5)
    assert {path.name for path in tmp_path.iterdir()} == before | {"step-00000015"}
    assert newest_complete(tmp_path)[0].step == 15


def test_a_checkpoint_moved_elsewhere_and_linked_is_let_go_not_emptied(tmp_path):
    save(tmp_path / "run", 5)
    step_folder(tmp_path / "run", 5).rename(tmp_path / "elsewhere")
    step_folder(tmp_path / "run", 5).symlink_to(tmp_path / "elsewhere")
    assert newest_complete(tmp_path / "run")[0].step == 5
    save(tmp_path / "run", 10, keep_last=1, resume_step=5)
    assert checkpoint_steps(tmp_path / "run") == [10]
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()


def test_steps_are_ordered_by_number(tmp_path):
    save(tmp_path, 99_999_999, 100_000_000, keep_last=1)
    assert checkpoint_steps(tmp_path) == [100_000_000]
