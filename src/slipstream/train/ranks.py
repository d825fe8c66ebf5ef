"""Starts one process a pipeline stage on this machine, watches over them, and says what went wrong first."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in its export list

from slipstream import errors
from slipstream.config import Config
from slipstream.errors import SlipstreamError, StageError
from slipstream.pipeline.board import Board
from slipstream.pipeline.transport import PeerError
from slipstream.train.rank import run_pipeline_rank
from slipstream.train.trainer import stop_signals

GRACE_S = 2.0
"""How long after the first failure other ranks may still report, so that the cause can be told from its echoes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTask:
    """What a rank's process is told.

    Attributes:
        config: Resolved settings.
        checkpoint: Where to continue from.
        folder: Shared by the ranks: rendezvous and board.
    """

    config: Config
    checkpoint: Path | None
    folder: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank ended badly.

    Attributes:
        kind: Class of the error, ``"signal"`` or ``"exit"`` where the process could not speak.
        message: Its text.
        trace: Traceback; empty for errors that need none.
    """

    kind: str
    message: str
    trace: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether it only says that another rank is gone."""
        return self.kind == PeerError.__name__


def run_ranks(config: Config, checkpoint: Path | None) -> dict[str, Any] | None:
    """Run a pipeline, one process a stage.

    Args:
        config: Resolved settings.
        checkpoint: Where to continue from.

    Returns:
        Rank 0's summary; ``None`` where the run was asked to stop and has saved.

    Raises:
        StageError: A rank failed or died; names rank, stage and last action. Every process has ended.
        SlipstreamError: What a rank found wrong that the user can mend.
    """
    num_ranks = config.pipeline.num_stages
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        task = RankTask(config=config, checkpoint=checkpoint, folder=Path(name))
        board = Board(task.folder / "board", num_ranks=num_ranks, create=True)
        # torch takes seconds to import: one process does it, the ranks are forked from that one.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        processes, pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, task, theirs), name=f"rank-{rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _watch(processes, pipes, board, timeout_s=config.pipeline.timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()


def _leave_with_launcher() -> None:
    """End this process when the one that started the run is gone: nobody would read its results or stop it."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    wait([launcher.sentinel])
    os._exit(1)


def _rank_main(rank: int, task: RankTask, pipe: Connection) -> None:
    """Be a rank; leave without cleaning up, since after a failure a collective clean-up would only hang."""
    config = task.config
    code = 1
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    try:
        num_ranks = config.pipeline.num_stages
        board = Board(task.folder / "board", num_ranks=num_ranks)
        board.note(rank, "connecting")
        store = FileStore(str(task.folder / "store"), num_ranks)
        summary = run_pipeline_rank(
            config, rank=rank, local_rank=rank, store=store, note=board.note, checkpoint=task.checkpoint
        )
        pipe.send(("done", summary))
        code = 0
    except SlipstreamError as error:
        # A stage's own fault needs its traceback; a sentence that a user can act on does not.
        trace = traceback.format_exc() if isinstance(error, StageError) and not isinstance(error, PeerError) else ""
        pipe.send(("failed", Failure(kind=type(error).__name__, message=str(error), trace=trace)))
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        pipe.send(("failed", Failure(kind=type(error).__name__, message=message, trace=traceback.format_exc())))
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _watch(
    processes: Sequence[ForkServerProcess], pipes: Sequence[Connection], board: Board, *, timeout_s: float
) -> dict[str, Any] | None:
    """Wait until every rank is done, or for the first failure."""
    results: dict[int, dict[str, Any] | None] = {}
    failures: dict[int, Failure] = {}
    deadline = None
    rows, moved_at = [0] * len(processes), time.monotonic()
    with stop_signals() as stop:
        passed_on = False
        while len(results) + len(failures) < len(processes):
            open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results and rank not in failures}
            for ready in wait(list(open_pipes), timeout=0.5):
                assert isinstance(ready, Connection)
                _hear(open_pipes[ready], ready, processes, results, failures)
            if stop.requested and not passed_on:
                passed_on = True
                for process in processes:
                    if process.is_alive() and process.pid is not None:
                        os.kill(process.pid, signal.SIGTERM)
            now = time.monotonic()
            if failures and deadline is None:
                deadline = now + GRACE_S
            if deadline is not None and now > deadline:
                break
            new_rows = [board.read(rank)[0] for rank in range(len(processes))]
            if new_rows != rows:
                rows, moved_at = new_rows, now
            elif now - moved_at > 2 * timeout_s:
                raise StageError(_standstill(board, len(processes), now - moved_at))
    if failures:
        raise _primary(failures, board)
    return results[0]


def _hear(
    rank: int,
    pipe: Connection,
    processes: Sequence[ForkServerProcess],
    results: dict[int, dict[str, Any] | None],
    failures: dict[int, Failure],
) -> None:
    """Take a rank's last word; a pipe that closed without one belongs to a process that was killed."""
    try:
        word, content = pipe.recv()
    except EOFError:
        processes[rank].join(timeout=5)
        code = processes[rank].exitcode
        if code is not None and code < 0:
            failures[rank] = Failure(kind="signal", message=f"was killed by {signal.Signals(-code).name}")
        else:
            failures[rank] = Failure(kind="exit", message=f"ended with exit code {code} and no word")
        return
    if word == "done":
        results[rank] = content
    else:
        failures[rank] = content


def _primary(failures: dict[int, Failure], board: Board) -> SlipstreamError:
    """Return the failure that the others follow from, as an error to raise."""
    causes = {rank: failure for rank, failure in failures.items() if not failure.is_echo} or failures
    killed = {rank: failure for rank, failure in causes.items() if failure.kind == "signal"}
    rank, failure = next(iter((killed or causes).items()))
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, SlipstreamError) and not issubclass(kind, StageError):
        return kind(failure.message)
    row, action = board.read(rank)
    verb = failure.message if failure.kind in ("signal", "exit") else f"failed: {failure.message}"
    return StageError(
        f"{failure.trace}rank {rank} (stage {rank}) {verb}; its last action was '{action}' (row {row} of its stream). "
        "All ranks have been stopped. Continue from the last checkpoint with --resume."
    )


def _standstill(board: Board, num_ranks: int, seconds: float) -> str:
    lines = []
    for rank in range(num_ranks):
        row, action = board.read(rank)
        lines.append(f"\n  rank {rank}: '{action}' (row {row})")
    return (
        f"nothing has moved for {seconds:.0f} s; all ranks have been stopped. Each was at:{''.join(lines)}\n"
        "Raise pipeline.timeout_s if one action may take this long, then continue with --resume."
    )
