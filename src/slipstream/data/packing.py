"""Documents -> ids, each followed by its end, on their side of the split."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data.corpus import split_hash
from slipstream.data.processes import Processes
from slipstream.data.records import Document
from slipstream.data.shards import SPLITS, Split, token_dtype
from slipstream.data.tokenizer import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """What some documents give to one side of the split."""

    ids: npt.NDArray[Any]
    """As they are stored, shape (n,)."""
    documents: int
    num_bytes: int
    """UTF-8 bytes of the text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitAt:
    """Which documents are held out."""

    salt: str
    threshold: int

    def side(self, document: Document) -> Split:
        """Return the side that a document is on."""
        return "validation" if split_hash(document, self.salt) < self.threshold else "train"

    def takes(self, document: Document) -> bool:
        """Return whether a document's text falls below the threshold, whatever group it is in."""
        return split_hash(Document(text=document.text), self.salt) < self.threshold


def pack(documents: Sequence[Document], *, tokenizer: Tokenizer, split: SplitAt) -> dict[Split, Packed]:
    """Encode documents, none of them empty, and part them by side."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eos_id], dtype=dtype)
    parts: dict[Split, list[npt.NDArray[Any]]] = {side: [np.empty(0, dtype=dtype)] for side in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)
    num_bytes = dict.fromkeys(SPLITS, 0)
    for document, ids in zip(documents, tokenizer.encode_batch([document.text for document in documents])):
        side = split.side(document)
        parts[side] += [ids.astype(dtype), end]
        counts[side] += 1
        num_bytes[side] += document.num_bytes
    return {
        side: Packed(ids=np.concatenate(parts[side]), documents=counts[side], num_bytes=num_bytes[side])
        for side in SPLITS
    }


def pack_in_order(
    batches: Iterable[list[Document]], *, tokenizer: Tokenizer, split: SplitAt, processes: Processes
) -> Iterator[dict[Split, Packed]]:
    """Yield what each batch gives to either side, packed by this process or by several."""
    if processes.count == 1:
        yield from map(functools.partial(pack, tokenizer=tokenizer, split=split), batches)
        return
    with TemporaryDirectory(prefix="slipstream-") as folder:
        tokenizer.save(folder)
        yield from processes.in_order(functools.partial(_pack_there, folder, split), batches)


def _pack_there(folder: str, split: SplitAt, documents: list[Document]) -> dict[Split, Packed]:
    return pack(documents, tokenizer=_loaded(folder), split=split)


@functools.cache
def _loaded(folder: str) -> Tokenizer:
    return load_tokenizer(folder)
