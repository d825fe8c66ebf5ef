"""The C library's heap, set up for training: memory that a step frees is there for the next one."""

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
"""Of malloc.h, the same on every machine."""


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its own next allocations; with glibc, else do nothing.

    glibc maps each large block anew and gives it back to the system when it is freed. Every activation of every
    microbatch would then be made of pages that the system must first find and clear: some 30,000 page faults in a
    second of computing a small model, a seventh of its time. A step allocates what the step before did, so what is
    kept is used.

    Whoever has set glibc's own variables (``MALLOC_...``, ``GLIBC_TUNABLES``) has decided otherwise and is left alone.

    Returns:
        Whether it was done.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        mallopt = ctypes.CDLL(None).mallopt
    except (ValueError, OSError, AttributeError):
        return False
    # A larger threshold for mapping would do too, but older releases refuse one above 32 MiB.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
