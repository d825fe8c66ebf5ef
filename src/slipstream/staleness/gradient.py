"""The gradient of one batch, with the version of the weights that it was computed on."""

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """Gradient of one batch's loss, its *mean* over valid tokens, with respect to a set of named parameters.

    Attributes:
        tensors: Gradient by parameter name, each of its parameter's shape, in the master weights' dtype; ``None``
            for a parameter that took no part in the batch (an expert without tokens).
        read_version: Version of the weights that every forward and backward of the batch read; the oldest of them
            where ``read_versions`` tells parameters apart.
        num_tokens: Valid target tokens of the batch.
        read_versions: Version read by parameter name, where they differ; ``None``: ``read_version`` for all.
        worker: Number of the worker that computed it; ``None``: there are none to tell apart.
    """

    tensors: Mapping[str, Tensor | None]
    read_version: int
    num_tokens: int
    read_versions: Mapping[str, int] | None = None
    worker: int | None = None

    def version_of(self, name: str) -> int:
        """Return the version that was read of one parameter."""
        return self.read_version if self.read_versions is None else self.read_versions[name]

    def norms(self, names: Iterable[str], *, device: torch.device | str | None = None) -> Tensor:
        """Return each parameter's Euclidean norm.

        Args:
            names: Parameters, in the order wanted. One that this gradient does not hold contributes 0, so several
                holders of disjoint parts can add their vectors and lose nothing to rounding.
            device: Where the result goes; ``None``: where the tensors are.

        Returns:
            Float32 vector of shape ``(len(names),)``.
        """
        held = [self.tensors.get(name) for name in names]
        if device is None:
            device = next((tensor.device for tensor in held if tensor is not None), torch.device("cpu"))
        zero = torch.zeros((), dtype=torch.float32, device=device)
        norms = [zero if tensor is None else torch.linalg.vector_norm(tensor).to(zero) for tensor in held]
        return torch.stack(norms) if norms else torch.zeros(0, device=device)


def global_norm(norms: Tensor) -> Tensor:
    """Return the norm of a whole gradient from the norms of its parameters.

    The same reduction over the same vector wherever it runs, so any cut of the model into stages gives bitwise the
    norm of one process; and the same as ``torch.nn.utils.clip_grad_norm_`` returns for parameters in this order.

    Args:
        norms: Vector of per-parameter norms, in the whole model's parameter order.

    Returns:
        Scalar of the same dtype.
    """
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def clip(tensors: Iterable[Tensor | None], norm: Tensor | float, *, limit: float) -> None:
    """Scale gradients in place as ``torch.nn.utils.clip_grad_norm_`` does, to the bit.

    Args:
        tensors: Gradients, or parts of them.
        norm: Global norm that the factor is made of.
        limit: Norm above which they are scaled down; 0: never.
    """
    if limit > 0:
        scale = torch.clamp(torch.as_tensor(limit / (norm + 1e-6)), max=1.0)
        for tensor in tensors:
            if tensor is not None:
                tensor.mul_(scale)


class GradientAccumulator:
    """Sums the gradients of one batch's microbatches, in microbatch order.

    The sums belong to the batch, not to the leaves: two batches may compute on the same leaves (the first two of
    PipeDream-2BW do), and a batch's sum may have to wait while the next batch computes.

    The sums are float32, as the master weights are; microbatch gradients of a narrower type are widened before they are
    added.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, leaves: Mapping[str, Tensor]) -> None:
        """Move the leaves' ``.grad`` into the sums; call it after each microbatch's backward."""
        for name, leaf in leaves.items():
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                continue
            if name in self._sums:
                self._sums[name].add_(gradient)
            else:
                self._sums[name] = gradient.to(torch.float32)

    def take(self) -> dict[str, Tensor]:
        """Return the sums by leaf name, without the leaves that got no gradient, and begin a new batch."""
        sums, self._sums = self._sums, {}
        return sums
