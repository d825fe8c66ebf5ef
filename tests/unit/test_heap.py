"""Page faults of a process that makes and frees the same large tensors again and again."""

import os
import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from slipstream.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(10_000_000).add(1)  # beyond what glibc itself may come to keep
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
before = faults()
kept = keep_freed_memory()
faults()
print(kept, before, faults())
"""


def is_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (AttributeError, ValueError):
        return False


def count(**environment: str) -> tuple[bool, int, int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=plain | environment, capture_output=True, text=True, check=True, timeout=120
    )
    kept, before, after = done.stdout.split()
    return kept == "True", int(before), int(after)


@pytest.mark.skipif(not is_glibc(), reason="the heap of glibc is set up, no other")
def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    kept, before, after = count()
    assert kept
    assert after * 10 < before


def test_who_has_set_the_heap_up_is_left_alone() -> None:
    kept, _, _ = count(MALLOC_ARENA_MAX="4")
    assert not kept
