"""Text files -> packed token shards in two splits, with a manifest.

The text is read twice (three times with a BPE tokenizer to train), one document at a time; several processes may share
the work, which changes nothing of what is written::

    survey   every fault is found, documents are counted, hashes bounded    nothing written yet
    train    BPE alone: from the documents of the training split, or a sample of them
    write    encode, append each document and its end to its split's shards

The shards are written beside the target and renamed at the end: the target is complete or not there.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from slipstream.cores import num_cores
from slipstream.data.corpus import Corpus, Survey, split_threshold, survey
from slipstream.data.files import SourceFile, find_files
from slipstream.data.learning import sample_bytes, training_texts
from slipstream.data.manifest import MANIFEST_FILE, Manifest, SourceInfo, SplitInfo, SplitRule, TokenizerInfo
from slipstream.data.packing import Packed, SplitAt, pack_in_order
from slipstream.data.processes import Processes
from slipstream.data.records import Document
from slipstream.data.shards import SPLITS, ShardWriter, Split, sync
from slipstream.data.tokenizer import ByteTokenizer, Tokenizer, check_vocab_size, train_bpe
from slipstream.errors import ConfigError, DataError, nearest
from slipstream.folders import real_target, whole_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a preparation is."""

    phase: Literal["survey", "train tokenizer", "write"]
    num_bytes: int
    """Of text, done in this phase."""
    total_bytes: int
    """Of text, in all; 0 while unknown."""
    num_tokens: int = 0
    """Written."""


_ENCODE_CHARS = 2**22
_SHARED_BYTES = 2**25
_MOST_WORKERS = 1024

VOCAB_SIZE = 4096
"""Tokens of a BPE to train, where nothing else is asked for."""


def prepare(
    sources: Sequence[str | Traversable],
    out: str | Path,
    *,
    tokenizer: Literal["bytes", "bpe"] | Tokenizer = "bytes",
    vocab_size: int = VOCAB_SIZE,
    text_field: str = "text",
    split_key: str | None = None,
    validation_fraction: float = 0.1,
    shard_tokens: int = 2**26,
    salt: str = "",
    num_workers: int | None = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Turn files of text into a folder of token shards for training and validation.

    The side of a document is decided by a hash of its text, or of its group, so that equal documents and whole groups
    stay together and a growing corpus keeps its split. If there is only one document, it is cut into blocks first.
    The same text and settings give the same files, byte for byte.

    Args:
        sources: Files named `.txt` or `.jsonl`, also with `.gz` or `.zst` after it, `.parquet` or `.arrow`, and folders
            of them.
        out: The folder to make; must not exist, or be empty.
        tokenizer: `bytes`; `bpe`, trained on the training split alone, and of a large one on an even sample
            (see :mod:`slipstream.data.learning`); or one that exists.
        vocab_size: Most tokens of the BPE to train, from 257 to 16,777,216; without effect otherwise.
        text_field: Field of records that holds the text.
        split_key: Field of records whose equal values stay on one side, such as the author.
        validation_fraction: About this part of documents, groups or blocks is held out; above 0, below 1.
        shard_tokens: Most ids in a file, from 1.
        salt: Any text; another one gives another split.
        num_workers: Processes that read files and encode, from 1, which is this one alone, to 1,024; none: one for each
            core, where there is enough text. A program that gives more than 1 needs the usual
            ``if __name__ == "__main__":``.
        progress: Called as the work goes on.

    Returns:
        The manifest, also written into the folder.

    Raises:
        ConfigError: A setting outside its range.
        DataError: Text that cannot be read or used as it is (see :mod:`slipstream.data.sources`), that is too little
            for two splits, or a folder that cannot be written.

    Cost: memory for one document and for about 4 MB of text being encoded, three times that for each further process.
    """
    _check_settings(tokenizer, vocab_size, validation_fraction=validation_fraction, shard_tokens=shard_tokens)
    if num_workers is not None and not 1 <= num_workers <= _MOST_WORKERS:
        raise ConfigError(
            f"num_workers is {num_workers}; at least 1 process has to work, and {_MOST_WORKERS} at most can."
        )
    out = Path(out)
    _check_target(out)
    files = find_files(sources)
    corpus = Corpus(files=files, text_field=text_field, split_key=split_key, salt=salt)
    with Processes(num_workers or _num_workers(files)) as processes:
        return _prepare(
            corpus,
            out,
            tokenizer,
            processes=processes,
            vocab_size=vocab_size,
            validation_fraction=validation_fraction,
            shard_tokens=shard_tokens,
            progress=progress or (lambda progress: None),
        )


def _prepare(
    corpus: Corpus,
    out: Path,
    tokenizer: Literal["bytes", "bpe"] | Tokenizer,
    *,
    processes: Processes,
    vocab_size: int,
    validation_fraction: float,
    shard_tokens: int,
    progress: Callable[[Progress], None],
) -> Manifest:
    corpus, found = survey(
        corpus,
        processes=processes,
        report=lambda done: progress(Progress(phase="survey", num_bytes=done, total_bytes=0)),
    )
    split = SplitAt(salt=corpus.salt, threshold=split_threshold(found, corpus, validation_fraction=validation_fraction))
    if tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif isinstance(tokenizer, str):
        total_bytes = found.num_bytes
        texts = training_texts(
            corpus,
            split,
            total_bytes=total_bytes,
            most_bytes=sample_bytes(vocab_size),
            report=lambda done: progress(Progress(phase="train tokenizer", num_bytes=done, total_bytes=total_bytes)),
        )
        tokenizer = train_bpe(texts, vocab_size=vocab_size)
    with _complete_or_nothing(out) as folder:
        packed = pack_in_order(_batches(corpus), tokenizer=tokenizer, split=split, processes=processes)
        writers = {
            side: ShardWriter(folder, side, vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens)
            for side in SPLITS
        }
        splits = _write_shards(writers, packed, total_bytes=found.num_bytes, progress=progress)
        if sum(side.num_bytes for side in splits.values()) != found.num_bytes:
            raise DataError("the text changed while it was read. Prepare it again when nothing writes to it.")
        manifest = Manifest(
            tokenizer=_tokenizer_info(tokenizer),
            split_rule=_split_rule(corpus, split.threshold, validation_fraction=validation_fraction),
            splits=splits,
            sources=_source_infos(corpus.files, found, processes),
        )
        tokenizer.save(folder)
        with (folder / MANIFEST_FILE).open("wb") as stream:
            stream.write(manifest.to_json().encode())
            sync(stream)
    return manifest


def builtin_source() -> Traversable:
    """Return the text that ships with the package: 1.1 MB of Shakespeare's plays, in the public domain."""
    return resources.files("slipstream.data") / "texts" / "shakespeare.txt.gz"


def _num_workers(files: Sequence[SourceFile]) -> int:
    """Return the cores of this process, or 1 where processes would take longer to start than the text to encode."""
    return num_cores() if sum(file.num_bytes for file in files) >= _SHARED_BYTES else 1


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
    if tokenizer == "bpe":
        check_vocab_size(vocab_size)


def _check_target(out: Path) -> None:
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = "holds files" if out.is_dir() else "is a file"
            raise DataError(f"{out} exists and {what}; nothing was written. Give a new folder, or remove this one.")
        target = real_target(out)
        if os.path.ismount(target):
            raise DataError(f"{out} is a mount point, whose place no folder can take. Give a folder in it: {out}/data.")
        above = next(parent for parent in target.parents if parent.exists())
    except OSError as error:
        raise DataError(f"cannot use the folder {out}: {error.strerror}. Give another.") from error
    # Else this would show when all the work is done.
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "may not be written in" if above.is_dir() else "is a file"
        raise DataError(f"cannot make the folder {out}: {above} {what}. Give another place.")


def _write_shards(
    writers: dict[Split, ShardWriter],
    packed: Iterable[dict[Split, Packed]],
    *,
    total_bytes: int,
    progress: Callable[[Progress], None],
) -> dict[str, SplitInfo]:
    documents = dict.fromkeys(SPLITS, 0)
    num_bytes = dict.fromkeys(SPLITS, 0)
    num_tokens = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        for writer in writers.values():
            stack.enter_context(writer)
        for batch in packed:
            for side, part in batch.items():
                writers[side].write(part.ids)
                documents[side] += part.documents
                num_bytes[side] += part.num_bytes
                num_tokens[side] += len(part.ids)
            progress(
                Progress(
                    phase="write",
                    num_bytes=sum(num_bytes.values()),
                    total_bytes=total_bytes,
                    num_tokens=sum(num_tokens.values()),
                )
            )
    return {
        side: SplitInfo(
            documents=documents[side],
            num_bytes=num_bytes[side],
            num_tokens=num_tokens[side],
            shards=writers[side].shards,
        )
        for side in SPLITS
    }


def _batches(corpus: Corpus) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_chars = 0
    for document in corpus.documents():
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


def _source_infos(files: Sequence[SourceFile], found: Survey, processes: Processes) -> list[SourceInfo]:
    digests = processes.in_order(SourceFile.digest, files)
    return [
        SourceInfo(name=file.name, num_bytes=num_bytes, sha256=sha256, documents=documents, empty_documents=empty)
        for file, (num_bytes, sha256), documents, empty in zip(files, digests, found.documents, found.empty_documents)
    ]


@contextmanager
def _complete_or_nothing(out: Path) -> Iterator[Path]:
    """Give a folder beside ``out`` that takes its place at the end, or vanishes with any error."""
    try:
        with whole_folder(out) as folder:
            yield folder
    except OSError as error:
        raise DataError(
            f"cannot write {out}: {error.strerror}. Nothing was left there. Give another folder."
        ) from error
