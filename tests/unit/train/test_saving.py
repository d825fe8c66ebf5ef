"""What a save writes, what it removes, and what it says meanwhile."""

import errno
import threading

import pytest
import torch

from slipstream.digests import combined_digest
from slipstream.executor import Snapshot
from slipstream.train import checkpoint, saving
from slipstream.train.checkpoint import checkpoint_steps, newest_complete, open_checkpoint, step_folder
from slipstream.train.saving import CheckpointWriter

MANIFEST = {"config": {}, "tokenizer": "", "data_sha256": ""}

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


def test_a_file_that_the_disk_does_not_give_is_passed_over(tmp_path, monkeypatch):
    save(tmp_path, 5, 10)
    digest = checkpoint.file_digest

    def fails_on_the_newest(path):
        if path.parent.name == "step-00000010":
            raise OSError(errno.EIO, "Input/output error")
        return digest(path)

    monkeypatch.setattr(checkpoint, "file_digest", fails_on_the_newest)
    found, passed_over = newest_complete(tmp_path)
    assert found.step == 5
    (sentence,) = passed_over
    assert sentence.endswith("step-00000010 cannot be read: rank-0.safetensors: Input/output error.")


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


# --- what is said meanwhile --------------------------------------------------------------------------------------


LARGE = Snapshot(tensors={f"y/{i}": torch.full((4,), float(i)) for i in range(6)}, scalars={"optim": {}})


@pytest.fixture
def three_pieces(monkeypatch):
    monkeypatch.setattr(saving, "PIECE_BYTES", 2 * 16)
    monkeypatch.setattr(saving, "LOOK_EVERY_S", 0.005)


@pytest.mark.usefixtures("three_pieces")
def test_much_goes_to_several_files(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.save(1, LARGE, MANIFEST)
    digest = writer.wait()
    found = open_checkpoint(step_folder(tmp_path, 1))
    names = {"rank-0.safetensors", "rank-0.1.safetensors", "rank-0.2.safetensors", "rank-0.json"}
    assert set(found.manifest["files"]) == names == {path.name for path in found.folder.iterdir()} - {"manifest.json"}
    assert found.tensor_names == set(LARGE.tensors)
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in LARGE.tensors.items())
    assert digest == combined_digest(LARGE.digests)


@pytest.mark.usefixtures("three_pieces")
def test_whoever_waits_for_a_slow_disk_says_how_far_it_is(tmp_path, monkeypatch):
    said, heard = [], threading.Semaphore(0)

    def note(text):
        said.append(text)
        heard.release()

    def slow_digest(path):
        assert heard.acquire(timeout=20), "nothing was said of what is being done"
        return "digest"

    monkeypatch.setattr(saving, "file_digest", slow_digest)
    writer = CheckpointWriter(tmp_path, note=note)
    writer.save(7, LARGE, MANIFEST)
    writer.wait()
    assert len(set(said)) == len(said) >= 4, "each once, or a save that hangs would seem to move"
    assert all(text.startswith("saving step 7: ") for text in said)


@pytest.mark.usefixtures("three_pieces")
def test_a_save_that_hangs_says_so_once(tmp_path, monkeypatch):
    said, looked, resumed = [], threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(saving, "file_digest", lambda path: resumed.wait(20) and "digest")
    real = saving.wait_for

    def look(pending, timeout):
        looked.release()
        return real(pending, timeout=timeout)

    def go_on():
        for _ in range(10):
            looked.acquire(timeout=20)
        said.append("ten looks")
        resumed.set()

    monkeypatch.setattr(saving, "wait_for", look)
    writer = CheckpointWriter(tmp_path, note=said.append)
    threading.Thread(target=go_on, daemon=True).start()
    writer.save(7, LARGE, MANIFEST)
    writer.wait()
    before = said[: said.index("ten looks")]
    assert before[-1] == "saving step 7: reading rank-0.safetensors again"
    assert len(set(before)) == len(before) <= 3


def test_while_nobody_waits_nothing_is_said(tmp_path):
    """What training does meanwhile is what is to be known of a rank that dies."""
    said = []
    writer = CheckpointWriter(tmp_path, note=said.append)
    writer.save(7, LARGE, MANIFEST)
    writer._pending.result()
    writer.wait()
    assert not said


def test_reading_is_said_tensor_by_tensor(tmp_path):
    save(tmp_path, 1)
    said = []
    open_checkpoint(step_folder(tmp_path, 1), note=said.append).tensor("y/w")
    assert said == ["reading y/w"]
