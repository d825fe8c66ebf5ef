"""Same-batch probes of the engine `inline`: a microbatch computed again at the weights of now."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.server import Server
from slipstream.dataparallel.worker import Worker
from slipstream.staleness.damping import agc_of
from slipstream.staleness.gradient import clip


class Prober:
    """Computes the last microbatch of a gradient that has arrived at the weights it read and at the newest.

    In a worker that would cost the second half: the first is part of the gradient it pushes. So the virtual clock is
    charged one microbatch, while this process computes two, and nothing has to be kept in between.

    Args:
        config: Resolved settings.
        server: Holds the weights that workers have read, and the compensator.
        worker: Computes gradients on the server's weights.
    """

    def __init__(self, config: Config, server: Server, worker: Worker) -> None:
        self._every = config.staleness.agc.probe_every
        self._max_grad_norm = config.optim.max_grad_norm
        self._server = server
        self._worker = worker
        self._agc = agc_of(server.parts[0].updater.corrections) if self._every else None

    def observe(self, order: Order, *, sequence: int, grad_norm: float) -> bool:
        """Probe, if it is time and the weights have moved.

        Args:
            order: Of the gradient, before the server takes it.
            sequence: Of the worker's pushes.
            grad_norm: Of the gradient: the probe is clipped by the same factor.

        Returns:
            Whether the worker computes one more microbatch for it.
        """
        server = self._server
        if self._agc is None or sequence % self._every or order.version == server.version:
            return False
        weights = server.parts[0].updater.weights
        newest = weights.read(server.version)
        read = server.shards[0].weights_read(order.version)
        backup = {name: tensor.clone() for name, tensor in newest.items()}
        new = self._gradient(order)
        _copy(newest, read)
        old = self._gradient(order)
        _copy(newest, backup)
        clip((*old.values(), *new.values()), grad_norm, limit=self._max_grad_norm)
        self._agc.probe(old, read, new, backup)
        return True

    def _gradient(self, order: Order) -> Mapping[str, Tensor | None]:
        last = order.lease.ranges[-1][1] - 1
        lease = dataclasses.replace(order.lease, ranges=((last, last + 1),))
        return self._worker.compute(lease, version=order.version, worker=order.worker).gradient.tensors


@torch.no_grad()
def _copy(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(tensors[name])
