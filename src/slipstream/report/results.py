"""What came out of the cells of a grid, read from their run directories."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from slipstream.report.cells import Arm, Cell
from slipstream.report.statistics import spikes
from slipstream.report.workers import RunOfWorkers, run_of_workers
from slipstream.train.disk import AGAIN, write_whole
from slipstream.train.metrics import read_json_lines
from slipstream.train.outcome import Kind, read_outcome
from slipstream.train.rundir import RunDir

MAX_NATS = 100.0
"""Loss up to which there is a perplexity: beyond lie figures of 44 digits, and soon what no float holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellResult:
    """What came out of one cell.

    Attributes:
        cell: The cell.
        kind: ``finished``, ``diverged``, ``crashed``, or ``missing``: it has not ended.
        message: What went wrong.
        val_loss: Nats per token on the published weights x; ``None`` unless finished.
        val_bits_per_byte: The same in bits per byte of text.
        losses: Training loss of each step.
        spikes: Steps at which it spikes.
        training_s: Seconds spent in steps; of workers, by their virtual clock.
        workers: What asynchronous workers did; ``None``: there were none.
    """

    cell: Cell
    kind: Kind | Literal["missing"]
    message: str = ""
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    losses: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    spikes: Sequence[int] = ()
    training_s: float = 0.0
    workers: RunOfWorkers | None = None

    @property
    def last_line(self) -> str:
        """What went wrong, without the traceback before it."""
        return (self.message.strip().splitlines() or [""])[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmResult:
    """The cells of one arm.

    Attributes:
        arm: The arm.
        cells: One a seed.
    """

    arm: Arm
    cells: Sequence[CellResult]

    @property
    def val_loss(self) -> dict[int, float]:
        """Validation loss of the seeds that finished."""
        return {each.cell.seed: each.val_loss for each in self.cells if each.val_loss is not None}

    @property
    def val_bits_per_byte(self) -> dict[int, float]:
        """Bits per byte of the seeds that finished."""
        return {each.cell.seed: each.val_bits_per_byte for each in self.cells if each.val_bits_per_byte is not None}

    @property
    def val_perplexity(self) -> dict[int, float]:
        """Perplexity per token of the seeds that finished; empty where that of one is no figure any more."""
        # Without the worst seed the mean of the others would flatter the arm.
        if any(loss > MAX_NATS for loss in self.val_loss.values()):
            return {}
        return {seed: math.exp(loss) for seed, loss in self.val_loss.items()}

    @property
    def workers(self) -> list[RunOfWorkers]:
        """What asynchronous workers did, of each seed that finished."""
        return [each.workers for each in self.cells if each.workers is not None]

    @property
    def mean_val_loss(self) -> float:
        """Mean validation loss of the seeds that finished; infinity where none did."""
        values = list(self.val_loss.values())
        return sum(values) / len(values) if values else float("inf")

    def count(self, kind: str) -> int:
        """Return how many cells ended in a way."""
        return sum(each.kind == kind for each in self.cells)

    @property
    def num_spikes(self) -> int:
        """Loss spikes of all seeds."""
        return sum(len(each.spikes) for each in self.cells)

    @property
    def mean_losses(self) -> np.ndarray:
        """Training loss of each step, the mean of the seeds that finished with no row lost; shape (num_steps,)."""
        curves = [each.losses for each in self.cells if each.kind == "finished"]
        whole = max(map(len, curves), default=0)
        return np.mean([curve for curve in curves if len(curve) == whole], axis=0) if curves else np.zeros(0)

    @property
    def tokens_per_step(self) -> int:
        """Tokens a batch."""
        return self.cells[0].cell.config.batch_tokens


def read_results(cells: Sequence[Cell], folder: Path) -> list[ArmResult]:
    """Read the run directories of a grid.

    Args:
        cells: All of them.
        folder: The folder that holds their run directories.

    Returns:
        A result an arm, in the order of the cells.

    Raises:
        CheckpointError: A file is there and not readable.
    """
    by_arm: dict[Arm, list[CellResult]] = {}
    read: dict[str, CellResult] = {}
    for cell in cells:
        if cell.folder not in read:
            read[cell.folder] = _read(cell, folder / cell.folder)
        by_arm.setdefault(cell.arm, []).append(dataclasses.replace(read[cell.folder], cell=cell))
    return [ArmResult(arm=arm, cells=results) for arm, results in by_arm.items()]


def _read(cell: Cell, path: Path) -> CellResult:
    outcome = read_outcome(path)
    metrics = RunDir(path).metrics
    rows = read_json_lines(metrics) if metrics.exists() else []
    losses = np.array([row["loss"] for row in rows], dtype=np.float64)
    if outcome is None:
        return CellResult(cell=cell, kind="missing", message="it has not ended", losses=losses)
    is_finished = outcome.kind == "finished"
    return CellResult(
        cell=cell,
        kind=outcome.kind,
        message=outcome.message,
        val_loss=outcome.summary["val_loss"] if is_finished else None,
        val_bits_per_byte=outcome.summary["val_bits_per_byte"] if is_finished else None,
        losses=losses,
        spikes=spikes(losses.tolist()),
        training_s=sum(row["step_s"] for row in rows),
        workers=run_of_workers(cell.config, outcome.summary, rows) if is_finished else None,
    )


def failures(results: Sequence[ArmResult]) -> list[CellResult]:
    """Return the cells that did not finish, a shared run once."""
    found: dict[str, CellResult] = {}
    for result in results:
        for each in result.cells:
            if each.kind != "finished":
                found.setdefault(each.cell.folder, each)
    return list(found.values())


def write_json(path: Path, value: object) -> None:
    """Write a file whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n", then=AGAIN)
