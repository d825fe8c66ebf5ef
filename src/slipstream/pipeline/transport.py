"""Point-to-point messages between the ranks of a pipeline; the only caller of ``torch.distributed`` send and receive.

One process group per purpose. A communicator is one queue: if activations and gradients shared one, a receive that
was posted early for one direction could hold up a send of the other, and the pipeline would stand still.
"""

import datetime
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import StageError


class PeerError(StageError):
    """A rank waited for another in vain; the other one's own failure is the cause to look for."""


class Channel:
    """Tensors of one shape that flow one way between this rank and its neighbours, first in, first out.

    Receives are posted ahead, each into a fresh tensor: a buffer that were used again could still be the leaf of a
    microbatch whose backward has not run.

    Args:
        name: For messages.
        group: This channel's own process group.
        shape: Of every message.
        dtype: Of every message.
        device: Where messages live.
        timeout_s: Seconds to wait for a peer.
        num_ahead: Receives posted before they are asked for.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
        num_ahead: int = 2,
    ) -> None:
        self._name = name
        self._group = group
        self._shape = tuple(shape)
        self._dtype = dtype
        self._device = device
        self._timeout_s = timeout_s
        self._num_ahead = num_ahead
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._receiving: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self._expected: dict[int, int] = {}
        self.idle_s = 0.0

    def expect(self, source: int, count: int) -> None:
        """Say how many messages will still come from a rank, so that none is posted that never arrives."""
        self._expected[source] = count
        self._receiving[source] = deque()
        self._post(source)

    def send(self, tensor: Tensor, destination: int) -> None:
        """Hand a message over; returns at once.

        Args:
            tensor: Of the channel's shape and dtype; must not change until it has been sent.
            destination: Rank.

        Raises:
            StageError: The shape or dtype is not the channel's: a receiver would cut or misread it.
        """
        tensor = tensor.detach().contiguous()
        if tuple(tensor.shape) != self._shape or tensor.dtype != self._dtype:
            raise StageError(
                f"channel '{self._name}' carries {self._dtype} of shape {self._shape}, given {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}. Every microbatch must have the same shape; pad and mask a short one."
            )
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        self._sending.append((_checked_work(dist.isend(tensor, destination, group=self._group)), tensor))

    def receive(self, source: int, *, what: str) -> Tensor:
        """Wait for the next message of a rank.

        Args:
            source: Rank.
            what: What is waited for, for the message of a failure.

        Raises:
            PeerError: It did not come in time, or the peer is gone.
        """
        self._post(source)
        work, tensor = self._receiving[source].popleft()
        begin = time.perf_counter()
        wait(work, what=f"{what} from rank {source}", timeout_s=self._timeout_s)
        self.idle_s += time.perf_counter() - begin
        self._post(source)
        return tensor

    def flush(self) -> None:
        """Wait until everything sent has left."""
        while self._sending:
            work, _ = self._sending.popleft()
            wait(work, what=f"a send on channel '{self._name}' to complete", timeout_s=self._timeout_s)

    def _post(self, source: int) -> None:
        posted = self._receiving[source]
        while len(posted) < self._num_ahead and self._expected[source] > 0:
            buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            posted.append((_checked_work(dist.irecv(buffer, source, group=self._group)), buffer))
            self._expected[source] -= 1


class Transport:
    """All process groups of one pipeline, made and warmed up in the same order on every rank.

    Args:
        rank: This rank.
        num_ranks: Ranks of the pipeline.
        backend: ``gloo`` or ``nccl``.
        device: Where messages live.
        timeout_s: Seconds to wait for a peer.
    """

    PURPOSES = ("forward", "backward", "tied_to_first", "tied_to_last", "evaluate", "control")

    def __init__(self, *, rank: int, num_ranks: int, backend: str, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.timeout_s = timeout_s
        timeout = datetime.timedelta(seconds=timeout_s)
        self.groups = {name: dist.new_group(backend=backend, timeout=timeout) for name in self.PURPOSES}
        for name in self.PURPOSES:
            self._warm_up(name)

    def _warm_up(self, purpose: str) -> None:
        """Make the connections now, in a fixed order; ranks that made them lazily could enter in different orders."""
        group = self.groups[purpose]
        try:
            dist.all_reduce(torch.ones(1, device=self.device), group=group)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} could not reach all {self.num_ranks} ranks within {self.timeout_s:.0f} s "
                f"(group '{purpose}'): {error}"
            ) from error

    def channel(self, purpose: str, *, shape: Sequence[int], dtype: torch.dtype, num_ahead: int = 2) -> Channel:
        """Return the channel of a purpose for messages of one shape."""
        return Channel(
            purpose,
            self.groups[purpose],
            shape=shape,
            dtype=dtype,
            device=self.device,
            timeout_s=self.timeout_s,
            num_ahead=num_ahead,
        )

    def add_up(self, vector: Tensor) -> dist.Work:
        """Begin to sum a vector over all ranks, in place; returns at once."""
        return _checked_work(dist.all_reduce(vector, group=self.groups["control"], async_op=True))

    def share(self, vector: Tensor, source: int, *, purpose: str) -> None:
        """Give every rank the vector of one, in place."""
        dist.broadcast(vector, source, group=self.groups[purpose])


def wait(work: Any, *, what: str, timeout_s: float) -> None:
    """Wait for an operation.

    Raises:
        PeerError: It did not end in time, or the peer is gone.
    """
    begin = time.perf_counter()
    try:
        work.wait(datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        waited = time.perf_counter() - begin
        reason = f"nothing came for {waited:.0f} s" if waited >= timeout_s * 0.99 else f"{error}".splitlines()[0]
        raise PeerError(f"waited for {what}: {reason}") from error


def _checked_work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
