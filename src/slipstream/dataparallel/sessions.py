"""Weights and gradients through sessions of torch.distributed, of two ranks each: the server and one life of a worker.

::

    server   publish   copy to a flat tensor, once a version
             offer     send it, and expect a gradient        | gloo does both while the server is busy with others
    worker   read      receive                               | write: send, and wait until it has left

A session has a rendezvous, connections and a thread of its own and belongs to no default group, of which a process has
one: whoever dies or hangs at its other end breaks this session alone, and what is under way in it is dropped with it. A
worker that comes again has another.

Gloo on CUDA too, through the CPU's memory: NCCL ends a process in which one of its communicators fails, which would be
the server, and knows no two ranks on one GPU.
"""

import datetime
import functools
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # not in its export list

from slipstream.dataparallel.cycles import DEADLINE_FLOOR_S
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.transport import FarEnd
from slipstream.dataparallel.wire import PushSlots, Sent, Wire
from slipstream.errors import StageError

_SERVER, _WORKER = 0, 1

_WEIGHTS, _GRADIENT = 0, 1
"""Tags, and with them queues."""

_UNTIL_ENDED = datetime.timedelta(days=30)
"""For a worker. The server judges who takes too long, and a connection whose other end is gone fails at once."""

_Group = Any
"""A ProcessGroupGloo, whose types leave out how to send and receive."""


class Sessions:
    """The server's side, to all workers.

    Args:
        weights: Layout of published weights.
        gradient: Layout of a gradient.
        wire: Of both sides.
        host: Address of this machine at which workers reach it, and the only one that is listened on.
        timeout_s: How long the two ends of a session look for each other.

    Cost:
        A version costs one copy. The newest is held, and those that workers were told to read, until they have pushed;
        and two gradients in the wire's numbers for each worker.
    """

    def __init__(self, weights: Layout, gradient: Layout, *, wire: Wire, host: str, timeout_s: float) -> None:
        self._layout = weights
        self._host = host
        self._timeout_s = timeout_s
        self._slots = functools.partial(PushSlots, wire, gradient, is_shared=False)
        self._far_end = functools.partial(SessionEnd, weights, gradient, wire=wire, timeout_s=timeout_s)
        self._open: list[Session] = []
        self._version = -1
        self._newest: Tensor | None = None
        self._flats: list[Tensor] = []

    @torch.no_grad()
    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Copy a version, to where nobody reads."""
        self._open = [session for session in self._open if not session.is_closed]
        held = {id(session.reading) for session in self._open}
        flat = next((each for each in self._flats if id(each) not in held), None)
        if flat is None:
            flat = self._layout.empty()
            self._flats.append(flat)
        for name, view in self._layout.views(flat).items():
            view.copy_(weights[name])
        self._version, self._newest = version, flat

    def _read(self, version: int) -> Tensor:
        assert version == self._version, f"version {version} was asked for when {self._version} was the newest"
        assert self._newest is not None
        return self._newest

    def open(self) -> "Session":
        """Return a session with a worker that is about to come.

        Raises:
            StageError: This machine cannot listen.
        """
        try:
            listener = socket.create_server((self._host, 0))
        except OSError as error:
            raise StageError(
                f"the server cannot listen on {self._host}, where workers would reach it: {error}. Is this the address "
                "of this machine, and are ports of it free? `--dataparallel.ray-transport object_store` needs none."
            ) from error
        port = listener.getsockname()[1]
        # It would listen on all addresses of the machine, if the socket were its own.
        store = TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=self._timeout_s),
            master_listen_fd=listener.detach(),
        )
        connect = functools.partial(_connect, store, rank=_SERVER, host=self._host, timeout_s=self._timeout_s)
        far_end = functools.partial(self._far_end, (self._host, port))
        session = Session(self._slots(), weights=self._read, connect=connect, far_end=far_end)
        self._open.append(session)
        return session


class Session:
    """The server's end of a session, see :class:`slipstream.dataparallel.transport.Line`.

    A worker answers one order after another, so the n-th order brings the n-th push.

    Args:
        slots: Where gradients come to lie.
        weights: Gives a version.
        connect: Makes the process group.
        far_end: Opens the worker's end.
    """

    def __init__(
        self,
        slots: PushSlots,
        *,
        weights: Callable[[int], Tensor],
        connect: Callable[[], _Group],
        far_end: Callable[[], FarEnd],
    ) -> None:
        self.far_end = far_end
        self.reading: Tensor | None = None
        self.is_closed = False
        self.is_reference = slots.is_reference
        self.read = slots.read
        self._slots = slots
        self._weights = weights
        self._connect: Callable[[], _Group] | None = connect
        self._is_connected = threading.Event()
        self._group: _Group | None = None
        self._num_orders = 0
        self._num_arrived = 0
        self._works: list[dist.Work] = []

    def offer(self, version: int) -> None:
        """Send a version, and expect a gradient; returns at once."""
        if self.is_closed:
            return
        self._num_orders += 1
        self.reading = flat = self._weights(version)
        if self._num_orders == 1:
            # The worker looks for this end when it reads, and may be slow at that.
            threading.Thread(target=self._begin, args=(self._connect, flat), daemon=True).start()
        else:
            self._exchange(self._group, flat)

    def _begin(self, connect: Callable[[], _Group], flat: Tensor) -> None:
        try:
            group = connect()
        except RuntimeError:
            self.close()
            return
        self._group = group
        if self.is_closed:  # meanwhile, in the other thread
            self.close()
            return
        self._exchange(group, flat)
        self._is_connected.set()

    def _exchange(self, group: _Group, flat: Tensor) -> None:
        try:
            sending = group.send([flat], _WORKER, _WEIGHTS)
            receiving = [group.recv([slot], _WORKER, _GRADIENT) for slot in self._slots.flats(self._num_orders)]
            self._works = [sending, *receiving]
        except RuntimeError:
            # The worker, if it lives, finds its connection closed and says so; if not, its call fails.
            self.close()

    def arrive(self, sequence: int, parcel: None = None) -> None:
        """Wait for the rest of a push that has left its worker, which is at most what the network holds.

        Raises:
            StageError: It does not come.
        """
        if sequence <= self._num_arrived:
            return
        try:
            if self.is_closed or not self._is_connected.wait(DEADLINE_FLOOR_S):
                raise RuntimeError("the connection was closed")
            for work in self._works:
                work.wait(datetime.timedelta(seconds=DEADLINE_FLOOR_S))
        except RuntimeError as error:
            self.close()
            raise StageError(f"the gradient of a push has left its worker and does not arrive: {error}") from error
        self._num_arrived = sequence
        self._works, self.reading = [], None

    def close(self) -> None:
        """End the session; what has arrived can still be read."""
        self.is_closed = True
        # In this order: what is under way, then the connection, then the rendezvous.
        self._works = []
        self._group = None
        self._connect = None
        self.reading = None


class SessionEnd:
    """A worker's end of a session.

    Args:
        weights: Layout of published weights.
        gradient: Layout of a gradient.
        address: Of the session's rendezvous.
        wire: Of both sides.
        timeout_s: How long the two ends look for each other.

    Cost:
        A gradient in the wire's numbers; and where weights are to be on another device than the CPU, a copy of them.
    """

    def __init__(
        self, weights: Layout, gradient: Layout, address: tuple[str, int], *, wire: Wire, timeout_s: float
    ) -> None:
        self.layout = weights
        self._address = address
        self._timeout_s = timeout_s
        self._slots = PushSlots(wire, gradient, count=1, is_shared=False)

    @functools.cached_property
    def _group(self) -> _Group:
        """The connection, made when the first weights come; until then the server does not look for this end."""
        store = TCPStore(*self._address, is_master=False, timeout=datetime.timedelta(seconds=self._timeout_s))
        return _connect(store, rank=_WORKER, host=_address_towards(self._address), timeout_s=self._timeout_s)

    @functools.cached_property
    def _landing(self) -> Tensor:
        return self.layout.empty()

    def offer(self, version: int, note: None) -> None:
        """Do nothing: weights come with the order."""

    @torch.no_grad()
    def read(self, version: int, into: Tensor) -> bool:
        """Receive the version of an order.

        Args:
            version: Which.
            into: Flat tensor of the layout's size, on any device.
        """
        flat = into if into.device.type == "cpu" else self._landing
        self._group.recv([flat], _SERVER, _WEIGHTS).wait(_UNTIL_ENDED)
        if flat is not into:
            into.copy_(flat)
        return True

    def write(self, sequence: int, tensors: Mapping[str, Tensor | None], *, key: int) -> Sent:
        """Send the gradient of a push; it has left when this returns."""
        sent = self._slots.write(sequence, tensors, key=key)
        works = [self._group.send([flat], _SERVER, _GRADIENT) for flat in self._slots.flats(sequence)]
        for work in works:
            work.wait(_UNTIL_ENDED)
        return sent

    def take(self, sequence: int) -> None:
        """Return nothing: gradients do not go with the report."""


def _connect(store: TCPStore, *, rank: int, host: str, timeout_s: float) -> _Group:
    """Return a group of two that is nobody else's, listening on one address; waits for the other rank."""
    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host)]
    options._threads = 1  # for collectives, of which there are none
    options._timeout = datetime.timedelta(seconds=timeout_s)
    return kind(store, rank, 2, options)


def _address_towards(address: tuple[str, int]) -> str:
    """Return the address of this machine that another reaches it at; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
