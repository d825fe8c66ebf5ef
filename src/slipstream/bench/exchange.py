"""`slipstream bench exchange`: how fast weights and gradients pass between server and worker processes.

Workers compute nothing: they copy the newest weights, write a gradient of the same size, and ask again. The optimizer
is left out. Beside it, in the same rounds, one process copies as many bytes from one tensor to another.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.bench.pipeline import load_average, machine, quartiles
from slipstream.bench.settings import BenchExchangeConfig, check_exchange
from slipstream.config import Config, DataParallelConfig
from slipstream.dataparallel.checks import check_ray_installed
from slipstream.dataparallel.crew import Crew, ProcessCrew
from slipstream.dataparallel.ledger import Lease
from slipstream.dataparallel.messages import Order, Push
from slipstream.dataparallel.shared import Layout, WeightBoard
from slipstream.dataparallel.transport import WeightsOffered
from slipstream.dataparallel.worker_process import Hello, Overtaken, Result, Workplace
from slipstream.errors import StageError, counted

_CPU = torch.device("cpu")
_TENSOR_BYTES = 4 * 2**20
"""Of one matrix of the model, 1024 x 1024."""


def run_bench_exchange(
    config: BenchExchangeConfig, *, note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure the exchange and return what was found.

    Args:
        config: What to time.
        note: Is told what is about to be timed.

    Returns:
        ``copy_bytes_per_s`` (of one process), ``exchange_bytes_per_s`` (pushed and pulled by all workers together) and
        ``share_of_copy``, medians over rounds; ``summed_bytes_per_s`` and ``share_of_copy_summed``, where the server
        also adds the gradients up; with each ``..._rounds``; ``quartiles_share``, ``settings`` and ``machine``.

    Raises:
        ConfigError: The settings cannot be timed, or Ray is not installed.
        StageError: A worker died.
    """
    check_exchange(config)
    if config.engine == "ray":
        check_ray_installed()
    torch.set_num_threads(1)
    note(
        f"{counted(config.num_workers, 'worker')}, {config.megabytes} MB of weights, {counted(config.rounds, 'round')}"
    )
    load_before = load_average()
    with contextlib.ExitStack() as end:
        if config.engine == "ray":
            end.enter_context(_ray(config))
        exchange = end.enter_context(_Exchange(config))
        exchange.run(config.cycles)  # memory is there when it was touched once
        rounds = [
            (exchange.copy(config.cycles), exchange.run(config.cycles), exchange.run(config.cycles, sums=True))
            for _ in range(config.rounds)
        ]
    copy, plain, summed = ([float(each[column]) for each in rounds] for column in range(3))
    shares = [b / a for a, b in zip(copy, plain)]
    return {
        "copy_bytes_per_s": statistics.median(copy),
        "exchange_bytes_per_s": statistics.median(plain),
        "share_of_copy": statistics.median(shares),
        "quartiles_share": quartiles(shares),
        "summed_bytes_per_s": statistics.median(summed),
        "share_of_copy_summed": statistics.median(b / a for a, b in zip(copy, summed)),
        "copy_rounds": copy,
        "exchange_rounds": plain,
        "summed_rounds": summed,
        "settings": {
            "engine": config.engine,
            "ray_transport": config.ray_transport,
            "num_workers": config.num_workers,
            "megabytes": config.megabytes,
            "rounds": config.rounds,
            "cycles": config.cycles,
        },
        "machine": machine() | {"load_average_before": load_before, "load_average_after": load_average()},
    }


class _Exchange(contextlib.AbstractContextManager["_Exchange"]):
    """A server without an optimizer, and its workers."""

    def __init__(self, config: BenchExchangeConfig) -> None:
        self._num_workers = config.num_workers
        count = -(-config.megabytes * 10**6 // _TENSOR_BYTES)
        layout = Layout(shapes={f"{number}": (1024, 1024) for number in range(count)}, dtype=torch.float32)
        self._num_bytes = layout.size * 4
        self._masters = layout.views(layout.empty())
        self._sums = layout.views(layout.empty())
        self._from, self._to = layout.empty(), layout.empty()
        self._version = 0
        self._board, self._crew = _transport(config, layout)
        self._board.publish(0, self._masters)

    def __enter__(self) -> "_Exchange":
        for worker in range(self._num_workers):
            self._crew.start(worker)
        for _ in range(self._num_workers):
            self._hear()
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.close()

    def copy(self, cycles: int) -> float:
        """Return the bytes per second of a plain copy from memory to memory."""
        begin = time.perf_counter()
        for _ in range(2 * cycles):
            self._to.copy_(self._from)
        return 2 * cycles * self._num_bytes / (time.perf_counter() - begin)

    def run(self, cycles: int, *, sums: bool = False) -> float:
        """Let each worker go through some cycles; return the bytes per second pulled and pushed.

        Args:
            cycles: Of each worker.
            sums: Let the server add the gradients up.
        """
        begin = time.perf_counter()
        left = {seat.worker: cycles for seat in self._crew.seats}
        for seat in self._crew.seats:
            self._crew.tell(seat, self._order(seat.worker))
        pushed = 0
        while pushed < cycles * self._num_workers:
            seat, report = self._hear()
            if isinstance(report, Result):
                pushed += 1
                left[seat.worker] -= 1
                if sums:
                    for name, gradient in seat.gradient.read(report.push.sequence, ()).items():
                        assert gradient is not None
                        self._sums[name].add_(gradient, alpha=0.5)
                if pushed % self._num_workers == 0:
                    self._version += 1
                    self._board.publish(self._version, self._masters)
            if left[seat.worker]:
                self._crew.tell(seat, self._order(seat.worker))
        return 2 * pushed * self._num_bytes / (time.perf_counter() - begin)

    def _hear(self) -> tuple[Any, Any]:
        heard = self._crew.hear(timeout_s=60.0)
        if heard is None or heard.report is None:
            raise StageError("a worker of the measurement died or says nothing. Is there enough memory? Start again.")
        return heard.seat, heard.report

    def _order(self, worker: int) -> Order:
        lease = Lease(id=0, worker=worker, incarnation=1, ranges=(), deadline_s=0.0)
        return Order(worker=worker, incarnation=1, epoch=1, version=self._version, lease=lease)


def _ray(config: BenchExchangeConfig) -> contextlib.AbstractContextManager[None]:
    """Return a cluster with room for two versions of the weights, and for two gradients of each worker."""
    from slipstream.dataparallel.ray_cluster import STORE_BYTES, ray_cluster

    size = int(1.25e6 * config.megabytes * (2 + 2 * config.num_workers))
    return ray_cluster(DataParallelConfig(), num_cpus=config.num_workers + 1, store_bytes=max(STORE_BYTES, size))


def _transport(config: BenchExchangeConfig, layout: Layout) -> tuple[WeightsOffered, Crew]:
    """Return what an engine publishes weights with, and its workers."""
    if config.engine == "process":
        board = WeightBoard(layout)
        return board, ProcessCrew(Config(), weights=board, gradient=layout, device=_CPU, main=exchange_worker)
    from slipstream.dataparallel.ray_crew import RayCrew
    from slipstream.dataparallel.ray_engine import build_lines

    run = Config(dataparallel=DataParallelConfig(ray_transport=config.ray_transport))
    lines = build_lines(run, layout, layout)
    return lines, RayCrew(run, lines=lines, device=_CPU, main=exchange_worker)


def exchange_worker(place: Workplace) -> None:
    """Copy weights and push a gradient, for each order."""
    torch.set_num_threads(1)
    layout = place.weights.layout
    weights = layout.empty()
    gradient: dict[str, Tensor | None] = dict(layout.views(layout.empty() + 1.0))
    sequence = 0
    place.pipe.send(Hello(identity=""))
    while isinstance(order := place.pipe.recv(), Order):
        if not place.weights.read(order.version, weights):
            place.pipe.send(Overtaken(lease_id=0))
            continue
        sequence += 1
        place.gradient.write(sequence, gradient, key=sequence)
        push = Push(
            worker=place.worker,
            incarnation=1,
            sequence=sequence,
            epoch=1,
            lease_id=0,
            read_version=order.version,
            num_tokens=1,
        )
        place.pipe.send(Result(push=push, grad_norm=1.0, loss=0.0, idle=()))


def exchange_text(result: dict[str, Any]) -> str:
    """Return the figures for people."""
    settings, (low, _, high) = result["settings"], result["quartiles_share"]
    engine = f"ray ({settings['ray_transport']})" if settings["engine"] == "ray" else settings["engine"]
    return (
        f"engine {engine}, {settings['num_workers']} worker(s), {settings['megabytes']} MB of float32\n"
        f"plain copy of one process         {result['copy_bytes_per_s'] / 1e9:6.2f} GB/s\n"
        f"pushed and pulled                 {result['exchange_bytes_per_s'] / 1e9:6.2f} GB/s, "
        f"{result['share_of_copy']:.0%} of it (quartiles {low:.0%} to {high:.0%})\n"
        f"with the sums of the gradients    {result['summed_bytes_per_s'] / 1e9:6.2f} GB/s, "
        f"{result['share_of_copy_summed']:.0%}\n"
        "A cycle: the server publishes, once for all workers; a worker copies the weights and writes its gradient. The "
        "optimizer is left out."
    )
