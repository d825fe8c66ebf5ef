"""Saves checkpoints in the background; :mod:`slipstream.train.checkpoint` reads them.

A folder is written beside its final place and renamed when whole, so a reader never sees half of one.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import Config, config_hash, to_dict
from slipstream.digests import combined_digest
from slipstream.errors import CheckpointError
from slipstream.executor import Snapshot
from slipstream.train.checkpoint import (
    FORMAT_VERSION,
    MANIFEST,
    Checkpoint,
    best_step,
    checkpoint_steps,
    file_digest,
    step_folder,
)

PIECE_BYTES = 2**31
"""Largest safetensors file with more than one tensor; each is written, flushed and read again, and then told of."""

LOOK_EVERY_S = 0.5
"""How often whoever waits for a save looks how far it is."""

GatherRecords = Callable[[int, dict[str, Any]], list[dict[str, Any]] | None]
"""Takes a step and this rank's record; returns every rank's on rank 0, ``None`` elsewhere."""


class CheckpointWriter:
    """Saves snapshots in the background and keeps the newest ``keep_last``, and what the manifest calls the best.

    Args:
        folder: The run's ``checkpoints`` folder.
        rank: This writer's number; rank 0 completes and prunes.
        gather: Collects the ranks' records without stopping them.
        keep_last: Complete checkpoints kept; at least 1.
        resume_step: Step that the run goes on from. Later ones that lie there were passed over: they count for nothing.
        note: Is told, while somebody waits for a save, of each part of it that begins; a save that hangs says nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        gather: GatherRecords | None = None,
        keep_last: int = 2,
        resume_step: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._gather: GatherRecords = gather or (lambda step, record: [record])
        self._keep_last = keep_last
        self._resume_step = resume_step
        self._saved: set[int] = set()
        self._note = note
        self._doing = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[str | None] | None = None

    def save(self, step: int, snapshot: Snapshot, manifest: Mapping[str, Any]) -> None:
        """Begin to save; waits for the previous save first.

        Args:
            step: Updates made.
            snapshot: This rank's state; must not change any more.
            manifest: What rank 0 adds to the manifest (config, data cursor, versions).

        Raises:
            CheckpointError: The *previous* save failed.
        """
        self.wait()
        self._pending = self._thread.submit(self._save, step, snapshot, manifest)

    def wait(self) -> str | None:
        """Wait until the last save is complete; return its weights digest (rank 0 only).

        Raises:
            CheckpointError: It failed.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        told = ""
        while not wait_for([pending], timeout=LOOK_EVERY_S).done:
            # From here alone: while training goes on, what it does is what is to be known of a rank.
            if (doing := self._doing) != told:
                told = doing
                self._note(doing)
        try:
            return pending.result()
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"cannot save a checkpoint in {self._folder}: {reason}. Free space or choose another "
                "run directory, then go on with --resume."
            ) from error

    def _save(self, step: int, snapshot: Snapshot, manifest: Mapping[str, Any]) -> str | None:
        part = self._folder / f".saving-{step:08d}"
        part.mkdir(parents=True, exist_ok=True)
        stem = f"rank-{self._rank}"
        files: dict[str, Any] = {}
        digests: dict[str, str] = {}

        def written(name: str) -> None:
            self._doing = f"saving step {step}: flushing {name}"
            _sync(part / name)
            self._doing = f"saving step {step}: reading {name} again"
            files[name] = {"sha256": file_digest(part / name), "num_bytes": (part / name).stat().st_size}

        for number, piece in enumerate(_pieces(snapshot.tensors)):
            name = f"{stem}.{number}.safetensors" if number else f"{stem}.safetensors"
            self._doing = f"saving step {step}: writing {name}"
            save_file(piece, part / name)
            written(name)
            digests |= Snapshot(tensors=piece, scalars={}).digests
        (part / f"{stem}.json").write_text(json.dumps(snapshot.scalars))
        written(f"{stem}.json")
        self._doing = f"saving step {step}: waiting for the other ranks' files"
        records = self._gather(step, {"files": files, "digests": digests})
        if records is None:
            return None
        self._doing = f"saving step {step}: completing it"
        return self._complete(step, part, records, manifest)

    def _complete(
        self, step: int, part: Path, records: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any]
    ) -> str:
        digests: dict[str, str] = {}
        files: dict[str, Any] = {}
        for record in records:
            digests |= record["digests"]
            files |= record["files"]
        for stale in {path.name for path in part.iterdir()} - set(files):
            (part / stale).unlink()  # left by an interrupted save with more ranks
        weights = combined_digest(digests)
        whole = {"format_version": FORMAT_VERSION, "step": step, "weights_sha256": weights, "files": files} | dict(
            manifest
        )
        (part / MANIFEST).write_text(json.dumps(whole, indent=1))
        _sync(part / MANIFEST)
        _sync(part)
        final = step_folder(self._folder, step)
        _remove(final)
        os.rename(part, final)
        _sync(self._folder)
        self._saved.add(step)
        self._prune(step, best=best_step(manifest))
        return weights

    def _prune(self, step: int, *, best: int | None) -> None:
        """Remove what the newest checkpoint, of this step, makes superfluous; never what it has not overtaken."""
        past = [each for each in checkpoint_steps(self._folder) if each <= step]
        ours = [each for each in past if each <= self._resume_step or each in self._saved]
        for old in set(past) - set(ours[: self._keep_last]) - {best}:
            _remove(step_folder(self._folder, old))


def run_manifest(
    config: Config, *, step: int, tokenizer: str, data_sha256: str, resumed: Checkpoint | None = None
) -> dict[str, Any]:
    """Return what a run adds to the manifest of a checkpoint.

    Args:
        config: Resolved settings.
        step: Updates made.
        tokenizer: Its fingerprint.
        data_sha256: Identifies the data.
        resumed: What the run was resumed from, maybe with batches of another size.
    """
    step_before, used = (resumed.step, int(resumed.manifest["next_sequence"])) if resumed is not None else (0, 0)
    return {
        "config": to_dict(config),
        "config_hash": config_hash(config),
        "tokenizer": tokenizer,
        "data_sha256": data_sha256,
        "next_sequence": used + (step - step_before) * config.batch_size * config.local_steps,
        "versions": {"torch": torch.__version__},
    }


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield tensors as the files they go to, at least one; see :data:`PIECE_BYTES`."""
    piece: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if piece and num_bytes + tensor.nbytes > PIECE_BYTES:
            yield piece
            piece, num_bytes = {}, 0
        piece[name] = tensor
        num_bytes += tensor.nbytes
    yield piece


def _remove(path: Path) -> None:
    """Remove a folder, if there is one; of a link, what it leads to stays."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
