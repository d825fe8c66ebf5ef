"""Tokenizers in the files of the Hugging Face hub: writing ours, reading any that has a ``tokenizer.json``."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from slipstream.data.tokenizer import (
    BPE_FILE,
    EOS_TEXT,
    IDENTITY_FILE,
    ByteTokenizer,
    Tokenizer,
    checked_ids,
    fingerprint_of,
    load_tokenizer,
    write_identity,
)
from slipstream.errors import DataError

CONFIG_FILE = "tokenizer_config.json"
_CONFIGS = (CONFIG_FILE, "special_tokens_map.json")
_MODEL_CONFIGS = ("generation_config.json", "config.json")
_MARKS = ("continuing_subword_prefix", "end_of_word_suffix")


class HubTokenizer:
    """A tokenizer of the hub, without the tokens that it would put around a text by itself.

    Args:
        text: Content of ``tokenizer.json``.
        eos_id: Id that ends a document.

    Raises:
        DataError: The tokenizers library cannot read the text, or ``eos_id`` is none of its ids, or one of text.
    """

    name = "hub"

    def __init__(self, text: str, eos_id: int) -> None:
        self._backend = _backend_of(text, source="the tokenizer")
        self._backend.no_truncation()
        self._backend.no_padding()
        # A text that spells a special token is a text like any other.
        self._backend.encode_special_tokens = True
        self._text = text
        self._vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values()) + 1
        self.eos_id = eos_id
        checked_ids([eos_id], vocab_size=self.vocab_size)
        self._end = self._backend.id_to_token(eos_id) or ""
        model = json.loads(text)["model"]
        self._prefix, self._suffix = (model.get(name) or "" for name in _MARKS)
        if model.get("unk_token") != self._end:
            self._check_end()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return self._without_end(text) if self.eos_id in ids else ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
        """Return the ids of each text, shape (number of tokens,)."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        found = [np.array(encoding.ids, dtype=np.uint32) for encoding in encoded]
        return [
            np.array(self._without_end(text), dtype=np.uint32) if (ids == self.eos_id).any() else ids
            for text, ids in zip(texts, found)
        ]

    def _without_end(self, text: str) -> list[int]:
        """Return the ids of a text that spells the end of a document, which is cut there inside the name.

        A vocabulary of whole pieces or words has the name as one of them, special or not.
        """
        head, *others = text.split(self._end)
        parts = [head]
        for other in others:
            parts[-1] += self._end[:1]
            parts.append(self._end[1:] + other)
        encoded = [self._backend.encode(part, add_special_tokens=False).ids for part in parts]
        return list(itertools.chain.from_iterable(encoded))

    def _check_end(self) -> None:
        """Refuse an end of document that stands for ordinary text, such as a line break: no cut keeps it out."""
        for text in (self._end, self._backend.decode([self.eos_id], skip_special_tokens=False)):
            try:
                # Thrice, for a name whose halves make it anew where it is repeated.
                is_text = self.eos_id in self.encode(3 * text)
            except Exception:  # the library's, of a vocabulary that lacks the signs
                continue
            if is_text:
                raise DataError(
                    f"id {self.eos_id} ({self._end!r}) cannot end documents: text holds it, and would fall apart "
                    f'there. Name another "eos_token" in {CONFIG_FILE}, one that stands for no text.'
                )

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens give nothing.

        Raises:
            DataError: An id outside the vocabulary.
        """
        return self._backend.decode(checked_ids(ids, vocab_size=self.vocab_size), skip_special_tokens=True)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return how many UTF-8 bytes each id stands for, shape (vocab_size,); 0 for special tokens and gaps.

        Marks of the parts of words are none of the text; where a vocabulary knows words alone, neither are the spaces
        between them.
        """
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._backend.get_added_tokens_decoder()
        # One sign of the byte-level alphabet is one byte; other tokenizers write a space as a low line.
        by_bytes = '"ByteLevel"' in self._text
        for token, i in self._vocabulary.items():
            if i in added and added[i].special:
                continue
            if i not in added:
                token = token.removeprefix(self._prefix).removesuffix(self._suffix)
            if by_bytes:
                counts[i] = len(token.encode() if i in added else token)
            elif len(token) == 6 and token.startswith("<0x"):
                counts[i] = 1
            else:
                counts[i] = len(token.replace("\u2581", " ").encode())
        return counts

    def fingerprint(self) -> str:
        """Return 64 hex digits of ``tokenizer.json`` and the end-of-document id."""
        return fingerprint_of({"kind": self.name, "tokenizer": json.loads(self._text), "eos_id": self.eos_id})

    def begin_ids(self) -> tuple[int, ...]:
        """Return the ids that its file puts before a text by itself; :meth:`encode` leaves them out."""
        if not self._backend.num_special_tokens_to_add(is_pair=False):
            return ()
        # Around a text that is not empty, which parts what comes before it from what comes after.
        encoding = self._backend.encode("a")
        pairs = zip(encoding.ids, encoding.special_tokens_mask)
        return tuple(i for i, _ in itertools.takewhile(lambda pair: pair[1], pairs))

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder that exists."""
        (Path(folder) / BPE_FILE).write_text(self._text, encoding="utf-8")
        write_identity(self, Path(folder))

    def bare(self) -> "HubTokenizer":
        """Return the tokenizer without the tokens that its file puts around a text, with the same ids otherwise."""
        if not self._backend.num_special_tokens_to_add(is_pair=False):
            return self
        content = json.loads(self._text) | {"post_processor": None}
        return HubTokenizer(json.dumps(content, ensure_ascii=False, indent=2), self.eos_id)


def write_hub_tokenizer(tokenizer: Tokenizer, folder: Path, *, context_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, with which transformers gives the same ids.

    Our own file goes beside them, so that :func:`open_hub_tokenizer` gives the very tokenizer back.

    Args:
        tokenizer: Any.
        folder: One that exists.
        context_length: Tokens of the sequences that the model was trained on.
    """
    if isinstance(tokenizer, HubTokenizer):
        tokenizer = tokenizer.bare()  # transformers would begin a text with a token that no document began with
    tokenizer.save(folder)
    if isinstance(tokenizer, ByteTokenizer):
        (folder / BPE_FILE).write_text(_byte_backend().to_str(pretty=True), encoding="utf-8")
    backend = tokenizers.Tokenizer.from_file(str(folder / BPE_FILE))
    end = backend.id_to_token(tokenizer.eos_id)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # A document follows the end of another, so what ends one is also what begins one.
        "bos_token": end,
        "eos_token": end,
        "add_bos_token": False,
        "add_eos_token": False,
        # A text that spells a special token is a text like any other.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def open_hub_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer of a model folder or of prepared data: our own where it is from here, else any of the hub's.

    Raises:
        DataError: There is none, it cannot be read, or it has no token that ends a text.
    """
    folder = Path(folder)
    if (folder / IDENTITY_FILE).is_file():
        return load_tokenizer(folder)
    return HubTokenizer(_tokenizer_text(folder), _end_id(folder))


def named_begin_id(folder: str | Path) -> int | None:
    """Return the id of the token that a model folder names as the one that begins a text; ``None``: it names none."""
    folder = Path(folder)
    return _named_id(folder, "bos_token", _backend_of(_tokenizer_text(folder), source=f"the tokenizer in {folder}"))


def read_hub_tokenizer(folder: str | Path) -> HubTokenizer:
    """Read what :meth:`HubTokenizer.save` wrote."""
    end = _json(Path(folder) / IDENTITY_FILE).get("eos_id")
    if type(end) is not int:
        raise DataError(f"{Path(folder) / IDENTITY_FILE} has no 'eos_id', a whole number. Restore the file.")
    return HubTokenizer(_tokenizer_text(Path(folder)), end)


def _tokenizer_text(folder: Path) -> str:
    path = folder / BPE_FILE
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}. Give a folder with a {BPE_FILE}; for a tokenizer in another form, "
            "save it again with transformers' AutoTokenizer."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}). Restore the file.") from error


def _backend_of(text: str, *, source: Path | str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"{source} is none that the tokenizers library can read: {error}. Restore its {BPE_FILE}."
        ) from error


def _end_id(folder: Path) -> int:
    backend = _backend_of(_tokenizer_text(folder), source=f"the tokenizer in {folder}")
    if (named := _named_id(folder, "eos_token", backend)) is not None:
        return named
    for name in _MODEL_CONFIGS:
        found = _json(folder / name).get("eos_token_id")
        found = found[0] if isinstance(found, list) and found else found
        if type(found) is int:
            return found
    raise DataError(
        f'no token that ends a text is named in {folder}. Put "eos_token" into its {CONFIG_FILE}: documents are '
        "parted by it."
    )


def _named_id(folder: Path, role: str, backend: tokenizers.Tokenizer) -> int | None:
    for name in _CONFIGS:
        token = _json(folder / name).get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and (found := backend.token_to_id(token)) is not None:
            return int(found)
    return None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}. Restore the file.") from error
    return content if isinstance(content, dict) else {}


def _byte_backend() -> tokenizers.Tokenizer:
    """Return the byte tokenizer as one of the library: byte-level BPE without merges, byte b under the id b."""
    vocabulary = {sign: byte for byte, sign in _byte_signs().items()} | {EOS_TEXT: ByteTokenizer.eos_id}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS_TEXT])
    return backend


def _byte_signs() -> dict[int, str]:
    """Return the sign by which the byte-level alphabet shows each byte: itself, or the next unused from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
