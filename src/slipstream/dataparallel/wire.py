"""What a push weighs on its way to the server: number formats of gradients, their bytes, and what they lose."""

import abc
import collections
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.config import DataParallelConfig
from slipstream.dataparallel.shared import GradientSlots, Layout

BLOCK = 2048
"""Neighbouring numbers that share a scale in `int8`."""

_LARGEST_CODE = 127

_LEAST_SCALE = 1e-30
"""A block of numbers that are smaller than that, times 127, is sent as zeros."""

NUM_REMEMBERED = 100
"""Pushes that the figures are means over."""

Parts = Mapping[str, Tensor]
"""A tensor as it is sent: one or several tensors by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """What it took to send a gradient.

    Attributes:
        num_bytes: Sent, without the few hundred of the message.
        relative_error: Norm of the difference between what was sent and what arrives, over the norm of the former.
        idle: Parameters without a gradient.
    """

    num_bytes: int = 0
    relative_error: float = 0.0
    idle: tuple[str, ...] = ()


class Wire(abc.ABC):
    """The wire seam: turns a gradient into what is sent, and back.

    Args:
        seed: Of the rounding, where that is random.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    @property
    def is_exact(self) -> bool:
        """Whether what arrives is what was sent, to the bit."""
        return False

    @abc.abstractmethod
    def layouts(self, gradient: Layout) -> dict[str, Layout]:
        """Return the layouts of the parts that a gradient is sent in, by the name of the part."""

    @abc.abstractmethod
    def encode(self, tensor: Tensor, generator: torch.Generator) -> Parts:
        """Return a float32 tensor as it is sent."""

    @abc.abstractmethod
    def decode(self, parts: Parts) -> Tensor:
        """Return a tensor from what was sent."""

    def generator(self, key: int, *, device: torch.device) -> torch.Generator:
        """Return where the rounding of a gradient gets its randomness: a function of the seed and the key alone."""
        seed = random.Random(f"{self._seed}/{key}").getrandbits(63)
        return torch.Generator(device=device).manual_seed(seed)

    @torch.no_grad()
    def carry(self, tensors: Mapping[str, Tensor | None], *, key: int) -> tuple[dict[str, Tensor | None], Sent]:
        """Send a gradient within one process.

        Args:
            tensors: By name.
            key: Number of the gradient; the same one is rounded in the same way.

        Returns:
            What arrives; an exact wire hands over the very tensors.
        """
        arrived: dict[str, Tensor | None] = {}
        meter = _Meter()
        for name, tensor, parts in self.encoded(tensors, key=key):
            arrived[name] = None
            if tensor is not None:
                found = self.decode(parts)
                meter.add(tensor, parts, found)
                arrived[name] = found
        return arrived, meter.sent([name for name, tensor in tensors.items() if tensor is None])

    def packed(
        self, tensors: Mapping[str, Tensor | None], *, key: int
    ) -> tuple[dict[str, dict[str, Tensor | None]], Sent]:
        """Return a gradient as it is sent, by part and name, and what it takes; the arguments are those of `carry`."""
        held: dict[str, dict[str, Tensor | None]] = collections.defaultdict(lambda: dict.fromkeys(tensors))
        meter = _Meter()
        for name, tensor, parts in self.encoded(tensors, key=key):
            for part, each in parts.items():
                held[part][name] = each
            if tensor is not None:
                meter.add(tensor, parts, self.decode(parts))
        return held, meter.sent([name for name, tensor in tensors.items() if tensor is None])

    def encoded(self, tensors: Mapping[str, Tensor | None], *, key: int) -> Iterator[tuple[str, Tensor | None, Parts]]:
        """Yield each tensor by name, and as it is sent: nothing, of one that is not there."""
        generator = None
        for name, tensor in tensors.items():
            if tensor is None:
                yield name, None, {}
                continue
            generator = generator or self.generator(key, device=tensor.device)
            yield name, tensor, self.encode(tensor, generator)


class _Meter:
    """Adds up what one gradient takes and loses."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._lost = 0.0
        self._whole = 0.0

    def add(self, tensor: Tensor, parts: Parts, arrived: Tensor) -> None:
        self._num_bytes += sum(part.numel() * part.element_size() for part in parts.values())
        if arrived is not tensor:
            self._lost += float(torch.linalg.vector_norm(arrived - tensor)) ** 2
            self._whole += float(torch.linalg.vector_norm(tensor)) ** 2

    def sent(self, idle: Sequence[str]) -> Sent:
        error = math.sqrt(self._lost / self._whole) if self._whole else 0.0
        return Sent(num_bytes=self._num_bytes, relative_error=error, idle=tuple(idle))


class Float32(Wire):
    """Gradients as they are, 4 bytes a number."""

    @property
    def is_exact(self) -> bool:
        """Say yes."""
        return True

    def layouts(self, gradient: Layout) -> dict[str, Layout]:
        """Return the gradient's own."""
        return {"values": gradient}

    def encode(self, tensor: Tensor, generator: torch.Generator) -> Parts:
        """Return the tensor itself."""
        return {"values": tensor}

    def decode(self, parts: Parts) -> Tensor:
        """Return the tensor itself."""
        return parts["values"]


class BFloat16(Wire):
    """2 bytes a number, rounded to the nearest: an error of at most 0.4 % of each number, whatever its size."""

    def layouts(self, gradient: Layout) -> dict[str, Layout]:
        """Return one of half the bytes."""
        return {"values": Layout(shapes=gradient.shapes, dtype=torch.bfloat16)}

    def encode(self, tensor: Tensor, generator: torch.Generator) -> Parts:
        """Round."""
        return {"values": tensor.to(torch.bfloat16)}

    def decode(self, parts: Parts) -> Tensor:
        """Widen."""
        return parts["values"].float()


class Int8(Wire):
    r"""1 byte a number and a scale for each :data:`BLOCK` of them, rounded at random.

    With a the largest magnitude of a block, x is sent as a code :math:`q = \lfloor 127 x / a + u \rfloor`, u uniform in
    [0, 1), and arrives as :math:`a q / 127`. Its mean is x. Rounded to the nearest instead, the error would be
    smaller by a factor of 1.4, but whatever stays below a / 254 for a whole run (the rows of rare tokens beside that of
    a frequent one) would never arrive.

    Source:
        Blocks with a scale each: Dettmers et al., "8-bit optimizers via block-wise quantization" (2021, arXiv
        2110.02861). Random rounding that is right on average: Alistarh et al., "QSGD" (2016, arXiv 1610.02132).
    """

    def layouts(self, gradient: Layout) -> dict[str, Layout]:
        """Return the codes' and the scales'."""
        blocks = {name: (-(-math.prod(shape) // BLOCK),) for name, shape in gradient.shapes.items()}
        return {
            "codes": Layout(shapes=gradient.shapes, dtype=torch.int8),
            "scales": Layout(shapes=blocks, dtype=torch.float32),
        }

    def encode(self, tensor: Tensor, generator: torch.Generator) -> Parts:
        """Round each block to multiples of a 127th of its largest magnitude."""
        count = tensor.numel()
        blocks = torch.nn.functional.pad(tensor.reshape(-1), (0, -count % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1) / _LARGEST_CODE
        # What is not a number stays one, so that whoever takes the norm after the wire skips the step.
        scales = torch.where(scales <= _LEAST_SCALE, torch.zeros_like(scales), scales)
        steps = torch.where(scales > 0, scales, torch.full_like(scales, math.inf))
        noise = torch.rand(blocks.shape, generator=generator, device=tensor.device)
        codes = (blocks / steps[:, None]).add_(noise).floor_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        return {"codes": codes.to(torch.int8).view(-1)[:count].view(tensor.shape), "scales": scales}

    def decode(self, parts: Parts) -> Tensor:
        """Multiply by the scales."""
        codes = parts["codes"]
        scales = parts["scales"].repeat_interleave(BLOCK)[: codes.numel()]
        return codes.float() * scales.view(codes.shape)


def build_wire(settings: DataParallelConfig) -> Wire:
    """Return the wire that the settings name."""
    kinds: dict[str, type[Wire]] = {"float32": Float32, "bfloat16": BFloat16, "int8": Int8}
    return kinds[settings.wire](seed=settings.seed)


class PushSlots:
    """Where the gradients of one worker process lie for the server, as they are sent; see :class:`GradientSlots`.

    Args:
        wire: Of both sides.
        gradient: Layout of a gradient.
        count: Of slots.
        is_shared: Whether other processes map them.

    Cost:
        Two gradients in the wire's format. One that is not exact costs the worker an encoding and, to know the error, a
        decoding; and the server a decoding and the memory of a gradient while it adds one up.
    """

    def __init__(self, wire: Wire, gradient: Layout, *, count: int = 2, is_shared: bool = True) -> None:
        self._wire = wire
        self._names = tuple(gradient.shapes)
        self._slots = {
            part: GradientSlots(layout, count=count, is_shared=is_shared)
            for part, layout in wire.layouts(gradient).items()
        }

    @property
    def is_reference(self) -> bool:
        """Whether :meth:`read` gives memory that the push after the next overwrites."""
        return self._wire.is_exact

    @torch.no_grad()
    def write(self, sequence: int, tensors: Mapping[str, Tensor | None], *, key: int) -> Sent:
        """Write the gradient of a push.

        Args:
            sequence: Number of the push.
            tensors: By name.
            key: As for :meth:`Wire.carry`.
        """
        held, sent = self._wire.packed(tensors, key=key)
        for part, slots in self._slots.items():
            slots.write(sequence, held[part])
        return sent

    def read(self, sequence: int, idle: tuple[str, ...]) -> dict[str, Tensor | None]:
        """Return the gradient of a push, which may be changed.

        Args:
            sequence: Number of the push.
            idle: What :meth:`write` gave.
        """
        found = {part: slots.read(sequence, idle) for part, slots in self._slots.items()}
        gradient: dict[str, Tensor | None] = {}
        for name in self._names:
            parts = {part: tensor for part, held in found.items() if (tensor := held[name]) is not None}
            gradient[name] = self._wire.decode(parts) if parts else None
        return gradient

    def flats(self, sequence: int) -> list[Tensor]:
        """Return the slots of a push, a flat tensor for each part."""
        return [slots.flat(sequence) for slots in self._slots.values()]


class WireTally:
    """Bytes and errors of the last pushes that counted."""

    def __init__(self) -> None:
        self._recent: collections.deque[tuple[int, float]] = collections.deque(maxlen=NUM_REMEMBERED)

    def add(self, num_bytes: int, relative_error: float) -> None:
        """Count a push; one that is not finite has no error to speak of."""
        if math.isfinite(relative_error):
            self._recent.append((num_bytes, relative_error))

    def figures(self) -> dict[str, float]:
        """Return the means; 0 where nothing was pushed."""
        count = max(len(self._recent), 1)
        return {
            "wire_bytes_per_push": sum(size for size, _ in self._recent) / count,
            "wire_relative_error": sum(error for _, error in self._recent) / count,
        }

    def state_dict(self) -> list[tuple[int, float]]:
        """Return the state as plain JSON values."""
        return list(self._recent)

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._recent.clear()
        self._recent.extend((int(size), float(error)) for size, error in state)
