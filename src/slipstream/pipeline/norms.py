"""The exact global gradient norm, and what else every rank must know of a batch, without a barrier."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.models.moe import RouterReport
from slipstream.pipeline.transport import Transport, wait
from slipstream.staleness.gradient import Gradient

_EXTRAS = 4
"""Loss, tokens, stop requests, idle seconds: the last numbers of a vector."""

_PER_ROUTER = len(RouterReport._fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What all ranks know of a batch once its vectors are added up.

    Attributes:
        norms: Norm of each parameter of the whole model, float32, in the model's order.
        loss: Mean loss in nats.
        num_tokens: Valid target tokens.
        stop: Some rank was asked to stop.
        idle_s: Seconds that ranks waited since the batch before, summed over ranks.
        router: What the router of each layer with experts did, in the order of layers.
    """

    norms: Tensor
    loss: float
    num_tokens: int
    stop: bool
    idle_s: float
    router: tuple[RouterReport, ...] = ()


class NormExchange:
    """Adds up one small vector a batch over all ranks while they go on computing.

    Each rank fills in the norms of the parameters it answers for and leaves 0 elsewhere, so adding loses nothing and
    the result does not depend on how many ranks there are. A norm that is not finite reaches every rank the same way:
    all of them skip the step, or none.

    Args:
        transport: Connects the ranks.
        names: Parameters of the whole model, in order.
        router_layers: Layers of the whole model that have experts, in order.

    Cost:
        8 (parameters by name + 4 a layer with experts + 4) bytes a batch; no wait before the optimizer step that needs
        it.
    """

    def __init__(self, transport: Transport, *, names: Sequence[str], router_layers: Sequence[int] = ()) -> None:
        self._transport = transport
        self._names = names
        self._router_layers = router_layers
        self._vectors: dict[int, Tensor] = {}
        self._works: dict[int, dist.Work] = {}
        self._results: dict[int, BatchResult] = {}
        self.idle_s = 0.0

    def add(
        self, version: int, gradient: Gradient, loss: Tensor | None, *, router: Mapping[int, Tensor] | None = None
    ) -> None:
        """Enter a stage's share.

        Args:
            version: The version that the batch makes.
            gradient: Of the parameters the stage answers for.
            loss: Mean loss of the batch, from the last stage.
            router: Fields of :class:`RouterReport` by layer, of the layers that the stage holds.
        """
        device = self._transport.device
        if version not in self._vectors:
            length = len(self._names) + _PER_ROUTER * len(self._router_layers) + _EXTRAS
            self._vectors[version] = torch.zeros(length, dtype=torch.float64, device=device)
        vector = self._vectors[version]
        vector[: len(self._names)] += gradient.norms(self._names, device=device)
        for layer, numbers in (router or {}).items():
            begin = len(self._names) + _PER_ROUTER * self._router_layers.index(layer)
            vector[begin : begin + _PER_ROUTER] += numbers
        if loss is not None:
            vector[-_EXTRAS] += loss

    def post(self, version: int, *, num_tokens: int, stop: bool, idle_s: float) -> None:
        """Send this rank's vector on its way; returns at once."""
        vector = self._vectors[version]
        if self._transport.rank == 0:
            vector[-3] = num_tokens
        vector[-2], vector[-1] = float(stop), idle_s
        self._works[version] = self._transport.add_up(vector)

    def wait(self, version: int) -> BatchResult:
        """Return the sum, waiting for it if it is not there.

        Raises:
            PeerError: A rank did not enter its share in time.
        """
        if version not in self._results:
            begin = time.perf_counter()
            what = f"the gradient norm of batch {version - 1} from all ranks"
            work, transport = self._works.pop(version), self._transport
            wait(work, what=what, device=transport.device, timeout_s=transport.timeout_s)
            self.idle_s += time.perf_counter() - begin
            vector = self._vectors.pop(version)
            loss, num_tokens, stop, idle_s = vector[-_EXTRAS:].tolist()
            router = vector[len(self._names) : -_EXTRAS].view(-1, _PER_ROUTER).tolist()
            self._results[version] = BatchResult(
                norms=vector[: len(self._names)].float(),
                loss=loss,
                num_tokens=int(num_tokens),
                stop=stop > 0,
                idle_s=idle_s,
                router=tuple(RouterReport(*each) for each in router),
            )
        return self._results[version]

    def take(self, version: int) -> BatchResult:
        """Return the sum and forget it."""
        result = self.wait(version)
        del self._results[version]
        return result
