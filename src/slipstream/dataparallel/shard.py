"""One shard of the parameter server: accumulates the workers' gradients and makes the optimizer's steps."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.executor import StateReader
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.updater import Updater, UpdateReport


class Shard:
    """Owns a set of parameters, through the one update path.

    Each gradient is clipped and corrected for its own staleness as it arrives, then added by the weight that its tokens
    have; a step is made of the mean. A step of one gradient is made of that gradient, bitwise.

    Args:
        updater: Over the parameters; its ring of versions needs one buffer.

    Cost:
        One gradient, while several make a step; and a copy of each version that a worker is still computing on, if a
        correction looks at the weights read.
    """

    def __init__(self, updater: Updater) -> None:
        self.updater = updater
        self._held: dict[int, dict[str, Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._weights: list[float] = []
        self._stalenesses: list[int] = []
        self._norms: list[float] = []
        self._num_tokens = 0

    @property
    def reads_weights(self) -> bool:
        """Whether a version must be held while somebody computes on it."""
        return bool(self.updater.corrections)

    def lacks(self, version: int) -> bool:
        """Whether a gradient computed on a version cannot be corrected."""
        return self.reads_weights and version not in self._held

    def hold(self, version: int) -> None:
        """Keep the newest version: a worker reads it now."""
        if self.reads_weights and version not in self._held:
            newest = self.updater.weights.read(version)
            self._held[version] = {name: tensor.clone() for name, tensor in newest.items()}

    def weights_read(self, version: int) -> Mapping[str, Tensor]:
        """Return the weights of a version that somebody computes on, and that a correction looks at; not copied."""
        return self._held[version]

    def retain(self, versions: Collection[int]) -> None:
        """Forget the versions that nobody computes on any more."""
        for version in [each for each in self._held if each not in versions]:
            del self._held[version]

    @torch.no_grad()
    def accumulate(self, gradient: Gradient, grad_norm: Tensor, *, weight: float, is_borrowed: bool = False) -> None:
        """Take a gradient into the step under way.

        Args:
            gradient: Finite; its tensors are changed.
            grad_norm: Scalar global norm of the whole model's gradient, of which this shard may hold a part.
            weight: Its tokens as a share of a step's.
            is_borrowed: Its memory is about to be used again by somebody else.
        """
        staleness = self.updater.staleness_of(gradient)
        read: Mapping[str, Tensor] = self._held[gradient.read_version] if self.reads_weights else {}
        prepared = self.updater.prepare(gradient, grad_norm, read=read)
        assert prepared is not None, "a gradient that is not finite is rejected before it gets here"
        if len(self._weights) == 1:  # until now the first one stood for itself, without a weight
            for held in self._sums.values():
                held.mul_(self._weights[0])
        for name, tensor in prepared.tensors.items():
            if tensor is None:
                continue
            if name in self._sums:
                self._sums[name].add_(tensor, alpha=weight)
            elif self._weights:
                self._sums[name] = tensor * weight
            else:
                self._sums[name] = tensor.clone() if is_borrowed else tensor
        self._weights.append(weight)
        self._stalenesses.append(staleness)
        self._norms.append(float(grad_norm))
        self._num_tokens += gradient.num_tokens

    @torch.no_grad()
    def apply(self) -> UpdateReport:
        """Make the optimizer step of what was accumulated, and publish."""
        total = sum(self._weights)
        if len(self._weights) > 1:
            for tensor in self._sums.values():
                tensor.div_(total)
        norm = self._norms[0]
        if len(self._norms) > 1:
            norm = sum(norm * weight for norm, weight in zip(self._norms, self._weights)) / total
        gradient = Gradient(
            tensors={name: self._sums.get(name) for name in self.updater.masters},
            read_version=self.updater.weights.latest - max(self._stalenesses),
            num_tokens=self._num_tokens,
        )
        report = self.updater.apply(gradient, stalenesses=self._stalenesses, grad_norm=norm)
        self._sums, self._weights, self._stalenesses, self._norms, self._num_tokens = {}, [], [], [], 0
        return report

    def tensors(self) -> dict[str, Tensor]:
        """Return what a resumed run needs beside the updater's state, by name; not copied."""
        tensors = {f"accumulator/{name}": tensor for name, tensor in self._sums.items()}
        for version, weights in self._held.items():
            tensors |= {f"held@{version}/{name}": tensor for name, tensor in weights.items()}
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers that belong to :meth:`tensors`."""
        return {
            "weights": list(self._weights),
            "stalenesses": list(self._stalenesses),
            "norms": list(self._norms),
            "num_tokens": self._num_tokens,
            "held": list(self._held),
        }

    def restore(self, numbers: Mapping[str, Any], state: StateReader) -> None:
        """Take back what :meth:`state_dict` and :meth:`tensors` gave."""
        masters = self.updater.masters
        self._weights, self._stalenesses = list(numbers["weights"]), list(numbers["stalenesses"])
        self._norms, self._num_tokens = list(numbers["norms"]), int(numbers["num_tokens"])
        names = [name for name in masters if f"accumulator/{name}" in state.tensor_names]
        self._sums = {name: state.tensor(f"accumulator/{name}").to(masters[name].device) for name in names}
        self._held = {
            version: {name: state.tensor(f"held@{version}/{name}").to(masters[name].device) for name in masters}
            for version in numbers["held"]
            if self.reads_weights
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one optimizer step was made of, over all shards.

    Attributes:
        update: As the first shard reports it.
        losses: Mean loss of each gradient.
        num_tokens: Valid tokens of each.
        stalenesses: Of each.
    """

    update: UpdateReport
    losses: tuple[float, ...]
    num_tokens: tuple[int, ...]
    stalenesses: tuple[int, ...]

    @property
    def loss(self) -> float:
        """Mean loss over the tokens; of one gradient its own, to the bit."""
        if len(self.losses) == 1:
            return self.losses[0]
        return sum(loss * count for loss, count in zip(self.losses, self.num_tokens)) / sum(self.num_tokens)

    @property
    def staleness_mean(self) -> float:
        """Mean over the gradients."""
        return sum(self.stalenesses) / len(self.stalenesses)
