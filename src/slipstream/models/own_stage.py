"""A part of a module of yours, as one stage of a pipeline computes it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.compiled import while_training
from slipstream.models.llama import stable_seed
from slipstream.models.moe import MicrobatchKey
from slipstream.models.nested import cast_floats

CallBlock = Callable[[nn.Module, nn.Module, Tensor], Tensor]
Watch = Callable[[str, Any], object]


def call_alone(_stage: nn.Module, block: nn.Module, x: Tensor) -> Any:
    """Call a block with one tensor and nothing else."""
    return block(x)


class OwnStage(nn.Module):
    """A part of a module of yours, whose parameters keep their names.

    Dropout, and whatever else draws from torch's generator, draws the same on any cut into stages: before each call the
    generator is seeded by (seed, batch, microbatch, name of the part).

    Args:
        whole: The module; it is taken over, and loses the parameters that the stage does not hold.
        calls: Names of the submodules to call, in order, each with its place: a block's number, -1 before the blocks.
        num_blocks: Blocks of the whole.
        call_block: How a block is called, where not with one tensor.
        seed: Of dropout.
        compile: Whether the blocks are compiled while they train.
    """

    def __init__(
        self,
        whole: nn.Module,
        calls: Sequence[tuple[str, int]],
        *,
        num_blocks: int,
        call_block: CallBlock | None,
        seed: int,
        compile: bool = False,
    ) -> None:
        super().__init__()
        held = {id(parameter) for name, _ in calls for parameter in whole.get_submodule(name).parameters()}
        for name, child in whole.named_children():
            self.add_module(name, child)
        for module in self.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in held:
                    module.register_parameter(name, None)
        self._calls = tuple(calls)
        self._num_blocks = num_blocks
        self._call_block = call_block or call_alone
        self._seed = seed
        self._compile = compile

    def forward(self, x: Any, *, dropout_key: MicrobatchKey | None = None, watch: Watch | None = None) -> Any:
        """Run the parts in turn.

        Args:
            x: Inputs, or what the stage before gave.
            dropout_key: (batch, microbatch); none: evaluation.
            watch: Is told what each part gives.
        """
        if self.training != (dropout_key is not None):
            self.train(dropout_key is not None)
        parameter = next(self.parameters(), None)
        x = x if parameter is None else cast_floats(x, parameter.dtype)
        for name, place in self._calls:
            module = self.get_submodule(name)
            with contextlib.nullcontext() if dropout_key is None else self._seeded(*dropout_key, name):
                is_block = 0 <= place < self._num_blocks
                call = while_training(self._call_block, compile=self._compile) if is_block else call_alone
                x = call(self, module, x)
            if watch is not None:
                watch(name, x)
        return x

    @contextlib.contextmanager
    def _seeded(self, batch: int, microbatch: int, name: str) -> Iterator[None]:
        device = next(self.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(stable_seed("dropout", self._seed, batch, microbatch, name))
            yield
