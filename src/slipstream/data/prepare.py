"""Text files -> packed token shards in two splits, with a manifest.

The text is read twice (three times with a BPE tokenizer to train), one document at a time::

    survey   every fault is found, documents are counted, hashes bounded    nothing written yet
    train    BPE alone: from the documents of the training split
    write    encode, append each document and its end to its split's shards

The shards are written beside the target and renamed at the end: the target is complete or not there.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

import numpy as np

from slipstream.data.corpus import Corpus, Survey, split_threshold, survey
from slipstream.data.manifest import MANIFEST_FILE, Manifest, SourceInfo, SplitInfo, SplitRule, TokenizerInfo
from slipstream.data.shards import SPLITS, ShardWriter, Split, sync
from slipstream.data.sources import Document, SourceFile, find_files
from slipstream.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from slipstream.errors import ConfigError, DataError, nearest

Progress = Callable[[str, int, int], None]
"""Called now and then with the phase (`survey`, `train tokenizer`, `write`), bytes of text done, and bytes in all (0
while unknown)."""

_ENCODE_CHARS = 2**22


def prepare(
    sources: Sequence[str | Traversable],
    out: str | Path,
    *,
    tokenizer: Literal["bytes", "bpe"] | Tokenizer = "bytes",
    vocab_size: int = 4096,
    text_field: str = "text",
    split_key: str | None = None,
    validation_fraction: float = 0.1,
    shard_tokens: int = 2**26,
    salt: str = "",
    progress: Progress | None = None,
) -> Manifest:
    """Turn files of text into a folder of token shards for training and validation.

    The side of a document is decided by a hash of its text, or of its group, so that equal documents and whole groups
    stay together and a growing corpus keeps its split. If there is only one document, it is cut into blocks first.
    The same text and settings give the same files, byte for byte.

    Args:
        sources: Files named `.txt`, `.txt.gz`, `.jsonl` or `.jsonl.gz`, and folders of them.
        out: The folder to make; must not exist, or be empty.
        tokenizer: `bytes`; `bpe`, trained on the training split alone; or one that exists.
        vocab_size: Most tokens of the BPE to train, from 257; without effect otherwise.
        text_field: Field of `.jsonl` records that holds the text.
        split_key: Field of `.jsonl` records whose equal values stay on one side, such as the author.
        validation_fraction: About this part of documents, groups or blocks is held out; above 0, below 1.
        shard_tokens: Most ids in a file, from 1.
        salt: Any text; another one gives another split.
        progress: Called as the work goes on.

    Returns:
        The manifest, also written into the folder.

    Raises:
        ConfigError: A setting outside its range.
        DataError: Text that cannot be read or used as it is (see :mod:`slipstream.data.sources`), that is too little
            for two splits, or a folder that cannot be written.

    Cost: memory for one document and for about 4 MB of text being encoded.
    """
    _check_settings(tokenizer, vocab_size, validation_fraction=validation_fraction, shard_tokens=shard_tokens)
    out = Path(out)
    _check_target(out)
    files = find_files(sources)
    corpus = Corpus(files=files, text_field=text_field, split_key=split_key, salt=salt)
    corpus, found = survey(corpus, report=_reporter(progress, "survey", 0))
    threshold = split_threshold(found, corpus, validation_fraction=validation_fraction)
    if tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif isinstance(tokenizer, str):
        report = _reporter(progress, "train tokenizer", found.num_bytes)
        tokenizer = train_bpe(_training_texts(corpus, threshold, report=report), vocab_size=vocab_size)
    with _complete_or_nothing(out) as folder:
        report = _reporter(progress, "write", found.num_bytes)
        splits = _write_shards(folder, corpus, threshold, tokenizer, shard_tokens=shard_tokens, report=report)
        if sum(split.num_bytes for split in splits.values()) != found.num_bytes:
            raise DataError("the text changed while it was read. Prepare it again when nothing writes to it.")
        manifest = Manifest(
            tokenizer=_tokenizer_info(tokenizer),
            split_rule=_split_rule(corpus, threshold, validation_fraction=validation_fraction),
            splits=splits,
            sources=_source_infos(files, found),
        )
        tokenizer.save(folder)
        with (folder / MANIFEST_FILE).open("wb") as stream:
            stream.write(manifest.to_json().encode())
            sync(stream)
    return manifest


def builtin_source() -> Traversable:
    """Return the text that ships with the package: 1.1 MB of Shakespeare's plays, in the public domain."""
    return resources.files("slipstream.data") / "texts" / "shakespeare.txt.gz"


def _check_settings(
    tokenizer: str | Tokenizer, vocab_size: int, *, validation_fraction: float, shard_tokens: int
) -> None:
    if isinstance(tokenizer, str) and tokenizer not in ("bytes", "bpe"):
        hint = nearest(tokenizer, ("bytes", "bpe"))
        raise ConfigError(f"unknown tokenizer '{tokenizer}'.{hint} Allowed: 'bytes', 'bpe'.")
    if not 0 < validation_fraction < 1:
        raise ConfigError(
            f"validation_fraction is {validation_fraction}; it must lie above 0 and below 1, as 0.1 does."
        )
    if shard_tokens < 1:
        raise ConfigError(f"shard_tokens is {shard_tokens}; a shard needs at least 1 token. Leave it out for 2^26.")
    if tokenizer == "bpe" and vocab_size < ByteTokenizer.vocab_size:
        train_bpe([], vocab_size=vocab_size)  # raises, before any text is read


def _check_target(out: Path) -> None:
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = "holds files" if out.is_dir() else "is a file"
            raise DataError(f"{out} exists and {what}; nothing was written. Give a new folder, or remove this one.")
    except OSError as error:
        raise DataError(f"cannot use the folder {out}: {error.strerror}. Give another.") from error


def _training_texts(corpus: Corpus, threshold: int, *, report: Callable[[int], None]) -> Iterator[str]:
    done = 0
    for _, document in corpus.documents():
        if not document.is_empty and corpus.hash(document) >= threshold:
            yield document.text
        done += document.num_bytes
        report(done)


def _write_shards(
    folder: Path,
    corpus: Corpus,
    threshold: int,
    tokenizer: Tokenizer,
    *,
    shard_tokens: int,
    report: Callable[[int], None],
) -> dict[str, SplitInfo]:
    end = np.array([tokenizer.eos_id])
    documents = dict.fromkeys(SPLITS, 0)
    num_bytes = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                ShardWriter(folder, split, vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens)
            )
            for split in SPLITS
        }
        for batch in _batches(corpus):
            for document, ids in zip(batch, tokenizer.encode_batch([document.text for document in batch])):
                split: Split = "validation" if corpus.hash(document) < threshold else "train"
                writers[split].write(ids)
                writers[split].write(end)
                documents[split] += 1
                num_bytes[split] += document.num_bytes
            report(sum(num_bytes.values()))
    return {
        split: SplitInfo(
            documents=documents[split],
            num_bytes=num_bytes[split],
            num_tokens=sum(shard.num_tokens for shard in writers[split].shards),
            shards=writers[split].shards,
        )
        for split in SPLITS
    }


def _batches(corpus: Corpus) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_chars = 0
    for _, document in corpus.documents():
        if document.is_empty:
            continue
        batch.append(document)
        num_chars += len(document.text)
        if num_chars >= _ENCODE_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    return TokenizerInfo(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        fingerprint=tokenizer.fingerprint(),
    )


def _split_rule(corpus: Corpus, threshold: int, *, validation_fraction: float) -> SplitRule:
    return SplitRule(
        key="block" if corpus.block_chars else f"field {corpus.split_key}" if corpus.split_key else "text",
        salt=corpus.salt,
        validation_fraction=float(validation_fraction),
        threshold=f"{threshold:016x}",
        block_chars=corpus.block_chars,
    )


def _source_infos(files: Sequence[SourceFile], found: Survey) -> list[SourceInfo]:
    infos = []
    for file, documents, empty in zip(files, found.documents, found.empty_documents):
        num_bytes, sha256 = file.digest()
        infos.append(
            SourceInfo(name=file.name, num_bytes=num_bytes, sha256=sha256, documents=documents, empty_documents=empty)
        )
    return infos


@contextmanager
def _complete_or_nothing(out: Path) -> Iterator[Path]:
    """Give a folder beside ``out`` that takes its place at the end, or vanishes with any error."""
    folder = out.absolute().parent / f".{out.absolute().name}.partial-{os.getpid()}"
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed process that had our number
        folder.mkdir(parents=True)
        yield folder
        os.replace(folder, out)
    except OSError as error:
        raise DataError(
            f"cannot write {out}: {error.strerror}. Nothing was left there. Give another folder."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reporter(progress: Progress | None, phase: str, total: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        if progress is not None:
            progress(phase, done, total)

    return report
