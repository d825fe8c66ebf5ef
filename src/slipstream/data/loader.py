"""Tokens -> batches, in an order that is a pure function of the seed.

A split of n ids has (n - 1) // L sequences of L tokens; sequence i reads ids i L to i L + L, inputs and, one further
on, targets. Sequences are counted without end: number s lies in epoch s // num_sequences, which visits every sequence
once, in an order of its own::

    epoch 0             epoch 1             ...
    2 0 3 1             3 2 0 1                   sequences of the split
    |---| |---| |-------| |---|                   batches of 2; a batch may span two epochs

So any rank can read any part of any batch alone, and one number, the cursor, is the whole state.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from slipstream.data.shards import TokenArray
from slipstream.errors import ConfigError, DataError

IGNORE = -100
"""Target of a position that does not count, as in torch's cross-entropy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of one optimizer step."""

    index: int
    """Batches before this one."""
    inputs: npt.NDArray[np.int64]
    """Token ids, shape (sequences, sequence_length)."""
    targets: npt.NDArray[np.int64]
    """The ids one position on; -100 where a position does not count. Same shape."""

    @property
    def num_tokens(self) -> int:
        """Targets that count."""
        return int(np.count_nonzero(self.targets != IGNORE))

    def microbatch(self, j: int, num_microbatches: int) -> "Batch":
        """Return the j-th of equal parts, in order.

        Raises:
            ConfigError: The sequences do not divide evenly.
        """
        rows, rest = divmod(len(self.inputs), num_microbatches)
        if rest:
            raise ConfigError(
                f"{len(self.inputs)} sequences do not make {num_microbatches} equal microbatches. Give a batch that "
                "pipeline.num_microbatches divides."
            )
        part = slice(j * rows, (j + 1) * rows)
        return Batch(index=self.index, inputs=self.inputs[part], targets=self.targets[part])


class Loader:
    """Batches of a split: shuffled and endless, or in order and once.

    Args:
        tokens: The split.
        sequence_length: Tokens a sequence, from 1.
        batch_size: Sequences a batch, from 1.
        seed: Of the order, from 0; each epoch's order follows from the seed and the epoch's number.
        cursor: Number of the first sequence that iteration reads.
        batch_index: Number of the first batch that iteration gives.
        sequential: In the order of the split, once, the end included: the last sequence and the last batch are filled
            up with targets of -100. For evaluation.
        max_sequences: With ``sequential``, read as many, spread evenly over the split; none: read all.

    Raises:
        ConfigError: A number below its least value.
        DataError: The split has less than one batch.

    Cost: 8 bytes a sequence of the split for the order of each of the last two epochs read.

    Example:
        >>> tokens = TokenArray("train", [np.arange(9)])
        >>> loader = Loader(tokens, sequence_length=2, batch_size=2, seed=0)
        >>> batch = next(iter(loader))
        >>> bool((batch.targets == batch.inputs + 1).all())
        True
    """

    def __init__(
        self,
        tokens: TokenArray,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        cursor: int = 0,
        batch_index: int = 0,
        sequential: bool = False,
        max_sequences: int | None = None,
    ) -> None:
        _require("sequence_length", sequence_length, least=1)
        _require("batch_size", batch_size, least=1)
        _require("seed", seed, least=0)
        _require("cursor", cursor, least=0)
        _require("batch_index", batch_index, least=0)
        if max_sequences is not None:
            _require("max_sequences", max_sequences, least=1)
            if not sequential:
                raise ConfigError("max_sequences is given, but the loader is endless. Leave it out, or set sequential.")
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self.sequential = sequential
        self._tokens = tokens
        self._cursor = cursor
        self._batch_index = batch_index
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        num_targets = max(len(tokens) - 1, 0)
        whole = num_targets // sequence_length
        self._check_enough(whole)
        available = -(-num_targets // sequence_length) if sequential else whole
        self.num_sequences = min(available, max_sequences or available)
        """Sequences an epoch."""
        self._available = available

    @property
    def num_batches(self) -> int:
        """Batches an epoch; a last one that is not full counts."""
        return -(-self.num_sequences // self.batch_size)

    def sequences(self, start: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return sequences number ``start`` to ``start + count - 1`` of the endless order.

        Depends on nothing but the arguments, the seed and the split. With ``sequential``, sequences beyond the end are
        filled with inputs of 0 and targets of -100.

        Args:
            start: From 0.
            count: From 0.

        Returns:
            Inputs and targets, each of shape (count, sequence_length), int64.
        """
        inputs = np.zeros((count, self.sequence_length), dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        for row, number in enumerate(range(start, start + count)):
            window = self._window(number)
            if window is None:
                continue
            first = window * self.sequence_length
            ids = self._tokens.read(first, min(first + self.sequence_length + 1, len(self._tokens)))
            inputs[row, : len(ids) - 1] = ids[:-1]
            targets[row, : len(ids) - 1] = ids[1:]
        return inputs, targets

    def batch(self, index: int) -> Batch:
        """Return batch number ``index``, counted from the cursor with this loader's batch size."""
        inputs, targets = self.sequences(self._first(index), self.batch_size)
        return Batch(index=index, inputs=inputs, targets=targets)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the cursor on."""
        index = self._batch_index
        while not (self.sequential and self._first(index) >= self.num_sequences):
            yield self.batch(index)
            index += 1

    def epochs_for(self, num_steps: int) -> float:
        """Return how often ``num_steps`` batches go through the split.

        Example:
            >>> Loader(TokenArray("train", [np.arange(9)]), sequence_length=2, batch_size=2).epochs_for(3)
            1.5
        """
        return num_steps * self.batch_size / self.num_sequences

    def extent(self, num_steps: int) -> str:
        """Return in words what ``num_steps`` batches read."""
        return f"{self.epochs_for(num_steps):.2f} epochs of {len(self._tokens)} training tokens"

    def _first(self, index: int) -> int:
        """Return the number of the first sequence of a batch."""
        return self._cursor + (index - self._batch_index) * self.batch_size

    def _window(self, number: int) -> int | None:
        """Return which sequence of the split has this number in the endless order; none beyond the end."""
        if self.sequential:
            # Spread: the first ones would all be of one document, or of the first kind of text.
            return number * self._available // self.num_sequences if number < self.num_sequences else None
        epoch, position = divmod(number, self.num_sequences)
        return int(self._order(epoch)[position])

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._orders:
            # Sorting raw words, not Generator.permutation: numpy may change the latter's stream between releases.
            words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.num_sequences)
            # Two, because a batch may span two epochs and stale batches are read again.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = np.argsort(words, kind="stable")
        return self._orders[epoch]

    def _check_enough(self, whole: int) -> None:
        if whole < self.batch_size:
            need = self.batch_size * self.sequence_length + 1
            raise DataError(
                f"the {self._tokens.name} split is too small: {len(self._tokens)} tokens make {whole} sequences of "
                f"{self.sequence_length}, a batch needs {self.batch_size} ({need} tokens). Give more text, or lower "
                "data.sequence_length, train.microbatch_size or pipeline.num_microbatches."
            )


def _require(name: str, value: int, *, least: int) -> None:
    if not least <= value < 2**64:
        raise ConfigError(f"{name} is {value}; allowed are whole numbers from {least} to 2^64 - 1.")
