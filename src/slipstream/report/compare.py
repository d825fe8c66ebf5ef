"""Runs a grid and writes what came out of it: ``table.json``, ``table.md``, ``report.html``."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from slipstream.config import Config, load_toml
from slipstream.errors import ConfigError
from slipstream.report.cells import Cell, cells_of, repeats
from slipstream.report.comparison import Comparison, Judge, evaluate
from slipstream.report.grid import Grid, grid_of_config
from slipstream.report.grid_file import load_grid
from slipstream.report.render import render
from slipstream.report.results import write_json
from slipstream.report.verdict import switch_sentence
from slipstream.train.disk import AGAIN, write_whole

NUM_SEEDS, TOLERANCE = 3, 0.005
"""With `--from`, where nothing else is asked for."""

CELLS = "cells"
"""Folder of the run directories, below that of the comparison."""


def grid_and_judge(grid: str, from_config: str, *, num_seeds: int, tolerance: float) -> tuple[Grid, Judge | None]:
    """Return what the command line asks to compare, and who makes a sentence of it.

    Args:
        grid: Path of a grid, or empty.
        from_config: Path of a training config, or empty.
        num_seeds: To train the config with.
        tolerance: Share of the synchronous loss that a switch to a delay may cost.

    Raises:
        ConfigError: Both or neither are given, a number is out of range, or the file is wrong.
    """
    if bool(grid) == bool(from_config):
        raise ConfigError(
            "give one of the two: the TOML file of a grid (slipstream compare configs/compare/tiny.toml --run-dir "
            "DIR), or a training config (slipstream compare --from CONFIG --run-dir DIR)."
        )
    if grid:
        return load_grid(grid), None
    if num_seeds < 1:
        raise ConfigError(f"--num-seeds is {num_seeds}; give 1 or more, 3 for an interval worth having.")
    if not 0 < tolerance < math.inf:
        raise ConfigError(f"--tolerance is {tolerance}; give a share above 0, such as 0.005.")
    config = load_toml(from_config)
    return grid_of_config(config, seeds=range(num_seeds), source=from_config), partial(
        switch_sentence, tolerance=tolerance
    )


class TrainAll(Protocol):
    """Trains runs; this package reads what they leave behind and knows no trainer."""

    def __call__(self, configs: Mapping[str, Config], *, keep_checkpoints: bool) -> bool:
        """Train every run that has no result yet.

        Args:
            configs: Settings with a run directory each, by a name for people.
            keep_checkpoints: Of finished runs.

        Returns:
            Whether every run was tried; otherwise somebody asked to stop.
        """


def compare_grid(
    grid: Grid,
    folder: Path,
    *,
    train: TrainAll,
    note: Callable[[str], None],
    judge: Judge | None = None,
) -> Comparison | None:
    """Train the cells of a grid that have no result yet, and write the tables and the report.

    Args:
        grid: What to compare.
        folder: Gets ``cells``, ``table.json``, ``table.md`` and ``report.html``.
        train: Trains runs.
        note: Is told sentences for people.
        judge: Makes a first sentence of the rows best against best.

    Returns:
        What came out; ``None`` where somebody asked to stop before every cell was tried, and nothing was written.

    Raises:
        ConfigError: The grid is wrong, or a cell of it; names it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the run directory {folder} is a file. Choose another --run-dir.")
    cells = cells_of(grid)
    same_as = repeats(cells)
    for arm, other in same_as.items():
        note(f"'{arm.label}' changes nothing there: it is '{other.label}', which is trained once")
    if not train(_configs(cells, folder / CELLS), keep_checkpoints=grid.keep_checkpoints):
        return None
    comparison = evaluate(grid, cells, folder / CELLS, judge=judge)
    write_json(folder / "table.json", comparison.to_json())
    write_whole(folder / "table.md", comparison.to_markdown(), then=AGAIN)
    write_whole(folder / "report.html", render(comparison, folder / CELLS), then=AGAIN)
    return comparison


def _configs(cells: Sequence[Cell], folder: Path) -> dict[str, Config]:
    """Return the settings of the cells to train, by name; cells that share a folder once."""
    by_folder: dict[str, Cell] = {}
    for cell in cells:
        by_folder.setdefault(cell.folder, cell)
    return {
        f"cell '{cell.name}'": dataclasses.replace(cell.config, run_dir=str(folder / cell.folder))
        for cell in by_folder.values()
    }
