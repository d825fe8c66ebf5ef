"""Ranks for tests: started once a world size, they run function after function, one thread each.

They find one another through a file, so tests can run side by side without quarrelling over ports. A rank that does
not answer in time is named together with what it was at.
"""

import atexit
import contextlib
import datetime
import multiprocessing
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from slipstream.pipeline.board import Board
from slipstream.pipeline.transport import Transport

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


class RankError(Exception):
    """A rank raised, died or did not answer."""


@dataclass
class Rank:
    """What a function that runs on a rank is given first."""

    rank: int
    num_ranks: int
    transport: Transport
    store: FileStore
    board: Board


class Pool:
    """Processes that are the ranks of one pipeline.

    Args:
        num_ranks: How many.
        timeout_s: Seconds a rank waits for another one.
    """

    def __init__(self, num_ranks: int, *, timeout_s: float = 60.0) -> None:
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))  # handed on to the ranks, which import the functions they run
        self.num_ranks = num_ranks
        self.is_usable = True
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-pool-"))
        self._board = Board(self._folder / "board", num_ranks=num_ranks, create=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["slipstream.train.ranks"])
        self._pipes, self.processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, num_ranks, self._folder, timeout_s, theirs)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Let every rank begin with ``function(rank, *args)``."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def results(self, *, timeout_s: float = 120.0) -> list[Any]:
        """Return what the function returned on each rank.

        Raises:
            RankError: One raised (the first to do so is told of), died or did not answer; the pool is used up then.
        """
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.num_ranks:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"no answer within {timeout_s} s; {self._activities(waiting.values())}")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    is_good, answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    self._fail(f"rank {rank} died; {self._activities(range(self.num_ranks))}")
                if not is_good:
                    self._fail(f"rank {rank} raised\n{answers[rank]}")
        return [answers[rank] for rank in range(self.num_ranks)]

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Start a function on all ranks and return what it returned on each."""
        self.start(function, *args)
        return self.results(timeout_s=timeout_s)

    def close(self) -> None:
        """End the ranks."""
        self.is_usable = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _activities(self, ranks: Any) -> str:
        return ", ".join(f"rank {rank} was at '{self._board.read(rank)[1]}'" for rank in ranks)

    def _fail(self, what: str) -> None:
        self.close()
        raise RankError(what)


_POOLS: dict[int, Pool] = {}


def shared_pool(num_ranks: int) -> Pool:
    """Return the ranks of this size that all tests of this process share."""
    if num_ranks not in _POOLS or not _POOLS[num_ranks].is_usable:
        _POOLS[num_ranks] = Pool(num_ranks)
    return _POOLS[num_ranks]


@atexit.register
def _close_all() -> None:
    for pool in _POOLS.values():
        pool.close()


def _serve(rank: int, num_ranks: int, folder: Path, timeout_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    board = Board(folder / "board", num_ranks=num_ranks)
    board.note(rank, "connecting")
    store = FileStore(str(folder / "store"), num_ranks)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    transport = Transport(rank=rank, num_ranks=num_ranks, device=CPU, timeout_s=timeout_s)
    this = Rank(rank=rank, num_ranks=num_ranks, transport=transport, store=store, board=board)
    with contextlib.suppress(EOFError):  # the tests are over
        while True:
            board.note(rank, "waiting for work")
            function, args = pipe.recv()
            try:
                pipe.send((True, function(this, *args)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
