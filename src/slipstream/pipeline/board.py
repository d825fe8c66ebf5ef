"""What each rank is doing now, in a file that all ranks of one machine map into memory.

A rank that was killed cannot speak; whoever started it reads here what it was at.
"""

import mmap
import struct
from pathlib import Path

_SLOT_BYTES = 128
_HEAD = struct.Struct("<QH")
_MAX_TEXT = _SLOT_BYTES - _HEAD.size


class Board:
    """One slot a rank: how many actions it has begun, and the text of the newest.

    Args:
        path: The file.
        num_ranks: Slots.
        create: Make the file; exactly one process does.

    Cost:
        About a microsecond a note; no system call.
    """

    def __init__(self, path: Path, *, num_ranks: int, create: bool = False) -> None:
        size = num_ranks * _SLOT_BYTES
        if create:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        self._rows = [0] * num_ranks

    def note(self, rank: int, text: str) -> None:
        """Say that a rank begins something."""
        self._rows[rank] += 1
        data = text.encode()[:_MAX_TEXT]
        start = rank * _SLOT_BYTES
        self._memory[start : start + _HEAD.size + len(data)] = _HEAD.pack(self._rows[rank], len(data)) + data

    def read(self, rank: int) -> tuple[int, str]:
        """Return a rank's number of actions begun, and its newest one; ``(0, "")`` before the first."""
        start = rank * _SLOT_BYTES
        row, length = _HEAD.unpack_from(self._memory, start)
        text = self._memory[start + _HEAD.size : start + _HEAD.size + min(length, _MAX_TEXT)]
        return row, text.decode(errors="replace")
