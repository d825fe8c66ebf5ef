"""Byte-level BPE by whole words, each encoded once: what makes preparing a corpus fast.

The byte-level pattern cuts a text into words before any merge, so a word has the same ids wherever it stands. Finding
the words here and looking their ids up costs a quarter of letting the library cut and merge them again each time. It
needs the pattern's classes of characters to be the library's, so it keeps to scripts whose classes have long been
settled; text with any other character is left to the library.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import tokenizers

SETTLED = (
    (0x0000, 0x0530),  # Latin, Greek, Cyrillic
    (0x2000, 0x2C00),  # punctuation, symbols
    (0x3000, 0x3100),  # kana
    (0x4E00, 0x9FD6),  # Chinese characters
    (0xAC00, 0xD7A4),  # Hangul
)
"""First and last + 1 of the ranges of code points; what is not assigned in them is left out."""

_MAX_CHARS = 2**24
"""Of the words kept, so that a text without end takes memory with an end: some 100 MB."""


class WordEncoder:
    """Encodes text by a table of words.

    Args:
        backend: Encodes one word; its pre-tokenizer must be byte-level without a prefix space.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._table = _Table(backend)

    def encode(self, texts: Iterable[str]) -> list[npt.NDArray[np.uint32] | None]:
        """Return the ids of each text, shape (number of tokens,); none where a character is not settled.

        Cost: a text's words lie in memory at once: some KB of text at a time keep them in the processor's cache, which
        makes a fifth of the speed.
        """
        words, unsettled = _patterns()
        ids_of = self._table.__getitem__
        return [
            None
            if unsettled.search(text)
            else np.frombuffer(b"".join(map(ids_of, words.findall(text))), dtype=np.uint32)
            for text in texts
        ]


class _Table(dict[str, bytes]):
    """Ids of words, which it learns from the library as they are asked for."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._num_chars = 0

    def __missing__(self, word: str) -> bytes:
        if self._num_chars + len(word) > _MAX_CHARS:
            self.clear()
            self._num_chars = 0
        self._num_chars += len(word)
        found = self[word] = np.array(self._backend.encode(word).ids, dtype=np.uint32).tobytes()
        return found


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what finds the words of a text, and what finds a character that is not settled."""
    codes = [code for first, end in SETTLED for code in range(first, end)]
    kinds = {code: _kind(code) for code in codes}
    letter, number, space = (_set_of(code for code in codes if kinds[code] == kind) for kind in ("L", "N", "space"))
    every = _set_of(code for code in codes if kinds[code] != "none")
    # The pattern of GPT-2; letters come first, since they are the most and no other part begins like them.
    words = (
        rf" ?[{letter}]+| ?[{number}]+|'(?:[stmd]|re|ve|ll)| ?[^{space}{letter}{number}]+"
        rf"|[{space}]+(?![^{space}])|[{space}]+"
    )
    return re.compile(words), re.compile(f"[^{every}]")


def _kind(code: int) -> str:
    category = unicodedata.category(chr(code))
    if category[0] == "Z" or 0x09 <= code <= 0x0D or code == 0x85:
        return "space"
    if category == "Cn":
        return "none"
    return category[0] if category[0] in "LN" else "other"


def _set_of(codes: Iterable[int]) -> str:
    """Return ascending code points as the inside of a character class."""
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in ranges)
