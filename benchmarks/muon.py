"""Time of a Muon step: ours (float32 on a CPU) against torch.optim.Muon (always bfloat16).

    python benchmarks/muon.py [--write benchmarks/results/muon.md]

How the two compare depends on whether the CPU multiplies bfloat16 matrices in hardware (AMX, AVX512-BF16). Each
setting below therefore runs in a process of its own, as the machine is and with those units masked; settings and
optimizers alternate over the rounds, and the table shows medians.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from slipstream.optim import Muon, newton_schulz

SHAPES = ((384, 384), (128, 352), (384, 1024))
MASKS = {
    "as it is": {},
    "bfloat16 units masked": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "all limited to AVX2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
RULES = {"torch": torch.optim.Muon, "ours": Muon}
FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")


def time_steps(shape: tuple[int, int], *, num_repeats: int) -> dict[str, list[float]]:
    """Return seconds a step of either optimizer on one matrix, measured in turn."""
    weights = {name: nn.Parameter(torch.randn(shape)) for name in RULES}
    optimizers = {name: rule([weights[name]], lr=0.02) for name, rule in RULES.items()}
    for weight in weights.values():
        weight.grad = torch.randn(shape)
    seconds: dict[str, list[float]] = {name: [] for name in RULES}
    for repeat in range(num_repeats + 1):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if repeat > 0:  # the first touches memory and picks kernels
                seconds[name].append(time.perf_counter() - start)
    return seconds


def errors(shape: tuple[int, int]) -> dict[str, float]:
    """Return each optimizer's largest deviation from the exact direction, whose entries are about 1/sqrt(width)."""
    grad = torch.randn(shape, dtype=torch.float64)
    exact = newton_schulz(grad)
    found = {}
    for name, rule in RULES.items():
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = grad.float()
        rule([weight], lr=1.0, weight_decay=0.0, momentum=0.0).step()
        ratio = max(1.0, shape[0] / shape[1]) ** 0.5
        found[name] = float((-weight.detach().double() / ratio - exact).abs().max())
    return found


def child(num_repeats: int, num_threads: int) -> None:
    """Measure under the environment this process was started with, and print JSON."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    measured = [{"seconds": time_steps(shape, num_repeats=num_repeats), "errors": errors(shape)} for shape in SHAPES]
    print(json.dumps(measured))


def measure(args: argparse.Namespace) -> dict[str, list[dict]]:
    """Run every setting in turn for a number of rounds; return all timings by setting and shape."""
    total = {mask: [{"seconds": {"torch": [], "ours": []}} for _ in SHAPES] for mask in MASKS}
    command = [sys.executable, __file__, "--child", "--repeats", str(args.repeats), "--threads", str(args.threads)]
    for _ in range(args.rounds):
        for mask, variables in MASKS.items():
            environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)} | variables
            printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            for entry, new in zip(total[mask], json.loads(printed), strict=True):
                entry["errors"] = new["errors"]
                for name in RULES:
                    entry["seconds"][name] += new["seconds"][name]
    return total


def table(measured: dict[str, list[dict]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| matrix | instructions | torch.optim.Muon, ms | ours, ms | ours is faster by | max error, torch | ours |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for i, (rows, columns) in enumerate(SHAPES):
        for mask, entries in measured.items():
            seconds = {name: statistics.median(entries[i]["seconds"][name]) for name in RULES}
            error = entries[i]["errors"]
            lines.append(
                f"| {rows} x {columns} | {mask} | {1e3 * seconds['torch']:.2f} | {1e3 * seconds['ours']:.2f} | "
                f"{seconds['torch'] / seconds['ours']:.2f}x | {error['torch']:.1e} | {error['ours']:.1e} |"
            )
    return lines


def machine(num_threads: int) -> list[str]:
    """Describe what the figures depend on."""
    model, flags = platform.processor() or platform.machine(), "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        model = fields.get("model name", model)
        flags = ", ".join(flag for flag in FLAGS if flag in fields.get("flags", "").split()) or "none of " + ", ".join(
            FLAGS
        )
    return [
        f"* CPU: {model}, {os.cpu_count()} cores; {num_threads} thread(s) used",
        f"* Instruction sets: {flags}",
        f"* torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}, "
        f"oneDNN {'on' if torch.backends.mkldnn.is_available() else 'off'}, "
        f"MKL {'on' if torch.backends.mkl.is_available() else 'off'}",
    ]


def main() -> None:
    """Measure, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all settings")
    parser.add_argument("--repeats", type=int, default=3, help="steps of either optimizer a round and matrix")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--write", type=Path, help="Markdown file to write as well")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.repeats, args.threads)
        return
    lines = [
        "# Time of a Muon step on a CPU",
        "",
        f"{datetime.date.today()}, `python benchmarks/muon.py --rounds {args.rounds} --repeats {args.repeats} "
        f"--threads {args.threads}`",
        "",
        *machine(args.threads),
        "",
        "A step is one update of one float32 matrix, momentum and decay included. Medians of "
        f"{args.rounds * args.repeats} steps; optimizers and settings alternate. The error is the largest deviation of "
        "an update from the same iteration in float64.",
        "",
        *table(measure(args)),
    ]
    print("\n".join(lines))
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
