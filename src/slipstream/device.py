"""Where a process computes, and how: the same for every process of a run, so that all get the same bits."""

import os

import torch

from slipstream.compiled import settle_compiler
from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.heap import keep_freed_memory


def choose_device(config: Config, *, local_rank: int = 0) -> torch.device:
    """Return the device to compute on. To be asked before anything computes: on CUDA it also sets up cuBLAS.

    Raises:
        ConfigError: CUDA was asked for and there is none, or not enough of it.
    """
    available = torch.cuda.is_available()
    if config.train.device == "cuda" and not available:
        raise ConfigError(
            "the device is to be 'cuda', but this torch finds no CUDA device. Give auto or cpu, or install a CUDA "
            "build of torch and check `slipstream doctor`."
        )
    if not available or config.train.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"rank {local_rank} of this machine needs a CUDA device of its own, there are {count}. Use fewer stages "
            "here (pipeline.num_stages), more machines, or --train.device cpu."
        )
    _settle_cublas()
    return torch.device("cuda", local_rank)


def device_of(device: torch.device, index: int) -> torch.device:
    """Return where one of several processes on a machine computes.

    Args:
        device: Where the first does.
        index: Which process it is. CUDA devices are given out in turn, again from the first when all are taken; on the
            processor all compute.
    """
    return torch.device("cuda", index % torch.cuda.device_count()) if device.type == "cuda" else device


def settle(config: Config, device: torch.device) -> None:
    """Set this process up to compute for a run: its threads, its memory, and on CUDA kernels that repeat their bits.

    Without them a resumed run would not equal a continuous one. Where CUDA knows no such kernel torch warns and goes on
    with another.
    """
    torch.set_num_threads(config.train.threads_per_rank)
    if config.train.compile:
        settle_compiler(num_threads=config.train.threads_per_rank)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        # Else NCCL and whatever names no device would open a context on the first one as well.
        torch.cuda.set_device(device)
        _settle_cublas()
        torch.use_deterministic_algorithms(True, warn_only=True)


def _settle_cublas() -> None:
    """Fix cuBLAS's workspaces, here and in processes to come; torch reads this once, at the first product on CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
