"""What this machine offers, and whether everything needed is there."""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import tempfile
from pathlib import Path

import torch

from slipstream import __version__
from slipstream.compiled import MISSING, find_compiler
from slipstream.cores import num_cores

REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "tyro", "tomli-w", "rich")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Attributes:
        name: What was looked at.
        value: What was found; where not ``ok``, with what to do.
        ok: Whether a run can work with it.
    """

    name: str
    value: str
    ok: bool = True


def examine() -> list[Finding]:
    """Look at the interpreter, the packages, the devices and the disk; compute a product and its gradient."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        Finding("slipstream", __version__),
        Finding("python", platform.python_version()),
        Finding("platform", platform.platform()),
        *(_package(name) for name in REQUIRED),
        Finding("cpu cores", str(num_cores())),
        Finding("cpu capability", torch.backends.cpu.get_cpu_capability()),
        Finding("memory", f"{memory_bytes / 2**30:.1f} GiB"),
        Finding("devices", _devices()),
        Finding("compiler", _compiler()),
        Finding("backends", _backends(), ok=torch.distributed.is_available()),
        _disk(),
        _gradient(),
    ]


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, f"missing; install it with: pip install {name}", ok=False)


def _devices() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "cpu, " + ", ".join(f"cuda:{index} {name}" for index, name in enumerate(names))


def _compiler() -> str:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    _, remedy = MISSING[kind]
    return find_compiler(kind) or f"none, so train.compile cannot be used; {remedy}"


def _backends() -> str:
    if not torch.distributed.is_available():
        return "none; this torch was built without torch.distributed, the executor `pipeline` cannot run"
    known = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    return ", ".join(name for name, there in known.items() if there)


def _disk() -> Finding:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("disk", f"cannot write in {folder}: {error.strerror}; give a --run-dir elsewhere", ok=False)
    return Finding("disk", f"{free / 2**30:.1f} GiB free in {folder}")


def _gradient() -> Finding:
    x = torch.ones(4, 4, requires_grad=True)
    torch.autograd.backward((x @ x).sum())
    assert x.grad is not None
    right = bool((x.grad == 8).all())
    return Finding("gradient check", "right" if right else "wrong result; reinstall torch", ok=right)
