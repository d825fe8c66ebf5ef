"""Files and folders of text, read as documents, one at a time.

A `.txt` file is one document; a `.jsonl` file has one document a line. Both may be gzipped. Every fault of the input is
named with its file and line or byte.
"""

import dataclasses
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO, Any

from slipstream.errors import DataError, nearest

TEXT_SUFFIXES = (".txt", ".txt.gz")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz")
_SUFFIXES = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
_CHUNK_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


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

    def digest(self) -> tuple[int, str]:
        """Return the size in bytes and the sha256 of the file as it is stored."""
        hasher = hashlib.sha256()
        num_bytes = 0
        with _reading(self), self.file.open("rb") as raw:
            while chunk := raw.read(_CHUNK_BYTES):
                hasher.update(chunk)
                num_bytes += len(chunk)
        return num_bytes, hasher.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text that is kept in one piece and on one side of the split."""

    text: str
    group: str | None = None
    """Value of the split key, if one was given."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but white space."""
        return not self.text or self.text.isspace()

    @property
    def num_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())


def find_files(sources: Sequence[str | Traversable]) -> list[SourceFile]:
    """List the files of text among paths, folders searched to any depth, in the order given and then by name.

    Args:
        sources: Files named `.txt`, `.txt.gz`, `.jsonl` or `.jsonl.gz`, and folders of them. Other files in a folder,
            and those whose name begins with a dot, are passed over.

    Raises:
        DataError: A path does not exist or cannot be read, a file has another name, or no file is found.
    """
    files: list[SourceFile] = []
    for given in sources:
        source = Path(given) if isinstance(given, str) else given
        if source.is_dir():
            found = sorted(_walk(source, prefix=source.name), key=lambda file: file.name)
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
    return files


def read_documents(source: SourceFile, *, text_field: str, split_key: str | None) -> Iterator[Document]:
    """Yield the documents of a file, empty ones too.

    Args:
        source: The file.
        text_field: Field of a `.jsonl` record that holds the text.
        split_key: Field of a `.jsonl` record whose value names the document's group; none: no groups.

    Raises:
        DataError: The file cannot be read, is not UTF-8 (with the byte offset), or a line is not a JSON object, or
            lacks a field (with the line number); ``split_key`` is given for a `.txt` file.

    Cost: memory for one document.
    """
    if source.is_text:
        if split_key is not None:
            raise DataError(
                f"the split key '{split_key}' needs records, but {source.file} is plain text and has no fields. "
                f"Leave the split key out, or give files named {' or '.join(RECORD_SUFFIXES)}."
            )
        yield Document(text="".join(read_chunks(source)))
    else:
        yield from _read_records(source, text_field=text_field, split_key=split_key)


def read_chunks(source: SourceFile) -> Iterator[str]:
    """Yield the text of a `.txt` file in chunks of about 1 MB, line ends as they are.

    Raises:
        DataError: The file cannot be read or is not UTF-8 (with the byte offset).
    """
    with _reading(source), _open(source) as stream:
        pending = b""
        offset = 0
        while chunk := stream.read(_CHUNK_BYTES):
            block = pending + chunk
            # A chunk may end inside a character: at most 3 bytes wait for the next.
            end = len(block) - _unfinished(block)
            yield _decode(block[:end], source=source, offset=offset)
            pending = block[end:]
            offset += end
        yield _decode(pending, source=source, offset=offset)


def cut_blocks(chunks: Iterator[str], *, block_chars: int) -> Iterator[str]:
    r"""Cut one long text into contiguous blocks that end at a paragraph, else at a line, a word, or anywhere.

    Args:
        chunks: The text in parts of any size; the blocks joined give it again.
        block_chars: Least size of a block but the last, in characters; the largest is under twice that.

    Example:
        >>> list(cut_blocks(iter(["To be,\n\nor not to ", "be"]), block_chars=5))
        ['To be,\n\n', 'or not ', 'to be']
    """
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) - start >= 2 * block_chars:
            end = _block_end(buffer, start=start, block_chars=block_chars)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _block_end(buffer: str, *, start: int, block_chars: int) -> int:
    for mark in ("\n\n", "\n", " "):
        at = buffer.find(mark, start + block_chars - len(mark), start + 2 * block_chars - 1)
        if at >= 0:
            return at + len(mark)
    return start + block_chars


def _walk(folder: Traversable, *, prefix: str) -> Iterator[SourceFile]:
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}. Check its permissions.") from error
    for entry in entries:
        name = f"{prefix}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry, prefix=name)
        elif entry.name.endswith(_SUFFIXES):
            yield SourceFile(name=name, file=entry)


def _read_records(source: SourceFile, *, text_field: str, split_key: str | None) -> Iterator[Document]:
    offset = 0
    with _reading(source), _open(source) as stream:
        for number, line in enumerate(stream, start=1):
            text = _decode(line, source=source, offset=offset)
            offset += len(line)
            if text.isspace():
                continue
            where = f"{source.file}, line {number}"
            record = _parse(text, where=where)
            value = _field(record, text_field, where=where)
            if not isinstance(value, str):
                raise DataError(f"{where}: the field '{text_field}' must be a text, given {_kind(value)}.")
            if not value.isascii():
                _refuse_surrogates(value, where=where)
            group = None
            if split_key is not None:
                group_value = _field(record, split_key, where=where)
                group = group_value if isinstance(group_value, str) else json.dumps(group_value, sort_keys=True)
            yield Document(text=value, group=group)


def _parse(text: str, *, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: not JSON: {reason}. Each line must hold one JSON object; mend or remove it."
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON object is needed, given {_kind(record)}. Mend or remove the line.")
    return record


def _field(record: dict[str, Any], name: str, *, where: str) -> Any:
    if record.get(name) is None:
        state = "is null" if name in record else "is missing"
        present = ", ".join(f"'{key}'" for key in record) or "none"
        raise DataError(
            f"{where}: the field '{name}' {state}.{nearest(name, record.keys() - {name})} Fields here: {present}. "
            "Name another field, or mend the line."
        )
    return record[name]


def _refuse_surrogates(text: str, *, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} of the text is half of a surrogate pair ({text[error.start]!r}), which "
            "UTF-8 cannot hold. Mend or remove the line."
        ) from error


def _decode(block: bytes, *, source: SourceFile, offset: int) -> str:
    # Some editors begin UTF-8 files with a byte-order mark; it is not part of the text.
    skip = len(_BOM) if offset == 0 and block.startswith(_BOM) else 0
    try:
        return block[skip:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + skip + error.start
        unpacked = " of the unpacked text" if source.name.endswith(".gz") else ""
        raise DataError(
            f"{source.file} is not UTF-8: byte {at}{unpacked} is 0x{block[skip + error.start]:02x}. Convert the file "
            "(for example with iconv), or leave it out."
        ) from error


def _unfinished(block: bytes) -> int:
    """Return how many bytes at the end may begin a character that is not complete."""
    for back in range(1, min(3, len(block)) + 1):
        byte = block[-back]
        if byte >= 0xC0:  # first byte of a character of 2 to 4 bytes
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0


@contextmanager
def _reading(source: SourceFile) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {source.file}: {reason}. Check the file and its permissions.") from error


@contextmanager
def _open(source: SourceFile) -> Iterator[IO[bytes]]:
    with source.file.open("rb") as raw:
        if source.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream  # type: ignore[misc]  # GzipFile reads as IO[bytes] does
        else:
            yield raw


def _allowed() -> str:
    return ", ".join(f"*{suffix}" for suffix in _SUFFIXES)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
