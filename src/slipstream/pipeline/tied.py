"""Tied embedding and head on two stages: both see both gradients, add them alike, and make the same update.

::

    last rank   ... last backward  N: send head's sum ............ O: receive the embedding's sum, add, step
    first rank  ...............  last backward  N: receive, add, send the embedding's sum ... O: step

The first rank's last backward comes after the last rank's, so its wait at N finds the message there.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.assembly import StageParts
from slipstream.pipeline.transport import Channel, Transport
from slipstream.staleness.gradient import Gradient


class _Shelf:
    """A channel between two stages of one rank."""

    idle_s = 0.0

    def __init__(self) -> None:
        self._waiting: deque[Tensor] = deque()

    def expect(self, source: int, count: int) -> None:
        """Do nothing."""

    def send(self, tensor: Tensor, destination: int) -> None:
        """Keep a tensor."""
        self._waiting.append(tensor)

    def receive(self, source: int, *, what: str) -> Tensor:
        """Return the oldest tensor."""
        return self._waiting.popleft()


class TiedExchange:
    """Exchanges the gradients of a tied pair whose leaves live on two stages; does nothing otherwise.

    Args:
        transport: Connects the ranks.
        held: The stages of this rank.
    """

    def __init__(self, transport: Transport, held: Sequence[StageParts]) -> None:
        self._last = transport.num_ranks - 1
        self._pair = held[0].tied_pair
        self._channels: dict[str, Channel | _Shelf] = {}
        pair = set(self._pair or ())
        holders = [parts for parts in held if pair & parts.parameter_of.keys()]
        self._holds_head = self._pair is not None and any(self._pair[1] in parts.parameter_of for parts in holders)
        purposes = ("tied_to_first", "tied_to_last")
        if len(holders) == 2:
            self._channels = {purpose: _Shelf() for purpose in purposes}
        elif self._pair is not None and holders and not pair <= holders[0].parameter_of.keys():
            shape = holders[0].updater.masters[self._pair[0]].shape
            self._channels = {
                purpose: transport.channel(purpose, shape=shape, dtype=torch.float32) for purpose in purposes
            }

    def begin(self, num_batches: int) -> None:
        """Expect the messages of the batches to come."""
        if self._channels:
            purpose, source = ("tied_to_last", 0) if self._holds_head else ("tied_to_first", self._last)
            self._channels[purpose].expect(source, num_batches)

    @property
    def idle_s(self) -> float:
        """Seconds spent waiting."""
        return sum(channel.idle_s for channel in self._channels.values())

    def offer(self, parts: StageParts, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give a batch's gradient of this rank's leaf to the other one.

        Args:
            parts: A stage of this rank.
            sums: Its gradients by leaf name.

        Returns:
            The same, on the first rank with the head's gradient as well.
        """
        if not self._channels or self._pair is None:
            return sums
        embedding, head = self._pair
        if head in parts.parameter_of:
            self._channels["tied_to_first"].send(sums[head], 0)
        elif embedding in parts.parameter_of:
            self._channels["tied_to_last"].send(sums[embedding], self._last)
            other = self._channels["tied_to_first"].receive(self._last, what="the tied head's gradient")
            return sums | {head: other}
        return sums

    def complete(self, parts: StageParts, gradient: Gradient) -> Gradient:
        """Add the embedding's gradient to the head's on the last rank, just before the optimizer step.

        The embedding's comes first in the sum, as everywhere.
        """
        if not self._channels or self._pair is None or self._pair[1] not in parts.parameter_of:
            return gradient
        embedding, _ = self._pair
        other = self._channels["tied_to_last"].receive(0, what="the tied embedding's gradient")
        held = gradient.tensors[embedding]
        total = other if held is None else other + held
        return dataclasses.replace(gradient, tensors={**gradient.tensors, embedding: total})
