"""Rows of parquet and arrow files as documents, a few at a time.

Only the columns needed are read. A group is a row group of parquet, or a record batch of arrow (a file as Hugging Face
`datasets` saves it, or one in arrow's file format); reading can begin at any.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.data.files import CHUNK_BYTES, SourceFile, need, reading
from slipstream.data.records import Document, Placed, document_of
from slipstream.errors import DataError, nearest

# Small, because rows may be whole books; each costs far more than its share of a call.
_ROWS = 128
_ARROW_FILE = b"ARROW1"
_STREAM_BEGIN = b"\xff\xff\xff\xff"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def read_rows(
    source: SourceFile, *, text_field: str, split_key: str | None, group: int = 0, row: int = 0
) -> Iterator[Placed]:
    """Yield the documents of a table, from a row of a group on.

    Raises:
        DataError: See :func:`slipstream.data.sources.read_documents`.

    Cost: memory for 128 documents; of arrow, for one group.
    """
    columns = [text_field] if split_key is None else list(dict.fromkeys((text_field, split_key)))
    with _arrow_errors(source), source.file.open("rb") as raw:
        batches = _parquet(source, raw, columns, group) if source.name.endswith(".parquet") else _arrow(source, raw)
        for index, at, before, batch in batches:
            if index < group or (index == group and at + batch.num_rows <= row):
                continue
            skip = max(row - at, 0) if index == group else 0
            part = batch.select(_checked(source, batch.schema.names, columns)).slice(skip)
            for i, record in enumerate(_records(source, part, before + at + skip)):
                yield index, at + skip + i, record_document(source, record, before + at + skip + i, columns)


def record_document(source: SourceFile, record: dict[str, Any], number: int, columns: list[str]) -> Document:
    """Return what a row holds; ``columns`` are that of the text and, if any, that of the group."""
    split_key = columns[-1] if len(columns) > 1 else None
    return document_of(record, columns[0], split_key, where=f"{source.file}, row {number} (from 0)", unit="row")


Batches = Iterator[tuple[int, int, int, Any]]
"""Group, row in it, rows of the groups before, rows."""


def _parquet(source: SourceFile, raw: Any, columns: list[str], first: int) -> Batches:
    file = need("pyarrow.parquet", source=source).ParquetFile(raw, buffer_size=CHUNK_BYTES)
    _checked(source, file.schema_arrow.names, columns)
    before = 0
    for group in range(file.num_row_groups):
        if group >= first:
            at = 0
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns, use_threads=False):
                yield group, at, before, batch
                at += batch.num_rows
        before += file.metadata.row_group(group).num_rows


def _arrow(source: SourceFile, raw: Any) -> Batches:
    ipc = need("pyarrow", source=source).ipc
    begin = raw.read(len(_ARROW_FILE))
    is_file = begin == _ARROW_FILE
    if begin.startswith(_STREAM_BEGIN):
        _check_end(raw)
    raw.seek(0)
    reader = ipc.open_file(raw) if is_file else ipc.open_stream(raw)
    groups = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
    before = 0
    for index, group in enumerate(groups):
        for at in range(0, group.num_rows, _ROWS):
            yield index, at, before, group.slice(at, _ROWS)
        before += group.num_rows
    if not is_file and raw.read(1):
        raise DataError(f"{source.file} goes on after the end of its arrow stream. Put what follows in another file.")


def _check_end(raw: Any) -> None:
    """Refuse a stream that was cut short between two batches, where arrow's reader takes its end for the stream's.

    Streams of arrow before 0.15 begin and end otherwise: with four zero bytes, as what pads a batch may as well.
    """
    raw.seek(max(raw.seek(0, io.SEEK_END) - len(_STREAM_END), 0))
    if raw.read() != _STREAM_END:
        raise EOFError("it lacks the mark that ends a stream; it was cut short, or its writer was not closed")


def _checked(source: SourceFile, present: list[str], columns: list[str]) -> list[str]:
    for name in columns:
        if name not in present:
            listed = ", ".join(f"'{each}'" for each in present)
            raise DataError(
                f"{source.file} has no column '{name}'.{nearest(name, present)} Columns here: {listed}. Name another "
                "(--text-field, --split-key)."
            )
        if present.count(name) > 1:
            raise DataError(
                f"{source.file} has {present.count(name)} columns '{name}', and nothing says which is meant. Rename "
                "all but one, or name another (--text-field, --split-key)."
            )
    return columns


def _records(source: SourceFile, batch: Any, first: int) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{source.file}, row {first + i} (from 0): not UTF-8: byte {error.start} is "
                    f"0x{error.object[error.start]:02x}. Mend or remove the row."
                ) from error
        raise
    return rows


@contextmanager
def _arrow_errors(source: SourceFile) -> Iterator[None]:
    arrow = need("pyarrow", source=source)
    try:
        with reading(source):
            yield
    except arrow.ArrowException as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise DataError(f"cannot read {source.file}: {first}. Check the file.") from error
