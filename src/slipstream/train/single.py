"""The executor `single`: one process, any delay."""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.assembly import StageParts, llama_parts, restore_slots, slot_tensors
from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.executor import BatchSource, Point, Snapshot, StateReader, StepReport
from slipstream.microbatches import run_microbatches, to_device
from slipstream.models.moe import RouterReport
from slipstream.models.partition import uncut
from slipstream.models.parts import ModelParts
from slipstream.staleness.backward import backward_on, build_backward
from slipstream.staleness.damping import agc_of
from slipstream.staleness.gradient import Gradient, GradientAccumulator, clip, global_norm
from slipstream.train.delays import delay_line


class SingleExecutor:
    """Trains the whole model in this process, each batch on the version that the delay line names.

    Args:
        config: Resolved settings.
        batches: Gives the batch of an index.
        device: Where to compute.
        model: What to train; ``None``: the decoder that the settings describe.
    """

    def __init__(
        self, config: Config, batches: BatchSource, *, device: torch.device, model: ModelParts | None = None
    ) -> None:
        model = model or llama_parts(config)
        self._config = config
        self._batches = batches
        self._device = device
        self._delay_line = delay_line(config)
        self._parts = StageParts(
            config,
            uncut(model.num_blocks),
            num_versions=self._delay_line.num_versions,
            device=device,
            model=model,
        )
        self._accumulator = GradientAccumulator()
        delays: dict[str, int] = {}
        for leaf, name in self._parts.parameter_of.items():
            delays[name] = max(delays.get(name, 0), self._delay_line.leaf_delay(leaf))
        self._backward = build_backward(config.staleness.backward_weights, delays=delays)
        self._agc = agc_of(self._parts.updater.corrections) if config.staleness.agc.probe_every else None

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
        router = self._parts.router_log.take(batch.index)
        norm = global_norm(gradient.norms(self._parts.names, device=self._device))
        if self._agc is not None and batch.index % self._config.staleness.agc.probe_every == 0:
            self._probe(batch, versions, grad_norm=float(norm))
        report = self._parts.updater.step(gradient, norm)
        if self._backward is not None:
            weights = self._parts.updater.weights
            self._backward.observe(weights.read(report.version - 1), weights.read(report.version))
        return StepReport(
            step=report.version,
            loss=loss,
            grad_norm=report.grad_norm,
            lr=self._config.optim.lr * report.lr_factor,
            staleness=report.staleness,
            num_tokens=batch.num_tokens,
            skipped=report.skipped,
            stop=stop_requested,
            router=tuple(RouterReport(*each.tolist()) for _, each in sorted(router.items())),
        )

    def method_metrics(self) -> Mapping[str, float]:
        """Return what methods against staleness tell of themselves, by name."""
        return self._parts.method_metrics()

    def _accumulate(self, batch: Batch, versions: Mapping[str, int]) -> float:
        """Run forward and backward of each microbatch in order; return the batch's mean loss."""
        module, leaves = self._parts.mixed_module(versions)
        count = self._config.pipeline.num_microbatches
        return run_microbatches(
            (((batch.index, index), batch.microbatch(index, count)) for index in range(count)),
            module=module,
            leaves=leaves,
            accumulator=self._accumulator,
            num_tokens=batch.num_tokens,
            device=self._device,
            saving=self._saving(versions, leaves),
            loss_sum=self._parts.model.loss_sum,
        )

    def _probe(self, batch: Batch, versions: Mapping[str, int], *, grad_norm: float) -> None:
        """Let the compensator see the last microbatch at the weights that were read and at the newest."""
        weights = self._parts.updater.weights
        newest = dict.fromkeys(versions, weights.latest)
        if self._agc is None or versions == newest:
            return
        log = self._parts.router_log
        share, log.batch_share = log.batch_share, 1.0
        old, new = self._last_gradient(batch, versions), self._last_gradient(batch, newest)
        log.take(batch.index)
        log.batch_share = share
        clip((*old.values(), *new.values()), grad_norm, limit=self._config.optim.max_grad_norm)
        names = self._parts.parameter_of.items()
        read = {name: weights.read(versions[leaf])[name] for leaf, name in names}
        self._agc.probe(old, read, new, weights.read(weights.latest))

    def _last_gradient(self, batch: Batch, versions: Mapping[str, int]) -> dict[str, Tensor | None]:
        """Return the gradient of a batch's last microbatch, at the version given for each leaf."""
        module, leaves = self._parts.mixed_module(versions)
        count = self._config.pipeline.num_microbatches
        part = batch.microbatch(count - 1, count)
        run_microbatches(
            [((batch.index, count - 1), part)],
            module=module,
            leaves=leaves,
            accumulator=self._accumulator,
            num_tokens=part.num_tokens,
            device=self._device,
            loss_sum=self._parts.model.loss_sum,
        )
        return self._parts.by_parameter(self._accumulator.take())

    def _saving(
        self, versions: Mapping[str, int], leaves: Mapping[str, Tensor]
    ) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a forward keeps the weights that its backward is to use."""
        weights = self._parts.updater.weights
        if self._backward is None or set(versions.values()) == {weights.latest}:
            return contextlib.nullcontext()
        newest = weights.read(weights.latest)
        others = {
            leaf: self._backward.of(name, newest[name], steps=weights.latest - versions[leaf])
            for leaf, name in self._parts.parameter_of.items()
        }
        return backward_on(leaves, others)

    @property
    def has_two_points(self) -> bool:
        """Whether x can differ from y by more than a cast."""
        return self._parts.updater.publish.changes_weights

    def evaluate(self, batches: Iterable[Batch], point: Point) -> float:
        """Return the summed loss in nats over batches."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            logits = self._parts.forward_at(point, to_device(batch.inputs, self._device))
            total += self._parts.model.loss_sum(logits, to_device(batch.targets, self._device))
        return float(total)

    def snapshot(self) -> Snapshot:
        """Return a copy of the state after the newest update."""
        snapshot = self._parts.snapshot()
        if self._backward is None:
            return snapshot
        held = slot_tensors("backward", self._backward.slots)
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in held.items()}
        return dataclasses.replace(snapshot, tensors={**snapshot.tensors, **copies})

    def figures(self) -> Mapping[str, Any]:
        """Return nothing beside what all executors have."""
        return {}

    def restore(self, state: StateReader) -> None:
        """Continue from a saved state."""
        self._parts.restore(state)
        if self._backward is not None:
            restore_slots("backward", self._backward.slots, state, self._parts.updater.masters)
