"""What a rank trains on: the data that the settings name, opened, and its batches."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from slipstream.config import Config
from slipstream.data import Batch, Dataset, StreamLoader, open_data
from slipstream.data.loader import Loader
from slipstream.data.tokenizer import Tokenizer
from slipstream.models.parts import ModelParts
from slipstream.pipeline.runtime import pipeline_spec
from slipstream.train.checkpoint import Checkpoint
from slipstream.train.trainer import TimedSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What a rank trains, and on what.

    Attributes:
        source: Gives the batches.
        validation: Batches to evaluate on.
        data_sha256: Identifies the data.
        tokenizer: Whose ids the batches hold; ``None``: they hold something else.
        model: What to train; ``None``: the decoder that the settings describe.
    """

    source: TimedSource
    validation: Sequence[Batch]
    data_sha256: str
    tokenizer: Tokenizer | None
    model: ModelParts | None = None


OpenWorkload = Callable[[Config, int, Checkpoint | None], Workload]
"""Takes resolved settings, a rank, and the checkpoint to continue from."""


def open_run_data(config: Config, *, verify: bool = True) -> Dataset:
    """Open the data that a run's settings name.

    Raises:
        DataError: See :func:`slipstream.data.open_data`.
    """
    data = config.data
    return open_data(data.path, stream=data.stream, text_field=data.text_field, verify=verify)


def training_loader(config: Config, dataset: Dataset, checkpoint: Checkpoint | None = None) -> Loader | StreamLoader:
    """Return the endless training batches.

    Args:
        config: Resolved settings.
        dataset: Opened data.
        checkpoint: Where reading goes on, whatever the batch size was until then. Another stream than it was saved with
            is read from its beginning.

    Raises:
        DataError: The split has less than one batch; the checkpoint does not say where to go on.
    """
    if dataset.stream is not None:
        stream = StreamLoader(
            dataset.stream,
            sequence_length=config.data.sequence_length,
            batch_size=config.batch_size,
            seed=config.data.seed,
        )
        if checkpoint is not None:
            is_same = checkpoint.manifest["data_sha256"] == dataset.digest()
            stream.resume(checkpoint.step, checkpoint.manifest.get("data_state") if is_same else None)
        return stream
    return Loader(
        dataset.train,
        sequence_length=config.data.sequence_length,
        batch_size=config.batch_size,
        seed=config.data.seed,
        cursor=0 if checkpoint is None else int(checkpoint.manifest["next_sequence"]),
        batch_index=0 if checkpoint is None else checkpoint.step,
    )


def validation_batches(config: Config, dataset: Dataset) -> list[Batch]:
    """Return the batches to evaluate on: of a microbatch's size, the last one padded and masked.

    Raises:
        DataError: The split has less than one batch.
    """
    loader = Loader(
        dataset.validation,
        sequence_length=config.data.sequence_length,
        batch_size=config.train.microbatch_size,
        sequential=True,
        max_sequences=config.evaluate.num_sequences,
    )
    return list(loader)


def open_tokens(config: Config, rank: int, checkpoint: Checkpoint | None) -> Workload:
    """Open the data that the settings name, for a rank that trains the decoder they describe."""
    dataset = open_run_data(config, verify=False)
    source = timed(training_loader(config, dataset, checkpoint))
    if dataset.stream is not None and not _reads_tokens(config, rank):
        source = TimedSource(functools.partial(_untold, config))
    return of_dataset(config, dataset, source)


def of_dataset(config: Config, dataset: Dataset, source: TimedSource) -> Workload:
    """Return the workload of opened data whose training batches come from ``source``."""
    return Workload(
        source=source,
        validation=validation_batches(config, dataset),
        data_sha256=dataset.digest(),
        tokenizer=dataset.tokenizer,
    )


def timed(loader: Loader | StreamLoader) -> TimedSource:
    """Return a loader's batches, with the time that they take."""
    return TimedSource(loader.batch, state=loader.state if isinstance(loader, StreamLoader) else None)


def _reads_tokens(config: Config, rank: int) -> bool:
    """Return whether a rank has the embedding or the head."""
    spec = pipeline_spec(config)
    return bool({0, spec.num_stages - 1} & set(spec.stages(rank)))


def _untold(config: Config, index: int) -> Batch:
    """Return a batch for ranks that only count its tokens, in place of encoding text for nothing."""
    ids = np.zeros((config.batch_size, config.data.sequence_length), dtype=np.int64)
    return Batch(index=index, inputs=ids, targets=ids)
