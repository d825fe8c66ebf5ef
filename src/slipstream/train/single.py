"""The executor `single`: one process, any delay."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from slipstream.assembly import StageParts
from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.executor import BatchSource, Point, Snapshot, StateReader, StepReport
from slipstream.models.llama import cross_entropy_sum
from slipstream.models.partition import whole
from slipstream.staleness.gradient import Gradient, GradientAccumulator, global_norm
from slipstream.train.delays import delay_line


class SingleExecutor:
    """Trains the whole model in this process, each batch on the version that the delay line names.

    Args:
        config: Resolved settings.
        batches: Gives the batch of an index.
        device: Where to compute.
    """

    def __init__(self, config: Config, batches: BatchSource, *, device: torch.device) -> None:
        self._config = config
        self._batches = batches
        self._device = device
        self._delay_line = delay_line(config)
        self._parts = StageParts(config, whole(config.model), num_versions=self._delay_line.num_versions, device=device)
        self._accumulator = GradientAccumulator()

    @property
    def step(self) -> int:
        """Updates made so far."""
        return self._parts.updater.weights.latest

    def run_step(self, *, stop_requested: bool = False) -> StepReport:
        """Compute the next batch on the version it reads and make an update of it."""
        batch = self._batches(self.step)
        versions = self._delay_line.read_versions(batch.index, self._parts.parameter_of)
        loss = self._accumulate(batch, versions)
        by_parameter = {self._parts.parameter_of[leaf]: version for leaf, version in versions.items()}
        gradient = Gradient(
            tensors=self._parts.by_parameter(self._accumulator.take()),
            read_version=min(versions.values()),
            num_tokens=batch.num_tokens,
            read_versions=by_parameter if len(set(versions.values())) > 1 else None,
        )
        norm = global_norm(gradient.norms(self._parts.names, device=self._device))
        report = self._parts.updater.step(gradient, norm)
        return StepReport(
            step=report.version,
            loss=loss,
            grad_norm=report.grad_norm,
            lr=self._config.optim.lr * report.lr_factor,
            staleness=report.staleness,
            num_tokens=batch.num_tokens,
            skipped=report.skipped,
            stop=stop_requested,
        )

    def _accumulate(self, batch: Batch, versions: Mapping[str, int]) -> float:
        """Run forward and backward of each microbatch in order; return the batch's mean loss."""
        module, leaves = self._parts.mixed_module(versions)
        num_tokens = batch.num_tokens
        num_microbatches = self._config.pipeline.num_microbatches
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index in range(num_microbatches):
            part = batch.microbatch(index, num_microbatches)
            logits = module(self._tensor(part.inputs), dropout_key=(batch.index, index))
            # The whole batch's token count is the one normalization, so no mean of means arises.
            loss = cross_entropy_sum(logits, self._tensor(part.targets)) / num_tokens
            torch.autograd.backward(loss)
            self._accumulator.add(leaves)
            total += loss.detach()
        return float(total)

    @property
    def has_two_points(self) -> bool:
        """Whether x can differ from y by more than a cast."""
        return self._parts.updater.publish.changes_weights

    def evaluate(self, batches: Iterable[Batch], point: Point) -> float:
        """Return the summed loss in nats over batches."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            logits = self._parts.forward_at(point, self._tensor(batch.inputs))
            total += cross_entropy_sum(logits, self._tensor(batch.targets))
        return float(total)

    def _tensor(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self._device)

    def snapshot(self) -> Snapshot:
        """Return a copy of the state after the newest update."""
        return self._parts.snapshot()

    def restore(self, state: StateReader) -> None:
        """Continue from a saved state."""
        self._parts.restore(state)
