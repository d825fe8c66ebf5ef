"""Checkpoints: one folder a step, safetensors files and one JSON file a rank, a manifest that makes it complete.

Everything is kept by parameter name, so any number of ranks can read what any other number wrote. How they are written:
:mod:`slipstream.train.saving`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_NEEDED = ("step", "config", "weights_sha256", "tokenizer", "data_sha256")
"""Keys of a manifest without which a checkpoint cannot be used."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; reads tensors one at a time, from files that stay open as long as it is there.

    Args:
        folder: A ``step-...`` folder.
        manifest: Its parsed manifest.
        note: Is told of each tensor before it is read.
    """

    folder: Path
    manifest: Mapping[str, Any]
    note: Callable[[str], None] = lambda text: None

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
        self.note(f"reading {name}")
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


def open_checkpoint(
    folder: Path, *, verify: bool = True, note: Callable[[str], None] = lambda text: None
) -> Checkpoint:
    """Open one step folder and verify every file against its manifest.

    Args:
        folder: A ``step-...`` folder.
        verify: Also compare checksums; a rank leaves that to whoever chose the checkpoint.
        note: Is told of each tensor before it is read.

    Raises:
        CheckpointError: The manifest or a file is missing, truncated, changed or not to be read.
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
        try:
            _check_file(folder, name, record, verify=verify)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {folder} cannot be read: {name}: {error.strerror}.") from error
    if missing := [key for key in _NEEDED if key not in manifest]:
        raise CheckpointError(f"the checkpoint {folder} is incomplete: its {MANIFEST} has no '{missing[0]}'.")
    checkpoint = Checkpoint(folder, manifest, note)
    try:
        _ = checkpoint.tensor_names
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the checkpoint {folder} is corrupt: {error}.") from error
    return checkpoint


def _check_file(folder: Path, name: str, record: Mapping[str, Any], *, verify: bool) -> None:
    path = folder / name
    if not path.is_file() or path.stat().st_size != record["num_bytes"]:
        raise CheckpointError(f"the checkpoint {folder} is incomplete: {name} is missing or cut short.")
    if verify and file_digest(path) != record["sha256"]:
        raise CheckpointError(f"the checkpoint {folder} is corrupt: {name} does not match its checksum.")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
