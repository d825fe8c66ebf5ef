"""A set of documents and the rule that puts each on one side of the split."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence

from slipstream.data.files import SourceFile
from slipstream.data.processes import Processes
from slipstream.data.records import Document
from slipstream.data.sources import cut_blocks, read_chunks, read_documents
from slipstream.errors import DataError

# A lone text is cut into about 100 blocks, which are large beside a sequence and small beside the text.
_BLOCKS = 100
_MIN_BLOCK_CHARS = 256
_MAX_BLOCK_CHARS = 65_536
_HASH_RANGE = 2**64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents to prepare, readable any number of times."""

    files: Sequence[SourceFile]
    text_field: str
    split_key: str | None
    salt: str
    block_chars: int | None = None
    """Set where the only document is cut into blocks."""

    def documents(self) -> Iterator[Document]:
        """Yield the documents of all files in order, empty ones too."""
        for file in self.files:
            yield from self.documents_of(file)

    def documents_of(self, file: SourceFile) -> Iterator[Document]:
        """Yield the documents of a file, empty ones too."""
        if self.block_chars is None:
            yield from read_documents(file, text_field=self.text_field, split_key=self.split_key)
        else:
            for block in cut_blocks(self._text(file), block_chars=self.block_chars):
                yield Document(text=block)

    def _text(self, file: SourceFile) -> Iterator[str]:
        if file.is_text:
            return read_chunks(file)
        return (document.text for document in read_documents(file, text_field=self.text_field, split_key=None))


def split_hash(document: Document, salt: str) -> int:
    """Return the hash that decides a document's side, 0 to 2^64 - 1."""
    key = document.text if document.group is None else document.group
    hasher = hashlib.sha256(salt.encode() + b"\0")
    hasher.update(key.encode())
    return int.from_bytes(hasher.digest()[:8], "big")


@dataclasses.dataclass(kw_only=True)
class Survey:
    """What a first reading of a corpus found."""

    documents: list[int]
    """By file; empty ones are not counted."""
    empty_documents: list[int]
    """By file."""
    num_bytes: int = 0
    num_chars: int = 0
    lowest: int = _HASH_RANGE
    highest: int = -1
    """Bounds of the hashes."""
    block_hashes: list[int] = dataclasses.field(default_factory=list)
    """All of them, where the only document was cut into blocks."""


Report = Callable[[int], None]
"""Is told the bytes of text done so far."""


def survey(corpus: Corpus, *, processes: Processes, report: Report) -> tuple[Corpus, Survey]:
    """Read everything once; where there is only one document, cut it into blocks and survey these.

    Args:
        corpus: Documents not yet cut.
        processes: Share the files among them.
        report: Is told the bytes of text read so far.

    Returns:
        The corpus, cut into blocks where that was needed, and what is in it.

    Raises:
        DataError: Any fault of the text; see :mod:`slipstream.data.sources`.

    Cost: memory for one document; a lone `.txt` file is read in chunks.
    """
    lone_text = len(corpus.files) == 1 and corpus.files[0].is_text and corpus.split_key is None
    if lone_text:
        num_chars = sum(len(chunk) for chunk in read_chunks(corpus.files[0]))
    else:
        found = _survey(corpus, processes, report)
        if sum(found.documents) != 1 or corpus.split_key is not None:
            return corpus, found
        num_chars = found.num_chars
    block_chars = min(max(num_chars // _BLOCKS, _MIN_BLOCK_CHARS), _MAX_BLOCK_CHARS)
    corpus = dataclasses.replace(corpus, block_chars=block_chars)
    return corpus, _survey(corpus, processes, report)


def split_threshold(found: Survey, corpus: Corpus, *, validation_fraction: float) -> int:
    """Return the hash below which a document is held out, moved as far as needed to leave neither side empty.

    For documents it is a fixed part of the range of hashes, so that each keeps its side when others are added. Blocks
    are few, and cut anew when the text grows: the lowest hashes are taken, for a fraction that holds.

    Raises:
        DataError: There is no text, or only one text or group, which cannot be on both sides.
    """
    num_documents = sum(found.documents)
    names = ", ".join(file.name for file in corpus.files[:3]) + (", ..." if len(corpus.files) > 3 else "")
    if num_documents == 0:
        raise DataError(f"no text in {names}: empty, or nothing but white space. Give files with text.")
    if found.lowest == found.highest:
        if corpus.split_key is not None:
            what = f"all {num_documents} documents have the same '{corpus.split_key}'"
            remedy = "Give more text, or another split key, or none"
        else:
            what = f"{found.num_bytes} bytes in {num_documents} documents, all with the same text"
            if num_documents == 1:
                what = f"one document of {found.num_bytes} bytes"
            remedy = f"Give more; a lone text of at least {2 * _MIN_BLOCK_CHARS} characters is cut into blocks"
        raise DataError(f"too little text in {names} to hold a part out for validation: {what}. {remedy}.")
    threshold = int(validation_fraction * _HASH_RANGE)
    if found.block_hashes:
        num_held_out = round(validation_fraction * len(found.block_hashes))
        threshold = sorted(found.block_hashes)[min(num_held_out, len(found.block_hashes) - 1)]
    return min(max(threshold, found.lowest + 1), found.highest)


def _survey(corpus: Corpus, processes: Processes, report: Report) -> Survey:
    found = Survey(documents=[], empty_documents=[])
    surveys: Iterator[Survey]
    if processes.count == 1:
        surveys = (_survey_file(corpus, file, done=found, report=report) for file in corpus.files)
    else:
        surveys = processes.in_order(functools.partial(_survey_file, corpus), corpus.files)
    for each in surveys:
        found.documents += each.documents
        found.empty_documents += each.empty_documents
        found.num_bytes += each.num_bytes
        found.num_chars += each.num_chars
        found.lowest = min(found.lowest, each.lowest)
        found.highest = max(found.highest, each.highest)
        found.block_hashes += each.block_hashes
        report(found.num_bytes)
    return found


def _survey_file(
    corpus: Corpus, file: SourceFile, *, done: Survey | None = None, report: Report = lambda done: None
) -> Survey:
    """Survey one file; ``report`` is told the bytes of ``done`` and of this file so far."""
    found = Survey(documents=[0], empty_documents=[0])
    before = 0 if done is None else done.num_bytes
    for document in corpus.documents_of(file):
        if document.is_empty:
            found.empty_documents[0] += 1
            continue
        value = split_hash(document, corpus.salt)
        found.documents[0] += 1
        found.num_bytes += document.num_bytes
        found.num_chars += len(document.text)
        found.lowest = min(found.lowest, value)
        found.highest = max(found.highest, value)
        if corpus.block_chars is not None:
            found.block_hashes.append(value)
        report(before + found.num_bytes)
    return found
