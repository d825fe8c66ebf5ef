"""torch.compile, where training computes: each function once a process, each shape by code of its own.

Compiled code is a function of the graph and the shapes alone, so every stage of a pipeline, and one process that holds
the whole model, compute a block by the same code, and get the same bits. Only training is compiled: evaluation runs a
few batches, and sees the same numbers as `slipstream eval`, which compiles nothing.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from slipstream.config import Config
from slipstream.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    # A shape that is made general once a second one is seen would get other code in a process that saw both.
    return torch.compile(function, dynamic=False)


def while_training(function: Callable[P, R], *, compile: bool) -> Callable[P, R]:
    """Return a function as it is to be called now: compiled where that is wanted and gradients are recorded.

    Args:
        function: Of a module's top level, so that all its callers share what is compiled. Its arguments may be modules,
            whose parameters may be replaced by others of the same shape.
        compile: Whether it is wanted.
    """
    return _compiled(function) if compile and torch.is_grad_enabled() else function


def check_compile(config: Config, *, device: torch.device) -> None:
    """Refuse settings under which compiled code would do something else, and machines that have no compiler.

    Raises:
        ConfigError: With the setting or the package by name.
    """
    if not config.train.compile:
        return
    if config.model.dropout:
        raise ConfigError(
            f"train.compile cannot be used with model.dropout ({config.model.dropout:g}): masks follow from numbers of "
            "the batch, for which code would be compiled anew each time. Leave out one of them."
        )
    if config.staleness.backward_weights != "read":
        raise ConfigError(
            f"train.compile cannot be used with staleness.backward_weights '{config.staleness.backward_weights}': "
            "compiled code keeps the weights for its backward in its own way, where no others can be put. Leave out "
            "one of them."
        )
    if find_compiler(device.type) is None:
        what, remedy = MISSING[device.type]
        raise ConfigError(f"train.compile is set, but there is {what}: {remedy}, or leave train.compile out.")


MISSING = {
    "cpu": ("no C++ compiler", "install g++, or name one in the environment variable CXX"),
    "cuda": ("no package triton, which builds of torch for CUDA bring along", "install it"),
}
"""What there is not where :func:`find_compiler` finds none, and what to do."""


def find_compiler(device_type: str) -> str | None:
    """Return what torch.compile makes code with, or ``None``.

    Args:
        device_type: ``cpu`` or ``cuda``.
    """
    if device_type == "cuda":
        return "triton" if importlib.util.find_spec("triton") else None
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def settle_compiler(*, num_threads: int) -> None:
    """Let code be compiled for a number of threads, which is then part of what it is kept by on the disk."""
    import torch._inductor.config as inductor  # slow to import

    inductor.cpp.threads = num_threads
