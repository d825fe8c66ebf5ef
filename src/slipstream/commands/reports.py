"""`compare`, `report` and `watch`: many runs, some, and one under way."""

from collections.abc import Sequence
from functools import partial

import tyro

from slipstream.arguments import CompareArgs, ReportArgs, WatchArgs, refuse_bytes, refuse_given
from slipstream.strict_json import json_text


def compare(argv: Sequence[str]) -> int:
    """Train a grid of runs and compare them; or ask whether a config of yours stands a delay."""
    args = tyro.cli(CompareArgs, args=argv, prog="slipstream compare")
    from slipstream.console import Console
    from slipstream.report.compare import NUM_SEEDS, TOLERANCE, compare_grid, grid_and_judge
    from slipstream.train.many import train_all
    from slipstream.train.many_progress import ConsoleObserver

    if args.grid:
        own = {"--num-seeds": args.num_seeds, "--tolerance": args.tolerance}
        refuse_given(own, "with a grid, which has seeds of its own and no verdict")
    refuse_bytes([f"--run-dir {args.run_dir}"])
    grid, judge = grid_and_judge(
        args.grid,
        args.from_config,
        num_seeds=NUM_SEEDS if args.num_seeds is None else args.num_seeds,
        tolerance=TOLERANCE if args.tolerance is None else args.tolerance,
    )
    observer = ConsoleObserver(Console(stderr=args.json))
    train = partial(train_all, observer=observer, num_workers=args.num_workers, overwrite=args.overwrite)
    result = compare_grid(grid, args.run_dir, train=train, note=observer.note, judge=judge)
    if result is None:
        observer.note("stopped, runs under way are saved; the same command goes on")
        if args.json:
            print(json_text(None))
        return 0
    print(json_text(result.to_json()) if args.json else result.to_text(args.run_dir))
    return 1 if result.has_crashed else 0


def report(argv: Sequence[str]) -> int:
    """Draw one or several runs as one HTML file."""
    args = tyro.cli(ReportArgs, args=argv, prog="slipstream report")
    from slipstream.report.run_report import write_run_report

    written = write_run_report(args.runs, args.out)
    if args.json:
        print(json_text({"out": str(written.out), "verdict": written.verdict, "runs": written.figures}))
    else:
        print("\n".join([*written.verdict, str(written.out)]))
    return 0


def watch(argv: Sequence[str]) -> int:
    """Follow a run under way."""
    args = tyro.cli(WatchArgs, args=argv, prog="slipstream watch")
    from slipstream.console import Console
    from slipstream.report.watch import watch as follow

    return follow(args.run, console=Console(is_result=True), interval_s=args.interval)
