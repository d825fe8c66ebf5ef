"""Held-out loss on the published weights x and on the optimizer's own weights y."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from slipstream.data.loader import Batch
from slipstream.executor import Executor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Mean loss over the validation tokens.

    Attributes:
        val_loss: Nats per token, on the published weights x.
        val_loss_y: Nats per token, on the optimizer's weights y.
        val_bits_per_byte: Bits per byte of the text behind those tokens, on x; ``None``: there is no text.
        num_tokens: Tokens predicted.
    """

    val_loss: float
    val_loss_y: float
    val_bits_per_byte: float | None
    num_tokens: int


def evaluate(executor: Executor, batches: Sequence[Batch], *, token_bytes: np.ndarray | None) -> Evaluation:
    """Evaluate on every rank alike.

    Args:
        executor: Holds the weights.
        batches: The same validation batches every time.
        token_bytes: UTF-8 bytes behind each token id, shape (vocab_size,); ``None``: the targets are no tokens.
    """
    num_tokens = sum(batch.num_tokens for batch in batches)
    nats_x = executor.evaluate(batches, "x")
    nats_y = executor.evaluate(batches, "y") if executor.has_two_points else nats_x
    return Evaluation(
        val_loss=nats_x / num_tokens,
        val_loss_y=nats_y / num_tokens,
        val_bits_per_byte=None if token_bytes is None else _bits_per_byte(nats_x, batches, token_bytes),
        num_tokens=num_tokens,
    )


def _bits_per_byte(nats: float, batches: Sequence[Batch], token_bytes: np.ndarray) -> float:
    num_bytes = sum(int(token_bytes[batch.targets[batch.targets >= 0]].sum()) for batch in batches)
    return nats / math.log(2) / num_bytes if num_bytes else math.nan
