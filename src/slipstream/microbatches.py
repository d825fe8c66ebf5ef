"""Microbatches by number, and the one loop that a process without pipeline stages computes their gradients with."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import Config
from slipstream.data import Dataset
from slipstream.data.loader import Batch, Loader
from slipstream.models.moe import MicrobatchKey
from slipstream.models.nested import map_tensors
from slipstream.models.parts import Loss
from slipstream.staleness.gradient import GradientAccumulator


def run_microbatches(
    microbatches: Iterable[tuple[MicrobatchKey, Batch]],
    *,
    module: nn.Module,
    leaves: Mapping[str, Tensor],
    accumulator: GradientAccumulator,
    num_tokens: int,
    device: torch.device,
    loss_sum: Loss,
    saving: contextlib.AbstractContextManager[object] | None = None,
) -> float:
    """Run forward and backward of each microbatch in order.

    Args:
        microbatches: Each with the key of its dropout masks.
        module: The whole model.
        leaves: Its leaf parameters by name.
        accumulator: Gets their gradients.
        num_tokens: Valid tokens of all that the gradient is the mean over: the one normalization, so that no mean of
            means arises.
        device: Where the module lives.
        loss_sum: Of the module's output and the targets, summed.
        saving: Context of each forward; it must be reusable.

    Returns:
        The loss in nats, summed over the microbatches, over ``num_tokens``.
    """
    saving = saving or contextlib.nullcontext()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for key, batch in microbatches:
        with saving:
            output = module(to_device(batch.inputs, device), dropout_key=key)
        loss = loss_sum(output, to_device(batch.targets, device)) / num_tokens
        torch.autograd.backward(loss)
        accumulator.add(leaves)
        total += loss.detach()
    return float(total)


def to_device(values: Any, device: torch.device) -> Any:
    """Return arrays as tensors on a device: token ids, or of a model of one's own tuples and tables of anything."""
    return map_tensors(values, lambda tensor: tensor.to(device))


def microbatch_loader(config: Config, dataset: Dataset) -> Loader:
    """Return the endless training data a microbatch at a time, in the order in which batches have it.

    Raises:
        DataError: The split has less than one microbatch.
    """
    return Loader(
        dataset.train,
        sequence_length=config.data.sequence_length,
        batch_size=config.train.microbatch_size,
        seed=config.data.seed,
    )
