"""A worker's compute: published weights and a lease make a gradient."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.assembly import StageParts, bind, llama_parts, sum_by_parameter
from slipstream.config import Config
from slipstream.dataparallel.ledger import Lease
from slipstream.dataparallel.router_tally import RouterRows
from slipstream.executor import BatchSource, StateReader
from slipstream.microbatches import run_microbatches
from slipstream.models.moe import RouterLog, attach_log
from slipstream.models.partition import whole
from slipstream.models.parts import master_names, tied_pair
from slipstream.staleness.gradient import Gradient, GradientAccumulator, global_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """A whole model whose leaves are somebody else's memory: the published weights.

    Attributes:
        module: The model.
        leaves: Its leaf parameters.
        names: Parameters in module order, a tied pair once.
        tied_pair: Leaf names of a tied embedding and head.
        router_log: What the module's routers note.
    """

    module: nn.Module
    leaves: Mapping[str, Tensor]
    names: list[str]
    tied_pair: tuple[str, str] | None
    router_log: RouterLog

    @classmethod
    def of_server(cls, parts: StageParts) -> "Replica":
        """Return the model that a server in this process publishes into."""
        return cls(
            module=parts.modules[0],
            leaves=parts.leaves[0],
            names=parts.names,
            tied_pair=parts.tied_pair,
            router_log=parts.router_log,
        )

    @classmethod
    def over(cls, config: Config, weights: Mapping[str, Tensor], *, device: torch.device) -> "Replica":
        """Build a model over weights by parameter name, such as a buffer in shared memory; they are not copied."""
        model = llama_parts(config)
        module = model.build(whole(config.model), device)
        log = RouterLog()
        attach_log(module, log)
        leaves = bind(module, {leaf: weights[model.tied.get(leaf, leaf)] for leaf, _ in module.named_parameters()})
        return cls(
            module=module,
            leaves=leaves,
            names=master_names(model),
            tied_pair=tied_pair(model),
            router_log=log,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a worker has computed.

    Attributes:
        gradient: Mean over its tokens, by parameter name.
        grad_norm: Scalar, exact global norm of it; a shard clips by it.
        loss: Mean loss.
        router: What the routers did, of a model with experts.
    """

    gradient: Gradient
    grad_norm: Tensor
    loss: float
    router: RouterRows = ()

    @property
    def is_finite(self) -> bool:
        """Whether the server can use it."""
        return bool(torch.isfinite(self.grad_norm))


class Worker:
    """Computes the gradient of leases.

    Args:
        config: Resolved settings.
        replica: The model.
        microbatches: Gives the microbatch of a number, as a batch.
        device: Where to compute.
    """

    def __init__(self, config: Config, replica: Replica, microbatches: BatchSource, *, device: torch.device) -> None:
        self._replica = replica
        self._microbatches = microbatches
        self._device = device
        self._step_microbatches = config.pipeline.num_microbatches
        self._loss_sum = llama_parts(config).loss_sum
        self._accumulator = GradientAccumulator()

    def compute(self, lease: Lease, *, version: int, worker: int, mean_over: int | None = None) -> Work:
        """Compute a lease's gradient on the weights that the replica holds now.

        Args:
            lease: Which microbatches.
            version: Of those weights.
            worker: Number of this worker.
            mean_over: Tokens to take the mean over; ``None``: the lease's own.
        """
        # A microbatch's dropout masks belong to it, whoever computes it.
        parts = [
            (divmod(number, self._step_microbatches), self._microbatches(number)) for number in lease.microbatches()
        ]
        num_tokens = sum(part.num_tokens for _, part in parts)
        replica = self._replica
        # The auxiliary losses of experts are means over microbatches, of whatever the gradient is the mean over.
        replica.router_log.batch_share = parts[0][1].num_tokens / (mean_over or num_tokens)
        loss = run_microbatches(
            parts,
            module=replica.module,
            leaves=replica.leaves,
            accumulator=self._accumulator,
            num_tokens=mean_over or num_tokens,
            device=self._device,
            loss_sum=self._loss_sum,
        )
        reports = [each.tolist() for _, each in sorted(replica.router_log.take_all().items())]
        whole_share = (mean_over or num_tokens) / num_tokens  # of a part of a mean, what it would be by itself
        gradient = Gradient(
            tensors=sum_by_parameter(self._accumulator.take(), replica.names, tied_pair=replica.tied_pair),
            read_version=version,
            num_tokens=num_tokens,
            worker=worker,
        )
        router = tuple((*loads, aux_loss * whole_share) for *loads, aux_loss in reports)
        return Work(gradient=gradient, grad_norm=self.norm(gradient), loss=loss, router=router)

    def norm(self, gradient: Gradient) -> Tensor:
        """Return the exact global norm of a gradient."""
        return global_norm(gradient.norms(self._replica.names, device=self._device))

    def prepare(self, worker: int) -> None:
        """Get ready for a worker's first lease: there is nothing to do."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what passes from one lease to the next, by path: nothing."""
        return {}

    def state_dict(self) -> list[Any]:
        """Return the numbers that belong to :meth:`tensors`."""
        return []

    def restore(self, numbers: Sequence[Any], state: StateReader) -> None:
        """Take back what :meth:`state_dict` and :meth:`tensors` gave."""


def work_state(work: Work) -> dict[str, Any]:
    """Return the numbers of a piece of work as plain JSON values; its tensors are saved by name."""
    return {
        "read_version": work.gradient.read_version,
        "num_tokens": work.gradient.num_tokens,
        "worker": work.gradient.worker,
        "loss": work.loss,
        "names": list(work.gradient.tensors),
        "idle": [name for name, tensor in work.gradient.tensors.items() if tensor is None],
    }


def work_tensors(work: Work, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a piece of work by path."""
    tensors = {f"{prefix}/{name}": tensor for name, tensor in work.gradient.tensors.items() if tensor is not None}
    return {f"{prefix}-norm": work.grad_norm, **tensors}


def restored_work(numbers: Mapping[str, Any], state: StateReader, prefix: str, *, device: torch.device) -> Work:
    """Return what :func:`work_state` and :func:`work_tensors` gave."""
    tensors: dict[str, Tensor | None] = {
        name: None if name in numbers["idle"] else state.tensor(f"{prefix}/{name}").to(device)
        for name in numbers["names"]
    }
    gradient = Gradient(
        tensors=tensors,
        read_version=int(numbers["read_version"]),
        num_tokens=int(numbers["num_tokens"]),
        worker=numbers["worker"],
    )
    return Work(gradient=gradient, grad_norm=state.tensor(f"{prefix}-norm").to(device), loss=float(numbers["loss"]))
