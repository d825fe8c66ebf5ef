"""The transport seam: what carries weights from the server to workers, and gradients back.

On one machine both lie in memory that all map (:mod:`slipstream.dataparallel.shared`). Across machines there is a line
to each life of a worker: through Ray's object store (:mod:`slipstream.dataparallel.ray_store`) or a session of
torch.distributed (:mod:`slipstream.dataparallel.sessions`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.wire import Sent


class WeightsOffered(Protocol):
    """The server's side of published weights."""

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Offer a version; the one before may be gone."""


class WeightsFetched(Protocol):
    """A worker's side of published weights."""

    @property
    def layout(self) -> Layout:
        """Of the weights."""

    def read(self, version: int, into: Tensor) -> bool:
        """Copy a version into a flat tensor; whether it was there, whole."""


class PushWriter(Protocol):
    """A worker's side of its gradients."""

    def write(self, sequence: int, tensors: Mapping[str, Tensor | None], *, key: int) -> Sent:
        """Write the gradient of a push."""


class PushReader(Protocol):
    """The server's side of one worker's gradients."""

    @property
    def is_reference(self) -> bool:
        """Whether :meth:`read` gives memory that a later push overwrites."""

    def read(self, sequence: int, idle: tuple[str, ...]) -> dict[str, Tensor | None]:
        """Return the gradient of a push, which may be changed."""


class Lines(WeightsOffered, Protocol):
    """The server's side of a transport to workers on any machine."""

    def open(self) -> "Line":
        """Return a line to a worker that is about to come, and that nobody else has."""


class Line(PushReader, Protocol):
    """The server's end towards one life of a worker."""

    @property
    def far_end(self) -> "Callable[[], FarEnd]":
        """What the worker opens the other end with; small, for it is sent there."""

    def offer(self, version: int) -> Any:
        """Let the worker read the newest version, and push the gradient of one order; returns at once.

        Returns:
            What it must be told of the version before it reads; ``None``: nothing.
        """

    def arrive(self, sequence: int, parcel: Any) -> None:
        """Take what a worker has pushed, when its report is here.

        Args:
            sequence: Number of the push; one that came before is ignored.
            parcel: What came with the report.

        Raises:
            StageError: It is lost.
        """

    def close(self) -> None:
        """Let go of the worker, whatever it is at; what has arrived can still be read. May be called twice."""


class FarEnd(WeightsFetched, PushWriter, Protocol):
    """A worker's end of its line."""

    def offer(self, version: int, note: Any) -> None:
        """Take note of what :meth:`Line.offer` has returned."""

    def take(self, sequence: int) -> Any:
        """Return what must go with the report of a push, once; ``None``: nothing."""


class Pipe(Protocol):
    """A worker's side of orders and reports."""

    def send(self, report: Any, /) -> None:
        """Report."""

    def recv(self) -> Any:
        """Wait for the next command."""
