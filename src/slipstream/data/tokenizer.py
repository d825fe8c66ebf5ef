"""Text to token ids and back: bytes, or byte-level BPE.

Both keep every text intact: ``decode(encode(text)) == text``. One further id, ``eos_id``, ends a document; it stands
for no bytes, and no text encodes to it, not even one that spells its name.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from slipstream.data.words import WordEncoder
from slipstream.errors import ConfigError, DataError

IDENTITY_FILE = "slipstream_tokenizer.json"
"""Names the kind of tokenizer and its fingerprint."""
BPE_FILE = "tokenizer.json"
"""Vocabulary and merges, in the format of Hugging Face tokenizers."""
EOS_TEXT = "<|endoftext|>"
"""Name of the end-of-document id in the vocabulary of a BPE tokenizer."""

_MOST_TOKENS = 2**24
PIECE_CHARS = 2048
SLAB_PIECES = 2048
# `\n` after a sign that is not white space always begins a new word of the byte-level pattern, which looks ahead but
# never back. Cutting just before it therefore changes no token. (U+180E once counted as white space.)
_SAFE_CUT = re.compile(r"(?<=[^\s\u180e])\n")


class Tokenizer(Protocol):
    """What the package needs of a tokenizer."""

    name: str
    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document id."""

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
        """Return the ids of each text as an array; the same ids as :meth:`encode`, faster."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; the end-of-document id gives nothing, incomplete UTF-8 the replacement sign."""

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return how many UTF-8 bytes each id stands for, shape (vocab_size,); 0 for the end-of-document id."""

    def fingerprint(self) -> str:
        """Return 64 hex digits that change with anything that changes ids."""

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder that exists; :func:`load_tokenizer` reads it back."""


class ByteTokenizer:
    """Each UTF-8 byte is its own id, 0 to 255; 256 ends a document.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("Où?")
        [79, 195, 185, 63]
        >>> tokenizer.decode([79, 195, 185, 63, tokenizer.eos_id])
        'Où?'
    """

    name = "bytes"
    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text as numbers."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
        """Return the UTF-8 bytes of each text, shape (number of bytes,)."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; the end-of-document id gives nothing, incomplete UTF-8 the replacement sign.

        Raises:
            DataError: An id outside the vocabulary.
        """
        checked = checked_ids(ids, vocab_size=self.vocab_size)
        return bytes(i for i in checked if i != self.eos_id).decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return how many bytes each id stands for, shape (257,): 1, and 0 for the end-of-document id."""
        counts = np.ones(self.vocab_size, dtype=np.int64)
        counts[self.eos_id] = 0
        return counts

    def fingerprint(self) -> str:
        """Return 64 hex digits, the same for every byte tokenizer."""
        return fingerprint_of({"kind": self.name, "eos_id": self.eos_id})

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder that exists."""
        write_identity(self, Path(folder))


class BpeTokenizer:
    """Byte-level byte-pair encoding: bytes, then frequent pairs of tokens, as ids.

    Args:
        vocabulary: Token (in the byte-level alphabet) to id; holds ``<|endoftext|>``.
        merges: Pairs of tokens, most frequent first.

    Raises:
        DataError: The vocabulary lacks ``<|endoftext|>`` or one of the 256 bytes, or does not fit the merges.

    Source: Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2 (Radford et al. 2019), whose pattern cuts the
        text into words before merging.
    """

    name = "bpe"

    def __init__(self, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> None:
        self.vocab_size = len(vocabulary)
        missing = {EOS_TEXT, *pre_tokenizers.ByteLevel.alphabet()} - vocabulary.keys()
        if missing or sorted(vocabulary.values()) != list(range(self.vocab_size)):
            raise DataError(
                f"the vocabulary of {self.vocab_size} tokens must hold {EOS_TEXT} and all 256 bytes under the ids 0 to "
                f"{self.vocab_size - 1}; {len(missing)} of these tokens are missing. Train the tokenizer again."
            )
        try:
            # Without the library's word cache: its lock costs more than it saves, the more so on several cores.
            model = models.BPE(vocab=vocabulary, merges=list(merges), cache_capacity=0)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"the merges do not fit the vocabulary: {error}. Train the tokenizer again.") from error
        self.eos_id = vocabulary[EOS_TEXT]
        self._vocabulary = vocabulary
        self._merges = [list(pair) for pair in merges]
        self._backend = _byte_level(model)
        self._backend.add_special_tokens([EOS_TEXT])
        # A text that spells <|endoftext|> is a text like any other.
        self._backend.encode_special_tokens = True
        self._words = WordEncoder(self._backend)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
        """Return the ids of each text, shape (number of tokens,).

        Long texts are cut where no token can cross, so that rare characters slow down their surroundings alone.
        """
        parts: list[list[npt.NDArray[np.uint32]]] = [[np.empty(0, dtype=np.uint32)] for _ in texts]
        pieces = ((i, piece) for i, text in enumerate(texts) for piece in cut_pieces(text))
        # In slabs, because the backend's own result takes far more memory than the ids.
        while slab := list(itertools.islice(pieces, SLAB_PIECES)):
            encoded = self._words.encode([piece for _, piece in slab])
            others = [number for number, ids in enumerate(encoded) if ids is None]
            for number, encoding in zip(others, self._backend.encode_batch_fast([slab[i][1] for i in others])):
                encoded[number] = np.array(encoding.ids, dtype=np.uint32)
            for (i, _), ids in zip(slab, encoded):
                assert ids is not None
                parts[i].append(ids)
        return [np.concatenate(arrays) for arrays in parts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; the end-of-document id gives nothing, incomplete UTF-8 the replacement sign.

        Raises:
            DataError: An id outside the vocabulary.
        """
        checked = checked_ids(ids, vocab_size=self.vocab_size)
        return self._backend.decode(checked, skip_special_tokens=True)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return how many bytes each id stands for, shape (vocab_size,); 0 for the end-of-document id."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._vocabulary.items():
            # One sign of the byte-level alphabet is one byte.
            counts[i] = 0 if token == EOS_TEXT else len(token)
        return counts

    def fingerprint(self) -> str:
        """Return 64 hex digits of vocabulary and merges."""
        return fingerprint_of({"kind": self.name, "vocabulary": self._vocabulary, "merges": self._merges})

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder that exists."""
        text = self._backend.to_str(pretty=True)
        (Path(folder) / BPE_FILE).write_text(text, encoding="utf-8")
        write_identity(self, Path(folder))


def check_vocab_size(vocab_size: int) -> None:
    """Refuse a size that no BPE vocabulary can have.

    Raises:
        ConfigError: It is below 257, or above 16,777,216.
    """
    if vocab_size < ByteTokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size is {vocab_size}; a BPE vocabulary needs at least {ByteTokenizer.vocab_size} tokens: 256 bytes "
            "and the end of a document. Give a larger vocab_size, or the tokenizer `bytes`."
        )
    if vocab_size > _MOST_TOKENS:
        raise ConfigError(f"vocab_size is {vocab_size}; allowed are {_MOST_TOKENS} at most, and usual are some 50,000.")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> BpeTokenizer:
    """Learn a byte-level BPE vocabulary.

    The same texts give the same tokenizer, in any process. Pairs seen only once are not merged, so a small text gives
    fewer than ``vocab_size`` tokens.

    Args:
        texts: Read once, one at a time.
        vocab_size: Tokens at most, from 257 (256 bytes and the end of a document).

    Raises:
        ConfigError: ``vocab_size`` is below 257, or above 16,777,216.

    Cost: memory for the distinct words of the texts, not for the texts.
    """
    check_vocab_size(vocab_size)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend = _byte_level(models.BPE())
    backend.train_from_iterator((piece for text in texts for piece in cut_pieces(text)), trainer=trainer)
    return _from_backend_json(backend.to_str())


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer that :meth:`Tokenizer.save` wrote.

    Raises:
        DataError: A file is missing or damaged, or the tokenizer is not the one that was saved.
    """
    path = Path(folder) / IDENTITY_FILE
    identity = _read_json(path)
    tokenizer: Tokenizer
    match identity.get("name"):
        case "bytes":
            tokenizer = ByteTokenizer()
        case "bpe":
            path = Path(folder) / BPE_FILE
            tokenizer = _from_backend_json(json.dumps(_read_json(path)), source=path)
        case "hub":
            from slipstream.data.hub_tokenizer import read_hub_tokenizer  # it stands on this module

            tokenizer = read_hub_tokenizer(folder)
        case other:
            raise DataError(
                f"{path} names the tokenizer {other!r}; allowed: 'bytes', 'bpe', 'hub'. Prepare the data again."
            )
    if tokenizer.fingerprint() != identity.get("fingerprint"):
        raise DataError(
            f"the tokenizer in {path} has the fingerprint {tokenizer.fingerprint()}, saved was "
            f"{identity.get('fingerprint')}: the file has changed. Prepare the data again, or restore the file."
        )
    return tokenizer


def cut_pieces(text: str, *, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    r"""Cut a text where no token of the byte-level pattern can cross: before a line end that follows a sign.

    Args:
        text: Any text; the pieces joined give it again.
        piece_chars: Shortest piece but the last; a piece is longer where no safe cut is near.

    Example:
        >>> list(cut_pieces("To be,\nor not\n\nto be", piece_chars=3))
        ['To be,', '\nor not', '\n\nto be']
    """
    start = 0
    while start < len(text):
        cut = _SAFE_CUT.search(text, start + piece_chars)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _from_backend_json(text: str, *, source: Path | None = None) -> BpeTokenizer:
    # Rebuilt from vocabulary and merges alone, so that the fingerprint covers all that decides ids.
    try:
        model = json.loads(text)["model"]
        vocabulary = {str(token): int(i) for token, i in model["vocab"].items()}
        merges = [(str(left), str(right)) for left, right in model["merges"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{source or 'the tokenizer'} is not a byte-level BPE tokenizer: {error}. Prepare the data again."
        ) from error
    return BpeTokenizer(vocabulary, merges)


def checked_ids(ids: Iterable[int], *, vocab_size: int) -> list[int]:
    """Return ids as a list of Python's numbers.

    Raises:
        DataError: One lies outside the vocabulary.
    """
    checked = [int(i) for i in ids]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise DataError(f"token id {i} is outside the vocabulary, 0 to {vocab_size - 1}. Use the data's tokenizer.")
    return checked


def fingerprint_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of all that decides ids, as 64 hex digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_identity(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the file by which :func:`load_tokenizer` knows a tokenizer again."""
    identity = {
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "fingerprint": tokenizer.fingerprint(),
    }
    (folder / IDENTITY_FILE).write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}. Give a folder made by `slipstream data prepare`."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is damaged, not JSON: {error}. Prepare the data again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a JSON object, not {type(content).__name__}. Prepare the data again.")
    return content
