"""Trains many runs side by side, one process each, and is sunk by none of them.

Each run is an ordinary run directory: a finished one is passed over, an interrupted one goes on from its checkpoint,
one that diverged or crashed says so in its ``failure.json``.
"""

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

import torch

from slipstream.config import Config
from slipstream.cores import num_cores
from slipstream.errors import ConfigError, NonFiniteError, SlipstreamError
from slipstream.optim.rules import find_rule
from slipstream.train.launch import launch
from slipstream.train.many_checks import PlannedRun, check_runs
from slipstream.train.many_progress import ManyObserver
from slipstream.train.outcome import Outcome, clear_failure, read_outcome, write_failure
from slipstream.train.progress import SilentReporter
from slipstream.train.rundir import RunDir
from slipstream.train.trainer import stop_signals

NEWS_EVERY_S = 0.2
"""Seconds between two messages of a run's progress."""

UNKNOWN_EXIT_CODE = 255
"""What multiprocessing gives for a process whose fork server is gone."""


def train_all(
    configs: Mapping[str, Config],
    *,
    observer: ManyObserver,
    num_workers: int | None = None,
    overwrite: bool = False,
    keep_checkpoints: bool = False,
) -> bool:
    """Check all runs, then train those that have no result yet; see :func:`run_many`.

    Args:
        configs: Settings with a run directory each, by a name for people.
        observer: Is told of every event.
        num_workers: Runs at a time; none: see :func:`default_num_workers`.
        overwrite: Begin a run anew where its directory holds one with other settings.
        keep_checkpoints: Keep those of finished runs.

    Returns:
        Whether every run has been tried; otherwise a signal asked to stop.

    Raises:
        SlipstreamError: A run is wrong; names it, and none was started.
    """
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"{num_workers} runs at a time (--num-workers) get nowhere; give 1 or more, or leave it out.")
    planned = [PlannedRun(name=name, config=config) for name, config in configs.items()]
    runs = check_runs(planned, overwrite=overwrite, warn=lambda sentence: observer.note(f"warning: {sentence}"))
    return run_many(
        runs,
        num_workers=default_num_workers(runs) if num_workers is None else num_workers,
        observer=observer,
        keep_checkpoints=keep_checkpoints,
    )


def default_num_workers(runs: Sequence[PlannedRun]) -> int:
    """Return how many runs the machine should train at once: its cores by the threads of a run, on CUDA one."""
    config = runs[0].config
    if config.train.device != "cpu" and torch.cuda.is_available():
        return 1
    return max(num_cores() // config.train.threads_per_rank, 1)


def run_many(
    runs: Sequence[PlannedRun], *, num_workers: int, observer: ManyObserver, keep_checkpoints: bool = False
) -> bool:
    """Train every run that has not ended yet, in the given order.

    Args:
        runs: Checked, by :func:`slipstream.train.many_checks.check_runs`; each with a run directory of its own.
        num_workers: Runs at a time.
        observer: Is told of every event.
        keep_checkpoints: Keep those of finished runs; otherwise they are removed with the last step, since a grid of
            them fills a disk.

    Returns:
        Whether every run has been tried; otherwise a signal asked to stop, and the runs under way have saved.
    """
    to_do = collections.deque(run for run in runs if run.begins_anew or not _has_result(run))
    observer.start(list(to_do), num_runs=len(runs))
    try:
        with stop_signals() as stop:
            pool = _Pool(observer, rules={run.config.optim.name for run in runs}, keep_checkpoints=keep_checkpoints)
            try:
                while (to_do and not stop.requested) or pool.num_active:
                    while to_do and not stop.requested and pool.num_active < num_workers:
                        pool.begin(to_do.popleft())
                    pool.listen()
                    if stop.requested:
                        pool.stop()
            finally:
                pool.kill()
    finally:
        observer.close()
    return not stop.requested


def _has_result(run: PlannedRun) -> bool:
    outcome = read_outcome(Path(run.config.run_dir))
    return outcome is not None and outcome.kind != "crashed"


@dataclasses.dataclass
class _Active:
    """A run in a process of its own."""

    run: PlannedRun
    process: ForkServerProcess
    began: float


class _Pool:
    """The runs under way."""

    def __init__(self, observer: ManyObserver, *, rules: Iterable[str], keep_checkpoints: bool) -> None:
        self._observer = observer
        self._keep_checkpoints = keep_checkpoints
        self._active: dict[Connection, _Active] = {}
        self._told_to_stop = False
        # torch takes seconds to import, and again as long what its optimizers import when the first is made: one
        # process does it, the runs are forked from that one.
        self._context = multiprocessing.get_context("forkserver")
        of_rules = sorted({find_rule(rule).__module__ for rule in rules})
        self._context.set_forkserver_preload([__name__, "torch._dynamo", *of_rules])

    @property
    def num_active(self) -> int:
        """Runs under way."""
        return len(self._active)

    def begin(self, run: PlannedRun) -> None:
        """Start a run."""
        clear_failure(Path(run.config.run_dir))
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run_main, args=(theirs, run.config, run.begins_anew), name=run.name)
        process.start()
        theirs.close()
        self._active[ours] = _Active(run, process, time.monotonic())
        self._observer.began(run)

    def listen(self) -> None:
        """Wait a moment for news of the runs, and take it."""
        for pipe in wait(list(self._active), timeout=0.5):
            assert isinstance(pipe, Connection)
            active = self._active[pipe]
            try:
                word, content = pipe.recv()
            except (EOFError, OSError):
                active.process.join(timeout=5)
                code = active.process.exitcode
                # Asked to stop before it had begun to listen for that; or the server that forks the runs was asked too
                # (a batch system tells the whole process group), and nobody knows how the run ended.
                is_stopped = self._told_to_stop and code in (-signal.SIGTERM, UNKNOWN_EXIT_CODE)
                self._end(pipe, None if is_stopped else Outcome(kind="crashed", message=_last_words(code)))
                continue
            if word == "step":
                self._observer.on_step(active.run, content)
            else:
                self._end(pipe, content)

    def stop(self) -> None:
        """Ask the runs to save and leave; once."""
        if not self._told_to_stop:
            self._told_to_stop = True
            for active in self._active.values():
                # Not asked whether it is alive: with the fork server gone, multiprocessing takes every run for dead.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(cast(int, active.process.pid), signal.SIGTERM)

    def kill(self) -> None:
        """End what is still there."""
        for active in self._active.values():
            active.process.kill()
            active.process.join()

    def _end(self, pipe: Connection, outcome: Outcome | None) -> None:
        """Take a run's last word: how it ended, or ``None`` where it was asked to stop and has saved."""
        active = self._active.pop(pipe)
        pipe.close()
        active.process.join()
        run_dir = Path(active.run.config.run_dir)
        if outcome is not None and outcome.kind != "finished":
            write_failure(run_dir, outcome)
        elif outcome is not None and not self._keep_checkpoints:
            shutil.rmtree(RunDir(run_dir).checkpoints, ignore_errors=True)
        if outcome is not None:
            self._observer.ended(active.run, outcome, seconds=time.monotonic() - active.began)


def _last_words(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the process was killed by {signal.Signals(-exit_code).name}"
    return f"the process ended with exit code {exit_code} and no word"


class _PipeReporter(SilentReporter):
    """Tells the parent process how far the run is, now and then."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._told_at = 0.0

    def on_step(self, row: Mapping[str, Any], *, eta_s: float) -> None:
        """Send the step and its loss."""
        if time.monotonic() - self._told_at > NEWS_EVERY_S:
            self._told_at = time.monotonic()
            self._pipe.send(("step", {"step": row["step"], "loss": row["loss"]}))


def _run_main(pipe: Connection, config: Config, begins_anew: bool) -> None:
    """Be a run: train, tell how it ended, leave."""
    # Signals to the whole process group are for the parent alone, which asks each run once: a second request would end
    # a run before it has saved.
    os.setsid()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    outcome: Outcome | None
    try:
        summary = launch(config, reporter=_PipeReporter(pipe), resume=not begins_anew, overwrite=begins_anew)
        outcome = None if summary is None else Outcome(kind="finished", summary=summary)
    except NonFiniteError as error:
        outcome = Outcome(kind="diverged", message=str(error))
    except SlipstreamError as error:
        outcome = Outcome(kind="crashed", message=str(error))
    except KeyboardInterrupt:
        outcome = None
    except BaseException:
        outcome = Outcome(kind="crashed", message=traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        pipe.send(("end", outcome))
        pipe.close()
        sys.stderr.flush()
    os._exit(0)


def _leave_with_parent() -> None:
    """End this process when the one that started it is gone: nobody would read its results or stop it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
