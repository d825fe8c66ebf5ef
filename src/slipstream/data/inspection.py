"""What prepared data holds, for people to look at before they train on it."""

import dataclasses
from pathlib import Path

from slipstream.data.dataset import Dataset, open_data
from slipstream.data.manifest import SourceInfo, SplitRule, TokenizerInfo
from slipstream.data.shards import SPLITS, TokenArray
from slipstream.data.tokenizer import EOS_TEXT, Tokenizer
from slipstream.errors import ConfigError

MAX_SAMPLES = 1000
"""Of each split, to be looked at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A stretch of a split, decoded."""

    start: int
    """Its first token."""
    num_tokens: int
    text: str
    """An end of document shows as `<|endoftext|>`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitReport:
    """One side of the split."""

    name: str
    documents: int
    num_tokens: int
    num_bytes: int
    """UTF-8 bytes of the text."""
    num_shards: int
    tokens_per_byte: float
    fraction: float
    """Part of all bytes."""
    samples: list[Sample]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataReport:
    """All that `slipstream data inspect` shows; ``dataclasses.asdict`` gives its JSON."""

    path: str
    """Empty: the built-in text."""
    digest: str
    """Identifies the tokenizer and all ids."""
    tokenizer: TokenizerInfo
    split_rule: SplitRule
    sources: list[SourceInfo]
    splits: list[SplitReport]
    empty_documents: int
    """Documents passed over because they hold nothing but white space."""
    epochs: float | None
    """How often the planned tokens go through the training split; none if no plan was given."""


def inspect_data(
    folder: str | Path,
    *,
    num_samples: int = 3,
    sample_tokens: int = 64,
    planned_tokens: int | None = None,
    verify: bool = True,
) -> DataReport:
    """Check prepared data and describe it, with samples spread evenly over each split.

    Args:
        folder: As for :func:`slipstream.data.open_data`.
        num_samples: Of each split, from 0 to 1000.
        sample_tokens: Tokens a sample, from 1.
        planned_tokens: Tokens that a run would read; gives ``epochs``.
        verify: Also compare the sha256 of all ids.

    Raises:
        DataError: As for :func:`slipstream.data.open_data`.
        ConfigError: ``num_samples`` is out of its range.

    Example:
        >>> report = inspect_data("", num_samples=1, sample_tokens=9)
        >>> [(split.name, split.samples[0].text) for split in report.splits]
        [('train', 'MENENIUS:'), ('validation', 'First Cit')]
    """
    if not 0 <= num_samples <= MAX_SAMPLES:
        raise ConfigError(f"num_samples is {num_samples}; it must be from 0 to {MAX_SAMPLES}.")
    data = open_data(folder, verify=verify)
    return DataReport(
        path=str(folder),
        digest=data.manifest.digest(),
        tokenizer=data.manifest.tokenizer,
        split_rule=data.manifest.split_rule,
        sources=data.manifest.sources,
        splits=_split_reports(data, num_samples=num_samples, sample_tokens=sample_tokens),
        empty_documents=sum(source.empty_documents for source in data.manifest.sources),
        epochs=None if planned_tokens is None else planned_tokens / len(data.train),
    )


def _split_reports(data: Dataset, *, num_samples: int, sample_tokens: int) -> list[SplitReport]:
    all_bytes = sum(split.num_bytes for split in data.manifest.splits.values())
    reports = []
    for name in SPLITS:
        info = data.manifest.splits[name]
        tokens = data.train if name == "train" else data.validation
        starts = [i * len(tokens) // num_samples for i in range(num_samples)]
        reports.append(
            SplitReport(
                name=name,
                documents=info.documents,
                num_tokens=info.num_tokens,
                num_bytes=info.num_bytes,
                num_shards=len(info.shards),
                tokens_per_byte=info.num_tokens / info.num_bytes,
                fraction=info.num_bytes / all_bytes,
                samples=[_sample(tokens, data.tokenizer, start=start, num_tokens=sample_tokens) for start in starts],
            )
        )
    return reports


def _sample(tokens: TokenArray, tokenizer: Tokenizer, *, start: int, num_tokens: int) -> Sample:
    ids = tokens.read(start, min(start + num_tokens, len(tokens))).tolist()
    documents: list[list[int]] = [[]]
    for i in ids:
        if i == tokenizer.eos_id:
            documents.append([])
        else:
            documents[-1].append(i)
    return Sample(start=start, num_tokens=len(ids), text=EOS_TEXT.join(tokenizer.decode(part) for part in documents))
