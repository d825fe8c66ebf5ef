"""Settings of data parallelism that make no sense where they are given. Imports no torch."""

import importlib.util
import socket

from slipstream.config import SINGLE_ONLY, Config, DataParallelConfig, StalenessConfig
from slipstream.errors import ConfigError

CONNECT_S = 10.0
"""How long a Ray cluster's address may take to answer."""


def check_dataparallel(config: Config) -> None:
    """Check the settings of the executor `dataparallel`.

    Args:
        config: Resolved settings.

    Raises:
        ConfigError: A number is out of its range, or two settings contradict each other.
    """
    _check_numbers(config.dataparallel)
    if config.engine != "inline":
        _check_emulation(config.dataparallel)
    _check_ray(config)
    _check_shares(config)
    _check_unit(config)
    if config.dataparallel.num_stages > 1:
        _check_stages(config)
    if config.dataparallel.mode == "sync":
        _check_sync(config)
    _check_staleness(config.staleness)


def _check_numbers(settings: DataParallelConfig) -> None:
    for position, speed in enumerate(settings.emulate_speeds):
        if not 0 < speed < float("inf"):
            raise ConfigError(
                f"dataparallel.emulate_speeds has {speed:g} for worker {position}; a speed is more than 0, and 1 is "
                "that of dataparallel.emulate_microbatch_ms."
            )
    if settings.emulate_microbatch_ms and not 1e-6 <= settings.emulate_microbatch_ms <= 1e9:
        raise ConfigError(
            f"dataparallel.emulate_microbatch_ms is {settings.emulate_microbatch_ms:g}; allowed is 1e-6 to 1e9 "
            "milliseconds, or 0 for as long as it takes."
        )
    if not settings.emulate_jitter <= 3:
        raise ConfigError(
            f"dataparallel.emulate_jitter is {settings.emulate_jitter:g}, a standard deviation of the logarithm of a "
            "time; allowed is 0 to 3, and 0.3 is a lot."
        )
    if 0 < settings.max_microbatches < settings.min_microbatches:
        raise ConfigError(
            f"dataparallel.max_microbatches is {settings.max_microbatches}, less than dataparallel.min_microbatches "
            f"of {settings.min_microbatches}. Raise the first, or leave it at 0 for no limit."
        )


def _check_emulation(settings: DataParallelConfig) -> None:
    for name in ("emulate_speeds", "emulate_jitter"):
        if getattr(settings, name) and not settings.emulate_microbatch_ms:
            raise ConfigError(
                f"dataparallel.{name} is given without dataparallel.emulate_microbatch_ms. With worker "
                "processes time is real: give the milliseconds of a microbatch at speed 1, at least four times what it "
                "takes here, or use --engine inline."
            )


def check_ray_installed() -> None:
    """Say how to install Ray where it is missing.

    Raises:
        ConfigError: It is.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "the engine 'ray' needs Ray, which is not installed here. Install it with: pip install 'slipstream[ray]'. "
            "On one machine --engine process does the same without it."
        )


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of a Ray cluster's address.

    Raises:
        ConfigError: It is none.

    Example:
        >>> split_address("10.0.0.1:6379")
        ('10.0.0.1', 6379)
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"dataparallel.ray_address is '{address}'; give host:port of a cluster's head, such as 10.0.0.1:6379, with "
            "this machine as one of its nodes (`ray start --address 10.0.0.1:6379`), or leave it out."
        )
    return host.strip("[]"), int(port)


def check_ray_answers(address: str) -> None:
    """See that somebody listens where a Ray cluster should be.

    Raises:
        ConfigError: Nobody does.
    """
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(unreachable(address, error)) from error


def unreachable(address: str, error: Exception) -> str:
    """Return what to do about a Ray cluster that cannot be used."""
    _, port = split_address(address)
    return (
        f"no Ray cluster can be reached at {address} (dataparallel.ray_address): {error}. Start it there with `ray "
        f"start --head --port {port}`, and let this machine be one of its nodes with `ray start --address {address}`; "
        "or leave ray_address out for a cluster of this run's own on this machine."
    )


def _check_ray(config: Config) -> None:
    if config.engine == "ray":
        if config.dataparallel.num_stages > 1:
            raise ConfigError(
                f"dataparallel.num_stages is {config.dataparallel.num_stages}, but with the engine 'ray' a worker is "
                "one process. Use --engine process, or --dataparallel.num-stages 1."
            )
        check_ray_installed()
        if config.dataparallel.ray_address:
            check_ray_answers(config.dataparallel.ray_address)
        return
    for name in ("ray_address", "ray_gpus", "ray_transport", "ray_log"):
        if getattr(config.dataparallel, name) != getattr(DataParallelConfig(), name):
            raise ConfigError(
                f"dataparallel.{name} is given, but the engine is '{config.engine}'. Use --engine ray, or leave it out."
            )


def _check_stages(config: Config) -> None:
    """Check what workers that are pipelines cannot do."""
    settings, pipeline = config.dataparallel, config.pipeline
    of = f"dataparallel.num_stages is {settings.num_stages}, so that each worker is a pipeline"
    if config.engine != "process":
        raise ConfigError(
            f"{of}, which the engine '{config.engine}' does not run. Use --engine process, or "
            "--dataparallel.num-stages 1."
        )
    if settings.mode == "sync":
        raise ConfigError(
            f"{of}, and with mode 'sync' all of them would drain at every step, to wait for the slowest. Use mode "
            "'async', or --executor pipeline for one pipeline."
        )
    if settings.unit == "pseudo_gradient":
        raise ConfigError(
            f"{of}, whose stages take no optimizer steps of their own. Use --dataparallel.unit gradient, or "
            "--dataparallel.num-stages 1."
        )
    if pipeline.pipeline_schedule not in ("two_bw", "one_f_one_b"):
        raise ConfigError(
            f"{of}, and pipeline.pipeline_schedule is '{pipeline.pipeline_schedule}'. Workers run 'two_bw', which does "
            "not drain between two gradients, or 'one_f_one_b', which does."
        )
    least = settings.num_stages - 1 + pipeline.num_extra_in_flight
    if pipeline.pipeline_schedule == "two_bw" and settings.min_microbatches < least:
        raise ConfigError(
            f"{of}. With 'two_bw' every gradient needs at least {least} microbatches, one fewer than the stages and "
            f"those of pipeline.num_extra_in_flight, or two versions of the weights do not suffice; given is "
            f"dataparallel.min_microbatches {settings.min_microbatches}. Give {least} or more, or fewer stages."
        )


def _check_shares(config: Config) -> None:
    settings, total = config.dataparallel, config.pipeline.num_microbatches
    pushes = settings.pushes_per_step or settings.num_workers
    if settings.pushes_per_step > settings.num_workers:
        raise ConfigError(
            f"dataparallel.pushes_per_step is {settings.pushes_per_step}, but dataparallel.num_workers is "
            f"{settings.num_workers}. Leave the first at 0 for as many as there are workers, or give at most that."
        )
    if total < pushes * settings.min_microbatches:
        raise ConfigError(
            f"a step has {total} microbatches (pipeline.num_microbatches), too few for {pushes} gradients of at least "
            f"{settings.min_microbatches} (dataparallel.min_microbatches). Raise pipeline.num_microbatches to "
            f"{pushes * settings.min_microbatches} or more, and lower train.microbatch_size if the batch shall stay."
        )


def outer_momentum_every(settings: DataParallelConfig) -> int:
    """Return the steps between two of the server's momentum; where none are given, a round of all workers.

    Example:
        >>> outer_momentum_every(DataParallelConfig(num_workers=4, pushes_per_step=1))
        4
    """
    pushes = settings.pushes_per_step or settings.num_workers
    return settings.outer_momentum_every or max(1, round(settings.num_workers / max(pushes, 1)))


def _check_unit(config: Config) -> None:
    """Check the settings of pseudo-gradients, or that there are none."""
    settings, default = config.dataparallel, DataParallelConfig()
    if settings.unit == "gradient":
        for name in ("local_steps", "outer_lr", "outer_momentum", "outer_momentum_every", "outer_momentum_spread"):
            if getattr(settings, name) != getattr(default, name):
                raise ConfigError(
                    f"dataparallel.{name} is {getattr(settings, name):g}, but dataparallel.unit is 'gradient', where "
                    "workers take no steps of their own. Leave it out, or use --dataparallel.unit pseudo_gradient."
                )
        return
    if not 0 <= settings.outer_momentum < 1:
        raise ConfigError(
            f"dataparallel.outer_momentum is {settings.outer_momentum:g}; allowed is 0 (none) to below 1, and 0.9 is "
            "usual."
        )
    every = outer_momentum_every(settings)
    if not 0 <= settings.outer_momentum_spread <= 1 / every:
        raise ConfigError(
            f"dataparallel.outer_momentum_spread is {settings.outer_momentum_spread:g}; with momentum once in {every} "
            f"steps (dataparallel.outer_momentum_every) allowed is 0 to {1 / every:g}."
        )
    for name, why in _NOT_OF_PSEUDO_GRADIENTS.items():
        value = getattr(config.staleness, name)
        if value != getattr(StalenessConfig(), name):
            raise ConfigError(
                f"staleness.{name} is {value!r}, which {why}; with dataparallel.unit 'pseudo_gradient' the server gets "
                "differences of weights. Leave it out, or use --dataparallel.unit gradient."
            )


_NOT_OF_PSEUDO_GRADIENTS = {
    "correction": "takes what arrives for the slope of the loss",
    "error_feedback": "foretells the next step of the run's optimizer",
    "prediction": "reads the momentum of the run's optimizer",
}
"""Settings of :class:`StalenessConfig` that make no sense there, and why."""


def _check_sync(config: Config) -> None:
    settings = config.dataparallel
    if config.pipeline.num_microbatches % settings.num_workers:
        raise ConfigError(
            f"dataparallel.mode is 'sync', where all workers have equal shares, but {config.pipeline.num_microbatches} "
            f"microbatches (pipeline.num_microbatches) do not divide among {settings.num_workers} workers. Give a "
            "multiple."
        )
    share = config.pipeline.num_microbatches // settings.num_workers
    if 0 < settings.max_microbatches < share:
        raise ConfigError(
            f"dataparallel.max_microbatches is {settings.max_microbatches}, but with mode 'sync' each of "
            f"{settings.num_workers} workers computes {share} of a step's {config.pipeline.num_microbatches} "
            f"microbatches (pipeline.num_microbatches). Leave max_microbatches at 0 or give at least {share}, or take "
            "more workers."
        )
    if settings.unit == "pseudo_gradient":
        raise ConfigError(
            "dataparallel.unit is 'pseudo_gradient', but with mode 'sync' all workers make one gradient together. Use "
            "mode 'async'; with pushes_per_step at 0 a step is made of as many pushes as there are workers there, too."
        )
    for name in ("pushes_per_step", "max_staleness"):
        if getattr(settings, name):
            raise ConfigError(
                f"dataparallel.{name} is {getattr(settings, name)}, but with mode 'sync' every step is made of one "
                "gradient of each worker, none of them stale. Leave it at 0, or use mode 'async'."
            )


def _check_staleness(staleness: StalenessConfig) -> None:
    default = StalenessConfig()
    for name in SINGLE_ONLY:
        if getattr(staleness, name) != getattr(default, name):
            raise ConfigError(
                f"staleness.{name} is {getattr(staleness, name)!r}, but with the executor 'dataparallel' the workers' "
                "speeds say how stale a gradient is. Leave it out, or use --executor single."
            )
    if staleness.prediction != "none" and not staleness.prediction_steps:
        raise ConfigError(
            f"staleness.prediction is '{staleness.prediction}' without staleness.prediction_steps; with the executor "
            "'dataparallel' there is no one delay to take for it. Give the updates to predict ahead."
        )
