"""One stage of a worker that is a pipeline: two buffers of weights, and the microbatches of leases."""

import copy
import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from slipstream.assembly import bind
from slipstream.data.loader import Batch
from slipstream.dataparallel.ledger import Lease
from slipstream.dataparallel.router_tally import RouterRows
from slipstream.dataparallel.shared import Layout
from slipstream.executor import BatchSource
from slipstream.models.moe import MicrobatchKey, RouterLog, attach_log
from slipstream.models.partition import StageSpec
from slipstream.models.parts import Loss, ModelParts
from slipstream.pipeline.cycle_order import NUM_BUFFERS
from slipstream.pipeline.stage import StageProgram

FORWARD_SHARE = 1 / 3
"""Of the emulated time of a microbatch; a backward takes twice as long as a forward."""


class StageBuffers:
    """A stage of the model over two buffers of weights in turns: cycle c is computed on buffer c mod 2.

    Args:
        model: The whole model.
        spec: Which part of it.
        layout: Of its weights, by parameter name.
        device: Where to compute.

    Attributes:
        flats: The buffers.
        newest: The newest cycle that has begun.
    """

    def __init__(self, model: ModelParts, spec: StageSpec, layout: Layout, *, device: torch.device) -> None:
        tied = model.tied
        self.spec = spec
        self.flats = [layout.empty(device=device) for _ in range(NUM_BUFFERS)]
        self.newest = 0
        module = model.build(spec, device)
        self.router_log = RouterLog()
        attach_log(module, self.router_log)
        self._modules = [module, *(copy.deepcopy(module) for _ in self.flats[1:])]
        leaves = [leaf for leaf, _ in module.named_parameters()]
        views = [layout.views(flat) for flat in self.flats]
        self.leaves = [
            bind(each, {leaf: held[tied.get(leaf, leaf)] for leaf in leaves})
            for each, held in zip(self._modules, views, strict=True)
        ]

    @property
    def live(self) -> range:
        """Cycles whose weights are here."""
        return range(max(self.newest - NUM_BUFFERS + 1, 0), self.newest + 1)

    def module(self, version: int) -> nn.Module:
        """Return the module of a cycle."""
        assert version in self.live
        return self._modules[version % NUM_BUFFERS]


class LeaseProgram(StageProgram[StageBuffers]):
    """Forward and backward of one stage, over leases: what is a batch elsewhere is a cycle here.

    Args:
        modules: The stage.
        microbatches: Gives the microbatch of a number.
        step_microbatches: Microbatches of a step; the masks of dropout are numbered by them.
        device: Where to compute.
        loss_sum: Of the last stage's output and the targets, summed.
    """

    def __init__(
        self,
        modules: StageBuffers,
        microbatches: BatchSource,
        *,
        step_microbatches: int,
        device: torch.device,
        loss_sum: Loss,
    ) -> None:
        super().__init__(modules, microbatches, num_microbatches=step_microbatches, device=device, loss_sum=loss_sum)
        self._places: dict[int, tuple[int, MicrobatchKey, Batch, int]] = {}
        self._shares: dict[int, float] = {}
        self._pace_s: dict[int, float] = {}
        self._keys: dict[int, list[MicrobatchKey]] = {}
        self._next = 0

    def begin(self, cycle: int, lease: Lease, *, pace_s: float = 0.0) -> None:
        """Get ready for the next cycle.

        Args:
            cycle: Its number.
            lease: Which microbatches.
            pace_s: Seconds that one shall take on this stage; less than it takes: as long as it takes.
        """
        numbers = list(lease.microbatches())
        parts = [self._batches(number) for number in numbers]
        num_tokens = sum(part.num_tokens for part in parts)
        # A microbatch's dropout masks belong to it, whoever computes it.
        keys = [divmod(number, self._num_microbatches) for number in numbers]
        for position, (key, part) in enumerate(zip(keys, parts, strict=True), start=self._next):
            self._places[position] = cycle, key, part, num_tokens
        self._shares[cycle], self._pace_s[cycle] = parts[0].num_tokens / num_tokens, pace_s
        self._keys[cycle] = keys
        self._next += len(numbers)
        self.parts.newest = cycle

    def end(self, cycle: int) -> RouterRows:
        """Forget a cycle, after its last backward; return what its routers did."""
        del self._shares[cycle], self._pace_s[cycle]
        found = self.parts.router_log.take_of(self._keys.pop(cycle))
        return tuple(tuple(report.tolist()) for _, report in sorted(found.items()))

    def forward(self, microbatch: int, version: int, received: Tensor | None) -> Tensor | None:
        """Compute a microbatch on the weights of its cycle."""
        compute = functools.partial(super().forward, microbatch, version, received)
        return self._at_pace(version, FORWARD_SHARE, compute)

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Compute the gradients of a microbatch and add the weights' to its cycle's."""
        cycle = self._places[microbatch][0]
        compute = functools.partial(super().backward, microbatch, received)
        gradient = self._at_pace(cycle, 1 - FORWARD_SHARE, compute)
        del self._places[microbatch]
        return gradient

    def _at_pace(self, cycle: int, share: float, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Compute, and sleep until it has taken as long as it shall."""
        until_s = time.perf_counter() + share * self._pace_s[cycle]
        # Cycles alternate on a stage, and activation checkpointing runs a forward again in the backward.
        self.parts.router_log.batch_share = self._shares[cycle]
        found = compute()
        if (rest_s := until_s - time.perf_counter()) > 0:
            time.sleep(rest_s)
        return found

    def _place(self, microbatch: int) -> tuple[int, MicrobatchKey, Batch, int]:
        return self._places[microbatch]
