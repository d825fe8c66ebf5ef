"""Loss against tokens and against the clock: synchronous training and 2BW, with and without error feedback.

    slipstream compare configs/compare/wall_clock.toml --run-dir RUN_DIR
    slipstream compare configs/compare/wall_clock_equal_time.toml --run-dir SHORTER
    python benchmarks/wall_clock.py score RUN_DIR --blimp blimp.tar.xz
    python benchmarks/wall_clock.py time RUN_DIR --out RUN_DIR/times.json
    python benchmarks/wall_clock.py write RUN_DIR SHORTER RUN_DIR/times.json \\
        --out benchmarks/results/wall_clock.md --pictures docs/pictures

A pipeline trains bitwise what one process with the same delay trains, so the losses come from the grid, which other
work on the machine does not disturb. `time` then runs the first steps of each arm as a pipeline of two stages, in turns
over several rounds on a machine that does nothing else, and refuses to go on when a loss differs from the grid's in a
bit. The clock of an arm is its number of steps times its median step; evaluations are no part of it.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawing import Curve, draw

from slipstream.bench.pipeline import load_average, machine, quartiles
from slipstream.cores import num_cores
from slipstream.report.cells import Cell, cells_of
from slipstream.report.grid import NONE
from slipstream.report.grid_file import load_grid
from slipstream.report.lines import thinned
from slipstream.report.results import read_results
from slipstream.report.statistics import smoothed_run
from slipstream.report.table import TableRow, at_equal_lr, figure, percent, signed
from slipstream.train.metrics import quantity, read_json_lines

ROOT = Path(__file__).parents[1]
GRID = ROOT / "configs" / "compare" / "wall_clock.toml"
SHORTER = ROOT / "configs" / "compare" / "wall_clock_equal_time.toml"
NUM_WARMUP_STEPS = 3
"""Steps of a timed run that are not counted: the pipeline fills, memory is taken. Nor is the last: it drains."""


class Case(NamedTuple):
    """What is timed: an arm of the grid as a pipeline."""

    rule: str
    remedy: str
    delay: int
    num_microbatches: int

    @property
    def label(self) -> str:
        """For people."""
        return label(self.rule, self.remedy, self.delay)


def label(rule: str, remedy: str, delay: int) -> str:
    """Return the name of an arm in tables and pictures."""
    kind = "synchronous (1F1B)" if delay == 0 else "2BW" if remedy == NONE else "2BW + error feedback"
    return f"{rule.replace('adamw', 'AdamW').replace('muon', 'Muon')}, {kind}"


def first_cells(grid: Path) -> dict[tuple[str, str, int], Cell]:
    """Return the first seed's cell of each arm."""
    found: dict[tuple[str, str, int], Cell] = {}
    for cell in cells_of(load_grid(grid)):
        found.setdefault((cell.arm.rule, cell.arm.remedy, cell.arm.delay), cell)
    return found


def command(*arguments: str) -> str:
    """Run a command of slipstream and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    return done.stdout


def score(folder: Path, *, grid: Path, blimp: str, limit: int | None) -> None:
    """Add to ``scores.json`` what each finished cell comes to on all of the held-out text, on x, and on BLiMP, on y."""
    path = folder / "scores.json"
    scores = json.loads(path.read_text()) if path.exists() else {}
    cells = [
        cell
        for cell in cells_of(load_grid(grid))
        if cell.folder not in scores and (folder / "cells" / cell.folder / "summary.json").exists()
    ]

    def ask(cell: Cell) -> dict[str, Any]:
        run = str(folder / "cells" / cell.folder)
        items = ("--limit", str(limit)) if limit else ()
        text = ("--task", "perplexity", "--file", cell.config.data.path, "--weights", "x")
        pairs = ("--task", "blimp", "--file", blimp, "--weights", "y", *items)
        asked = {"held_out": text, "blimp": pairs}
        return {name: json.loads(command("eval", run, *words, "--json")) for name, words in asked.items()}

    with ThreadPoolExecutor(max_workers=num_cores()) as pool:
        for cell, found in zip(cells, pool.map(ask, cells), strict=True):
            scores[cell.folder] = found
            path.write_text(json.dumps(scores, indent=1) + "\n")
            print(f"{cell.folder}: {found}", flush=True)


def one_timing(case: Case, run: Path, *, num_steps: int) -> dict[str, list[float]]:
    """Train the first steps of a cell as a pipeline of two stages.

    Raises:
        SystemExit: With the grid's own number of microbatches, a loss is not the grid's to the bit.
    """
    config = tomllib.loads((run / "config.toml").read_text())
    num_microbatches, train = config["pipeline"]["num_microbatches"], config["train"]
    schedule = "two_bw" if case.delay else "one_f_one_b"
    with tempfile.TemporaryDirectory() as folder:
        command(
            *("train", "--config", str(run / "config.toml"), "--run-dir", f"{folder}/run", "--executor", "pipeline"),
            *("--pipeline.num-stages", "2", "--pipeline.pipeline-schedule", schedule),
            *("--pipeline.num-microbatches", str(case.num_microbatches)),
            *("--train.microbatch-size", str(num_microbatches * train["microbatch_size"] // case.num_microbatches)),
            *("--train.num-steps", str(num_steps), "--optim.lr-total-steps", str(train["num_steps"])),
            *("--evaluate.every-steps", "0", "--evaluate.num-sequences", "16", "--checkpoint.every-steps", "0"),
        )
        rows = read_json_lines(Path(folder) / "run" / "metrics.jsonl")
    expected = [row["loss"] for row in read_json_lines(run / "metrics.jsonl")[:num_steps]]
    losses = [row["loss"] for row in rows]
    if case.num_microbatches == num_microbatches and losses != expected:
        sys.exit(f"{case.label}: the pipeline's losses {losses} are not the grid's {expected}")
    counted = rows[NUM_WARMUP_STEPS:-1]
    return {key: [row[key] for row in counted] for key in ("step_s", "bubble_fraction")}


def time_arms(
    folder: Path, *, grid: Path, rounds: int, num_steps: int, num_microbatches: Sequence[int]
) -> dict[str, Any]:
    """Time every arm in turns over several rounds."""
    cells = first_cells(grid)
    cases = [Case(*arm, m) for m in num_microbatches for arm in cells]
    rows: dict[Case, list[dict[str, list[float]]]] = {case: [] for case in cases}
    load_before = load_average()
    for number in range(rounds):
        for case in cases:
            run = folder / "cells" / cells[case[:3]].folder
            rows[case].append(one_timing(case, run, num_steps=num_steps))
            took = statistics.median(rows[case][-1]["step_s"])
            print(f"round {number + 1}: {case.label}, m = {case.num_microbatches}: {took:.3f} s a step", flush=True)
    return {
        "machine": machine() | {"load_average_before": load_before, "load_average_after": load_average()},
        "num_steps": num_steps,
        "cases": [
            {
                **case._asdict(),
                "rounds": [statistics.median(each["step_s"]) for each in rows[case]],
                **{key: [value for each in rows[case] for value in each[key]] for key in ("step_s", "bubble_fraction")},
            }
            for case in cases
        ],
    }


class Timed(NamedTuple):
    """Step times of a case over all rounds."""

    median: float
    low: float
    high: float
    bubble: float
    rounds: Sequence[float]


def timings(times: dict[str, Any]) -> dict[Case, Timed]:
    """Return what `time` has measured."""
    found = {}
    for each in times["cases"]:
        case = Case(each["rule"], each["remedy"], each["delay"], each["num_microbatches"])
        low, median, high = quartiles(each["step_s"])
        found[case] = Timed(median, low, high, statistics.fmean(each["bubble_fraction"]), each["rounds"])
    return found


def loss_table(rows: Sequence[TableRow], folder: Path) -> Iterator[str]:
    """Yield losses after equal tokens."""
    scores = json.loads((folder / "scores.json").read_text())
    yield (
        "| arm | validation, nats per token | gap to synchronous | share closed | all held-out text | bits per byte "
        "| BLiMP |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    synchronous = {row.arm.rule: row.val_loss for row in rows if row.arm.is_plain_synchronous}
    for row in rows:
        arm = row.arm
        gap = signed(row.gap) if row.gap else f"+{row.val_loss.mean - synchronous[arm.rule].mean:.3f}"
        found = [scores[cell.cell.folder] for cell in row.result.cells if cell.cell.folder in scores]
        nats, bits = (
            statistics.fmean(each["held_out"][key] for each in found) for key in ("nats_per_token", "bits_per_byte")
        )
        yield (
            f"| {label(arm.rule, arm.remedy, arm.delay)} | {figure(row.val_loss)} "
            f"| {gap if arm.delay else ''} | {percent(row.closed) if row.closed and arm.remedy != NONE else ''} "
            f"| {nats:.3f} | {bits:.3f} | {statistics.fmean(each['blimp']['acc'] for each in found):.1%} |"
        )


def equal_time_table(shorter: Sequence[TableRow], rows: Sequence[TableRow], timed: dict[Case, Timed]) -> Iterator[str]:
    """Yield what 2BW comes to beside synchronous runs of fewer steps, each with a decay of its own.

    Args:
        shorter: Of the shorter, synchronous grid.
        rows: Of the whole one.
        timed: What `time` has measured.
    """
    yield "| arm | steps | minutes | validation, nats per token |"
    yield "| --- | ---: | ---: | ---: |"
    delayed = [row for row in rows if row.arm.delay]
    for row in sorted([*shorter, *delayed], key=lambda row: row.arm.rule):
        arm, config = row.arm, row.result.cells[0].cell.config
        steps = config.train.num_steps
        case = Case(arm.rule, arm.remedy, arm.delay, config.pipeline.num_microbatches)
        yield f"| {case.label} | {steps:,} | {steps * timed[case].median / 60:.1f} | {figure(row.val_loss)} |"


def time_table(timed: dict[Case, Timed], *, num_steps: int, tokens_per_step: int) -> Iterator[str]:
    """Yield step times; a gain is the median of the rounds', in each of which the arms took turns."""
    yield "| microbatches | arm | step, s | quartiles | tokens/s | idle | minutes for all steps | over synchronous |"
    yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for case, found in sorted(timed.items(), key=lambda item: item[0].num_microbatches):
        synchronous = timed[Case(case.rule, NONE, 0, case.num_microbatches)]
        gain = ""
        if case.delay:
            single = [a / b for a, b in zip(synchronous.rounds, found.rounds, strict=True)]
            gain = f"**{statistics.median(single):.2f}x** ({', '.join(f'{each:.2f}' for each in single)})"
        yield (
            f"| {case.num_microbatches} | {case.label} | {found.median:.3f} | {found.low:.3f} to {found.high:.3f} "
            f"| {tokens_per_step / found.median:,.0f} | {found.bubble:.1%} | {num_steps * found.median / 60:.1f} "
            f"| {gain} |"
        )


def validation_curve(row: TableRow, folder: Path) -> list[tuple[int, float]]:
    """Return (step, validation loss), the mean over the seeds that finished."""
    by_step: dict[int, list[float]] = {}
    for cell in row.result.cells:
        if cell.kind == "finished":
            for each in read_json_lines(folder / "cells" / cell.cell.folder / "evaluations.jsonl"):
                by_step.setdefault(each["step"], []).append(each["val_loss"])
    return [(step, statistics.fmean(losses)) for step, losses in sorted(by_step.items())]


def minutes_to(curve: Sequence[tuple[int, float]], level: float, *, step_s: float) -> str:
    """Return the minutes in which a falling curve reaches a level, between evaluations on a straight line.

    Until the first evaluation after the start that line would cut off the steepest part: there it is "less than".
    """
    after_start = [each for each in curve if each[0]]
    first, loss = after_start[0]
    if loss <= level:
        return f"< {first * step_s / 60:.1f}"
    for (before, above), (after, below) in itertools.pairwise(after_start):
        if below <= level:
            steps = before + (after - before) * (above - level) / (above - below)
            return f"{steps * step_s / 60:.1f}"
    return ""


def level_table(
    rows: Sequence[TableRow], timed: dict[Case, Timed], folder: Path, *, num_microbatches: int
) -> Iterator[str]:
    """Yield the minutes in which each arm comes to some validation losses."""
    curves = {row.arm: validation_curve(row, folder) for row in rows}
    ends = sorted(curve[-1][1] for curve in curves.values())
    levels = np.arange(np.ceil(ends[0] * 4) / 4, ends[-1] + 1.0, 0.25)[::-1]
    yield "| arm | " + " | ".join(f"{level:.2f}" for level in levels) + " |"
    yield "| --- |" + " ---: |" * len(levels)
    for row in rows:
        arm = row.arm
        step_s = timed[Case(arm.rule, arm.remedy, arm.delay, num_microbatches)].median
        minutes = [minutes_to(curves[arm], level, step_s=step_s) for level in levels]
        yield f"| {label(arm.rule, arm.remedy, arm.delay)} | " + " | ".join(minutes) + " |"


def pictures(rows: Sequence[TableRow], timed: dict[Case, Timed], *, num_microbatches: int, out: Path) -> None:
    """Draw smoothed training losses by tokens and by the clock."""
    colours = {"synchronous": "sync", NONE: "c0", "error_feedback": "c1"}
    for name, title, x_label in (
        ("wall_clock_tokens", "10M parameters, two stages: loss by tokens", "tokens"),
        ("wall_clock", "The same runs by the clock", "minutes of training on two cores"),
    ):
        curves = []
        for row in rows:
            arm = row.arm
            tokens = row.result.tokens_per_step
            minutes = timed[Case(arm.rule, arm.remedy, arm.delay, num_microbatches)].median / 60
            unit = tokens if x_label == "tokens" else minutes
            css = colours["synchronous" if arm.delay == 0 else arm.remedy]
            points = [(step * unit, loss) for step, loss in thinned(smoothed_run(row.result.mean_losses))]
            end = figure(row.val_loss)
            steps = row.result.cells[0].cell.config.train.num_steps
            note = end if x_label == "tokens" else f"{end} after {steps * minutes:.1f} min"
            style = f"{css} other" if arm.rule == "muon" else css
            curves.append(Curve(label(arm.rule, arm.remedy, arm.delay), points, style, note))
        x_text = (lambda value: quantity(value).replace(".0", "")) if x_label == "tokens" else "{:g}".format
        text = draw(
            title,
            curves,
            x_label=x_label,
            y_label="training loss, nats per token",
            x_text=x_text,
            notes="validation loss in the end",
        )
        (out / f"{name}.svg").write_text(text, encoding="utf-8")


def finished_rows(grid: Path, folder: Path) -> list[TableRow]:
    """Return the arms of a comparison that have a result."""
    return [row for row in at_equal_lr(read_results(cells_of(load_grid(grid)), folder / "cells")) if row.val_loss]


def write(
    whole: tuple[Path, Path], shorter: tuple[Path, Path], times: dict[str, Any], *, out: Path, into: Path
) -> None:
    """Write the tables and draw the pictures.

    Args:
        whole: The grid that was trained, and its folder.
        shorter: The grid of synchronous runs of fewer steps, and its folder.
        times: What `time` has measured.
        out: Page to write.
        into: Folder of the pictures.
    """
    rows, folder = finished_rows(*whole), whole[1]
    timed = timings(times)
    config = rows[0].result.cells[0].cell.config
    num_steps, m = config.train.num_steps, config.pipeline.num_microbatches
    found = times["machine"]
    lines = [
        "# Loss by tokens and by the clock, 10M parameters on two cores",
        "",
        f"* {found['cpu']}, {found['num_cores']} cores, one thread a stage; torch {found['torch']}",
        f"* {num_steps} steps of {config.batch_tokens:,} tokens; seeds that finished: "
        f"{', '.join(str(seed) for seed in rows[0].result.val_loss)}; validation on "
        f"{config.evaluate.num_sequences * config.data.sequence_length:,} tokens of the authors held out",
        f"* timed: {times['num_steps'] - NUM_WARMUP_STEPS - 1} steps in each of {len(times['cases'][0]['rounds'])} "
        f"rounds in which the arms took turns; load average before and after: "
        f"{found['load_average_before']:.2f}, {found['load_average_after']:.2f}",
        "",
        "## After equal tokens",
        "",
        *loss_table(rows, folder),
        "",
        "## Step times of two stages",
        "",
        *time_table(timed, num_steps=num_steps, tokens_per_step=config.batch_tokens),
        "",
        f"## Minutes to a validation loss, {m} microbatches",
        "",
        f"Between evaluations, every {config.evaluate.every_steps} steps, on a straight line.",
        "",
        *level_table(rows, timed, folder, num_microbatches=m),
        "",
        "## At equal time",
        "",
        *equal_time_table(finished_rows(*shorter), rows, timed),
    ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pictures(rows, timed, num_microbatches=m, out=into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, default=GRID, help="that was trained")
    actions = parser.add_subparsers(dest="action", required=True)
    scoring = actions.add_parser("score", help="add all of the held-out text, and BLiMP")
    timing = actions.add_parser("time", help="time the arms as pipelines")
    writing = actions.add_parser("write", help="write tables and pictures")
    for action in (scoring, timing, writing):
        action.add_argument("run_dir", type=Path, help="of the comparison")
    scoring.add_argument("--blimp", required=True, help="archive of BLiMP")
    scoring.add_argument("--limit", type=int, help="most items of BLiMP")
    timing.add_argument("--rounds", type=int, default=3)
    timing.add_argument("--steps", type=int, default=14, help="of each timed run")
    timing.add_argument("--num-microbatches", type=int, nargs="+", default=[2])
    timing.add_argument("--out", type=Path, required=True)
    writing.add_argument("shorter_run_dir", type=Path, help="of the shorter comparison")
    writing.add_argument("times", type=Path, help="what `time` wrote")
    writing.add_argument("--shorter-grid", type=Path, default=SHORTER, help="that was trained for as long as 2BW takes")
    writing.add_argument("--out", type=Path, required=True)
    writing.add_argument("--pictures", type=Path, required=True, help="folder of the pictures")
    args = parser.parse_args()
    if args.action == "score":
        score(args.run_dir, grid=args.grid, blimp=args.blimp, limit=args.limit)
    elif args.action == "time":
        found = time_arms(
            args.run_dir,
            grid=args.grid,
            rounds=args.rounds,
            num_steps=args.steps,
            num_microbatches=args.num_microbatches,
        )
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    else:
        times = json.loads(args.times.read_text())
        shorter = (args.shorter_grid, args.shorter_run_dir)
        write((args.grid, args.run_dir), shorter, times, out=args.out, into=args.pictures)


if __name__ == "__main__":
    main()
