"""Forward and backward of one pipeline stage, and the microbatches in between."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from slipstream.data.loader import Batch
from slipstream.errors import StageError, StalenessError
from slipstream.executor import BatchSource
from slipstream.microbatches import to_device
from slipstream.models.moe import MicrobatchKey, RouterLog
from slipstream.models.partition import StageSpec
from slipstream.models.parts import Loss
from slipstream.staleness.gradient import GradientAccumulator


class StageModules(Protocol):
    """What a stage computes with: a module over each buffer of weights."""

    @property
    def spec(self) -> StageSpec:
        """Which part of the model."""

    @property
    def leaves(self) -> Sequence[dict[str, nn.Parameter]]:
        """Leaf parameters of each module, by name; version v is read from those of v mod their number."""

    @property
    def router_log(self) -> RouterLog:
        """What the modules' routers note."""

    @property
    def live(self) -> range:
        """Versions that can be read now."""

    def module(self, version: int) -> nn.Module:
        """Return the module whose leaves hold a live version."""


Modules = TypeVar("Modules", bound=StageModules)


class Read(NamedTuple):
    """What a batch was computed on and of."""

    version: int
    """Of the weights."""
    num_tokens: int
    """Valid target tokens."""


class _InFlight(NamedTuple):
    """A microbatch between its forward and its backward."""

    x: Tensor | None
    """Leaf that the stage before gave; none on the first stage."""
    output: Tensor
    version: int
    """Of the weights it read."""
    num_writes: int
    """Writes to those weights so far; more at its backward would mean that they are others now."""


class StageProgram(Generic[Modules]):
    """Computes one stage, microbatch by microbatch.

    A microbatch keeps its input leaf and its output from forward to backward; the graph between them holds the leaves
    of the weights version that its forward read, which no other version's buffer can change.

    Args:
        parts: Modules and weights of the stage.
        batches: Gives the batch of an index.
        num_microbatches: Microbatches a batch.
        device: Where to compute.
        loss_sum: Of the last stage's output and the targets, summed.
    """

    def __init__(
        self,
        parts: Modules,
        batches: BatchSource,
        *,
        num_microbatches: int,
        device: torch.device,
        loss_sum: Loss,
    ) -> None:
        self.parts = parts
        self._batches = batches
        self._num_microbatches = num_microbatches
        self._device = device
        self._loss_sum = loss_sum
        self._in_flight: dict[int, _InFlight] = {}
        self._accumulator = GradientAccumulator()
        self._batch: Batch | None = None
        self._losses: dict[int, Tensor] = {}
        self._reads: dict[int, Read] = {}
        self.peak_in_flight = 0

    def forward(self, microbatch: int, version: int, received: Tensor | None) -> Tensor | None:
        """Compute a microbatch on a weights version.

        Args:
            microbatch: Counted over the whole run.
            version: Which weights to read.
            received: Activations of the stage before, shape (B, T, D); ``None`` on the first stage.

        Returns:
            Activations for the next stage; ``None`` on the last.

        Raises:
            StageError: The stage gave something that is not a tensor.
        """
        batch, key, part, num_tokens = self._place(microbatch)
        spec = self.parts.spec
        x = to_device(part.inputs, self._device) if received is None else received.requires_grad_()
        output = self.parts.module(version)(x, dropout_key=key)
        if not isinstance(output, Tensor):
            raise StageError(
                f"the stage of blocks {spec.blocks.start} to {spec.blocks.stop - 1} returned a "
                f"{type(output).__name__}; stages exchange one tensor. Pack what the next stage needs into one."
            )
        if spec.head:
            # The whole batch's token count is the one normalization, so no mean of means arises.
            output = self._loss_sum(output, to_device(part.targets, self._device)) / num_tokens
            self._losses[batch] = self._losses.get(batch, 0) + output.detach().double()
        self._reads[batch] = Read(version, num_tokens)
        leaf = None if received is None else x
        self._in_flight[microbatch] = _InFlight(leaf, output, version, self._num_writes(version))
        self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))
        return None if spec.head else output.detach()

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Compute the gradients of a microbatch and add the weights' to the batch's.

        Args:
            microbatch: One whose forward has run.
            received: Gradient with respect to what forward returned; ``None`` on the last stage.

        Returns:
            Gradient with respect to what forward received; ``None`` on the first stage.

        Raises:
            StalenessError: The weights that forward read have been written to since. Autograd notices this only where
                it kept a weight itself: activations that are recomputed would silently be those of other weights.
        """
        x, output, version, num_writes = self._in_flight.pop(microbatch)
        if self._num_writes(version) != num_writes:
            live = self.parts.live
            raise StalenessError(
                f"version {version} of the weights was overwritten while microbatch {microbatch} was between its "
                f"forward and its backward; held are {live.start} to {live.stop - 1}. Its gradients would be those of "
                "other weights. Nothing but the optimizer step may write to published weights."
            )
        torch.autograd.backward(output, received)
        self._accumulator.add(self._leaves(version))
        return None if x is None else x.grad

    def rehearse(self, batch: int, shape: tuple[int, ...]) -> None:
        """Compute a batch's first microbatch for nothing, on zeros in place of what other stages would give.

        Whatever has to be compiled is compiled by it, on all stages at the same time: else each would begin when the
        first microbatch has come to it, while those behind it wait.

        Args:
            batch: The next one.
            shape: Of what stages hand over.
        """
        spec, version = self.parts.spec, self.parts.live.stop - 1
        weight = next(iter(self._leaves(version).values()))
        message = torch.zeros(shape, dtype=weight.dtype, device=self._device)
        microbatch = batch * self._num_microbatches
        self.forward(microbatch, version, None if spec.embed else message.clone())
        self.backward(microbatch, None if spec.head else message)
        self.take_gradients()
        self.take_loss(batch)
        self.take_router(batch)
        self.take_read(batch)

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the batch's summed gradients by leaf name, after its last backward, and begin a new batch."""
        return self._accumulator.take()

    def take_loss(self, batch: int) -> Tensor | None:
        """Return a batch's mean loss, after its last backward; ``None`` on a stage without the head."""
        return self._losses.pop(batch, None)

    def take_router(self, batch: int) -> dict[int, Tensor]:
        """Return what a batch's routers did by layer, after its last backward; empty without experts."""
        return self.parts.router_log.take(batch)

    def take_read(self, batch: int) -> Read:
        """Return what a batch read, after its last backward."""
        return self._reads.pop(batch)

    def _leaves(self, version: int) -> dict[str, nn.Parameter]:
        return self.parts.leaves[version % len(self.parts.leaves)]

    def _num_writes(self, version: int) -> int:
        """Count in-place writes, which a leaf and its buffer share; about 0.1 us a parameter."""
        return sum(leaf._version for leaf in self._leaves(version).values())

    def _place(self, microbatch: int) -> tuple[int, MicrobatchKey, Batch, int]:
        """Return a microbatch's batch, the key of its dropout masks, its tokens, and the valid ones of the batch."""
        batch, index = divmod(microbatch, self._num_microbatches)
        whole = self._current(batch)
        return batch, (batch, index), whole.microbatch(index, self._num_microbatches), whole.num_tokens

    def _current(self, index: int) -> Batch:
        """Return the batch being read; forwards go through batches in order, so one is enough."""
        if self._batch is None or self._batch.index != index:
            self._batch = self._batches(index)
        return self._batch
