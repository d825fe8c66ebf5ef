"""Checkpoints: one folder a step, one safetensors file and one JSON file a rank, a manifest that makes it complete.

A folder is written beside its final place and renamed when whole, so a reader never sees half of one. Everything is
kept by parameter name, so any number of ranks can read what any other number wrote.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import Config, config_hash, to_dict
from slipstream.digests import combined_digest
from slipstream.errors import CheckpointError
from slipstream.executor import Snapshot

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_NEEDED = ("step", "config", "weights_sha256", "tokenizer", "data_sha256")
"""Keys of a manifest without which a checkpoint cannot be used."""

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
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        gather: GatherRecords | None = None,
        keep_last: int = 2,
        resume_step: int = 0,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._gather: GatherRecords = gather or (lambda step, record: [record])
        self._keep_last = keep_last
        self._resume_step = resume_step
        self._saved: set[int] = set()
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
        save_file(dict(snapshot.tensors), part / f"{stem}.safetensors")
        (part / f"{stem}.json").write_text(json.dumps(snapshot.scalars))
        files = {}
        for name in (f"{stem}.safetensors", f"{stem}.json"):
            _sync(part / name)
            files[name] = {"sha256": file_digest(part / name), "num_bytes": (part / name).stat().st_size}
        records = self._gather(step, {"files": files, "digests": snapshot.digests})
        if records is None:
            return None
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
    config: Config, *, step: int, tokenizer: str, data_sha256: str, resumed: "Checkpoint | None" = None
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


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; reads tensors one at a time, from files that stay open as long as it is there.

    Args:
        folder: A ``step-...`` folder.
        manifest: Its parsed manifest.
    """

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Updates made."""
        return int(self.manifest["step"])

    @cached_property
    def _holders(self) -> dict[str, Any]:
        """Open each file once: every opening reads the names of all its tensors."""
        holders: dict[str, Any] = {}
        for file in self.manifest["files"]:
            if file.endswith(".safetensors"):
                holder: Any = safe_open(self.folder / file, framework="pt")
                holders |= dict.fromkeys(holder.keys(), holder)
        return holders

    @cached_property
    def tensor_names(self) -> frozenset[str]:
        """Names of all saved tensors."""
        return frozenset(self._holders)

    @cached_property
    def scalars(self) -> Mapping[str, Any]:
        """Scalars of all ranks, merged: what is per parameter by name, what all ranks share once."""
        merged: dict[str, Any] = {"optim": {}}
        for file in sorted(self.manifest["files"]):
            if file.endswith(".json"):
                part = json.loads((self.folder / file).read_text())
                merged["optim"] |= part.pop("optim")
                merged |= part
        return merged

    def tensor(self, name: str) -> Tensor:
        """Return one tensor.

        Raises:
            CheckpointError: There is none of that name.
        """
        if name not in self._holders:
            raise CheckpointError(
                f"the checkpoint {self.folder} has no tensor '{name}'. It belongs to another model or optimizer; "
                "resume with the settings it was saved with."
            )
        tensor: Tensor = self._holders[name].get_tensor(name)
        return tensor


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies.

    Args:
        folder: The run's ``checkpoints`` folder.
        step: Updates made.
    """
    return folder / f"step-{step:08d}"


def best_step(manifest: Mapping[str, Any]) -> int | None:
    """Return the step with the smallest validation loss up to that of a checkpoint; ``None``: it was not kept."""
    best = manifest.get("best")
    return None if best is None else int(best["step"])


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps that a run has folders of, newest first; whatever else lies beside them is not looked at."""
    numbers = (each.name.removeprefix("step-") for each in folder.glob("step-*"))
    steps = sorted({int(number) for number in numbers if number.isdecimal()}, reverse=True)
    return [step for step in steps if step_folder(folder, step).is_dir()]


def newest_complete(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest checkpoint whose files are all there and as they were written.

    Args:
        folder: The run's ``checkpoints`` folder; need not exist.

    Returns:
        The checkpoint, or ``None``; and a sentence for each newer one that was passed over.
    """
    passed_over: list[str] = []
    for step in checkpoint_steps(folder):
        try:
            return open_checkpoint(step_folder(folder, step)), passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    return None, passed_over


def open_checkpoint(folder: Path, *, verify: bool = True) -> Checkpoint:
    """Open one step folder and verify every file against its manifest.

    Args:
        folder: A ``step-...`` folder.
        verify: Also compare checksums; a rank leaves that to whoever chose the checkpoint.

    Raises:
        CheckpointError: The manifest or a file is missing, truncated or changed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        _ = {name: (record["num_bytes"], record["sha256"]) for name, record in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {folder} is incomplete: its {MANIFEST} cannot be read.") from error
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"the checkpoint {folder} has format {manifest.get('format_version')}, this version reads {FORMAT_VERSION}."
        )
    for name, record in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != record["num_bytes"]:
            raise CheckpointError(f"the checkpoint {folder} is incomplete: {name} is missing or cut short.")
        if verify and file_digest(path) != record["sha256"]:
            raise CheckpointError(f"the checkpoint {folder} is corrupt: {name} does not match its checksum.")
    if missing := [key for key in _NEEDED if key not in manifest]:
        raise CheckpointError(f"the checkpoint {folder} is incomplete: its {MANIFEST} has no '{missing[0]}'.")
    checkpoint = Checkpoint(folder, manifest)
    try:
        _ = checkpoint.tensor_names
    except SafetensorError as error:
        raise CheckpointError(f"the checkpoint {folder} is corrupt: {error}.") from error
    return checkpoint


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
