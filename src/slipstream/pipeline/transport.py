"""Messages between the ranks of a pipeline; the only caller of ``torch.distributed`` operations.

One queue per purpose: if activations and gradients shared one, a receive that was posted early for one direction could
hold up a send of the other, and the pipeline would stand still. An NCCL communicator is one queue, so each purpose has
a process group. Gloo has a queue for each tag, and each of its groups costs a thread that wakes a hundred times a
second and a socket between any two ranks, so there purposes share a group and have a tag each.
"""

import contextlib
import datetime
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its export list

from slipstream.errors import StageError

NCCL_TIMEOUT = datetime.timedelta(days=30)
"""NCCL's watchdog counts from where an operation began and then ends the process. A receive that is posted ahead begins
long before anyone waits for it, so the waiting is timed here."""

NUM_AHEAD = 2
"""Receives posted before they are asked for; one would be waited for while the next message cannot yet land."""

_POLL_S = 1e-4


class PeerError(StageError):
    """A rank waited for another in vain; the other one's own failure is the cause to look for."""


class Channel:
    """Tensors of one shape that flow one way between this rank and its neighbours, first in, first out.

    Receives are posted ahead, each into a fresh tensor: a buffer that were used again could still be the leaf of a
    microbatch whose backward has not run. So at most ``NUM_AHEAD`` buffers exist beyond the microbatches in flight.

    Args:
        name: Purpose, for messages.
        group: Process group.
        tag: With the group, this channel's own queue.
        shape: Of every message.
        dtype: Of every message.
        device: Where messages live.
        timeout_s: Seconds to wait for a peer.
        window: Sent messages kept at most. A gloo send does not say by itself that it has ended, so the oldest is
            waited for; where this is no less than the microbatches in flight, the peer has long taken it.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        *,
        tag: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
        window: int,
    ) -> None:
        self._name = name
        self._group = group
        self._tag = tag
        self._shape = tuple(shape)
        self._dtype = dtype
        self._device = device
        self._timeout_s = timeout_s
        self._window = window
        self._sending: deque[tuple[dist.Work, Tensor, int]] = deque()
        self._receiving: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self._expected: dict[int, int] = {}
        self.idle_s = 0.0

    def expect(self, source: int, count: int) -> None:
        """Say how many messages will still come from a rank, so that none is posted that never arrives."""
        self._expected[source] = self._expected.get(source, 0) + count
        self._receiving.setdefault(source, deque())
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
        while len(self._sending) >= self._window:
            self._wait_for_oldest_send()
        with _beginning(f"to send to rank {destination} ('{self._name}')"):
            work = _begun(dist.isend(tensor, destination, group=self._group, tag=self._tag))
        self._sending.append((work, tensor, destination))

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
        wait(work, what=f"{what} from rank {source}", device=self._device, timeout_s=self._timeout_s)
        self.idle_s += time.perf_counter() - begin
        self._post(source)
        return tensor

    def flush(self) -> None:
        """Wait until everything sent has left.

        Raises:
            PeerError: A peer did not take it in time.
        """
        while self._sending:
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        work, _, destination = self._sending.popleft()
        what = f"rank {destination} to take a message ('{self._name}')"
        wait(work, what=what, device=self._device, timeout_s=self._timeout_s)

    def _post(self, source: int) -> None:
        posted = self._receiving[source]
        while len(posted) < NUM_AHEAD and self._expected[source] > 0:
            buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            with _beginning(f"to receive from rank {source} ('{self._name}')"):
                work = _begun(dist.irecv(buffer, source, group=self._group, tag=self._tag))
            posted.append((work, buffer))
            self._expected[source] -= 1


class Transport:
    """All process groups of one pipeline, made and warmed up in the same order on every rank.

    Messages from the last rank's stage to the first rank's next one (schedules with several stages a rank) wrap
    around; they have queues of their own, since with two ranks they run against the others.

    Args:
        rank: This rank.
        num_ranks: Ranks of the pipeline.
        device: Where messages live; NCCL on CUDA, gloo elsewhere.
        timeout_s: Seconds to wait for a peer.

    Raises:
        PeerError: Not all ranks could be reached.
    """

    def __init__(self, *, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.timeout_s = timeout_s
        last = num_ranks - 1
        down = [(each, each + 1) for each in range(last)]
        up = [(each + 1, each) for each in range(last)]
        self._edges = {
            "forward": down,
            "backward": up,
            "forward_wrap": [(last, 0)] if last else [],
            "backward_wrap": [(0, last)] if last else [],
            "tied_to_first": [(last, 0)] if last else [],
            "tied_to_last": [(0, last)] if last else [],
            "evaluate": down,
            "evaluate_wrap": [(last, 0)] if last else [],
            "norm": [],
            "result": [],
        }
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = NCCL_TIMEOUT if backend == "nccl" else datetime.timedelta(seconds=timeout_s)
        with _connecting(rank=rank, num_ranks=num_ranks, timeout_s=timeout_s):
            if backend == "nccl":
                self._groups = {name: dist.new_group(backend=backend, timeout=timeout) for name in self._edges}
                self._tags = dict.fromkeys(self._edges, 0)
            else:
                shared, norm = (dist.new_group(backend=backend, timeout=timeout) for _ in range(2))
                # Collectives match up in their order within a group: the norm's must not meet the result's.
                self._groups = dict.fromkeys(self._edges, shared) | {"norm": norm}
                self._tags = {name: tag for tag, name in enumerate(self._edges)}
            for name in self._edges:
                self._warm_up(name)

    def _warm_up(self, purpose: str) -> None:
        """Connect now, in a fixed order; ranks that connected at first use could do so in different orders."""
        group, tag, token = self._groups[purpose], self._tags[purpose], torch.zeros(1, device=self.device)
        dist.all_reduce(token, group=group)
        for source, destination in self._edges[purpose]:
            if self.rank == source:
                dist.send(token, destination, group=group, tag=tag)
            elif self.rank == destination:
                dist.recv(token, source, group=group, tag=tag)

    def channel(self, purpose: str, *, shape: Sequence[int], dtype: torch.dtype, window: int = 4) -> Channel:
        """Return a channel of a purpose for messages of one shape; see :class:`Channel` for the window."""
        return Channel(
            purpose,
            self._groups[purpose],
            tag=self._tags[purpose],
            shape=shape,
            dtype=dtype,
            device=self.device,
            timeout_s=self.timeout_s,
            window=window,
        )

    def add_up(self, vector: Tensor) -> dist.Work:
        """Begin to sum a vector over all ranks, in place; returns at once. Calls match up in their order."""
        with _beginning("to add up gradient norms over all ranks"):
            return _begun(dist.all_reduce(vector, group=self._groups["norm"], async_op=True))

    def share_result(self, value: Tensor, source: int) -> None:
        """Give every rank the tensor of one, in place. Not in the norms' queue: ranks meet here at other moments."""
        what = f"a result of rank {source}"
        with _beginning(f"for {what}"):
            work = _begun(dist.broadcast(value, source, group=self._groups["result"], async_op=True))
        wait(work, what=what, device=self.device, timeout_s=self.timeout_s)


def wait(work: Any, *, what: str, device: torch.device, timeout_s: float) -> None:
    """Wait for an operation, on the host.

    Args:
        work: The operation.
        what: What is waited for, for the message of a failure.
        device: Where its tensor lives.
        timeout_s: Seconds to wait from now on.

    Raises:
        PeerError: It did not end in time, or the peer is gone.
    """
    begin = time.perf_counter()
    try:
        if device.type == "cuda":
            _poll(work, timeout_s=timeout_s)
        else:
            work.wait(datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        waited = time.perf_counter() - begin
        late = waited >= timeout_s * 0.99
        reason = f"nothing came for {waited:.0f} s (pipeline.timeout_s)" if late else _first_line(error)
        raise PeerError(f"waited for {what}: {reason}") from error


def _poll(work: Any, *, timeout_s: float) -> None:
    """Wait as NCCL's own wait with a timeout does, but count from now."""
    deadline = time.perf_counter() + timeout_s
    while not work.is_completed():
        if time.perf_counter() >= deadline:
            raise RuntimeError("timed out")
        time.sleep(_POLL_S)
    work.wait()  # raises what went wrong; what is computed next comes after it


def connect(store: Store, *, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> Transport:
    """Make this process a rank, and connect it with the others.

    Args:
        store: Rendezvous of all ranks.
        rank: This one.
        num_ranks: All of them.
        device: Where the tensors of messages live.
        timeout_s: Seconds after which a rank gives up waiting for another.

    Raises:
        PeerError: Not all ranks could be reached.
    """
    with _connecting(rank=rank, num_ranks=num_ranks, timeout_s=timeout_s):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    return Transport(rank=rank, num_ranks=num_ranks, device=device, timeout_s=timeout_s)


@contextlib.contextmanager
def _connecting(*, rank: int, num_ranks: int, timeout_s: float) -> Iterator[None]:
    """Turn the errors of ranks that look for one another into a sentence that says who misses whom.

    Raises:
        PeerError: Not all ranks could be reached.
    """
    begin = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank} could not reach all of the {num_ranks} ranks in {time.perf_counter() - begin:.0f} s "
            f"(pipeline.timeout_s is {timeout_s:g}): {_first_line(error)}"
        ) from error


@contextlib.contextmanager
def _beginning(what: str) -> Iterator[None]:
    """A peer that is gone may show where an operation begins already, not only where it is waited for."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"tried {what}: {_first_line(error)}") from error


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
