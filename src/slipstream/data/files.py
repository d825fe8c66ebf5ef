"""Files of text: found, opened, unpacked.

What a file holds shows in its name::

    .txt                 one document
    .jsonl               one document a line
    .txt.gz .jsonl.zst   the same, packed
    .parquet .arrow      one document a row; also what Hugging Face `datasets` saves and the hub holds
"""

import dataclasses
import gzip
import hashlib
import importlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from slipstream.errors import DataError

TEXT_SUFFIXES = (".txt", ".txt.gz", ".txt.zst")
LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TABLE_SUFFIXES = (".parquet", ".arrow")
_SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, *TABLE_SUFFIXES)
_PACKED = (".gz", ".zst")
CHUNK_BYTES = 2**20
_PACKED_BYTES = 2**16
_BOM = b"\xef\xbb\xbf"
_DATASET_STATE = "state.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of text and the name under which the manifest lists it."""

    name: str
    """Path relative to what the user gave, so that a manifest does not depend on where the text lay."""
    file: Traversable

    @property
    def is_text(self) -> bool:
        """Whether the whole file is one document."""
        return self.name.endswith(TEXT_SUFFIXES)

    @property
    def is_table(self) -> bool:
        """Whether each row is a document."""
        return self.name.endswith(TABLE_SUFFIXES)

    @property
    def is_packed(self) -> bool:
        """Whether the bytes stored are not those of the text."""
        return self.name.endswith(_PACKED)

    @property
    def num_bytes(self) -> int:
        """Size of the file as it is stored."""
        with reading(self), self.file.open("rb") as raw:
            return raw.seek(0, io.SEEK_END)

    def digest(self) -> tuple[int, str]:
        """Return the size in bytes and the sha256 of the file as it is stored."""
        hasher = hashlib.sha256()
        num_bytes = 0
        with reading(self), self.file.open("rb") as raw:
            while chunk := raw.read(CHUNK_BYTES):
                hasher.update(chunk)
                num_bytes += len(chunk)
        return num_bytes, hasher.hexdigest()


def find_files(sources: Sequence[str | Traversable]) -> list[SourceFile]:
    """List the files of text among paths, folders searched to any depth, in the order given and then by name.

    Links are followed, and each file and folder is taken once, however many ways lead to it.

    Args:
        sources: Files whose names say what they hold (see above), and folders of them. Other files in a folder, and
            those whose name begins with a dot, are passed over; of a folder that Hugging Face `datasets` has saved,
            the files that its `state.json` lists are taken.

    Raises:
        DataError: A path does not exist or cannot be read, a file has another name or is none, or no file is found.
    """
    files: list[SourceFile] = []
    for given in sources:
        source = Path(given) if isinstance(given, str) else given
        if source.is_dir():
            found = sorted(_walk(source, prefix=source.name, seen=set()), key=lambda file: file.name)
            if not found:
                raise DataError(f"the folder {source} holds no file named {_allowed()}. Give another, or rename files.")
            files += found
        elif not source.is_file():
            raise DataError(f"there is no file or folder {source}. Give files named {_allowed()}, or folders of them.")
        elif not source.name.endswith(_SUFFIXES):
            raise DataError(
                f"cannot tell what {source} holds. Allowed are files named {_allowed()}; rename or convert it."
            )
        else:
            files.append(SourceFile(name=source.name, file=source))
    if not files:
        raise DataError(f"no source was given. Give files named {_allowed()}, or folders of them.")
    once: dict[str, SourceFile] = {}
    for file in files:
        once.setdefault(_real_path(file.file), file)
    return list(once.values())


def hold_records(sources: Sequence[str | Traversable]) -> bool:
    """Return whether any file among paths has fields, as JSON lines and tables do.

    Raises:
        DataError: See :func:`find_files`.
    """
    return not all(file.is_text for file in find_files(sources))


def decode(block: bytes, *, source: SourceFile, offset: int) -> str:
    """Return UTF-8 bytes as text, without the byte-order mark that some editors begin files with.

    Raises:
        DataError: They are not UTF-8; names the byte, counted from ``offset``.
    """
    skip = len(_BOM) if offset == 0 and block.startswith(_BOM) else 0
    try:
        return block[skip:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + skip + error.start
        unpacked = " of the unpacked text" if source.is_packed else ""
        raise DataError(
            f"{source.file} is not UTF-8: byte {at}{unpacked} is 0x{block[skip + error.start]:02x}. Convert the file "
            "(for example with iconv), or leave it out."
        ) from error


@contextmanager
def reading(source: SourceFile) -> Iterator[None]:
    """Turn what goes wrong in reading a file into a sentence.

    Raises:
        DataError: The file cannot be read or unpacked.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise DataError(f"cannot read {source.file}: {reason}. Check the file and its permissions.") from error


@contextmanager
def opened(source: SourceFile) -> Iterator[IO[bytes]]:
    """Open the text of a file, unpacked as it is read; an unpacked stream can be read and iterated over by line."""
    with source.file.open("rb") as raw:
        if source.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream  # type: ignore[misc]  # GzipFile reads as IO[bytes] does
        elif source.name.endswith(".zst"):
            yield io.BufferedReader(_ZstdReader(raw, need("zstandard", source=source)), CHUNK_BYTES)
        else:
            yield raw


def need(package: str, *, source: SourceFile) -> ModuleType:
    """Import a package that only some files need.

    Raises:
        DataError: It is not installed; says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(
            f"reading {source.file} needs {package.partition('.')[0]}. Install it: pip install 'slipstream[data]'."
        ) from error


class _ZstdReader(io.RawIOBase):
    """Unpacks one frame after another; unlike the library's own reader it notices a file that was cut short."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        super().__init__()
        self._raw = raw
        self._zstandard = zstandard
        # Corpora packed with `zstd --long=31` need the window.
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._packed and not (packed := self._raw.read(_PACKED_BYTES)):
                if self._frame is not None:
                    raise EOFError("it ends inside a frame; it was cut short")
                return 0
            self._packed = self._packed or packed
            self._unpack()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> None:
        self._frame = self._frame or self._unpacker.decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(self._packed))
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None


def _walk(folder: Traversable, *, prefix: str, seen: set[str]) -> Iterator[SourceFile]:
    """Yield the files below a folder that is not among those seen: a link may lead back, to what it lies in."""
    if (real := _real_path(folder)) in seen:
        return
    seen.add(real)
    try:
        shown = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        entries = [(entry, entry.is_dir(), entry.is_file()) for entry in shown]
        listed = _files_of_dataset(folder)
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}. Check its permissions.") from error
    for entry, is_folder, is_file in sorted(entries, key=lambda each: each[0].name):
        name = f"{prefix}/{entry.name}"
        if is_folder:
            yield from _walk(entry, prefix=name, seen=seen)
        elif entry.name.endswith(_SUFFIXES) and (listed is None or entry.name in listed):
            if not is_file:
                raise DataError(f"{entry} is a link to nothing, or no file. Put the file there, or remove the name.")
            yield SourceFile(name=name, file=entry)


def _real_path(place: Traversable) -> str:
    return os.path.realpath(place) if isinstance(place, Path) else str(place)


def _files_of_dataset(folder: Traversable) -> set[str] | None:
    """Return what a folder saved by Hugging Face `datasets` consists of; caches lie beside it."""
    state = folder / _DATASET_STATE
    if not state.is_file():
        return None
    try:
        content: Any = json.loads(state.read_text(encoding="utf-8"))
        return {str(each["filename"]) for each in content["_data_files"]}
    except (ValueError, LookupError, TypeError):
        return None  # another program's state


def _allowed() -> str:
    return ", ".join(f"*{suffix}" for suffix in _SUFFIXES)
