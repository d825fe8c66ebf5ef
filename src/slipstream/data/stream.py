"""Tokens straight from files of text, for corpora that nobody wants to pack first.

The order is a pure function of the seed: each epoch has its own order of files; within a file, blocks of up to 1,024
documents follow one another, each shuffled. A place in it says how to go on::

    epoch 0    file 3 of its order    row group 2, row 4096    document 17 of the block    token 250 of it

so no text before the block is parsed again, and nothing that is on its way has to be kept.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data.files import SourceFile, find_files, reading
from slipstream.data.manifest import Manifest
from slipstream.data.packing import SplitAt
from slipstream.data.records import Document
from slipstream.data.sources import read_placed
from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import DataError

_BLOCK_ROWS = 1024
_BLOCK_CHARS = 2**22
_SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the endless order a token stands."""

    epoch: int = 0
    file: int = 0
    """Number in the epoch's order of files."""
    group: int = 0
    """Row group, or record batch; 0 where the file has none."""
    row: int = 0
    """Document of the group that begins the block."""
    taken: int = 0
    """Documents of the shuffled block before this one."""
    token: int = 0
    """Tokens of the document before this one."""


class TokenStream:
    """The training side of files of text, document by document, without end.

    Args:
        files: In any order; the order given is part of the seed's.
        tokenizer: Encodes the documents.
        split: Documents that it holds out are passed over.
        text_field: Field of records that holds the text.
        split_key: Field of records whose value decides the side; none: the text.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        tokenizer: Tokenizer,
        split: SplitAt,
        text_field: str,
        split_key: str | None,
    ) -> None:
        self.files = files
        self._tokenizer = tokenizer
        self._split = split
        self._text_field = text_field
        self._split_key = split_key

    def documents(self, start: Place, *, seed: int) -> Iterator[tuple[Place, npt.NDArray[Any]]]:
        """Yield each document's place and its ids with the end of document, from a place on (its token aside).

        Raises:
            DataError: A file has a fault (see :func:`slipstream.data.sources.read_documents`), or none has a document
                for training.
        """
        epoch, found = start.epoch, True
        while found:
            found = start.epoch == epoch and start != Place(epoch=epoch)  # something may lie before
            order = _shuffled(len(self.files), seed, epoch)
            for number in range(start.file if epoch == start.epoch else 0, len(order)):
                begin = start if (epoch, number) == (start.epoch, start.file) else Place(epoch=epoch, file=number)
                for each in self._documents_of(int(order[number]), begin, seed):
                    found = True
                    yield each
            epoch += 1
        names = ", ".join(str(file.file) for file in self.files[:3])
        raise DataError(f"no document of {names} is for training: all are empty or held out. Give more text.")

    def check(self) -> None:
        """Read one document, so that a missing column or package shows before training.

        Raises:
            DataError: The first file cannot be used.
        """
        next(read_placed(self.files[0], text_field=self._text_field, split_key=self._split_key), None)

    def name(self, place: Place, *, seed: int) -> str:
        """Return the name of the file that a place is in."""
        return self.files[int(_shuffled(len(self.files), seed, place.epoch)[place.file])].name

    def digest(self) -> str:
        """Return 64 hex digits of the files' names, sizes, beginnings and ends, and of which fields are read.

        A change in the middle of a file that keeps its size is not noticed: corpora that are streamed are too large to
        be read for this.
        """
        content: list[Any] = [self._text_field, self._split_key]
        for file in self.files:
            with reading(file), file.file.open("rb") as raw:
                num_bytes = raw.seek(0, 2)
                raw.seek(0)
                first = raw.read(_SAMPLE_BYTES)
                raw.seek(max(num_bytes - _SAMPLE_BYTES, 0))
                content.append([file.name, num_bytes, hashlib.sha256(first + raw.read()).hexdigest()])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def num_stored_bytes(self) -> int:
        """Size of the files."""
        return sum(file.num_bytes for file in self.files)

    def _documents_of(self, index: int, begin: Place, seed: int) -> Iterator[tuple[Place, npt.NDArray[Any]]]:
        taken = begin.taken
        for group, row, block in self._blocks(self.files[index], group=begin.group, row=begin.row):
            order = _shuffled(len(block), seed, begin.epoch, index, group, row)
            chosen = [
                (number, block[i])
                for number, i in enumerate(order)
                if number >= taken and not block[i].is_empty and self._split.side(block[i]) == "train"
            ]
            taken = 0
            encoded = self._tokenizer.encode_batch([document.text for _, document in chosen])
            for (number, _), ids in zip(chosen, encoded):
                place = dataclasses.replace(begin, group=group, row=row, taken=number, token=0)
                yield place, np.append(ids, [self._tokenizer.eos_id])

    def _blocks(self, file: SourceFile, *, group: int, row: int) -> Iterator[tuple[int, int, list[Document]]]:
        """Yield the place of a block's first document and the block; none spans two groups."""
        block: list[Document] = []
        num_chars, first = 0, (group, row)
        placed = read_placed(file, text_field=self._text_field, split_key=self._split_key, group=group, row=row)
        for at, number, document in placed:
            if block and (at != first[0] or len(block) >= _BLOCK_ROWS or num_chars >= _BLOCK_CHARS):
                yield *first, block
                block, num_chars = [], 0
            if not block:
                first = (at, number)
            block.append(document)
            num_chars += len(document.text)
        if block:
            yield *first, block


def open_stream(
    paths: Sequence[str], *, tokenizer: Tokenizer, manifest: Manifest, text_field: str = "text"
) -> TokenStream:
    """Open files of text for training beside prepared data, whose tokenizer and split they take.

    Args:
        paths: As for :func:`slipstream.data.files.find_files`.
        tokenizer: That of the prepared data.
        manifest: That of the prepared data; what its rule holds out is not trained on.
        text_field: Field of records that holds the text.

    Raises:
        DataError: A path is wrong, the first file cannot be read, or the prepared data's split rule says nothing of
            whole documents.
    """
    rule = manifest.split_rule
    if rule.key == "block":
        raise DataError(
            "the prepared data was cut from one text, so its rule cannot tell which documents of a stream to hold out. "
            "Prepare some of the stream's files (`slipstream data prepare`), and name that folder in data.path."
        )
    stream = TokenStream(
        find_files(paths),
        tokenizer=tokenizer,
        split=SplitAt(salt=rule.salt, threshold=int(rule.threshold, 16)),
        text_field=text_field,
        split_key=rule.key.removeprefix("field ") if rule.key.startswith("field ") else None,
    )
    stream.check()
    return stream


def _shuffled(count: int, *numbers: int) -> npt.NDArray[np.int64]:
    """Return the order of ``count`` things that some numbers stand for."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    # Sorting raw words, not Generator.permutation: numpy may change the latter's stream between releases.
    words = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")
