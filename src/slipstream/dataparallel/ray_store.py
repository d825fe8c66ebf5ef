"""Weights and gradients in Ray's object store: read where they lie, carried to other machines by Ray.

::

    server   publish   put the weights, once a version      | gradients arrive as results of calls
    node     ...       Ray fetches them once for all workers of a machine
    worker   read      copy from there, and let go          | write: a result is put by Ray where it was made

Everything is sent as bytes, for numpy knows no bfloat16; they are copied once on each side. The newest version is kept
in the store, and an older one until whoever was told to read it has done so.
"""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.dataparallel.ray_cluster import import_ray
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.transport import FarEnd
from slipstream.dataparallel.wire import Sent, Wire

Bytes = npt.NDArray[np.uint8]

Parcel = dict[str, dict[str, Bytes]]
"""A gradient on its way, by part and parameter; see :meth:`slipstream.dataparallel.wire.Wire.layouts`."""

_NUM_KEPT = 2
"""Gradients of a worker that are kept for the server to look at; more are never waited for."""


def as_bytes(tensor: Tensor) -> Bytes:
    """Return a tensor's bytes; of a contiguous one in the CPU's memory, that memory itself."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


@torch.no_grad()
def copy_bytes(source: Bytes, into: Tensor) -> None:
    """Copy what :func:`as_bytes` gave, which may be memory that cannot be written, into a contiguous tensor."""
    if into.device.type == "cpu":
        np.copyto(as_bytes(into), source)
    else:
        into.copy_(torch.from_numpy(source.copy()).view(into.dtype).view(into.shape))


class StoreLines:
    """The server's side, to all workers.

    Args:
        weights: Layout of published weights.
        gradient: Layout of a gradient.
        wire: Of both sides.

    Cost:
        A version costs one copy. In the store lie the newest, and those that somebody was told to read and has not.
    """

    def __init__(self, weights: Layout, gradient: Layout, *, wire: Wire) -> None:
        self._ray = import_ray()
        self._weights = weights
        self._gradient = gradient
        self._wire = wire
        self._version = -1
        self._reference: Any = None

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Put a version in the store."""
        self._version = version
        self._reference = self._ray.put([as_bytes(weights[name]) for name in self._weights.shapes])

    def reference(self, version: int) -> Any:
        """Return where the newest version lies."""
        assert version == self._version, f"version {version} was asked for when {self._version} was the newest"
        return self._reference

    def open(self) -> "StoreLine":
        """Return a line to a worker that is about to come."""
        far_end = functools.partial(StoreEnd, self._weights, wire=self._wire)
        return StoreLine(self._wire, self._gradient, reference=self.reference, far_end=far_end)


class StoreLine:
    """The server's end of a line, see :class:`slipstream.dataparallel.transport.Line`.

    Args:
        wire: Of both sides.
        gradient: Layout of a gradient.
        reference: Says where a version lies.
        far_end: Opens the worker's end.

    Cost:
        One gradient in the wire's numbers beside those in the store, which cannot be changed; and a copy to get there.
    """

    def __init__(
        self, wire: Wire, gradient: Layout, *, reference: Callable[[int], Any], far_end: Callable[[], FarEnd]
    ) -> None:
        self.offer = reference
        self.far_end = far_end
        self._wire = wire
        self._names = tuple(gradient.shapes)
        self._layouts = wire.layouts(gradient)
        self._parcels: collections.OrderedDict[int, Parcel] = collections.OrderedDict()
        self._views: dict[str, dict[str, Tensor]] = {}

    @property
    def is_reference(self) -> bool:
        """Whether :meth:`read` gives memory that the next push overwrites."""
        return self._wire.is_exact

    def arrive(self, sequence: int, parcel: Parcel | None) -> None:
        """Keep what has come."""
        if parcel is None:
            return
        self._parcels[sequence] = parcel
        while len(self._parcels) > _NUM_KEPT:
            self._parcels.popitem(last=False)

    def read(self, sequence: int, idle: tuple[str, ...]) -> dict[str, Tensor | None]:
        """Return the gradient of a push, once; it may be changed, and the next one that is read overwrites it.

        Args:
            sequence: Number of the push.
            idle: What :meth:`StoreEnd.write` gave.
        """
        parcel = self._parcels.pop(sequence)
        if not self._views:
            self._views = {part: layout.views(layout.empty()) for part, layout in self._layouts.items()}
        gradient: dict[str, Tensor | None] = dict.fromkeys(self._names)
        for name in self._names:
            if name in idle:
                continue
            for part, each in parcel.items():
                copy_bytes(each[name], self._views[part][name])
            gradient[name] = self._wire.decode({part: self._views[part][name] for part in parcel})
        return gradient

    def close(self) -> None:
        """Do nothing: what is nobody's leaves the store by itself."""


class StoreEnd:
    """A worker's end of a line.

    Args:
        layout: Of published weights.
        wire: Of both sides.
    """

    def __init__(self, layout: Layout, *, wire: Wire) -> None:
        self.layout = layout
        self._wire = wire
        self._version = -1
        self._reference: Any = None
        self._parcels: dict[int, Parcel] = {}

    def offer(self, version: int, note: Any) -> None:
        """Take note of where a version lies."""
        self._version, self._reference = version, note

    def read(self, version: int, into: Tensor) -> bool:
        """Copy a version, and let go of it; Ray brings it to this machine if nobody here has read it.

        Args:
            version: Which.
            into: Flat tensor of the layout's size, on any device.
        """
        if version != self._version or self._reference is None:
            return False
        for view, source in zip(self.layout.views(into).values(), import_ray().get(self._reference)):
            copy_bytes(source, view)
        self._reference = None
        return True

    @torch.no_grad()
    def write(self, sequence: int, tensors: Mapping[str, Tensor | None], *, key: int) -> Sent:
        """Make the parcel of a push; it is not copied before it is sent."""
        held, sent = self._wire.packed(tensors, key=key)
        self._parcels[sequence] = {
            part: {name: as_bytes(tensor) for name, tensor in each.items() if tensor is not None}
            for part, each in held.items()
        }
        return sent

    def take(self, sequence: int) -> Parcel | None:
        """Return the parcel of a push, once."""
        return self._parcels.pop(sequence, None)
