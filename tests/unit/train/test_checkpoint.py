import hashlib

import torch

from slipstream import executor as executors
from slipstream.executor import Snapshot
from slipstream.train import checkpoint
from slipstream.train.checkpoint import open_checkpoint, step_folder
from slipstream.train.saving import CheckpointWriter

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
