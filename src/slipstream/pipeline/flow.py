"""Passes activations and their gradients from stage to stage, action by action, as a rank's stream says."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.pipeline.actions import Action
from slipstream.pipeline.schedules import ScheduleSpec
from slipstream.pipeline.stage import StageProgram
from slipstream.pipeline.transport import Channel, Transport


class Flow:
    """Forwards, backwards and the messages in between, of the stages that one rank holds.

    Args:
        config: Resolved settings; they say what a message looks like.
        programs: The stages of this rank, by number.
        transport: Connected to the other ranks.
        spec: The schedule.
        shape: Of a message.

    Attributes:
        channels: By purpose.
        received: What a stage needs for a microbatch, by direction, stage and microbatch.
        produced: What waits to be sent, by the same.
    """

    def __init__(
        self,
        config: Config,
        programs: Mapping[int, StageProgram[Any]],
        transport: Transport,
        spec: ScheduleSpec,
        *,
        shape: Sequence[int],
    ) -> None:
        self._config = config
        self._programs = programs
        self._transport = transport
        self._spec = spec
        self._shape = tuple(shape)
        self.channels = {name: self.channel(name) for name in ("forward", "backward", "forward_wrap", "backward_wrap")}
        self.received: dict[tuple[str, int, int], Tensor] = {}
        self.produced: dict[tuple[str, int, int], Tensor] = {}
        self.actions = {
            "F": self._forward,
            "B": self._backward,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }

    @property
    def idle_s(self) -> float:
        """Seconds spent waiting for other ranks."""
        return sum(channel.idle_s for channel in self.channels.values())

    def expect(self, count: int) -> None:
        """Say that so many more microbatches will pass through each stage, forward and backward."""
        for stage in self._programs:
            for direction, offset in (("forward", -1), ("backward", 1)):
                if source := self.neighbour(stage, offset, direction):
                    self.channels[source[1]].expect(source[0], count)

    def neighbour(self, stage: int, offset: int, purpose: str) -> tuple[int, str] | None:
        """Return the rank of the stage at an offset and the channel of messages to or from it.

        ``None``: there is no such stage, or it is on this rank.
        """
        other, p = stage + offset, self._spec.num_ranks
        if not 0 <= other < self._spec.num_stages or p == 1:
            return None
        wraps = min(stage, other) % p == p - 1
        return other % p, f"{purpose}_wrap" if wraps else purpose

    def channel(self, purpose: str) -> Channel:
        """Return a channel for what passes between stages."""
        return self._transport.channel(
            purpose,
            shape=self._shape,
            dtype=getattr(torch, self._config.train.compute_dtype),
            window=channel_window(self._spec, self._transport.rank),
        )

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for channel in self.channels.values():
            channel.flush()

    def _forward(self, action: Action) -> None:
        stage, _, microbatch, version = action
        assert microbatch is not None
        assert version is not None
        received = self.received.pop(("forward", stage, microbatch), None)
        output = self._programs[stage].forward(microbatch, version, received)
        if output is not None:
            self._hand_over("forward", stage, 1, microbatch, output)

    def _backward(self, action: Action) -> None:
        stage, _, microbatch, _ = action
        assert microbatch is not None
        received = self.received.pop(("backward", stage, microbatch), None)
        gradient = self._programs[stage].backward(microbatch, received)
        if gradient is not None:
            self._hand_over("backward", stage, -1, microbatch, gradient)

    def _hand_over(self, direction: str, stage: int, offset: int, microbatch: int, tensor: Tensor) -> None:
        """Keep what the next stage needs until it is sent, or give it to that stage if it is on this rank."""
        if stage + offset in self._programs:
            self.received[direction, stage + offset, microbatch] = tensor
        else:
            self.produced[direction, stage, microbatch] = tensor

    def _send_forward(self, action: Action) -> None:
        self._send("forward", action, 1)

    def _send_backward(self, action: Action) -> None:
        self._send("backward", action, -1)

    def _receive_forward(self, action: Action) -> None:
        self._receive("forward", action, -1)

    def _receive_backward(self, action: Action) -> None:
        self._receive("backward", action, 1)

    def _send(self, direction: str, action: Action, offset: int) -> None:
        stage, _, microbatch, _ = action
        neighbour = self.neighbour(stage, offset, direction)
        assert microbatch is not None
        assert neighbour is not None
        self.channels[neighbour[1]].send(self.produced.pop((direction, stage, microbatch)), neighbour[0])

    def _receive(self, direction: str, action: Action, offset: int) -> None:
        stage, _, microbatch, _ = action
        neighbour = self.neighbour(stage, offset, direction)
        assert microbatch is not None
        assert neighbour is not None
        self.received[direction, stage, microbatch] = self.channels[neighbour[1]].receive(
            neighbour[0], what=str(action)
        )


def channel_window(spec: ScheduleSpec, rank: int) -> int:
    """Return how many sent messages a rank keeps in each channel.

    Of the neighbours the rank before has most in flight. Where all ranks pause at a step, that many gradients may wait
    for it to go on, and who sent them must not wait with them.
    """
    return spec.num_ahead(max(rank - 1, 0)) + 2
