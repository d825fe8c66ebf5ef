"""Settings of data parallelism that make no sense where they are given. Imports no torch."""

from slipstream.config import SINGLE_ONLY, Config, DataParallelConfig, Engine, StalenessConfig
from slipstream.errors import ConfigError

ENGINES: tuple[Engine, ...] = ("process", "inline")
"""Those that there are."""


def check_dataparallel(config: Config) -> None:
    """Check the settings of the executor `dataparallel`.

    Args:
        config: Resolved settings.

    Raises:
        ConfigError: A number is out of its range, or two settings contradict each other.
    """
    if config.engine not in ENGINES:
        raise ConfigError(f"the engine '{config.engine}' is not there yet. Use --engine {' or '.join(ENGINES)}.")
    _check_numbers(config.dataparallel)
    if config.engine == "process":
        _check_emulation(config.dataparallel)
    _check_shares(config)
    _check_unit(config)
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
                f"dataparallel.{name} is given without dataparallel.emulate_microbatch_ms. With the engine 'process' "
                "time is real: give the milliseconds of a microbatch at speed 1, at least four times what it takes "
                "here, or use --engine inline."
            )


def _check_shares(config: Config) -> None:
    settings, total = config.dataparallel, config.pipeline.num_microbatches
    pushes = settings.pushes_per_step or settings.num_workers
    if settings.pushes_per_step > settings.num_workers:
        raise ConfigError(
            f"dataparallel.pushes_per_step is {settings.pushes_per_step}, but there are {settings.num_workers} "
            "workers. Leave it at 0 for as many as there are workers, or give at most that."
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
    if staleness.error_feedback == "auto":
        raise ConfigError(
            "staleness.error_feedback is 'auto', which foretells one delay that all batches have; with the executor "
            "'dataparallel' each has its own. Give a number."
        )
    if staleness.prediction != "none" and not staleness.prediction_steps:
        raise ConfigError(
            f"staleness.prediction is '{staleness.prediction}' without staleness.prediction_steps; with the executor "
            "'dataparallel' there is no one delay to take for it. Give the updates to predict ahead."
        )
