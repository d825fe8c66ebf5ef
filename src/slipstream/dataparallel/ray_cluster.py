"""The Ray cluster of a run: one of our own that only this machine can reach, or one that the user names."""

import contextlib
import importlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from slipstream.config import Config, DataParallelConfig
from slipstream.dataparallel.checks import check_ray_answers, check_ray_installed, unreachable
from slipstream.errors import ConfigError, StageError
from slipstream.models.shapes import num_parameters

LOOPBACK = "127.0.0.1"

STORE_BYTES = 2**30
"""Least size of the object store of a cluster of our own."""

SPARE_CPUS = 1
"""Of a cluster of our own, beside the server's and the workers'."""


def import_ray() -> Any:
    """Return the module `ray`; only who uses this engine needs it."""
    check_ray_installed()
    return importlib.import_module("ray")


def cpus_of_worker(config: Config) -> int:
    """Return how many of Ray's CPUs a worker takes."""
    return config.train.threads_per_rank


def cluster_of(config: Config) -> AbstractContextManager[None]:
    """Return the cluster of a run, see :func:`ray_cluster`; one of its own has room for server and workers.

    Args:
        config: Resolved settings.
    """
    num_cpus = config.dataparallel.num_workers * cpus_of_worker(config) + 1 + SPARE_CPUS
    return ray_cluster(config.dataparallel, num_cpus=num_cpus, store_bytes=store_bytes(config))


@contextlib.contextmanager
def ray_cluster(settings: DataParallelConfig, *, num_cpus: int, store_bytes: int) -> Iterator[None]:
    """Connect to a cluster, or start one; nothing of that one is left afterwards.

    A program that is connected already stays as it is.

    Args:
        settings: Address and log.
        num_cpus: Of one that is started.
        store_bytes: Of its object store.

    Raises:
        ConfigError: No cluster answers at `dataparallel.ray_address`.
        StageError: A cluster cannot be started here.
    """
    if "ray" in sys.modules and import_ray().is_initialized():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.ExitStack() as end:
        end.callback(signal.signal, signal.SIGTERM, handler)  # Ray takes it
        if settings.ray_address:
            _connect(settings.ray_address, log=settings.ray_log)
        else:
            folder = end.enter_context(private_environment())
            _start(folder, num_cpus=num_cpus, store_bytes=store_bytes, log=settings.ray_log)
        end.callback(import_ray().shutdown)
        yield


def _connect(address: str, *, log: bool) -> None:
    check_ray_answers(address)  # Ray itself would try for a minute
    ray = import_ray()
    try:
        ray.init(address=address, namespace="slipstream", log_to_driver=log, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(unreachable(address, error)) from error


@contextlib.contextmanager
def private_environment() -> Iterator[Path]:
    """Give clusters of our own a secret and an address, before Ray is imported, and this one a folder while it lives.

    Raises:
        StageError: Ray was imported before: it has read its environment.
    """
    name, value = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
    if "ray" in sys.modules and os.environ.get(name) != value:
        raise StageError(
            f"Ray was imported before this run and would listen on more than {LOOPBACK}, where others could use it. "
            "Begin the run in a process of its own, connect to Ray first, or name a cluster "
            "(dataparallel.ray_address)."
        )
    # Without it Ray gives up the loopback address on Linux for one that other machines can reach.
    os.environ[name] = value
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Whoever can talk to a cluster can run programs on it, and other users of this machine reach its ports.
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Paths of Unix sockets are short; that of the system's folder for temporary files need not be.
    folder = Path(tempfile.mkdtemp(prefix="slipstream-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, *, num_cpus: int, store_bytes: int, log: bool) -> None:
    ray = import_ray()
    # A scheduler's SIGTERM reaches all processes of a group at once. Ray's, which inherit this, go on then, so that the
    # server can save; they end with the shutdown.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        ray.init(
            address="local",  # not one that happens to be here, or that the environment names
            num_cpus=num_cpus,
            object_store_memory=store_bytes,
            include_dashboard=False,
            namespace="slipstream",
            log_to_driver=log,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder),
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise StageError(
            f"Ray cannot start a cluster on {LOOPBACK}, with its files in {folder}: {error}. See that ports of "
            f"{LOOPBACK} are free and that {folder.parent} and /dev/shm have room, or use --engine process."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    found = {node["NodeManagerAddress"] for node in ray.nodes()}
    if found != {LOOPBACK}:
        ray.shutdown()
        raise StageError(
            f"Ray was to listen on {LOOPBACK} and does on {', '.join(sorted(found))}, where others could use it. Use "
            "--engine process, or name a cluster with dataparallel.ray_address."
        )


def store_bytes(config: Config) -> int:
    """Return how large the object store of a cluster of our own is.

    Two versions of the weights, and two gradients of each worker: one that is being added up and one that arrives. None
    of that where sessions carry them.
    """
    if config.dataparallel.ray_transport != "object_store":
        return STORE_BYTES
    size = 4 * num_parameters(config.model)
    return max(STORE_BYTES, int(1.25 * size * (2 + 2 * config.dataparallel.num_workers)))


def check_capacity(config: Config, *, others: int = 0) -> None:
    """Refuse a cluster that has no room for all workers: those left over would never come.

    Args:
        config: Resolved settings.
        others: CPUs that are needed beside the workers'.

    Raises:
        ConfigError: It has not.
    """
    offered = import_ray().cluster_resources().get("CPU", 0.0)
    each, count = cpus_of_worker(config), config.dataparallel.num_workers
    if offered < each * count + others:
        raise ConfigError(
            f"the Ray cluster offers {offered:g} CPUs; {count} workers of {each} (train.threads_per_rank) and the "
            f"server need {each * count + 1}. Use fewer workers (dataparallel.num_workers), or add nodes with "
            "`ray start --address`."
        )
