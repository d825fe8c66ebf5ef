"""What the training loop asks of whatever computes: one process, or one rank of a pipeline."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

from torch import Tensor

from slipstream.data.loader import Batch
from slipstream.digests import tensor_digest
from slipstream.models.moe import RouterReport

Point = Literal["x", "y"]
"""Which weights: ``x`` published and trained on, ``y`` the optimizer's own."""

BatchSource = Callable[[int], Batch]
"""Gives the batch with a global index (from 0); the same one every time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the update of one batch was made of.

    Attributes:
        step: Number of the update, from 1; it was made of batch ``step - 1``.
        loss: Mean loss of the batch over its valid tokens, in nats, on the weights it read.
        grad_norm: Global gradient norm before clipping.
        lr: Peak learning rate times the schedule's factor, as used.
        staleness: Versions between the weights read and the newest when the update was made; the largest, where
            several gradients made the update.
        num_tokens: Valid target tokens of the batch.
        skipped: The gradient was not finite and the weights stayed.
        idle_s: Seconds that ranks waited for one another since the report before, summed over ranks; ``None``: nobody
            counts them.
        num_ranks: Ranks that ``idle_s`` is summed over.
        num_devices: GPUs that computed the batch.
        stop: Every rank ends after this step, because one of them asked for it.
        staleness_mean: Mean over the gradients of the update; ``None``: there was one.
        step_s: Seconds since the update before, by a clock of the executor's own; ``None``: the wall's.
        router: What the router of each layer with experts did in the batch, in the order of layers.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    staleness: int
    num_tokens: int
    skipped: bool
    idle_s: float | None = 0.0
    num_ranks: int = 1
    num_devices: float = 1
    stop: bool = False
    staleness_mean: float | None = None
    step_s: float | None = None
    router: tuple[RouterReport, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of what one rank holds, right after an update.

    Attributes:
        tensors: By a name that does not depend on the number of ranks: ``y/NAME``, ``x@VERSION/NAME``,
            ``optim/NAME/KEY``.
        scalars: JSON values: the update path's own, the optimizers' per parameter.
    """

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Any]

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each master weight held, by parameter name; taken when asked for, not while training waits."""
        return {name[2:]: tensor_digest(each) for name, each in self.tensors.items() if name.startswith("y/")}


def merged(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the snapshots of several stages as one; what the update paths share is the same in all."""
    tensors: dict[str, Tensor] = {}
    optim: dict[str, Any] = {}
    for snapshot in snapshots:
        tensors |= snapshot.tensors
        optim |= snapshot.scalars["optim"]
    return Snapshot(tensors=tensors, scalars={**snapshots[0].scalars, "optim": optim})


class StateReader(Protocol):
    """A saved state, whatever number of ranks wrote it."""

    @property
    def step(self) -> int:
        """Updates made."""

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names as in :attr:`Snapshot.tensors`."""

    @property
    def scalars(self) -> Mapping[str, Any]:
        """Scalars of all ranks, merged."""

    def tensor(self, name: str) -> Tensor:
        """Return one tensor."""


class Executor(Protocol):
    """One rank's share of training."""

    @property
    def step(self) -> int:
        """Updates made so far."""

    def run_step(self, *, stop_requested: bool = False) -> StepReport:
        """Compute until the next update is made.

        Args:
            stop_requested: This rank was asked to stop; reported back once all ranks know.
        """

    @property
    def has_two_points(self) -> bool:
        """Whether the published weights x can differ from the optimizer's y by more than a cast."""

    def evaluate(self, batches: Iterable[Batch], point: Point) -> float:
        """Return the summed loss in nats over batches, without changing the course of training."""

    def snapshot(self) -> Snapshot:
        """Return a copy of the state after the newest update."""

    def restore(self, state: StateReader) -> None:
        """Continue from a saved state."""

    def method_metrics(self) -> Mapping[str, float]:
        """Return what corrections, discounts and error feedback tell of themselves, by name; of what is held here."""

    def figures(self) -> Mapping[str, Any]:
        """Return what the run's summary holds of this executor beside what all have."""
