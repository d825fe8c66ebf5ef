"""A stream of tokens -> batches, read in order; any batch from where it began can be asked for."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from slipstream.data.loader import Batch
from slipstream.data.stream import Place, TokenStream
from slipstream.errors import DataError

# A pipeline has two batches in flight; stages on one rank ask for each in turn.
_KEPT = 8


class StreamState(TypedDict):
    """Where a batch begins; enough to go on exactly, with any batch size."""

    next_batch: int
    file_name: str
    """For people."""
    place: dict[str, int]
    """See :class:`slipstream.data.stream.Place`."""


class StreamLoader:
    """Batches of a stream: whole sequences, each beginning with the last token of the one before.

    Args:
        stream: Gives the tokens.
        sequence_length: Tokens a sequence, from 1.
        batch_size: Sequences a batch, from 1.
        seed: Of the order of files and documents, from 0.

    Cost: memory for one block of the stream (about 4 MB of text) and the last 8 batches. Reading begins at the nearest
        batch kept, so going back further costs time, nothing else.
    """

    def __init__(self, stream: TokenStream, *, sequence_length: int, batch_size: int, seed: int = 0) -> None:
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self._stream = stream
        self._begin(0, Place())

    def batch(self, index: int) -> Batch:
        """Return a batch by number; the same one every time.

        Raises:
            DataError: The text has a fault, or a batch lies before the one that reading began with.
        """
        if index < self._origin:
            raise DataError(f"batch {index} was asked for, but the stream is read from batch {self._origin} on.")
        if index not in self._batches and index < self._next:
            nearest = max(each for each in self._places if each <= index)
            self._move(nearest, self._places[nearest])
        while index not in self._batches:
            self._read()
        return self._batches[index]

    def state(self, index: int) -> StreamState:
        """Return where a batch begins, for :meth:`resume`."""
        if index not in self._places:
            self.batch(index)
        place = self._places[index]
        return StreamState(
            next_batch=index,
            file_name=self._stream.name(place, seed=self.seed),
            place=dataclasses.asdict(place),
        )

    def resume(self, index: int, state: Mapping[str, Any] | None) -> None:
        """Begin with a batch of a number.

        Args:
            index: Number of the batch.
            state: What :meth:`state` said of it, of the same files and seed; none: the beginning of the stream.

        Raises:
            DataError: The state is of another batch, or is damaged.
        """
        if state is None:
            self._begin(index, Place())
            return
        try:
            place, number = Place(**state["place"]), state["next_batch"]
        except (KeyError, TypeError) as error:
            raise DataError(f"the checkpoint does not say where in the stream to go on: {error}.") from error
        if number != index:
            raise DataError(f"the checkpoint says where batch {number} of the stream begins, needed is {index}.")
        self._begin(index, place)

    def extent(self, num_steps: int) -> str:
        """Return in words what is read."""
        size = self._stream.num_stored_bytes / 1e6
        return f"read from a stream of {len(self._stream.files)} files, {size:,.1f} MB as stored"

    def _begin(self, index: int, place: Place) -> None:
        self._origin = index
        self._places = {index: place}
        self._batches: dict[int, Batch] = {}
        self._move(index, place)

    def _move(self, index: int, place: Place) -> None:
        self._next = index
        self._documents: Iterator[tuple[Place, npt.NDArray[Any]]] = self._stream.documents(place, seed=self.seed)
        self._waiting: collections.deque[tuple[Place, npt.NDArray[Any]]] = collections.deque()
        self._offset = place.token
        """Tokens of the first waiting document that are done with."""

    def _read(self) -> None:
        count = self.batch_size * self.sequence_length
        ids = self._look(count + 1)
        shape = (self.batch_size, self.sequence_length)
        inputs, targets = ids[:-1].reshape(shape), ids[1:].reshape(shape)
        self._batches[self._next] = Batch(index=self._next, inputs=inputs, targets=targets)
        self._next += 1
        self._drop(count)
        place, _ = self._waiting[0]  # holds at least the last target, which is the next input
        self._places[self._next] = dataclasses.replace(place, token=self._offset)
        self._batches = {each: batch for each, batch in self._batches.items() if each >= self._next - _KEPT}
        self._places = {
            each: kept for each, kept in self._places.items() if each >= self._next - _KEPT or each == self._origin
        }

    def _look(self, count: int) -> npt.NDArray[np.int64]:
        """Return the next ids without being done with them."""
        num_waiting = sum(len(ids) for _, ids in self._waiting) - self._offset
        while num_waiting < count:
            place, ids = next(self._documents)
            if not self._waiting and self._offset >= len(ids):
                raise DataError(
                    f"the stream has changed: the document that reading was to go on with, at token {self._offset}, "
                    f"has {len(ids)}. Put the files back as they were."
                )
            self._waiting.append((place, ids))
            num_waiting += len(ids)
        found = np.empty(count, dtype=np.int64)
        filled, skip = 0, self._offset
        for _, ids in self._waiting:
            part = ids[skip : skip + count - filled]
            found[filled : filled + len(part)] = part
            filled, skip = filled + len(part), 0
        return found

    def _drop(self, count: int) -> None:
        self._offset += count
        while self._offset >= len(self._waiting[0][1]):
            self._offset -= len(self._waiting.popleft()[1])
