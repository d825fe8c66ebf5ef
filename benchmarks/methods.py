"""Draws the pictures of docs/methods from what `slipstream compare` has trained of two grids.

    python benchmarks/methods.py RUN_DIR [--out docs/pictures/methods]                # configs/compare/methods.toml
    python benchmarks/methods.py RUN_DIR --grid configs/compare/async_quality.toml    # methods of asynchronous workers

One SVG a page: smoothed training loss of synchronous training, of plain delay, and of the method, mean over seeds, with
the validation loss and the gap to synchronous (95 % interval over paired seeds) in the legend.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from drawing import Curve, draw

from slipstream.report.cells import Arm, cells_of
from slipstream.report.grid import ALL, NONE
from slipstream.report.grid_file import load_grid
from slipstream.report.lines import thinned
from slipstream.report.results import read_results
from slipstream.report.statistics import smoothed_run
from slipstream.report.table import TableRow, at_equal_lr, figure, signed
from slipstream.train.metrics import quantity

ROOT = Path(__file__).parents[1]
GRID = ROOT / "configs" / "compare" / "methods.toml"
WORKERS_GRID = ROOT / "configs" / "compare" / "async_quality.toml"


class Line(NamedTuple):
    """An arm of the grid, what a legend calls it, and how it is drawn if not in its turn; of workers the delay is 1."""

    label: str
    remedy: str = NONE
    delay: int = 1
    read: str = ALL
    rule: str = "adamw"
    workers: str = ""
    css: str = ""

    @classmethod
    def of(cls, arm: Arm) -> "Line":
        """Return what to look an arm up by."""
        return cls("", arm.remedy, min(arm.delay, 1) if arm.workers else arm.delay, arm.read, arm.rule, arm.workers)

    @property
    def key(self) -> "Line":
        """What to look this line up by."""
        return self._replace(label="", css="")


SYNC, DELAY = Line("synchronous", delay=0), Line("delay 1")
STAGES = "four stages"

PICTURES: Mapping[str, tuple[str, Sequence[Line]]] = {
    "error_feedback": (
        "AdamW with error feedback",
        (
            SYNC,
            DELAY,
            Line("c = 1", "error_feedback"),
            Line("c = auto", "error_feedback, auto"),
            Line("c = 1 without delay", "error_feedback", 0),
        ),
    ),
    "error_feedback_muon": (
        "Muon with error feedback",
        tuple(
            line._replace(rule="muon")
            for line in (SYNC, DELAY, Line("c = 1", "error_feedback"), Line("c = auto", "error_feedback, auto"))
        ),
    ),
    "gradient_feedback": (
        "AdamW with gradient-level feedback",
        (SYNC, DELAY, Line("gradient level", "gradient_feedback"), Line("update level", "error_feedback")),
    ),
    "dc_asgd": (
        "AdamW with DC-ASGD",
        (SYNC, DELAY, Line("DC-ASGD", "dc_asgd"), Line("DC-ASGD-a", "dc_asgd_adaptive")),
    ),
    "weight_prediction": (
        "AdamW with XPipe's prediction",
        (SYNC, DELAY, Line("XPipe", "xpipe"), Line("error feedback, c = 1", "error_feedback")),
    ),
    "spectrain": (
        "SGD with SpecTrain's prediction",
        tuple(line._replace(rule="sgd") for line in (SYNC, DELAY, Line("SpecTrain", "spectrain"))),
    ),
    "pipemare": (
        "AdamW in four stages, delays 3, 2, 1, 0",
        (
            SYNC,
            Line("backward on the weights read", NONE, 3, STAGES),
            Line("backward on the newest", "backward on newest weights", 3, STAGES),
            Line("PipeMare T2", "pipemare T2", 3, STAGES),
            Line("PipeMare T1 + T2", "pipemare T1 + T2", 3, STAGES),
        ),
    ),
    "asyncpp": (
        "AsyncPP: NAdamW with a long momentum",
        (
            SYNC._replace(label="AdamW, synchronous"),
            DELAY._replace(label="AdamW, delay 1"),
            Line("AsyncPP, delay 1", rule="asyncpp"),
            Line("AsyncPP, synchronous", rule="asyncpp", delay=0),
            Line("NAdamW (0.9, 0.95), delay 1", rule="nadamw"),
        ),
    ),
    "gap_aware": ("AdamW with Gap-Aware", (SYNC, DELAY, Line("Gap-Aware", "gap_aware"))),
    "inverse_staleness": (
        "AdamW at a delay of 3",
        (SYNC, Line("delay 3", delay=3), Line("lr / 3", "1/tau", 3)),
    ),
    "sync_start_and_cool_down": (
        "AdamW, a quarter of the run without delay",
        (
            SYNC,
            DELAY,
            Line("the first quarter", "synchronous start"),
            Line("the last quarter", "synchronous cool-down"),
        ),
    ),
    "basis_rotation": (
        "Adam in a rotated basis",
        (
            SYNC._replace(label="AdamW, synchronous"),
            DELAY._replace(label="AdamW, delay 1"),
            Line("rotated, delay 1", rule="basis_rotation"),
            Line("rotated, synchronous", rule="basis_rotation", delay=0),
        ),
    ),
    "pipedream": (
        "AdamW in four stages: PipeDream beside 2BW",
        (
            SYNC,
            DELAY._replace(label="2BW: delay 1 everywhere"),
            Line("PipeDream: delays 3, 2, 1, 0", NONE, 3, STAGES),
            Line("delay 3 everywhere", delay=3),
        ),
    ),
    "rules": (
        "A step of delay under four rules",
        tuple(
            Line(f"{name}, {kind}", rule=rule, delay=delay, css=f"{css}{dash}")
            for name, rule, css in (
                ("AdamW", "adamw", "c0"),
                ("NAdamW", "nadamw", "c3"),
                ("Muon", "muon", "c1"),
                ("basis rotation", "basis_rotation", "c2"),
            )
            for kind, delay, dash in (("synchronous", 0, " other"), ("delay 1", 1, ""))
        ),
    ),
}
"""By file name: title and lines."""

_OF_WORKERS = Line("as they are", workers="c = 1")

WORKER_PICTURES: Mapping[str, tuple[str, Sequence[Line]]] = {
    "agc": (
        "AdamW, four uneven workers, a gradient a step: AGC",
        (
            SYNC,
            _OF_WORKERS,
            Line("with AGC, DBS and AALR", "full", workers="c = 1"),
            Line("without AGC", "all but AGC", workers="c = 1"),
            Line("damping in place of AGC", "damping in place of AGC", workers="c = 1"),
        ),
    ),
    "aalr": (
        "AdamW, four uneven workers, a gradient a step: AALR",
        (
            SYNC,
            _OF_WORKERS,
            Line("with AGC, DBS and AALR", "full", workers="c = 1"),
            Line("without AALR", "all but AALR", workers="c = 1"),
            Line("AALR with a threshold of 1", "AALR, threshold 1", workers="c = 1"),
        ),
    ),
}
"""The same of asynchronous workers."""


def picture(title: str, lines: Sequence[Line], rows: Mapping[Line, TableRow]) -> str:
    """Return one picture as a file of its own.

    Args:
        title: Above it.
        lines: What to draw, the most important first.
        rows: What came out, by arm.
    """
    return draw(
        title,
        [_curve(index, line, rows[line.key]) for index, line in enumerate(lines)],
        x_label="tokens",
        y_label="training loss, nats per token",
        x_text=lambda value: quantity(value).replace(".0", ""),
    )


def _curve(index: int, line: Line, row: TableRow) -> Curve:
    is_compared = row.gap is not None and not row.arm.is_plain_synchronous
    gap = f", {signed(row.gap)}" if is_compared else ""
    tokens = row.result.tokens_per_step
    return Curve(
        label=line.label,
        points=[(step * tokens, loss) for step, loss in thinned(smoothed_run(row.result.mean_losses))],
        css=line.css or ("sync" if index == 0 else f"c{index - 1}"),
        note=f"{figure(row.val_loss)}{gap}",
    )


def rows_by_line(grid_file: Path, folder: Path) -> dict[Line, TableRow]:
    """Return what came out of a grid, by arm."""
    results = read_results(cells_of(load_grid(grid_file)), folder / "cells")
    return {Line.of(row.arm): row for row in at_equal_lr(results) if row.val_loss is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="of the comparison")
    parser.add_argument("--grid", type=Path, default=GRID, help="that it was made with")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "methods")
    args = parser.parse_args()
    rows = rows_by_line(args.grid, args.run_dir)
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = WORKER_PICTURES if args.grid.name == WORKERS_GRID.name else PICTURES
    for name, (title, lines) in pictures.items():
        missing = [line for line in lines if line.key not in rows]
        if missing:
            print(f"{name}: left out, no result for {', '.join(line.label for line in missing)}")
            continue
        (args.out / f"{name}.svg").write_text(picture(title, lines, rows), encoding="utf-8")
        print(args.out / f"{name}.svg")


if __name__ == "__main__":
    main()
