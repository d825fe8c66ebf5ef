"""Published versions of the weights, held in a ring of buffers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.errors import StalenessError


class VersionedWeights:
    """The newest ``num_buffers`` versions of a set of weights; version ``v`` lives in buffer ``v mod num_buffers``.

    Readers get a buffer by reference; nothing is copied for them. Publishing version ``v`` overwrites the buffer of
    version ``v - num_buffers``, which no batch may read any more by then: with a delay of tau updates, batch ``b``
    reads version ``b - tau`` and its own update makes version ``b + 1``, so ``tau + 1`` buffers are enough.

    Args:
        initial: Version 0 by name; copied.
        num_buffers: Versions held at once (2 in PipeDream-2BW).
        dtype: Type the weights are computed with.
        device: Where they live; ``None``: where ``initial`` is.

    Cost:
        ``num_buffers`` copies of the weights in ``dtype``.
    """

    def __init__(
        self,
        initial: Mapping[str, Tensor],
        *,
        num_buffers: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        assert num_buffers >= 1
        self.num_buffers = num_buffers
        self._buffers = [
            {name: tensor.detach().to(device=device, dtype=dtype, copy=True) for name, tensor in initial.items()}
            for _ in range(num_buffers)
        ]
        self._latest = 0
        self._oldest = 0

    @property
    def latest(self) -> int:
        """Newest published version: the number of updates so far."""
        return self._latest

    @property
    def live(self) -> range:
        """Versions that can be read now."""
        return range(self._oldest, self._latest + 1)

    def buffer(self, version: int) -> dict[str, Tensor]:
        """Return the buffer that holds, or will hold, a version, whatever it holds now."""
        return self._buffers[version % self.num_buffers]

    def read(self, version: int) -> dict[str, Tensor]:
        """Return the weights of a live version, by name, by reference.

        Raises:
            StalenessError: The version is not held (any more, or yet).
        """
        if version not in self.live:
            raise StalenessError(
                f"version {version} of the weights was asked for, held are {self._oldest} to {self._latest}. "
                f"A reader this stale needs {self._latest - version + 1} buffers or more, there are {self.num_buffers}."
            )
        return self.buffer(version)

    def advance(self) -> int:
        """Declare the next version complete, after its buffer has been written; return its number."""
        self._latest += 1
        self._oldest = max(self._oldest, self._latest - self.num_buffers + 1)
        return self._latest

    def restore(self, versions: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Hold the given versions, as :attr:`live` and :meth:`read` gave them when they were saved.

        More buffers than versions given are filled with the oldest one: a run that changes to a larger delay reads
        that one until it has made its own.

        Raises:
            StalenessError: The versions are not consecutive.
        """
        numbers = sorted(versions)
        if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise StalenessError(f"versions {numbers} are not consecutive; cannot restore the weights from them.")
        self._latest = numbers[-1]
        self._oldest = max(self._latest - self.num_buffers + 1, 0)
        for version in self.live:
            for name, tensor in self.buffer(version).items():
                tensor.copy_(versions[max(version, numbers[0])][name])
