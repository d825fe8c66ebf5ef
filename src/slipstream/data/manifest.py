"""The manifest of prepared data: what the shards hold, in which order, and how they came about."""

import dataclasses
import hashlib
import json
import types
import typing
from pathlib import Path
from typing import Any

from slipstream.errors import DataError

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
_AGAIN = "Prepare the data again with `slipstream data prepare`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """A file of ids."""

    name: str
    num_tokens: int
    num_bytes: int
    """Size of the file, header included."""
    sha256: str
    """Of the ids, without the header."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One side of the split."""

    documents: int
    num_bytes: int
    """UTF-8 bytes of the text."""
    num_tokens: int
    """Ids, one end of document for each document included."""
    shards: list[ShardInfo]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """A file that was read."""

    name: str
    num_bytes: int
    """Size of the file as stored (compressed, if it is)."""
    sha256: str
    """Of the file as stored."""
    documents: int
    """Documents that were not empty; blocks, where the only document was cut."""
    empty_documents: int
    """Documents passed over because they hold nothing but white space."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """Which tokenizer the ids belong to."""

    name: str
    vocab_size: int
    eos_id: int
    fingerprint: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitRule:
    """Which side a document is on: validation, if the hash of its key is below the threshold.

    The hash is the first 8 bytes, big-endian, of sha256(salt, a zero byte, key), all UTF-8.
    """

    key: str
    """What is hashed: `text` (the document), `block` (a part of the only document), or `field NAME`."""
    salt: str
    validation_fraction: float
    """What was asked for."""
    threshold: str
    """16 hex digits: the fraction of 2^64, moved where a side would have been left empty."""
    block_chars: int | None = None
    """Least characters of a block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All about a folder of prepared data."""

    version: int = MANIFEST_VERSION
    tokenizer: TokenizerInfo
    split_rule: SplitRule
    splits: dict[str, SplitInfo]
    """`train` and `validation`."""
    sources: list[SourceInfo]

    def digest(self) -> str:
        """Return 64 hex digits that identify the data: the tokenizer and the ids of both splits, in order."""
        content = {name: [shard.sha256 for shard in split.shards] for name, split in self.splits.items()}
        text = json.dumps([self.tokenizer.fingerprint, content], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the text of the manifest file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a folder of prepared data.

    Raises:
        DataError: It is missing, not JSON, of another version, or lacks an entry.
    """
    path = Path(folder) / MANIFEST_FILE
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{folder} is not prepared data: it has no {MANIFEST_FILE}. "
            f"Give a folder made by `slipstream data prepare`."
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Check its permissions.") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged, not JSON: {error}. {_AGAIN}.") from error
    version = table.get("version") if isinstance(table, dict) else None
    if version != MANIFEST_VERSION:
        raise DataError(f"{path} has version {version!r}; this program reads {MANIFEST_VERSION}. {_AGAIN}.")
    manifest: Manifest = _build(Manifest, table, where=str(path))
    if set(manifest.splits) != {"train", "validation"}:
        raise DataError(f"{path} lists the splits {sorted(manifest.splits)}, needed are train, validation. {_AGAIN}.")
    return manifest


def _build(hint: Any, value: Any, *, where: str) -> Any:
    """Return JSON ``value`` as the type ``hint``, which is made of dataclasses, lists, dicts and plain values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint)
        if set(value) != set(hints):
            odd = ", ".join(sorted(set(value) ^ set(hints)))
            raise DataError(f"{where} is damaged: missing or unknown entries: {odd}. {_AGAIN}.")
        entries = {name: _build(hints[name], item, where=f"{where}, {name}") for name, item in value.items()}
        return typing.cast(type, hint)(**entries)
    if origin is list and isinstance(value, list):
        return [_build(arguments[0], item, where=where) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _build(arguments[1], item, where=f"{where}, {key}") for key, item in value.items()}
    if origin is types.UnionType and value is None:
        return None
    allowed = arguments if origin is types.UnionType else (hint,)
    if type(value) not in allowed:
        raise DataError(f"{where} is damaged: {value!r} is not {' or '.join(str(kind) for kind in allowed)}. {_AGAIN}.")
    return value
