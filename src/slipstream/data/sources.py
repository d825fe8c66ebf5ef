"""Files of text, read as documents, one at a time.

Every fault of the input is named with its file and line, row or byte.
"""

from collections.abc import Iterator

from slipstream.data.files import (
    CHUNK_BYTES,
    LINE_SUFFIXES,
    TABLE_SUFFIXES,
    SourceFile,
    decode,
    find_files,
    opened,
    reading,
)
from slipstream.data.records import Document, Placed, read_lines
from slipstream.data.tables import read_rows
from slipstream.errors import DataError

__all__ = ["cut_blocks", "find_files", "read_chunks", "read_documents", "read_placed"]


def read_documents(source: SourceFile, *, text_field: str, split_key: str | None) -> Iterator[Document]:
    """Yield the documents of a file, empty ones too.

    Args:
        source: The file.
        text_field: Field of a record that holds the text.
        split_key: Field of a record whose value names the document's group; none: no groups.

    Raises:
        DataError: The file cannot be read, or what reads it is not installed; the text is not UTF-8 (with the byte
            offset); a record is none, or lacks a field (with the number of its line or row); ``split_key`` is given
            for a `.txt` file.

    Cost: memory for one document, of tables for 128.
    """
    return (document for _, _, document in read_placed(source, text_field=text_field, split_key=split_key))


def read_placed(
    source: SourceFile, *, text_field: str, split_key: str | None, group: int = 0, row: int = 0
) -> Iterator[Placed]:
    """Yield the documents of a file with their places, from one on; as :func:`read_documents` otherwise.

    Cost: what lies before the place is unpacked but not parsed; row groups of parquet before it are not read.
    """
    if source.is_table:
        yield from read_rows(source, text_field=text_field, split_key=split_key, group=group, row=row)
    elif not source.is_text:
        yield from read_lines(source, text_field=text_field, split_key=split_key, row=row)
    elif split_key is not None:
        raise DataError(
            f"the split key '{split_key}' needs records, but {source.file} is plain text and has no fields. "
            f"Leave the split key out, or give files named {', '.join((*LINE_SUFFIXES, *TABLE_SUFFIXES))}."
        )
    elif row == 0:
        yield 0, 0, Document(text="".join(read_chunks(source)))


def read_chunks(source: SourceFile) -> Iterator[str]:
    """Yield the text of a `.txt` file in chunks of about 1 MB, line ends as they are.

    Raises:
        DataError: The file cannot be read or is not UTF-8 (with the byte offset).
    """
    with reading(source), opened(source) as stream:
        pending = b""
        offset = 0
        while chunk := stream.read(CHUNK_BYTES):
            block = pending + chunk
            # A chunk may end inside a character: at most 3 bytes wait for the next.
            end = len(block) - _unfinished(block)
            yield decode(block[:end], source=source, offset=offset)
            pending = block[end:]
            offset += end
        yield decode(pending, source=source, offset=offset)


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
