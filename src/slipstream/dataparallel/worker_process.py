"""One worker as a process: fetch weights, compute a lease, push the gradient, until the server says stop."""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait

import torch

from slipstream.config import Config, config_hash
from slipstream.data import open_data
from slipstream.dataparallel.emulation import Emulation
from slipstream.dataparallel.ledger import Lease
from slipstream.dataparallel.local_steps import build_worker
from slipstream.dataparallel.messages import Order, Push
from slipstream.dataparallel.transport import Pipe, PushWriter, WeightsFetched
from slipstream.dataparallel.wire import Sent
from slipstream.dataparallel.worker import Replica, Work, Worker
from slipstream.device import settle
from slipstream.executor import BatchSource
from slipstream.microbatches import microbatch_loader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workplace:
    """What a worker process is given.

    Attributes:
        config: Resolved settings.
        worker: Its number.
        pipe: To the server.
        weights: Where the server publishes.
        gradient: Where this worker pushes.
        device: Where to compute.
    """

    config: Config
    worker: int
    pipe: Pipe
    weights: WeightsFetched
    gradient: PushWriter
    device: torch.device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """A worker is ready for work.

    Attributes:
        identity: Digest of its settings.
        pace_s: Seconds that it has just taken for a microbatch, or shall take; a first guess.
    """

    identity: str
    pace_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A gradient lies in the worker's slot.

    Attributes:
        push: What the protocol wants to know.
        grad_norm: Its global norm, a float32 number.
        loss: Mean loss.
        idle: Parameters without a gradient.
    """

    push: Push
    grad_norm: float
    loss: float
    idle: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overtaken:
    """The weights of an order were overwritten before they were copied.

    Attributes:
        lease_id: Of the order.
    """

    lease_id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Answer to :class:`Calibrate`.

    Attributes:
        microbatch_s: Seconds a microbatch, with nobody else at work.
    """

    microbatch_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed:
    """Last word of a worker that raised.

    Attributes:
        trace: Traceback.
    """

    trace: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Compute some microbatches for the sake of the time.

    Attributes:
        num_microbatches: How many.
    """

    num_microbatches: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drain:
    """To a worker that is a pipeline: there is no work for now, finish what has begun."""


Report = Hello | Result | Overtaken | Calibrated | Failed
"""From worker to server."""

Command = Order | Calibrate | Drain | None
"""From server to worker; ``None``: leave."""

WorkerMain = Callable[[Workplace], None]
"""What a worker process does; of a module's top level."""


def work(place: Workplace, *, microbatches: BatchSource | None = None) -> None:
    """Be a worker until the server says stop, or is gone.

    Args:
        place: What it needs.
        microbatches: Gives the microbatch of a number; ``None``: those of the settings' data.
    """
    config = place.config
    settle(config, place.device)
    microbatches = microbatches or microbatch_loader(config, open_data(config.data.path, verify=False)).batch
    layout = place.weights.layout
    flat = layout.empty(device=place.device)
    replica = Replica.over(config, layout.views(flat), device=place.device)
    worker = build_worker(config, replica, microbatches, device=place.device)
    worker.prepare(place.worker)
    desk = _Desk(place, worker, flat)
    # The first forward and backward of a process take long, and no worker shall be judged by them.
    pace_s = max(desk.time_per_microbatch(1), desk.nominal_s)
    place.pipe.send(Hello(identity=config_hash(config), pace_s=pace_s))
    while (command := place.pipe.recv()) is not None:
        if isinstance(command, Calibrate):
            seconds = desk.time_per_microbatch(command.num_microbatches)
            place.pipe.send(Calibrated(microbatch_s=seconds))
        else:
            place.pipe.send(desk.carry_out(command))


class _Desk:
    """Carries out orders, one after another."""

    def __init__(self, place: Workplace, worker: Worker, flat: torch.Tensor) -> None:
        self._place = place
        self._worker = worker
        self._flat = flat
        self._sequence = 0
        settings = place.config.dataparallel
        self._emulation = Emulation.of(settings)
        # In step, the gradients of all workers are added up to the mean over the whole batch.
        self._mean_over = place.config.batch_tokens if settings.mode == "sync" else None

    @property
    def nominal_s(self) -> float:
        """Seconds that a microbatch shall take."""
        return self._emulation.microbatch_s / self._emulation.speed(self._place.worker)

    def time_per_microbatch(self, count: int) -> float:
        """Compute on whatever weights are here, for the time that it takes; nothing is kept."""
        lease = Lease(id=0, worker=0, incarnation=0, ranges=((0, count),), deadline_s=0.0)
        begin = time.perf_counter()
        self._worker.compute(lease, version=0, worker=self._place.worker)
        return (time.perf_counter() - begin) / count

    def carry_out(self, order: Order) -> Result | Overtaken:
        """Fetch the weights of an order, compute its lease, and write the gradient down."""
        place, lease = self._place, order.lease
        began = time.perf_counter()
        if not place.weights.read(order.version, self._flat):
            return Overtaken(lease_id=lease.id)
        fetched = time.perf_counter()
        work = self._worker.compute(lease, version=order.version, worker=order.worker, mean_over=self._mean_over)
        self._sequence += 1
        # Each incarnation has a jitter of its own, or it would live through its predecessor's cycles again.
        cycle = self._sequence + 1_000_000 * (order.incarnation - 1)
        rest_s = self._emulation.cycle_s(order.worker, cycle, lease.num_microbatches) - (time.perf_counter() - fetched)
        if rest_s > 0:
            time.sleep(rest_s)
        computed = time.perf_counter()
        sent = place.gradient.write(self._sequence, work.gradient.tensors, key=lease.ranges[0][0])
        written = time.perf_counter()
        push = _push(
            order,
            work,
            sent,
            sequence=self._sequence,
            compute_s=computed - fetched,
            communication_s=(fetched - began) + (written - computed),
        )
        return Result(push=push, grad_norm=float(work.grad_norm), loss=work.loss, idle=sent.idle)


def _push(order: Order, work: Work, sent: Sent, *, sequence: int, compute_s: float, communication_s: float) -> Push:
    return Push(
        worker=order.worker,
        incarnation=order.incarnation,
        sequence=sequence,
        epoch=order.epoch,
        lease_id=order.lease.id,
        read_version=order.version,
        num_tokens=work.gradient.num_tokens,
        is_finite=work.is_finite,
        compute_s=compute_s,
        communication_s=communication_s,
        router=work.router,
        wire_bytes=sent.num_bytes,
        wire_error=sent.relative_error,
    )


def process_main(main: WorkerMain, place: Workplace) -> None:
    """Do what a worker process does, and leave; its last word says why, if it raised."""
    # Ctrl-C and a scheduler's SIGTERM reach all processes of a group at once. The server saves then, after a step
    # that needs its workers; they leave when it says so, or is gone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_server, daemon=True).start()
    code = 1
    try:
        main(place)
        code = 0
    except BaseException:
        with contextlib.suppress(OSError):
            place.pipe.send(Failed(trace=traceback.format_exc()))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _leave_with_server() -> None:
    """End this process when the one that started it is gone, whatever it is at."""
    server = parent_process()
    assert server is not None
    wait([server.sentinel])
    os._exit(1)
