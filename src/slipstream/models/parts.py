"""A model as training takes it: a row of blocks between an embedding and a head, whatever they compute.

Stages, weights versions, schedules and update paths need no more of a model than this.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.compiled import while_training
from slipstream.config import ModelConfig
from slipstream.models.llama import build_stage, cross_entropy_sum
from slipstream.models.partition import StageSpec, layer_costs
from slipstream.models.roles import Role, role
from slipstream.models.shapes import expert_layers, parameter_names, tied_names

Loss = Callable[[Tensor, Any], Tensor]
"""Output of the head and targets -> a scalar, *summed* over the units that count; whoever knows their number in the
whole batch divides, once."""


class ModelParts(Protocol):
    """What training asks of a model."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""

    @property
    def names(self) -> Sequence[str]:
        """Every parameter of the whole model, in module order; a tied pair is two."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Leaves that are held equal to another: the head's name by the embedding's."""

    @property
    def router_layers(self) -> Sequence[int]:
        """Blocks that have experts."""

    @property
    def message_shape(self) -> tuple[int, ...]:
        """Shape of what one stage hands to the next for a microbatch."""

    def costs(self) -> Sequence[float]:
        """Return the cost of each block in any one unit, that of embedding and head included."""

    def build(self, spec: StageSpec, device: torch.device) -> nn.Module:
        """Return a part of the model with its initial weights, under the names they have in the whole.

        It is called with one tensor (on the first stage with a batch's inputs) and the keyword ``dropout_key``, (batch,
        microbatch) or none in evaluation, and returns one tensor.
        """

    def role(self, name: str) -> Role:
        """Return what a parameter is for; it decides the optimizer."""

    def loss_sum(self, output: Tensor, targets: Any) -> Tensor:
        """Return the loss; see :data:`Loss`."""


def master_names(model: ModelParts) -> list[str]:
    """Return the parameters that have master weights, in module order: all, a tied pair once."""
    return [name for name in model.names if name not in model.tied]


def tied_pair(model: ModelParts) -> tuple[str, str] | None:
    """Return the leaf names of a tied embedding and head; ``None``: the model ties nothing."""
    return next(((embedding, head) for head, embedding in model.tied.items()), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaParts:
    """The decoder of :mod:`slipstream.models.llama`."""

    cfg: ModelConfig
    microbatch_size: int
    sequence_length: int
    compile: bool = False
    """Compile what training computes."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return self.cfg.num_layers

    @property
    def names(self) -> Sequence[str]:
        """Every parameter."""
        return parameter_names(self.cfg)

    @property
    def tied(self) -> Mapping[str, str]:
        """The head's matrix by the embedding's, where they are one."""
        return tied_names(self.cfg)

    @property
    def router_layers(self) -> Sequence[int]:
        """Layers with experts."""
        return expert_layers(self.cfg)

    @property
    def message_shape(self) -> tuple[int, ...]:
        """(B, T, D)."""
        return (self.microbatch_size, self.sequence_length, self.cfg.dim)

    def costs(self) -> Sequence[float]:
        """Return the FLOPs of each layer per token."""
        return layer_costs(self.cfg, sequence_length=self.sequence_length)

    def build(self, spec: StageSpec, device: torch.device) -> nn.Module:
        """Return a stage of the decoder."""
        return build_stage(self.cfg, spec.blocks, embed=spec.embed, head=spec.head, device=device, compile=self.compile)

    def role(self, name: str) -> Role:
        """Return the role of a parameter."""
        return role(name)

    def loss_sum(self, output: Tensor, targets: Any) -> Tensor:
        """Return the cross-entropy."""
        return while_training(cross_entropy_sum, compile=self.compile)(output, targets)
