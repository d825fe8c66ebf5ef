"""A run on Ray: the parameter server is an actor on this machine, and whoever started the run watches over it.

::

    this process     | connect or start a cluster | news, news ...   server gone: newest checkpoint, train again
                     |                            ^
    server actor     | train: the ordinary loop   |  ----x   Ray starts it again
                     |                            |
    worker actors    | wherever there is room     |  end with the server, and come again with the next
"""

import collections
import dataclasses
import importlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream import errors
from slipstream.config import Config
from slipstream.data import open_data
from slipstream.dataparallel.ray_cluster import check_capacity, cluster_of, import_ray
from slipstream.device import choose_device
from slipstream.errors import SlipstreamError, StageError
from slipstream.train.checkpoint import newest_complete, open_checkpoint
from slipstream.train.progress import Reporter
from slipstream.train.rank import run_here
from slipstream.train.rundir import RunDir
from slipstream.train.trainer import StopFlag, stop_signals

MAX_DEATHS = 3
"""Of the server in a row, without a checkpoint in between, before the run ends."""

NEWS_S = 0.5
"""How long the server keeps a question for news when there are none."""

RESTART_S = 120.0
"""How long Ray may take to start the server."""

News = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call of :class:`slipstream.train.progress.Reporter`: name and arguments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How training ended in the server.

    Attributes:
        summary: ``None`` where it was asked to stop, or failed.
        kind: Class of the error.
        message: Its text.
    """

    summary: dict[str, Any] | None = None
    kind: str = ""
    message: str = ""


class _Mailbox:
    """A reporter whose events are fetched by somebody else."""

    def __init__(self) -> None:
        self._news: collections.deque[News] = collections.deque()
        self._arrived = threading.Condition()

    def _put(self, name: str, *args: Any, **kwargs: Any) -> None:
        with self._arrived:
            self._news.append((name, args, kwargs))
            self._arrived.notify()

    def note(self, text: str) -> None:
        self._put("note", text)

    def start(self, *, step: int, num_steps: int) -> None:
        self._put("start", step=step, num_steps=num_steps)

    def on_step(self, row: Mapping[str, Any], *, eta_s: float) -> None:
        self._put("on_step", dict(row), eta_s=eta_s)

    def close(self) -> None:
        self._put("close")

    def take(self, *, wait_s: float) -> list[News]:
        with self._arrived:
            if not self._news:
                self._arrived.wait(wait_s)
            news = list(self._news)
            self._news.clear()
        return news


class ServerActor:
    """The parameter server and its training loop; several calls at a time."""

    def __init__(self) -> None:
        self._mailbox = _Mailbox()
        self._stop = StopFlag()

    def process(self) -> int:
        """Return the number of this process; it is ready when it answers."""
        return os.getpid()

    def train(self, config: Config, checkpoint: Path | None) -> End:
        """Train to the end, or until :meth:`stop`.

        Args:
            config: Resolved and checked.
            checkpoint: Folder of the one to continue from.
        """
        try:
            summary = run_here(
                config,
                open_data(config.data.path, verify=False),
                reporter=self._mailbox,
                checkpoint=open_checkpoint(checkpoint, verify=False) if checkpoint else None,
                stop=self._stop,
            )
        except SlipstreamError as error:
            return End(kind=type(error).__name__, message=str(error))
        return End(summary=summary)

    def news(self, wait_s: float) -> list[News]:
        """Return what happened since the last call, or wait for it a little."""
        return self._mailbox.take(wait_s=wait_s)

    def stop(self) -> None:
        """Ask to stop after the step under way."""
        self._stop.requested = True


def run_on_ray(config: Config, *, reporter: Reporter, checkpoint: Path | None) -> dict[str, Any] | None:
    """Train with the engine `ray`.

    Args:
        config: Resolved and checked; the run directory is ready.
        reporter: Is told of every event.
        checkpoint: Folder of the one to continue from.

    Returns:
        The summary; ``None`` where the run was asked to stop and has saved.

    Raises:
        ConfigError: The cluster cannot be reached, or is too small.
        StageError: No cluster can be started, or the server dies again and again.
    """
    with cluster_of(config), stop_signals() as stop:
        check_capacity(config, others=1)
        watch = _Watch(config, reporter, stop)
        try:
            end = watch.until_done(checkpoint)
        finally:
            watch.close()
    if end.kind:
        raise getattr(errors, end.kind)(end.message)
    return end.summary


class _Watch:
    """Starts the server, passes its news on, and lets it train again where it died."""

    def __init__(self, config: Config, reporter: Reporter, stop: StopFlag) -> None:
        self._ray = ray = import_ray()
        self._config = config
        self._reporter = reporter
        self._stop = stop
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._server = (
            ray.remote(ServerActor)
            .options(
                num_cpus=1,
                num_gpus=config.dataparallel.ray_gpus if choose_device(config).type == "cuda" else 0,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=3,
                scheduling_strategy=here,  # the run directory is on this machine
            )
            .remote()
        )

    def until_done(self, checkpoint: Path | None) -> End:
        """Let the server train to the end, again from its newest checkpoint where it died.

        Raises:
            StageError: It does not start, or died :data:`MAX_DEATHS` times without having saved anything in between.
        """
        deaths = 0
        while True:
            process = self._wait_for_server()
            machines = sum(node["Alive"] for node in self._ray.nodes())
            self._reporter.note(f"Ray on {machines} machine(s); the server is process {process} of this one")
            end = self._attend(self._server.train.remote(self._config, checkpoint))
            if end is not None:
                return end
            self._reporter.close()
            newest, _ = newest_complete(RunDir(Path(self._config.run_dir)).checkpoints)
            before, checkpoint = checkpoint, newest.folder if newest else checkpoint
            deaths = 1 if checkpoint != before else deaths + 1
            where = f"step {newest.step}" if newest else "the beginning"
            if deaths == MAX_DEATHS:
                raise StageError(
                    f"the server died {deaths} times in a row before it had saved anything after {where}. Is there "
                    "enough memory? `--dataparallel.ray-log True` shows what it prints; go on with --resume."
                )
            self._reporter.note(f"warning: the server died; it comes again, and goes on from {where}")

    def _wait_for_server(self) -> int:
        deadline = time.monotonic() + RESTART_S
        while True:
            try:
                return int(self._ray.get(self._server.process.remote(), timeout=RESTART_S))
            except self._ray.exceptions.ActorUnavailableError:
                time.sleep(0.1)
            except self._ray.exceptions.RayError as error:
                raise StageError(f"Ray does not start the server: {error}. Go on with --resume.") from error
            if time.monotonic() > deadline:
                raise StageError(f"Ray has not started the server in {RESTART_S:.0f} s. Go on with --resume.")

    def _attend(self, call: Any) -> End | None:
        """Pass news on until training has ended; ``None``: the server is gone."""
        try:
            is_done = False
            while not is_done:
                is_done = bool(self._ray.wait([call], timeout=0)[0])
                for name, args, kwargs in self._ray.get(self._server.news.remote(0.0 if is_done else NEWS_S)):
                    getattr(self._reporter, name)(*args, **kwargs)
                if self._stop.requested:
                    self._server.stop.remote()
            end: End = self._ray.get(call)
        except self._ray.exceptions.RayActorError:
            return None
        return end

    def close(self) -> None:
        self._ray.kill(self._server)
