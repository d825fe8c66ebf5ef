"""Perplexity of texts: those of files, or the held-out documents of prepared data."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.data import open_data
from slipstream.data.files import find_files, hold_records
from slipstream.data.manifest import MANIFEST_FILE, read_manifest
from slipstream.data.sources import read_documents
from slipstream.data.text_checks import same_ids
from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import DataError
from slipstream.evaluation.scoring import Scorer, bits_per_byte

_READ_TOKENS = 2**20
_AT_ONCE = 64
"""Documents scored together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Text:
    """A document as the model takes it."""

    ids: list[int]
    num_bytes: int | None
    """Of its text; ``None`` where only the ids are left, which do not say it."""


def perplexity(scorer: Scorer, path: str | Path, *, limit: int | None, text_field: str) -> dict[str, Any]:
    """Score texts token by token.

    Args:
        scorer: Holds the model.
        path: Files of text, or a folder made by `slipstream data prepare`, of which the held-out split is taken.
        limit: Most documents.
        text_field: Of JSON records.

    Returns:
        ``nats_per_token``, ``bits_per_byte`` (``None``: see ``num_bytes``), ``perplexity`` (``None``: beyond all
        floats), ``num_tokens``, ``num_bytes`` (``None``: of a part of prepared data whose tokenizer does not give a
        text back), ``num_items``.

    Raises:
        DataError: There is no text, or the data was prepared with another tokenizer.
    """
    is_prepared = _is_prepared(path)
    texts = _held_out(scorer.tokenizer, path) if is_prepared else _of_files(scorer.tokenizer, path, text_field)
    nats, num_tokens = 0.0, 0
    counts: list[int | None] = []
    kept = itertools.islice(texts, limit)
    while some := list(itertools.islice(kept, _AT_ONCE)):
        nats -= sum(score.log_likelihood for score in scorer.rolling_ids([text.ids for text in some]))
        num_tokens += sum(len(text.ids) for text in some)
        counts += [text.num_bytes for text in some]
    if num_tokens == 0:
        raise DataError(f"{path} holds no text to evaluate on. Give a file that is not empty.")
    known = [count for count in counts if count is not None]
    num_bytes = sum(known) if len(known) == len(counts) else None
    if is_prepared and next(texts, None) is None:
        num_bytes = read_manifest(path).splits["validation"].num_bytes  # of the texts themselves
    return {
        "nats_per_token": nats / num_tokens,
        "bits_per_byte": None if num_bytes is None else bits_per_byte(nats, num_bytes),
        "perplexity": _exp(nats / num_tokens),
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
        "num_items": len(counts),
    }


def reads_records(path: str | Path) -> bool:
    """Return whether :func:`perplexity` would read records, of which one field is the text.

    Raises:
        DataError: There is no file of text.
    """
    return not _is_prepared(path) and hold_records([str(path)])


def _is_prepared(path: str | Path) -> bool:
    return (Path(path) / MANIFEST_FILE).is_file()


def _of_files(tokenizer: Tokenizer, path: str | Path, text_field: str) -> Iterator[_Text]:
    for file in find_files([str(path)]):
        for document in read_documents(file, text_field=text_field, split_key=None):
            if not document.is_empty:
                yield _Text(ids=tokenizer.encode(document.text), num_bytes=document.num_bytes)


def _held_out(tokenizer: Tokenizer, path: str | Path) -> Iterator[_Text]:
    data = open_data(path)
    if not same_ids(data.tokenizer, tokenizer):
        raise DataError(
            f"the data in {path} was prepared with the tokenizer '{data.tokenizer.name}', which gives a text other ids "
            "than the model's. Give the text itself, or prepare it again with --tokenizer-from and the model's folder."
        )
    ids: list[int] = []
    for start in range(0, len(data.validation), _READ_TOKENS):
        for token in data.validation.read(start, min(start + _READ_TOKENS, len(data.validation))).tolist():
            if token != tokenizer.eos_id:
                ids.append(token)
            elif ids:
                yield _stored(data.tokenizer, ids)
                ids = []
    if ids:
        yield _stored(data.tokenizer, ids)


def _stored(tokenizer: Tokenizer, ids: list[int]) -> _Text:
    # Not the sum over the tokens: some tokenizers put a space before a text, which is no part of it.
    text = tokenizer.decode(ids)
    # Words that a vocabulary does not know are lost.
    return _Text(ids=ids, num_bytes=len(text.encode()) if tokenizer.encode(text) == ids else None)


def _exp(nats: float) -> float | None:
    try:
        return math.exp(nats)
    except OverflowError:
        return None
