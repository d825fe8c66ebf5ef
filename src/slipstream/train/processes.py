"""Runs a function in one process a rank on this machine, watches over them, and says what went wrong first."""

import contextlib
import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # public, but not in its export list

from slipstream import errors
from slipstream.errors import SlipstreamError, StageError
from slipstream.pipeline.board import Board
from slipstream.pipeline.transport import PeerError
from slipstream.train.trainer import StopFlag, stop_signals

GRACE_S = 2.0
"""How long after the first failure other ranks may still report, so that the cause can be told from its echoes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a rank's function is given.

    Attributes:
        rank: This rank.
        num_ranks: All of them.
        store: Rendezvous of all ranks.
        note: Is told (rank, text) what the rank begins; the text is quoted if the rank dies.
    """

    rank: int
    num_ranks: int
    store: Store
    note: Callable[[int, str], None]


RankFunction = Callable[..., Any]
"""Called with a :class:`RankContext` and the arguments of :func:`run_processes`; of a module's top level."""


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


def run_processes(
    function: RankFunction,
    *arguments: Any,
    num_ranks: int,
    timeout_s: float,
    remedy: str,
    finish_on_signal: bool = False,
) -> list[Any]:
    """Call a function once a rank, each in a process of its own.

    Args:
        function: What a rank does.
        arguments: For each rank alike, after its context.
        num_ranks: Processes.
        timeout_s: Half of the time without any rank's movement after which all are stopped.
        remedy: Sentence that ends the message of a failure.
        finish_on_signal: Pass SIGTERM and Ctrl-C on to the ranks, as SIGTERM, and wait for them; they have to end by
            themselves then. Otherwise a signal ends them as it ends this process.

    Returns:
        What the function returned, by rank; ``None`` for each where a signal came before the ranks had met.

    Raises:
        StageError: A rank failed or died; names rank, stage and last action. Every process has ended.
        SlipstreamError: What a rank found wrong that the user can mend.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        folder = Path(name)
        board = Board(folder / "board", num_ranks=num_ranks, create=True)
        # torch takes seconds to import: one process does it, the ranks are forked from that one.
        context = multiprocessing.get_context("forkserver")
        # torch._dynamo is what the first optimizer imports, for another second and a half.
        context.set_forkserver_preload([__name__, function.__module__, "torch._dynamo"])
        processes: list[ForkServerProcess] = []
        pipes: list[Connection] = []
        try:
            with _signals(finish_on_signal) as stop:
                for rank in range(num_ranks):
                    ours, theirs = context.Pipe(duplex=False)
                    target = (rank, num_ranks, folder, theirs, finish_on_signal, function, arguments)
                    process = context.Process(target=_rank_main, args=target, name=f"rank-{rank}")
                    process.start()
                    theirs.close()
                    processes.append(process)
                    pipes.append(ours)
                return _Watch(processes, pipes, board, timeout_s=timeout_s, remedy=remedy).until_done(stop)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()


@contextlib.contextmanager
def _signals(finish: bool) -> Iterator[StopFlag]:
    if not finish:
        yield StopFlag()
        return
    with stop_signals() as stop:
        yield stop


def _leave_with_launcher() -> None:
    """End this process when the one that started the run is gone: nobody would read its results or stop it."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    wait([launcher.sentinel])
    os._exit(1)


def _rank_main(
    rank: int,
    num_ranks: int,
    folder: Path,
    pipe: Connection,
    finish_on_signal: bool,
    function: RankFunction,
    arguments: tuple[Any, ...],
) -> None:
    """Be a rank; leave without cleaning up, since after a failure a collective clean-up would only hang."""
    code = 1
    if finish_on_signal:
        # Until the function takes them itself. Ctrl-C reaches all processes of a terminal at once, and a rank that
        # dies of it while it connects would turn a stop into a failure.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    try:
        board = Board(folder / "board", num_ranks=num_ranks)
        board.note(rank, "connecting")
        store = FileStore(str(folder / "store"), num_ranks)
        context = RankContext(rank=rank, num_ranks=num_ranks, store=store, note=board.note)
        pipe.send(("done", function(context, *arguments)))
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


class _Watch:
    """Waits for the ranks' last words, and for those that will never come."""

    def __init__(
        self,
        processes: Sequence[ForkServerProcess],
        pipes: Sequence[Connection],
        board: Board,
        *,
        timeout_s: float,
        remedy: str,
    ) -> None:
        self._processes = processes
        self._pipes = pipes
        self._board = board
        self._timeout_s = timeout_s
        self._remedy = remedy
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}

    def until_done(self, stop: StopFlag) -> list[Any]:
        """Wait until every rank is done, or for the first failure."""
        deadline = None
        rows, moved_at = [0] * len(self._processes), time.monotonic()
        told: set[int] = set()
        while waited_for := self._silent_ranks():
            for ready in wait(list(waited_for), timeout=0.5):
                assert isinstance(ready, Connection)
                self._hear(waited_for[ready], ready)
            if stop.requested:
                self._pass_on_stop(told)
            now = time.monotonic()
            if self._failures and stop.requested and not told:
                # Ctrl-C ended a rank that was not yet ours, so the ranks never met: there is nothing to save.
                return [None] * len(self._processes)
            if self._failures and deadline is None:
                deadline = now + GRACE_S
            if deadline is not None and now > deadline:
                break
            new_rows = [self._board.read(rank)[0] for rank in range(len(self._processes))]
            if new_rows != rows:
                rows, moved_at = new_rows, now
            elif now - moved_at > 2 * self._timeout_s:
                raise StageError(self._standstill(now - moved_at))
        if self._failures:
            raise self._primary()
        return [self._results[rank] for rank in range(len(self._processes))]

    def _pass_on_stop(self, told: set[int]) -> None:
        """Send SIGTERM to each rank once, when it has noted something of its own: from then on it listens."""
        for rank, process in enumerate(self._processes):
            is_listening = self._board.read(rank)[0] > 1
            if rank not in told and is_listening and process.is_alive() and process.pid is not None:
                told.add(rank)
                os.kill(process.pid, signal.SIGTERM)

    def _silent_ranks(self) -> dict[Connection, int]:
        spoken = self._results.keys() | self._failures.keys()
        return {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in spoken}

    def _hear(self, rank: int, pipe: Connection) -> None:
        """Take a rank's last word; a pipe that closed without one belongs to a process that was killed."""
        try:
            word, content = pipe.recv()
        except (EOFError, OSError):  # it may have been killed in the midst of the word
            process = self._processes[rank]
            process.join(timeout=5)
            code = process.exitcode
            if code is not None and code < 0:
                failure = Failure(kind="signal", message=f"was killed by {signal.Signals(-code).name}")
            else:
                failure = Failure(kind="exit", message=f"ended with exit code {code} and no word")
            self._failures[rank] = failure
            return
        if word == "done":
            self._results[rank] = content
        else:
            self._failures[rank] = content

    def _primary(self) -> SlipstreamError:
        """Return the failure that the others follow from, as an error to raise."""
        causes = {rank: each for rank, each in self._failures.items() if not each.is_echo} or self._failures
        killed = {rank: each for rank, each in causes.items() if each.kind == "signal"}
        rank, failure = next(iter((killed or causes).items()))
        kind = getattr(errors, failure.kind, None)
        if isinstance(kind, type) and issubclass(kind, SlipstreamError) and not issubclass(kind, StageError):
            return kind(failure.message)
        row, action = self._board.read(rank)
        verb = failure.message if failure.kind in ("signal", "exit") else f"failed: {failure.message}"
        return StageError(
            f"{failure.trace}rank {rank} (stage {_stage(action, rank)}) {verb}; its last action was '{action}' (row "
            f"{row} of its stream). {self._silent() if failure.is_echo else ''}All ranks have been stopped. "
            f"{self._remedy}"
        )

    def _silent(self) -> str:
        """Name the ranks that neither failed nor waited: where all others only miss somebody, it is one of these."""
        at = {rank: self._board.read(rank) for rank in self._silent_ranks().values()}
        return "".join(
            f"Rank {rank} did not answer; it was at '{text}' (row {row}). " for rank, (row, text) in at.items()
        )

    def _standstill(self, seconds: float) -> str:
        lines = []
        for rank in range(len(self._processes)):
            row, action = self._board.read(rank)
            lines.append(f"\n  rank {rank}: '{action}' (row {row})")
        return (
            f"nothing has moved for {seconds:.0f} s; all ranks have been stopped. Each was at:{''.join(lines)}\n"
            f"Raise pipeline.timeout_s if one action may take this long. {self._remedy}"
        )


def _stage(action: str, rank: int) -> str:
    """Return the stage that an action's text begins with; a rank that has one stage only has its own number."""
    number = re.match(r"\d+", action)
    return number[0] if number else str(rank)
