"""The transport seam: what carries weights from the server to workers, and gradients back.

On one machine both lie in memory that all map (:mod:`slipstream.dataparallel.shared`), across machines in Ray's object
store (:mod:`slipstream.dataparallel.ray_store`).
"""

from collections.abc import Mapping
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


class Pipe(Protocol):
    """A worker's side of orders and reports."""

    def send(self, report: Any, /) -> None:
        """Report."""

    def recv(self) -> Any:
        """Wait for the next command."""
