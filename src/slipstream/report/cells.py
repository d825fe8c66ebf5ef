"""From a grid to its cells: each a config, a name for people, a folder, and the arm it is a seed of."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config import AgcConfig, Config, DataParallelConfig, StalenessConfig, config_hash, from_dict
from slipstream.errors import ConfigError
from slipstream.report.grid import ALL, NONE, Grid, Row, merged
from slipstream.staleness.aalr import expected_staleness
from slipstream.staleness.async_checks import COMPENSATORS
from slipstream.train.delays import read_staleness


class Arm(NamedTuple):
    """All of a cell but its seed.

    Of asynchronous workers, the delay is the mean staleness that their number gives, in whole updates from 1.
    """

    rule: str
    remedy: str
    read: str
    batch: str
    delay: int
    lr: float
    workers: str = ""

    @property
    def is_synchronous(self) -> bool:
        """Whether nothing is delayed."""
        return self.delay == 0

    @property
    def is_plain_synchronous(self) -> bool:
        """Whether nothing is delayed and nothing done about it."""
        return self.delay == 0 and self.remedy == NONE

    @property
    def label(self) -> str:
        """For people."""
        parts = [self.rule, self.remedy]
        parts += [f"read {self.read}"] if self.read != ALL else []
        parts += [f"batch {self.batch}"] if self.batch else []
        return ", ".join(
            [*parts, f"workers {self.workers}" if self.workers else f"delay {self.delay}", f"lr {self.lr:g}"]
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of a grid.

    Attributes:
        arm: All but the seed.
        seed: The seed.
        config: Its settings, without a run directory.
        folder: Name of its run directory; two cells share it where their settings differ only by what has no effect.
    """

    arm: Arm
    seed: int
    config: Config
    folder: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.arm.label}, seed {self.seed}"


def cells_of(grid: Grid) -> list[Cell]:
    """Return the cells of a grid, seed by seed, so that an interrupted grid has whole seeds to show.

    Raises:
        ConfigError: Settings that are wrong together, two cells that are the same, or two names that make one folder;
            names the cell.
    """
    given: dict[str, Cell] = {}
    by_effect: dict[str, Cell] = {}
    folders: dict[str, Cell] = {}
    cells = []
    for seed in grid.seeds:
        for arm, config in _arms(grid, seed):
            cell = Cell(arm=arm, seed=seed, config=config, folder=_folder(arm, seed))
            twin = given.setdefault(config_hash(config), cell)
            if twin is not cell:
                raise ConfigError(
                    f"{grid.source}: the cells '{twin.name}' and '{cell.name}' have the same settings. Remove one of "
                    "the rows."
                )
            effective = _effective(config)
            original = by_effect.setdefault(config_hash(effective), cell)
            cell = dataclasses.replace(cell, config=effective, folder=original.folder)
            other = folders.setdefault(cell.folder, original)
            if other is not original:
                raise ConfigError(
                    f"{grid.source}: the cells '{other.name}' and '{cell.name}' would have the same folder "
                    f"'{cell.folder}'. Let their names differ by a letter or digit."
                )
            cells.append(cell)
    return cells


def repeats(cells: list[Cell]) -> dict[Arm, Arm]:
    """Return the arms whose remedy has no effect at their delay, and the arm that each is the same as."""
    original: dict[str, Arm] = {}
    found = {}
    for cell in cells:
        arm = original.setdefault(cell.folder, cell.arm)
        if arm != cell.arm:
            found[cell.arm] = arm
    return found


def _effective(config: Config) -> Config:
    """Return the settings without those that have no effect, which rows may leave in what they share."""
    if config.executor == "dataparallel":
        staleness = config.staleness
        changes: dict[str, Any] = {}
        if staleness.correction not in COMPENSATORS:
            changes |= {"agc": AgcConfig()}
        if staleness.lr_discount != "aalr":
            changes |= {"aalr_threshold": "auto"}
        return dataclasses.replace(config, staleness=dataclasses.replace(staleness, **changes))
    staleness = effective_staleness(config.staleness)
    return dataclasses.replace(config, staleness=staleness, dataparallel=DataParallelConfig())


def effective_staleness(staleness: StalenessConfig) -> StalenessConfig:
    """Return the settings without those that have no effect at their delay.

    At delay 0 every correction returns the gradient as it is, a synchronous start changes nothing, a prediction over
    the delay predicts nothing, and neither does error feedback that finds its own coefficient; up to delay 1 no
    discount by staleness applies. Error feedback with a number and a prediction over a given number of steps act at
    any delay.

    Example:
        >>> effective_staleness(StalenessConfig(delay=0, correction="gap_aware")) == StalenessConfig(delay=0)
        True
        >>> effective_staleness(StalenessConfig(delay=0, error_feedback=1.0)).error_feedback
        1.0
    """
    if own_delay(staleness) is not None:
        return staleness
    changes: dict[str, Any] = {}
    # A threshold below a mean staleness of 1 is the one thing that discounts the rate at a delay of 1.
    if (staleness.delay or 0) <= (0 if staleness.lr_discount == "aalr" else 1):
        changes |= {"lr_discount": "none", "lr_discount_steps": 0, "aalr_threshold": "auto"}
    if not staleness.delay:
        changes |= {"correction": "none", "correction_strength": 0.0, "delay_roles": (), "delay_blocks": ()}
        changes |= {"backward_weights": "read", "agc": AgcConfig()}
        coefficient = 0.0 if staleness.error_feedback == "auto" else staleness.error_feedback
        changes |= {"error_feedback": coefficient}
        if staleness.prediction == "none" or not staleness.prediction_steps:
            changes |= {"prediction": "none", "prediction_steps": 0.0}
            if not coefficient:
                changes |= {"sync_until_step": 0, "sync_from_step": 0}
    return dataclasses.replace(staleness, **changes)


def own_delay(staleness: StalenessConfig) -> int | None:
    """Return the largest delay of settings that say by themselves what the delay of a batch is; otherwise ``None``.

    Raises:
        ConfigError: A recording cannot be read.
    """
    if staleness.delay_stages:
        return staleness.delay_stages - 1
    if staleness.delay_weights:
        return len(staleness.delay_weights) - 1
    if staleness.delay_replay:
        return max(read_staleness(Path(staleness.delay_replay)), default=0)
    return None


def _arms(grid: Grid, seed: int) -> Iterator[tuple[Arm, Config]]:
    """Yield the arms with their settings at one seed."""
    for batch in grid.batches:
        for rule in grid.rules:
            for remedy in grid.remedies:
                for read in grid.reads:
                    yield from _arms_of(grid, seed, rule=rule, remedy=remedy, read=read, batch=batch)
                for workers in grid.workers:
                    yield from _arms_of_workers(grid, seed, rule=rule, remedy=remedy, workers=workers, batch=batch)


def _arms_of(grid: Grid, seed: int, *, rule: Row, remedy: Row, read: Row, batch: Row) -> Iterator[tuple[Arm, Config]]:
    tables: dict[str, Any] = dict(grid.base)
    for each in (batch.tables, {"optim": {"name": rule.name}}, rule.tables, remedy.tables, read.tables):
        tables = merged(tables, each)
    name = ", ".join(filter(None, (rule.name, remedy.name, read.name if read.name != ALL else "", batch.name)))
    where = f"{grid.source}: cell '{name}'"
    staleness = from_dict({"staleness": tables.get("staleness", {})}, source=where).staleness
    try:
        own = own_delay(staleness)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    delays = grid.delays if own is None else (own,)
    for delay in delays:
        # Where nothing is delayed, it does not matter what would have been.
        if (delay == 0 and read.name != ALL) or not _takes_part(
            (rule, remedy, read, batch), rule=rule.name, remedy=remedy.name, delay=delay, is_own=own is not None
        ):
            continue
        for lr in rule.lr or (float(tables["optim"].get("lr", Config().optim.lr)),):
            settings = merged(tables, _axes(seed=seed, delay=delay, lr=lr))
            config = from_dict(settings, source=where)
            yield Arm(rule.name, remedy.name, read.name, batch.name, delay, lr), config


def _arms_of_workers(
    grid: Grid, seed: int, *, rule: Row, remedy: Row, workers: Row, batch: Row
) -> Iterator[tuple[Arm, Config]]:
    """Yield the arms of asynchronous workers: they make the delay, so neither a delay nor a read is theirs."""
    tables: dict[str, Any] = dict(grid.base)
    for each in (batch.tables, {"optim": {"name": rule.name}}, rule.tables, workers.tables, remedy.tables):
        tables = merged(tables, each)
    rows = (rule, remedy, workers, batch)
    if not _takes_part(rows, rule=rule.name, remedy=remedy.name, delay=workers.name, is_own=False):
        return
    name = ", ".join(filter(None, (rule.name, remedy.name, workers.name, batch.name)))
    for lr in rule.lr or (float(tables["optim"].get("lr", Config().optim.lr)),):
        settings = merged(tables, _axes(seed=seed, delay=None, lr=lr))
        config = from_dict(settings, source=f"{grid.source}: cell '{name}'")
        yield Arm(rule.name, remedy.name, ALL, batch.name, _usual_delay(config), lr, workers.name), config


def _usual_delay(config: Config) -> int:
    """Return the mean staleness of workers in whole updates, from 1."""
    settings = config.dataparallel
    num_workers = settings.num_workers or len(settings.emulate_speeds) or 2
    return max(1, round(expected_staleness(num_workers, settings.pushes_per_step or num_workers)))


def _takes_part(rows: tuple[Row, ...], *, rule: str, remedy: str, delay: int | str, is_own: bool) -> bool:
    """Whether no row's `only` speaks against a cell; of a delay that a row sets by itself none does.

    Args:
        rows: That make the cell.
        rule: Name.
        remedy: Name.
        delay: Number, or the name of the workers that make it.
        is_own: A row says by itself what the delay is.
    """
    return all(
        (not row.only.rules or rule in row.only.rules)
        and (not row.only.remedies or remedy in row.only.remedies)
        and (is_own or not (row.only.delays or row.only.workers) or delay in (*row.only.delays, *row.only.workers))
        for row in rows
    )


def _axes(*, seed: int, delay: int | None, lr: float) -> Mapping[str, Any]:
    """Return what the grid itself sets; without a delay: of workers."""
    # One process at any delay gives bitwise the weights of a pipeline at that delay.
    kind: dict[str, Any] = {"executor": "single", "staleness": {"delay": delay}}
    if delay is None:
        kind = {"executor": "dataparallel", "engine": "inline"}
    return {"run_dir": "", "data": {"seed": seed}, "model": {"seed": seed}, "optim": {"lr": lr}, **kind}


def _folder(arm: Arm, seed: int) -> str:
    """Return a name for the run directory that any file system takes."""
    parts = [arm.rule, arm.remedy]
    parts += [arm.read] if arm.read != ALL else []
    parts += [f"batch-{arm.batch}"] if arm.batch else []
    parts += [f"workers-{arm.workers}" if arm.workers else f"delay-{arm.delay}", f"lr-{arm.lr:g}", f"seed-{seed}"]
    return "--".join(re.sub(r"[^A-Za-z0-9._+-]+", "-", part).strip("-.") for part in parts)
