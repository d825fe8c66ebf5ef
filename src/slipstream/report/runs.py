"""What run directories tell, read for a report: finished, under way or failed, of any executor."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import Config, load_toml
from slipstream.errors import ConfigError
from slipstream.report.figures import NUM_COLOURS, Curve
from slipstream.report.workers import RunOfWorkers, run_of_workers
from slipstream.train.metrics import read_json_lines
from slipstream.train.rundir import RunDir
from slipstream.train.status import standing

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        name: For people; no two runs of a report have the same.
        path: Its directory.
        config: Its settings.
        rows: Of ``metrics.jsonl``, at least one.
        evaluations: Of ``evaluations.jsonl``.
        summary: Of a run that reached its last step, and has not been resumed since; otherwise empty.
        state: How it stands, in a few words.
        failure: Why it failed; empty where it did not.
    """

    name: str
    path: Path
    config: Config
    rows: Sequence[Row]
    evaluations: Sequence[Row]
    summary: Mapping[str, Any]
    state: str
    failure: str = ""

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens trained on up to each row."""
        return np.cumsum([row["num_tokens"] for row in self.rows])

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of training up to each row, without evaluations, by the run's own clock."""
        return np.cumsum([row["step_s"] for row in self.rows])

    @cached_property
    def workers(self) -> RunOfWorkers | None:
        """What asynchronous workers did; ``None``: there are none, or they have not told yet."""
        return run_of_workers(self.config, self.summary, self.rows)

    @property
    def units(self) -> str:
        """What the loss is a mean over; a model of one's own may have no tokens."""
        return "units" if any(row.get("val_bits_per_byte", 0) is None for row in self.evaluations) else "tokens"

    @property
    def loss_unit(self) -> str:
        """What the loss is given in."""
        return "nats per token" if self.units == "tokens" else "a unit"

    @property
    def is_virtual(self) -> bool:
        """Whether that clock is a virtual one."""
        return self.config.executor == "dataparallel" and self.config.engine == "inline"

    @property
    def tells_idle(self) -> bool:
        """Whether the rows say how long ranks waited for one another; workers of one process each do not."""
        return self.config.executor != "dataparallel" or self.config.dataparallel.num_stages > 1

    @property
    def last_step(self) -> int:
        """Updates made."""
        return int(self.rows[-1]["step"])

    def figures(self, key: str) -> np.ndarray:
        """Return one figure of every row; not a number where it has none."""
        return np.array([_number(row.get(key)) for row in self.rows])

    def nested(self, table: str, key: str) -> Curve:
        """Return steps and figures of the rows that have a figure in a table of their own."""
        rows = [row for row in self.rows if key in row.get(table, {})]
        return np.array([row["step"] for row in rows]), np.array([_number(row[table][key]) for row in rows])

    def keys(self, table: str) -> list[str]:
        """Return the names of the figures in a table of the rows."""
        return list(dict.fromkeys(key for row in self.rows for key in row.get(table, {})))

    def validation(self, across: np.ndarray, key: str = "val_loss") -> Curve:
        """Return the evaluations' figures.

        Args:
            across: Place of each row on the axis across, such as :attr:`tokens`.
            key: A field of an evaluation.
        """
        place = {0: 0.0} | {row["step"]: float(at) for row, at in zip(self.rows, across)}
        known = [row for row in self.evaluations if row["step"] in place]
        return np.array([place[row["step"]] for row in known]), np.array([_number(row[key]) for row in known])

    @property
    def last_evaluation(self) -> Row | None:
        """The newest after training began."""
        return next((row for row in reversed(self.evaluations) if row["step"]), None)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read the runs of a report.

    Args:
        paths: Run directories.

    Raises:
        ConfigError: One is no run directory, or has made no step, or is named twice.
        CheckpointError: A file in one of them is damaged.
    """
    folders = [Path(path) for path in paths]
    for path in folders:
        if sum(path.resolve() == other.resolve() for other in folders) > 1:
            raise ConfigError(f"{path} is given twice. Name each run once.")
    return [_open(path, name) for path, name in zip(folders, _names(folders))]


def _open(path: Path, name: str) -> Run:
    run_dir = RunDir(path)
    if not run_dir.config.is_file() or not run_dir.metrics.is_file():
        hint = ""
        if (path / "cells").is_dir():
            hint = (
                f" It is a comparison, whose report is {path / 'report.html'} and whose runs are in {path / 'cells'}."
            )
        raise ConfigError(
            f"{path} is no run directory: it has no config.toml with metrics.jsonl.{hint} Give the --run-dir of a run."
        )
    rows = read_json_lines(run_dir.metrics)
    if not rows:
        raise ConfigError(f"the run in {path} has made no step yet. Try again when it has.")
    config, status = load_toml(run_dir.config), standing(path)
    progress = f"step {rows[-1]['step']} of {config.train.num_steps}"
    states = {"running": f"under way, {progress}", "finished": "finished", "stopped": f"stopped at {progress}"}
    return Run(
        name=name,
        path=path,
        config=config,
        rows=rows,
        evaluations=read_json_lines(run_dir.evaluations) if run_dir.evaluations.is_file() else [],
        summary=_summary(run_dir, step=None if status and status.state == "finished" else rows[-1]["step"]),
        state=f"ended at {progress}" if status is None else states.get(status.state, f"failed at {progress}"),
        failure=status.message if status is not None else "",
    )


def _summary(run_dir: RunDir, *, step: int | None) -> dict[str, Any]:
    """Return what a run's summary says; nothing where it has none that can be read.

    Args:
        run_dir: The run's.
        step: That it must be of, for a run that goes on keeps the summary of its shorter past; ``None``: of any.
    """
    try:
        summary = json.loads(run_dir.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_of_now = isinstance(summary, dict) and (step is None or summary.get("num_steps") == step)
    return summary if is_of_now else {}


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of paths, as many as it takes to tell them apart.

    Example:
        >>> _names([Path("a/sync"), Path("b/sync")]), _names([Path("runs/a"), Path("runs/b")])
        (['a/sync', 'b/sync'], ['a', 'b'])
    """
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1)):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def colour(runs: Sequence[Run], run: Run) -> str:
    """Return the class of a run's colour: the same in all pictures."""
    index = runs.index(run)
    # Blue first: alone, red would look like a warning.
    return f"c{(index + 1) % NUM_COLOURS}{' again' if index >= NUM_COLOURS else ''}"


def finite(curve: Curve) -> Curve:
    """Return a curve without what is not a number: a skipped update has no gradient norm."""
    across, values = curve
    known = np.isfinite(values)
    return across[known], values[known]


def every(runs: Sequence[Run], of: Callable[[Run], Curve]) -> list[tuple[Run, Curve]]:
    """Return a curve of each run that has one, of finite figures."""
    found = [(run, finite(of(run))) for run in runs]
    return [(run, curve) for run, curve in found if len(curve[1])]


def units_of(runs: Sequence[Run]) -> str:
    """Return what is counted in runs, which need not be the same in all of them."""
    return " or ".join(dict.fromkeys(run.units for run in runs))


def loss_units_of(runs: Sequence[Run]) -> str:
    """Return what the losses of runs are given in."""
    return " or ".join(dict.fromkeys(run.loss_unit for run in runs))
