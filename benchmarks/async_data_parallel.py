"""Workers that do not wait, beside the same workers that do: throughput with uneven and with unsteady workers.

    python benchmarks/async_data_parallel.py [--write benchmarks/results/async_data_parallel.md] [--rounds 3]

Runs `slipstream train --config configs/async_dp.toml` on worker processes whose compute is emulated: the real forward
and backward, then a sleep up to the time the worker's speed stands for. Ratios are of runs that took turns.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "configs" / "async_dp.toml"
COMMON = ("--evaluate.every-steps", "0", "--evaluate.num-sequences", "4", "--checkpoint.every-steps", "0")
SYNC = ("--dataparallel.mode", "sync")
STEADY = ("--dataparallel.emulate-speeds", ",".join(["1"] * 8), "--dataparallel.emulate-microbatch-ms", "200")
JITTER = (*STEADY, "--dataparallel.emulate-jitter", "0.3")
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "4 workers of speeds 1, 1, 1, 1/4": {
        "synchronous": (*SYNC, "--train.num-steps", "15"),
        "asynchronous, equal batches": ("--dataparallel.dynamic-batches", "false", "--train.num-steps", "50"),
        "asynchronous": ("--train.num-steps", "50"),
        "asynchronous, a checkpoint every 10 steps": ("--train.num-steps", "50", "--checkpoint.every-steps", "10"),
    },
    "8 workers of one speed, each cycle times lognormal(0.3)": {
        "synchronous": (*JITTER, *SYNC, "--train.num-steps", "40"),
        "asynchronous": (*JITTER, "--train.num-steps", "50"),
    },
}

LEGEND = """\
Share: tokens per second of the clock on the wall over the sum of the workers' own nominal speeds; 1 would be workers
that never wait, for nobody and nothing. Gain: tokens per second over those of the synchronous run of the same round.
Both are medians over rounds, single rounds in brackets. Dynamic batches where nothing else is said; a step is of 16
microbatches.
"""


def measure(flags: tuple[str, ...]) -> dict[str, Any]:
    """Run the command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--config", str(CONFIG), "--run-dir", f"{folder}/run", *COMMON, *flags]
        print(" ".join(words), file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "slipstream.cli", *words], check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(Path(f"{folder}/run/summary.json").read_text(encoding="utf-8"))
    assert summary["ledger_balanced"]
    found = {name: round(summary[name], 3) for name in ("throughput_share", "tokens_per_s", "staleness_mean")}
    print(f"  {found}, load average {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return summary


def of_rounds(values: list[float], form: str) -> str:
    """Return the median, and all."""
    single = ", ".join(format(value, form) for value in values)
    return f"**{statistics.median(values):{form}}** ({single})"


def section(title: str, rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    """Return one case as Markdown."""
    lines = [
        f"## {title}",
        "",
        "| | share | gain | mean staleness | largest | pushes |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for name in rounds[0]:
        runs = [each[name] for each in rounds]
        gains = [each[name]["tokens_per_s"] / each["synchronous"]["tokens_per_s"] for each in rounds]
        lines.append(
            f"| {name} | {of_rounds([run['throughput_share'] for run in runs], '.3f')} | {of_rounds(gains, '.2f')} | "
            f"{runs[-1]['staleness_mean']:.2f} | {max(run['staleness_max'] for run in runs)} | "
            f"{runs[-1]['pushes_accepted']} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file to write; default: standard output")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", type=int, choices=range(len(CASES)), default=range(len(CASES)))
    args = parser.parse_args()
    load = os.getloadavg()[0]
    lines = ["# Workers that do not wait", "", f"{datetime.date.today()}, `python {' '.join(sys.argv)}`", ""]
    lines.append(f"* {platform.machine()}, {os.cpu_count()} cores, load average before: {load:.2f}")
    lines += [
        "* configs/async_dp.toml: a Llama of 2 blocks, width 64; one process a worker, one thread each",
        "",
        LEGEND,
    ]
    for title in [list(CASES)[number] for number in args.cases]:
        rounds = [{name: measure(flags) for name, flags in CASES[title].items()} for _ in range(args.rounds)]
        lines += section(title, rounds)
    text = "\n".join(lines).rstrip() + "\n"
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
