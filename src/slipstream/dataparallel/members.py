"""What the server knows of its workers and of the work they have out. Imports no torch."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.tally import Tally


@dataclasses.dataclass
class Member:
    """What the server knows of a worker.

    Attributes:
        incarnation: The one it counts on.
        epoch: In which it joined.
        state: ``lost``: it left, or a lease expired; it may come back as another incarnation.
        last_sequence: Of the newest push that was judged.
        strikes: Leases in a row whose gradients were not finite, and nobody else failed on them.
        patience: Factor on its deadlines: doubled whenever one passes, 1 again after a push that was accepted. Who is
            slower than was thought gets through sooner or later, instead of being given up for ever.
        staleness: Of its accepted pushes, over all incarnations.
        microbatches: Committed, over all incarnations.
    """

    incarnation: int
    epoch: int
    state: Literal["live", "lost", "quarantined"] = "live"
    last_sequence: int = 0
    strikes: list[int] = dataclasses.field(default_factory=list)
    patience: float = 1.0
    staleness: Tally = dataclasses.field(default_factory=Tally)
    microbatches: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {**vars(self), "strikes": list(self.strikes), "staleness": self.staleness.items()}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Member":
        """Return what :meth:`state_dict` gave."""
        tally = Tally((staleness, count) for staleness, count in state["staleness"])
        strikes = state["strikes"]
        if isinstance(strikes, int):  # a checkpoint of an older version kept no more than their number
            strikes = [-1] * strikes
        return cls(**{**state, "strikes": list(strikes), "staleness": tally})


class InFlight:
    """The orders whose gradients have not arrived, in the order in which they were given.

    Attributes:
        num_microbatches: In all of them.
        readers: How many read each version.

    Cost:
        O(1) an order; dropping a worker looks at all.
    """

    def __init__(self) -> None:
        self.num_microbatches = 0
        self.readers: collections.Counter[int] = collections.Counter()
        self._orders: collections.OrderedDict[int, Order] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def oldest_version(self) -> int:
        """The oldest version that somebody reads: the first order's, for versions only grow."""
        return next(iter(self._orders.values())).version

    def get(self, lease_id: int) -> Order | None:
        """Return the order of a lease that is out."""
        return self._orders.get(lease_id)

    def add(self, order: Order) -> None:
        """Take note of an order."""
        self._orders[order.lease.id] = order
        self.num_microbatches += order.lease.num_microbatches
        self.readers[order.version] += 1

    def settle(self, lease_id: int) -> int:
        """Forget an order: its gradient is here, or will not be waited for; return its microbatches."""
        order = self._orders.pop(lease_id)
        self.num_microbatches -= order.lease.num_microbatches
        self.readers[order.version] -= 1
        if not self.readers[order.version]:
            del self.readers[order.version]
        return order.lease.num_microbatches

    def drop(self, worker: int) -> None:
        """Forget a worker's orders."""
        for lease_id in [each for each, order in self._orders.items() if order.worker == worker]:
            self.settle(lease_id)

    def clear(self) -> None:
        """Forget all."""
        self.num_microbatches = 0
        self.readers.clear()
        self._orders.clear()

    def state_dict(self) -> list[tuple[int, int]]:
        """Return lease and version of each; the ledger knows the rest."""
        return [(order.lease.id, order.version) for order in self._orders.values()]
