"""Step times of pipeline schedules, ours beside torch's: runs `slipstream bench pipeline` for a table of sizes.

    python benchmarks/pipeline.py [--write benchmarks/results/pipeline.md] [--rounds 3] [--cases computed emulated]

Figures are ratios within one run, with their spread; run it on a machine that does nothing else.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from slipstream.bench.pipeline import gains

COMPUTED = (
    ("--num-stages", "2", "--num-microbatches", "2"),
    ("--num-stages", "2", "--num-microbatches", "4"),
    ("--num-stages", "2", "--num-microbatches", "8", "--steps", "2"),
)
SLEEP = ("--emulate-forward-ms", "40", "--emulate-backward-ms", "80")
EMULATED = (
    ("--num-stages", "4", "--num-microbatches", "4", *SLEEP),
    ("--num-stages", "8", "--num-microbatches", "8", *SLEEP),
    ("--num-stages", "16", "--num-microbatches", "16", "--steps", "2", *SLEEP),
)
CASES = {"computed": COMPUTED, "emulated": EMULATED}

LEGEND = """\
A step is the median time between optimizer steps on rank 0: forward, backward, messages, exact global-norm clipping
and the optimizer. For `two_bw` without fill and drain, which happen once a run; for flushing schedules, which fill and
drain at each step, the whole step. Schedules take turns over the rounds, on the same processes. Efficiency is
m (F + B) / step with F and B of the slowest stage alone, or emulated. Quartiles are over all steps measured. Gains are
medians over the rounds, with the smallest and the largest: a round is what two schedules have in common.
"""


def measure(flags: tuple[str, ...], *, rounds: int) -> dict[str, Any]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "slipstream.cli", "bench", "pipeline", *flags, "--rounds", str(rounds), "--json"]
    print(" ".join(command[3:]), file=sys.stderr, flush=True)
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def section(result: dict[str, Any]) -> list[str]:
    """Return one case as Markdown."""
    settings, schedules = result["settings"], result["schedules"]
    p, m = settings["num_stages"], settings["num_microbatches"]
    peer = schedules.get("torch_1f1b")
    work = f"F = {result['forward_s'] * 1e3:.1f} ms, B = {result['backward_s'] * 1e3:.1f} ms"
    kind = f"emulated, {work}" if settings["emulated"] else f"{work} on the slowest stage alone"
    before, after = (result["machine"][f"load_average_{when}"] for when in ("before", "after"))
    lines = [
        f"## p = {p}, m = {m}: {kind}",
        "",
        f"Rounds: {settings['rounds']}, steps in each: {settings['steps']}; bytes a message: "
        f"{settings['message_bytes']}; load average before and after: {before}, {after}",
        "",
        "| schedule | step, s | quartiles, s | efficiency | gain over torch_1f1b |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, each in sorted(schedules.items(), key=lambda item: item[1]["step_time_s"]):
        low, _, high = each["quartiles_s"]
        rounds = gains(each, over=peer) if peer else []
        gain = f"{statistics.median(rounds):.3f}x ({min(rounds):.3f} to {max(rounds):.3f})" if rounds else ""
        lines.append(
            f"| {name} | {each['step_time_s']:.4f} | {low:.4f} to {high:.4f} | {each['efficiency']:.1%} | {gain} |"
        )
    lines += ["", *gains_of_two_bw(result), ""]
    return lines


def gains_of_two_bw(result: dict[str, Any]) -> list[str]:
    """Return what two_bw gains, with the spread over rounds."""
    lines = []
    ideal = result["ideal_speedup"]
    for name, gain, note in (
        ("torch_1f1b", result["speedup_vs_torch_1f1b"], f" of at most {ideal:.3f}x without bubbles"),
        (result["best_flushing"], result["speedup_vs_best_flushing"], ", the fastest flushing schedule"),
    ):
        if gain is not None:
            rounds = ", ".join(f"{each:.3f}" for each in result["rounds_speedup"][name])
            lines.append(f"* two_bw over {name}{note}: **{gain:.3f}x** (single rounds: {rounds})")
    lines += [f"* {name} was left out: {reason}" for name, reason in result["left_out"].items()]
    return lines


def report(results: list[dict[str, Any]], *, command: str) -> str:
    """Return the whole Markdown file."""
    machine = results[0]["machine"]
    computed = next((each["settings"] for each in results if not each["settings"]["emulated"]), None)
    lines = ["# Pipeline schedules, ours beside torch's", "", f"{datetime.date.today()}, `{command}`", ""]
    lines.append(
        f"* CPU: {machine['cpu']}, {machine['num_cores']} cores; one process a rank, one thread each; messages by gloo"
    )
    lines.append(f"* torch {machine['torch']}, Python {machine['python']}")
    if computed:
        lines.append(
            f"* Model: {computed['num_layers']} Llama blocks of width {computed['dim']}, sequences of "
            f"{computed['sequence_length']}, {computed['microbatch_size']} a microbatch, {computed['optimizer']}"
        )
    lines += ["", LEGEND]
    for result in results:
        lines += section(result)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file to write; default: standard output")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    results = [measure(flags, rounds=args.rounds) for case in args.cases for flags in CASES[case]]
    command = f"python benchmarks/pipeline.py --rounds {args.rounds} --cases {' '.join(args.cases)}"
    text = report(results, command=command)
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
