"""How many cores a process may use."""

import os


def num_cores() -> int:
    """Return the cores that this process may run on; of the whole machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
