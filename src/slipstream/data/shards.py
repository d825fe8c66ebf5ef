r"""Packed token shards: written once, checksummed, read through a memory map.

A shard is a header of 64 bytes and then the ids, little-endian, one after another::

    bytes  0-7   b"SLIPTOK\0"
           8-11  format version, 1
          12-15  bytes an id, 2 or 4
          16-23  number of ids
          24-55  sha256 of the ids as stored
          56-63  zero

The manifest beside the shards says what is in them, in which order, and how they came about.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from slipstream.data.manifest import ShardInfo, read_manifest
from slipstream.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)

HEADER = struct.Struct("<8sIIQ32s8x")
_MAGIC = b"SLIPTOK\0"
_VERSION = 1
_AGAIN = "Restore the file, or prepare the data again"


class ShardWriter:
    """Writes the ids of one split into as many shards as they need.

    Args:
        folder: An existing folder; the shards are named `SPLIT-00000.tokens` and so on.
        split: `train` or `validation`.
        vocab_size: Ids up to 65,536 tokens take 2 bytes each, beyond that 4.
        shard_tokens: Most ids of one shard.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with ShardWriter(folder, "train", vocab_size=257, shard_tokens=2) as writer:
        ...     writer.write(np.array([7, 8, 9]))
        >>> [shard.num_tokens for shard in writer.shards]
        [2, 1]
    """

    def __init__(self, folder: str | Path, split: Split, *, vocab_size: int, shard_tokens: int) -> None:
        self.shards: list[ShardInfo] = []
        """Finished shards; complete once the writer is closed."""
        self._folder = Path(folder)
        self._split = split
        self._dtype = token_dtype(vocab_size)
        self._shard_tokens = shard_tokens
        self._stream: IO[bytes] | None = None
        self._hasher = hashlib.sha256()
        self._num_tokens = 0

    def write(self, ids: npt.NDArray[Any]) -> None:
        """Append ids, shape (n,), of any integer type."""
        start = 0
        while start < len(ids):
            if self._stream is None:
                self._begin()
            part = ids[start : start + self._shard_tokens - self._num_tokens]
            self._append(part)
            start += len(part)
            if self._num_tokens == self._shard_tokens:
                self._finish()

    def close(self) -> None:
        """Complete the last shard."""
        if self._stream is not None:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._stream is not None:
            self._stream.close()

    def _path(self) -> Path:
        return self._folder / f"{self._split}-{len(self.shards):05d}.tokens"

    def _begin(self) -> None:
        self._stream = self._path().open("wb")
        self._stream.write(bytes(HEADER.size))  # the header is known at the end
        self._hasher = hashlib.sha256()
        self._num_tokens = 0

    def _append(self, ids: npt.NDArray[Any]) -> None:
        assert self._stream is not None
        payload = ids.astype(self._dtype).tobytes()
        self._hasher.update(payload)
        self._stream.write(payload)
        self._num_tokens += len(ids)

    def _finish(self) -> None:
        assert self._stream is not None
        path = self._path()
        header = HEADER.pack(_MAGIC, _VERSION, self._dtype.itemsize, self._num_tokens, self._hasher.digest())
        with self._stream as stream:
            stream.seek(0)
            stream.write(header)
            sync(stream)
        self._stream = None
        self.shards.append(
            ShardInfo(
                name=path.name,
                num_tokens=self._num_tokens,
                num_bytes=HEADER.size + self._num_tokens * self._dtype.itemsize,
                sha256=self._hasher.hexdigest(),
            )
        )


class TokenArray:
    """The ids of a split, read as one array over all its shards.

    Args:
        name: `train` or `validation`; for messages.
        parts: Integer arrays, shape (n_i,), joined in order; memory maps are fine.

    Example:
        >>> tokens = TokenArray("train", [np.array([1, 2, 3]), np.array([4, 5])])
        >>> len(tokens), tokens.read(1, 4)
        (5, array([2, 3, 4]))
    """

    def __init__(self, name: str, parts: Sequence[npt.NDArray[Any]]) -> None:
        self.name = name
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return ids start to stop - 1 as a copy, shape (stop - start,), int64.

        Raises:
            IndexError: The range leaves the array; it is never cut short.

        Cost: touches only the pages of the range.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"ids {start} to {stop} of the {self.name} split, which has {len(self)}")
        out = np.empty(stop - start, dtype=np.int64)
        shard = int(np.searchsorted(self._ends, start, side="right"))
        done = 0
        while done < len(out):
            part = self._parts[shard]
            at = start + done - (int(self._ends[shard]) - len(part))
            piece = part[at : at + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1
        return out


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which ids are stored: 2 bytes for up to 65,536 tokens, else 4.

    Example:
        >>> token_dtype(65_536), token_dtype(65_537)
        (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def open_split(folder: str | Path, split: Split, *, verify: bool = True) -> TokenArray:
    """Map the shards of a split into memory, after checking them.

    Args:
        folder: Made by :func:`slipstream.data.prepare`.
        split: `train` or `validation`.
        verify: Also compare the sha256 of all ids; sizes and headers are always checked.

    Raises:
        DataError: The manifest or a shard is missing, cut short, changed or of another format.

    Cost: no memory but the page cache; with ``verify`` one pass over the files.
    """
    manifest = read_manifest(folder)
    dtype = token_dtype(manifest.tokenizer.vocab_size)
    shards = manifest.splits[split].shards
    return TokenArray(split, [_open_shard(Path(folder) / s.name, s, dtype=dtype, verify=verify) for s in shards])


def sync(stream: IO[bytes]) -> None:
    """Wait until what was written has reached the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def _open_shard(path: Path, info: ShardInfo, *, dtype: np.dtype[Any], verify: bool) -> npt.NDArray[Any]:
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as stream:
            header = stream.read(HEADER.size)
    except OSError as error:
        raise DataError(f"cannot read the shard {path}: {error.strerror}. {_AGAIN}.") from error
    if num_bytes != info.num_bytes:
        change = "cut short" if num_bytes < info.num_bytes else "longer than it was"
        raise DataError(
            f"the shard {path} is {change}: {num_bytes} bytes, the manifest says {info.num_bytes}. {_AGAIN}."
        )
    _check_header(path, header, info, dtype=dtype)
    ids = np.memmap(path, dtype=dtype, mode="r", offset=HEADER.size, shape=(info.num_tokens,))
    if verify and (found := hashlib.sha256(ids.data).hexdigest()) != info.sha256:
        raise DataError(
            f"the shard {path} is corrupt: its sha256 is {found}, the manifest says {info.sha256}. {_AGAIN}."
        )
    return np.asarray(ids)


def _check_header(path: Path, header: bytes, info: ShardInfo, *, dtype: np.dtype[Any]) -> None:
    if len(header) < HEADER.size or not header.startswith(_MAGIC):
        raise DataError(f"{path} is not a token shard: it does not begin with {_MAGIC!r}. {_AGAIN}.")
    _, version, itemsize, num_tokens, digest = HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(f"the shard {path} has format version {version}; this program reads {_VERSION}. {_AGAIN}.")
    for what, found, expected in (
        ("bytes an id", itemsize, dtype.itemsize),
        ("number of ids", num_tokens, info.num_tokens),
        ("sha256", digest.hex(), info.sha256),
        ("bytes", HEADER.size + num_tokens * itemsize, info.num_bytes),
    ):
        if found != expected:
            raise DataError(
                f"the header of the shard {path} does not match the manifest: {what} {found}, the manifest says "
                f"{expected}. {_AGAIN}."
            )
