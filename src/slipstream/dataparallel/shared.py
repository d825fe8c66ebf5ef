"""Tensors in memory that the server and its workers on one machine all map.

The system frees such memory with the last process that maps it, however that one ends: nothing has a name that could be
left behind.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from slipstream.errors import ConfigError

_ALIGNMENT = 64
"""Bytes; a cache line, and a vector register of any processor."""

_WRITING = -1
"""Stamp of a buffer that holds no whole version."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where named tensors of one type lie in one flat tensor.

    Attributes:
        shapes: By name, in order.
        dtype: Of all.

    Example:
        >>> layout = Layout(shapes={"a": (2, 3), "b": (1,)}, dtype=torch.float32)
        >>> layout.size, {name: tuple(view.shape) for name, view in layout.views(layout.empty()).items()}
        (32, {'a': (2, 3), 'b': (1,)})
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """Return the layout of tensors that all have the same type."""
        (dtype,) = {tensor.dtype for tensor in tensors.values()}
        return cls(shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype=dtype)

    @cached_property
    def _places(self) -> dict[str, int]:
        step = _ALIGNMENT // self.dtype.itemsize
        places, at = {}, 0
        for name, shape in self.shapes.items():
            places[name] = at
            at += -(-math.prod(shape) // step) * step
        return {**places, "": at}

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return self._places[""]

    def empty(self, *, device: torch.device | str = "cpu") -> Tensor:
        """Return a flat tensor of zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the named tensors as parts of a flat one."""
        places = self._places
        return {
            name: flat[places[name] : places[name] + math.prod(shape)].view(shape)
            for name, shape in self.shapes.items()
        }

    def shared(self, count: int = 1) -> Tensor:
        """Return flat tensors in shared memory, of shape ``(count, size)``.

        Raises:
            ConfigError: There is not so much of it.
        """
        try:
            return _shared(torch.zeros((count, self.size), dtype=self.dtype))
        except RuntimeError as error:
            needed = count * self.size * self.dtype.itemsize
            raise ConfigError(
                f"the system gives no {needed / 2**20:.0f} MiB of shared memory ({error}). Make /dev/shm larger "
                "(docker run --shm-size), or use fewer workers or --engine inline."
            ) from error


def _shared(tensor: Tensor) -> Tensor:
    """Move a tensor to shared memory and return it."""
    tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it without types
    return tensor


class WeightBoard:
    """Published weights: the server writes them, any number of processes read.

    Version v lies in buffer v mod 2, so that one version can be read while the next is written. Nobody waits for
    anybody; a reader that is overtaken finds out by the buffer's stamp and asks again::

        writer   stamp := writing | write buffer | stamp := v + 2
        reader   stamp = v ?      | copy buffer  | stamp = v still ?

    Processors of the x86 family show one process's writes to another in their order. Others need not, and Python has no
    fence to ask for it: there the boundaries between torch's operations have to do, which is likely but not proven.

    Args:
        layout: Of the weights.

    Cost:
        Two copies of the weights, whatever the number of workers. A version costs one copy, and each reader one.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._stamps = _shared(torch.full((2,), _WRITING, dtype=torch.int64))
        self._buffers = layout.shared(2)

    @cached_property
    def _views(self) -> list[dict[str, Tensor]]:
        return [self.layout.views(buffer) for buffer in self._buffers]

    def __getstate__(self) -> dict[str, object]:
        return {"layout": self.layout, "_stamps": self._stamps, "_buffers": self._buffers}

    @torch.no_grad()
    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Write a version; only one process ever does."""
        slot = version % 2
        _write(version, weights, self._views[slot], self._stamps[slot])

    @torch.no_grad()
    def read(self, version: int, into: Tensor) -> bool:
        """Copy a version.

        Args:
            version: Which.
            into: Flat tensor of the layout's size, on any device.

        Returns:
            Whether it is that version, whole. If not, it was overwritten before or while it was copied.
        """
        slot = version % 2
        if int(self._stamps[slot]) != version:
            return False
        into.copy_(self._buffers[slot])
        return int(self._stamps[slot]) == version


def _write(version: int, weights: Mapping[str, Tensor], views: Mapping[str, Tensor], stamp: Tensor) -> None:
    """Write a version to a buffer whose stamp, a scalar, tells readers in between that it is none."""
    stamp.fill_(_WRITING)
    for name, view in views.items():
        view.copy_(weights[name])
    stamp.fill_(version)


class HeldBoard:
    """Published weights that stay for as long as somebody may read them.

    For readers in several processes that must all have the same version, at moments of their own: none can be
    overtaken, so nobody has to agree with anybody.

    Args:
        layout: Of the weights.
        num_readers: Most orders out at once.

    Cost:
        ``num_readers + 2`` copies of the weights: a version for each order, the newest, and the next.
    """

    def __init__(self, layout: Layout, *, num_readers: int) -> None:
        self.layout = layout
        self._stamps = _shared(torch.full((num_readers + 2,), _WRITING, dtype=torch.int64))
        self._buffers = layout.shared(num_readers + 2)

    @torch.no_grad()
    def publish(self, version: int, weights: Mapping[str, Tensor], *, held: Collection[int] = ()) -> None:
        """Write a version; only one process ever does.

        Args:
            version: Which; any that is not older was of a run that went on from an earlier state, and is gone.
            weights: By name.
            held: Versions that may still be read.
        """
        self._stamps[self._stamps >= version] = _WRITING
        kept = {*held, max(self._stamps.tolist())}
        slot = next(slot for slot, stamp in enumerate(self._stamps.tolist()) if stamp == _WRITING or stamp not in kept)
        _write(version, weights, self.layout.views(self._buffers[slot]), self._stamps[slot])

    @torch.no_grad()
    def read(self, version: int, into: Tensor) -> bool:
        """Copy a version.

        Args:
            version: Which.
            into: Flat tensor of the layout's size, on any device.

        Returns:
            Whether it is held.
        """
        stamps = self._stamps.tolist()
        if version not in stamps:
            return False
        into.copy_(self._buffers[stamps.index(version)])
        return True


class GradientSlots:
    """The gradients of one worker process, on their way to the server.

    Push n lies in slot n mod 2. The worker has its next work as soon as the server knows of a push, and may be done
    with it before the server has added that push up; but not with the one after, for which it needs new work again.

    Args:
        layout: Of a gradient.
        count: Slots; with one, the worker is not done with a push before the server is.
        is_shared: Whether other processes map them.

    Cost:
        Two gradients. To push one costs one copy; the server adds it up from here.
    """

    def __init__(self, layout: Layout, *, count: int = 2, is_shared: bool = True) -> None:
        self._layout = layout
        self._buffers = layout.shared(count) if is_shared else torch.zeros((count, layout.size), dtype=layout.dtype)

    @cached_property
    def _views(self) -> list[dict[str, Tensor]]:
        return [self._layout.views(buffer) for buffer in self._buffers]

    def __getstate__(self) -> dict[str, object]:
        return {"_layout": self._layout, "_buffers": self._buffers}

    @torch.no_grad()
    def write(self, sequence: int, tensors: Mapping[str, Tensor | None]) -> tuple[str, ...]:
        """Write the gradient of a push; return the names of parameters that have none."""
        idle = []
        for name, view in self._views[sequence % len(self._buffers)].items():
            tensor = tensors[name]
            if tensor is None:
                idle.append(name)
            else:
                view.copy_(tensor)
        return tuple(idle)

    def read(self, sequence: int, idle: tuple[str, ...]) -> dict[str, Tensor | None]:
        """Return the gradient of a push by reference; it may be changed, and is overwritten by the push after the next.

        Args:
            sequence: Number of the push.
            idle: What :meth:`write` gave.
        """
        views = self._views[sequence % len(self._buffers)]
        return {name: None if name in idle else view for name, view in views.items()}

    def flat(self, sequence: int) -> Tensor:
        """Return the slot of a push as one tensor."""
        return self._buffers[sequence % len(self._buffers)]
