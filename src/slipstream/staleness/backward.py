"""The read seam's other half: which weights does the backward pass multiply by?

A pipeline that keeps no old weights has no choice: its backward finds the newest. PipeMare trains like that, and its
technique T2 undoes most of the difference.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slipstream.staleness.corrections import Slots

BackwardKind = Literal["read", "newest", "pipemare"]

DECAY = math.exp(-2)
"""D: what is left of a step in the running mean after as many steps as forward and backward are apart."""


class BackwardWeights:
    r"""PipeMare's backward: on the newest weights, or (T2) on those led back towards what the forward read.

    .. math:: \tilde w = w_{newest} - \tau\,\delta, \qquad
              \delta \leftarrow \gamma\,\delta + (1 - \gamma)\,(w_{t+1} - w_t), \quad \gamma = D^{1/\tau}

    with tau the updates between the version that the forward of a parameter read and the newest.

    Args:
        kind: ``newest``, or ``pipemare``: T2.
        delays: Configured delay of each parameter, for the length of its running mean.

    Attributes:
        slots: The running means, by parameter name; what a resumed run needs.

    Cost:
        One persistent float32 copy of the weights for T2; one transient one where the weights read are stale.

    Source:
        Yang et al. 2020, arXiv 1910.05124, technique 2, with D = exp(-2), as summarised elsewhere.

    Differs:
        The activations are the forward's, as in PipeMare without recomputation.
    """

    def __init__(self, kind: BackwardKind, *, delays: Mapping[str, int]) -> None:
        assert kind != "read"
        self.kind = kind
        self._decay = {name: DECAY ** (1 / delay) for name, delay in delays.items() if delay > 0}
        self.slots: Slots = {"drift": {}} if kind == "pipemare" else {}

    @torch.no_grad()
    def of(self, name: str, newest: Tensor, *, steps: int) -> Tensor:
        """Return the weights for the backward pass.

        Args:
            name: Of the parameter.
            newest: Its newest published weights.
            steps: Updates since the version that its forward reads.
        """
        drift = self.slots.get("drift", {}).get(name)
        if drift is None or steps == 0:
            return newest
        return torch.sub(newest.to(drift.dtype), drift, alpha=steps).to(newest.dtype)

    @torch.no_grad()
    def observe(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Take note of one update of the published weights."""
        if self.kind == "newest":
            return
        means = self.slots["drift"]
        for name, decay in self._decay.items():
            wide = torch.promote_types(after[name].dtype, torch.float32)
            step = after[name].to(wide) - before[name].to(wide)
            means[name] = torch.lerp(step, means[name], decay) if name in means else step.mul_(1 - decay)


def backward_on(forward: Mapping[str, Tensor], backward: Mapping[str, Tensor]) -> saved_tensors_hooks:
    """Let a forward pass keep, instead of its weights, those that its backward pass is to use.

    Whatever the graph saves of a weight, the weight itself or a view such as its transpose, is recognised by its
    memory, and the same view of the other weights is handed to the backward. Activations are saved as they are.
    Overwriting the leaves in between would do the same only while no operation keeps a copy, and swapping their
    ``.data`` not even for a linear layer, which keeps a view of the old memory.

    Args:
        forward: The leaves that the forward pass reads, each alone in its memory.
        backward: Weights for the backward pass, by the same names and of the same shapes and types.

    Returns:
        A context manager for the *forward* pass. Recomputed activations (checkpointing) do not pass through it.

    Example:
        >>> w = torch.tensor([3.0], requires_grad=True)
        >>> x = torch.tensor([1.0], requires_grad=True)
        >>> with backward_on({"w": w}, {"w": torch.tensor([5.0])}):
        ...     y = w * x
        >>> y.sum().backward()
        >>> y.item(), x.grad.item(), w.grad.item()
        (3.0, 5.0, 1.0)
    """
    by_memory: dict[int, Tensor] = {}
    for name, leaf in forward.items():
        other = backward[name].detach()
        assert leaf.shape == other.shape
        assert leaf.dtype == other.dtype
        if leaf.storage_offset() or leaf.untyped_storage().nbytes() != leaf.nbytes:
            raise AssertionError(f"{name} shares its memory with other tensors")
        if other.stride() != leaf.stride() or other.storage_offset():
            other = torch.empty_like(leaf.detach()).copy_(other)
        by_memory[leaf.untyped_storage().data_ptr()] = other

    def keep(tensor: Tensor) -> Callable[[], Tensor]:
        other = by_memory.get(tensor.untyped_storage().data_ptr())
        if other is None or not tensor.numel():
            kept = tensor.detach()  # the tensor itself would hold the graph that holds it
            return lambda: kept
        view = other.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return lambda: view

    return saved_tensors_hooks(keep, lambda kept: kept())


def build_backward(kind: BackwardKind, *, delays: Mapping[str, int]) -> BackwardWeights | None:
    """Return the backward's weights; ``None``: those that the forward read, as every other method has it."""
    return None if kind == "read" or not any(delays.values()) else BackwardWeights(kind, delays=delays)
