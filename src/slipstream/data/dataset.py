"""Prepared data, checked and opened: what a training run reads."""

import dataclasses
import functools
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.data.manifest import Manifest, read_manifest
from slipstream.data.prepare import builtin_source, prepare
from slipstream.data.shards import Split, TokenArray, open_split
from slipstream.data.stream import TokenStream, open_stream
from slipstream.data.tokenizer import Tokenizer, load_tokenizer
from slipstream.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Both splits, their tokenizer and their manifest."""

    tokenizer: Tokenizer
    manifest: Manifest
    train: TokenArray
    validation: TokenArray
    stream: TokenStream | None = None
    """To train on in place of ``train``."""

    def digest(self) -> str:
        """Return 64 hex digits that identify what is trained and evaluated on."""
        if self.stream is None:
            return self.manifest.digest()
        return hashlib.sha256(f"{self.manifest.digest()} {self.stream.digest()}".encode()).hexdigest()


def open_data(
    folder: str | Path,
    *,
    stream: Sequence[str] = (),
    text_field: str = "text",
    expected_tokenizer: str | None = None,
    verify: bool = True,
) -> Dataset:
    """Open prepared data.

    Args:
        folder: Made by :func:`slipstream.data.prepare`; an empty text: the built-in Shakespeare, as bytes.
        stream: Files and folders of text to train on in place of the shards; none: the shards.
        text_field: Field of a record that holds the text (with ``stream``).
        expected_tokenizer: Fingerprint that the tokenizer must have, such as that of a checkpoint; none: any.
        verify: Also compare the sha256 of all ids.

    Raises:
        DataError: Something is missing, cut short or changed, or the tokenizer is not that of the shards or not the
            expected one; for ``stream`` see :func:`slipstream.data.stream.open_stream`.

    Cost: no memory but the page cache; with ``verify`` one pass over the files. The built-in text takes 2 MB.
    """
    data = _open_builtin() if folder == "" else _open_folder(Path(folder), verify=verify)
    found = data.tokenizer.fingerprint()
    if expected_tokenizer is not None and found != expected_tokenizer:
        raise DataError(
            f"the data in {folder or 'the built-in text'} was made with the tokenizer '{data.tokenizer.name}' "
            f"({data.tokenizer.vocab_size} tokens, fingerprint {found}), expected is the fingerprint "
            f"{expected_tokenizer}: ids would mean other text. Use data made with the expected tokenizer."
        )
    if not stream:
        return data
    opened = open_stream(stream, tokenizer=data.tokenizer, manifest=data.manifest, text_field=text_field)
    return dataclasses.replace(data, stream=opened)


def _open_folder(folder: Path, *, verify: bool) -> Dataset:
    manifest = read_manifest(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint() != manifest.tokenizer.fingerprint:
        raise DataError(
            f"the tokenizer in {folder} does not match the shards: its fingerprint is {tokenizer.fingerprint()} "
            f"('{tokenizer.name}', {tokenizer.vocab_size} tokens), the shards were made with "
            f"{manifest.tokenizer.fingerprint} ('{manifest.tokenizer.name}', {manifest.tokenizer.vocab_size} tokens). "
            "Restore the tokenizer's files, or prepare the data again."
        )
    train = open_split(folder, "train", verify=verify)
    validation = open_split(folder, "validation", verify=verify)
    return Dataset(tokenizer=tokenizer, manifest=manifest, train=train, validation=validation)


@functools.cache
def _open_builtin() -> Dataset:
    # Prepared by each process, in a moment, so that a first run needs no folder and cannot find a stale one.
    with tempfile.TemporaryDirectory() as folder:
        prepare([builtin_source()], Path(folder) / "data")
        data = _open_folder(Path(folder) / "data", verify=False)
        return dataclasses.replace(
            data, train=_in_memory(data.train, "train"), validation=_in_memory(data.validation, "validation")
        )


def _in_memory(tokens: TokenArray, split: Split) -> TokenArray:
    ids = tokens.read(0, len(tokens)).astype(np.uint16)
    ids.setflags(write=False)  # all runs of this process share them
    return TokenArray(split, [ids])
