"""The unit of work `pseudo_gradient`: a worker takes optimizer steps of its own and pushes how far they led.

::

    weights read   x --step--> . --step--> . --step--> y      H steps of a batch each, by the worker's own optimizer
    pushed         x - y                                      the pseudo-gradient
    server         x <- x - outer_lr (x - y), and momentum    by delayed Nesterov, through the one update path

Source:
    Douillard et al., "DiLoCo" (2023, arXiv 2311.08105); asynchronously: Liu et al., "Asynchronous Local-SGD training
    for language modeling" (2024, arXiv 2401.09135).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.assembly import StageParts
from slipstream.config import Config, OptimConfig, StalenessConfig
from slipstream.dataparallel.checks import outer_momentum_every
from slipstream.dataparallel.ledger import Lease
from slipstream.dataparallel.ranges import RangeSet
from slipstream.dataparallel.router_tally import mean_rows
from slipstream.dataparallel.worker import Replica, Work, Worker
from slipstream.executor import BatchSource, StateReader
from slipstream.models.partition import whole
from slipstream.optim.state import export_state, import_state, join_tensors, split_tensors
from slipstream.staleness.gradient import Gradient

OUTER_OPTIMIZER = "slipstream.optim.delayed_nesterov.DelayedNesterov"


def build_worker(config: Config, replica: Replica, microbatches: BatchSource, *, device: torch.device) -> Worker:
    """Return what computes the unit of work that the settings name; the arguments are those of :class:`Worker`."""
    kind = Worker if config.dataparallel.unit == "gradient" else LocalWorker
    return kind(config, replica, microbatches, device=device)


def server_config(config: Config) -> Config:
    """Return the settings that the server's weights and optimizer are made by.

    With pseudo-gradients the run's own rule, schedule and clipping are the workers'; the server has a constant rate and
    clips nothing.
    """
    if config.dataparallel.unit == "gradient":
        return config
    settings = config.dataparallel
    optim = OptimConfig(
        name=OUTER_OPTIMIZER,
        lr=settings.outer_lr,
        weight_decay=0.0,
        args={
            "momentum": settings.outer_momentum,
            "every": outer_momentum_every(settings),
            "spread": settings.outer_momentum_spread,
        },
        max_grad_norm=0.0,
        lr_schedule="constant",
        lr_total_steps=1,
    )
    return dataclasses.replace(config, optim=optim)


def cut(lease: Lease, num_parts: int) -> list[Lease]:
    """Cut a lease into parts that are as even as can be, in the order of its microbatches.

    Args:
        lease: Of any number of microbatches.
        num_parts: Wanted; never more than there are microbatches.

    Example:
        >>> lease = Lease(id=0, worker=0, incarnation=1, ranges=((0, 3), (7, 9)), deadline_s=0.0)
        >>> [part.ranges for part in cut(lease, 2)]
        [((0, 2),), ((2, 3), (7, 9))]
    """
    numbers = list(lease.microbatches())
    num_parts = min(num_parts, len(numbers))
    ends = [len(numbers) * part // num_parts for part in range(num_parts + 1)]
    return [
        dataclasses.replace(lease, ranges=tuple(RangeSet((each, each + 1) for each in numbers[begin:end])))
        for begin, end in itertools.pairwise(ends)
    ]


class LocalSteps:
    """One worker's own optimizer, and weights that it moves.

    The rate follows the run, not the worker: step h of a worker that has read version v is update ``v H + h`` of the
    schedule, so whoever comes later, or is slower, has the rate of everybody else.

    Args:
        config: Resolved settings; the rule, schedule and clipping are the run's.
        microbatches: Gives the microbatch of a number.
        device: Where to compute.

    Attributes:
        incarnation: Of the worker whose state this is; 0: nobody's yet.

    Cost:
        Two copies of the weights and the optimizer's state; a pseudo-gradient is one more.
    """

    def __init__(self, config: Config, microbatches: BatchSource, *, device: torch.device) -> None:
        own = dataclasses.replace(config, staleness=StalenessConfig(delay=0))
        self._parts = StageParts(own, whole(config.model), num_versions=1, device=device)
        self._worker = Worker(config, Replica.of_server(self._parts), microbatches, device=device)
        self._num_steps = config.dataparallel.local_steps
        self.incarnation = 0

    @torch.no_grad()
    def _begin(self, read: Mapping[str, Tensor], *, version: int) -> None:
        updater = self._parts.updater
        updater.weights.restore({version * self._num_steps: read})
        for name, master in updater.masters.items():
            master.copy_(read[name])

    def compute(self, lease: Lease, read: Mapping[str, Tensor], *, version: int, worker: int) -> Work:
        """Take the local steps of a lease, and return how far they led.

        Args:
            lease: Its microbatches are shared out evenly among the steps.
            read: Published weights by name.
            version: Of those.
            worker: Number of the worker.
        """
        self._begin(read, version=version)
        updater = self._parts.updater
        works, routers = [], []
        is_whole = True
        for part in cut(lease, self._num_steps):
            work = self._worker.compute(part, version=updater.weights.latest, worker=worker)
            is_whole &= not updater.step(work.gradient, work.grad_norm).skipped
            works.append((work.loss, work.gradient.num_tokens))
            routers.append((float(work.gradient.num_tokens), work.router))
        num_tokens = sum(count for _, count in works)
        with torch.no_grad():
            moved = {name: read[name].to(y.dtype) - y for name, y in updater.masters.items()}
        gradient = Gradient(tensors=moved, read_version=version, num_tokens=num_tokens, worker=worker)
        norm = self._worker.norm(gradient)
        return Work(
            gradient=gradient,
            # What a step that was skipped would have changed is missing: the server must not take it for the whole.
            grad_norm=norm if is_whole else torch.full_like(norm, float("nan")),
            loss=sum(loss * count for loss, count in works) / num_tokens,
            router=mean_rows(routers),
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what passes from one lease to the next: the optimizer's tensors by path, and the rest of it."""
        tensors: dict[str, Tensor] = {}
        trees: dict[str, Any] = {}
        for optimizer in self._parts.updater.optimizers.values():
            for name, entry in export_state(optimizer).items():
                held, trees[name] = split_tensors(entry)
                tensors |= {f"{name}/{path}": tensor for path, tensor in held.items()}
        return tensors, trees

    def restore(self, trees: Mapping[str, Any], state: StateReader, prefix: str) -> None:
        """Take back what :meth:`state` gave, into an optimizer that has not stepped yet."""

        def read(name: str, path: str) -> Tensor:
            return state.tensor(f"{prefix}/{name}/{path}")

        saved = {name: join_tensors(tree, partial(read, name)) for name, tree in trees.items()}
        for optimizer in self._parts.updater.optimizers.values():
            import_state(optimizer, saved)


class LocalWorker(Worker):
    """Computes pseudo-gradients. Several workers of one process take turns, each with an optimizer of its own.

    Args:
        config: Resolved settings.
        replica: The published weights; they are only read.
        microbatches: Gives the microbatch of a number.
        device: Where to compute.
    """

    def __init__(self, config: Config, replica: Replica, microbatches: BatchSource, *, device: torch.device) -> None:
        super().__init__(config, replica, microbatches, device=device)
        self._begin_anew = partial(LocalSteps, config, microbatches, device=device)
        self._local: dict[int, LocalSteps] = {}

    def prepare(self, worker: int) -> None:
        """Build what a worker will need for its first lease, which shall not take the longer for it."""
        self._local[worker] = self._begin_anew()

    def compute(self, lease: Lease, *, version: int, worker: int, mean_over: int | None = None) -> Work:
        """Take the local steps of a lease; of one that nobody gave out (a trial for the time), only the gradient.

        Args:
            lease: Which microbatches. The optimizer's state belongs to an incarnation, and ends with it.
            version: Of the weights that the replica holds now.
            worker: Number of the worker.
            mean_over: As for a gradient.
        """
        if not lease.incarnation:
            return super().compute(lease, version=version, worker=worker, mean_over=mean_over)
        local = self._local.get(worker)
        if local is None or local.incarnation not in (0, lease.incarnation):
            local = self._local[worker] = self._begin_anew()
        local.incarnation = lease.incarnation
        read = {name: self._replica.leaves[name].detach() for name in self._replica.names}
        return local.compute(lease, read, version=version, worker=worker)

    def tensors(self) -> dict[str, Tensor]:
        """Return all workers' optimizer states by path."""
        return {
            f"local@{worker}/{path}": tensor
            for worker, local in self._local.items()
            for path, tensor in local.state()[0].items()
        }

    def state_dict(self) -> list[Any]:
        """Return the numbers that belong to :meth:`tensors`."""
        return [[worker, local.incarnation, local.state()[1]] for worker, local in self._local.items()]

    def restore(self, numbers: Sequence[Any], state: StateReader) -> None:
        """Take back what :meth:`state_dict` and :meth:`tensors` gave."""
        self._local = {}
        for worker, incarnation, trees in numbers:
            self.prepare(worker)
            self._local[worker].incarnation = incarnation
            self._local[worker].restore(trees, state, f"local@{worker}")
