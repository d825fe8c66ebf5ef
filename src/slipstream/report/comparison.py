"""What came out of a grid: rows, sentences, failures; as JSON and as Markdown."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.report.cells import Arm, Cell, repeats
from slipstream.report.columns import aligned, markdown
from slipstream.report.grid import Grid
from slipstream.report.results import ArmResult, CellResult, failures, read_results
from slipstream.report.statistics import SPIKE_TEXT
from slipstream.report.table import TableRow, at_equal_lr, best_against_best
from slipstream.report.verdict import rule_verdicts, rules_sentence

Judge = Callable[[Sequence[TableRow]], str]
"""Makes a sentence of the rows best against best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out of a grid.

    Attributes:
        grid: What was compared.
        results: Of each arm.
        equal: Rows at equal learning rate.
        best: Rows best against best.
        verdict: Sentences, the most important first.
        same_as: Arms whose remedy has no effect at their delay, and the arm each is the same as.
    """

    grid: Grid
    results: Sequence[ArmResult]
    equal: Sequence[TableRow]
    best: Sequence[TableRow]
    verdict: Sequence[str]
    same_as: Mapping[Arm, Arm]

    @property
    def failures(self) -> list[CellResult]:
        """Cells that did not finish."""
        return failures(self.results)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``table.json``."""
        return {
            "title": self.grid.title,
            "verdict": list(self.verdict),
            "cells": [row.to_json() for row in self.equal],
            "best": [row.to_json() for row in self.best],
            "same_as": [{"arm": arm.label, "same_as": other.label} for arm, other in self.same_as.items()],
            "failures": [
                {"cell": each.cell.name, "folder": each.cell.folder, "kind": each.kind, "message": each.message}
                for each in self.failures
            ],
        }

    def to_markdown(self) -> str:
        """Return the content of ``table.md``."""
        parts = [f"# {self.grid.title or 'Comparison'}", self.grid.description]
        parts += ["\n".join(f"* {sentence}" for sentence in self.verdict)]
        if self.has_several_rates:
            parts += ["## Best against best over learning rates", markdown(self.best)]
        parts += ["## At equal learning rate", markdown(self.equal), _NOTES]
        if any(row.arm.workers for row in self.equal):
            parts.append(_WORKER_NOTES)
        if self.failures:
            lines = [f"* {each.cell.name}: {each.kind}: {each.last_line}" for each in self.failures]
            parts += ["## Cells without a result", "\n".join(lines)]
        return "\n\n".join(part.strip() for part in parts if part) + "\n"

    def to_text(self, folder: Path) -> str:
        """Return the result for a terminal: the table, failures, sentences, and where the rest is.

        Args:
            folder: Of the comparison.
        """
        parts = [aligned(self.best), *(f"{each.cell.name}: {each.kind}: {each.last_line}" for each in self.failures)]
        return "\n".join([*parts, "", *self.verdict, "", f"report: {folder / 'report.html'}"])

    @property
    def has_crashed(self) -> bool:
        """Whether a cell ended without a result."""
        return any(each.kind != "diverged" for each in self.failures)

    @property
    def has_several_rates(self) -> bool:
        """Whether a rule has more than one learning rate, so that best against best is another table."""
        return len(self.best) < len(self.equal)


_NOTES = (
    "Validation loss in nats per token, on the published weights x. Gaps are differences to plain synchronous training "
    "of the same rule, paired by seed; ± is half of the 95 % interval by Student's t. The share of the gap closed is "
    "1 - gap / gap of plain delay, with Fieller's 95 % interval; it is left out where the gap itself cannot be told "
    f"from 0. A spike is a training loss {SPIKE_TEXT}."
)

_WORKER_NOTES = (
    "Synchronous is what all workers together are with a barrier at every step; all arms train on the same tokens "
    "in as many steps. Staleness is the mean over all gradients, and the largest of any. Perplexity is a token's. "
    "'Against' is the difference in loss to the remedy named, paired by seed."
)


def evaluate(grid: Grid, cells: Sequence[Cell], folder: Path, *, judge: Judge | None = None) -> Comparison:
    """Read what the cells of a grid left behind, and compare.

    Args:
        grid: What is compared.
        cells: All of its cells.
        folder: Holds their run directories.
        judge: Makes a first sentence.
    """
    results = read_results(cells, folder)
    against = {row.name: row.against for row in grid.remedies if row.against}
    best = best_against_best(results, against)
    verdicts = rule_verdicts(best)
    sentences = [judge(best)] if judge is not None else []
    sentences += [each.sentence for each in verdicts]
    if (across := rules_sentence(verdicts)) is not None:
        sentences.append(across)
    return Comparison(
        grid=grid,
        results=results,
        equal=at_equal_lr(results, against),
        best=best,
        verdict=sentences,
        same_as=repeats(list(cells)),
    )
