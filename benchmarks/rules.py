"""What the optimizers cost: time of an update and state kept, beside AdamW's on the same model.

    python benchmarks/rules.py [--write benchmarks/results/rules.md] [--rounds 5] [--updates 20]

One CPU thread, float32, gradients of one batch over and over; rules take turns over the rounds, and the table shows
medians. SOAP and Shampoo refresh their bases now and then, so an update is the mean over a whole number of refreshes.
"""

import argparse
import datetime
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from slipstream.config import ModelConfig, OptimConfig
from slipstream.models.llama import build_stage
from slipstream.models.partition import whole
from slipstream.models.roles import role
from slipstream.optim.build import build_optimizers
from slipstream.optim.rules import RULES

MODELS = {
    "126k parameters": ModelConfig(num_layers=4, dim=48, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=257),
    "1.3M parameters": ModelConfig(num_layers=4, dim=128, num_heads=4, num_kv_heads=2, ffn_dim=352, vocab_size=2048),
}


class Contender:
    """One rule over the parameters of a model."""

    def __init__(self, name: str, model: ModelConfig) -> None:
        spec = whole(model)
        module = build_stage(model, spec.blocks, embed=spec.embed, head=spec.head)
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.optimizers = build_optimizers(self.parameters, OptimConfig(name=name, lr=1e-3), role=role)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) / 100

    def update_s(self, num_updates: int) -> float:
        """Return mean seconds an update."""
        begin = time.perf_counter()
        for _ in range(num_updates):
            for optimizer in self.optimizers.values():
                optimizer.step()
        return (time.perf_counter() - begin) / num_updates

    def state_per_weight(self) -> float:
        """Return numbers kept for each weight."""
        states = [state for each in self.optimizers.values() for state in each.state.values()]
        return sum(numbers(state) for state in states) / sum(each.numel() for each in self.parameters.values())


def numbers(value: object) -> int:
    """Count the numbers in nested state, scalars left out."""
    if isinstance(value, torch.Tensor):
        return value.numel() if value.numel() > 1 else 0
    if isinstance(value, dict):
        return sum(map(numbers, value.values()))
    return sum(map(numbers, value)) if isinstance(value, (list, tuple)) else 0


def measure(model: ModelConfig, *, rounds: int, num_updates: int) -> dict[str, tuple[float, float]]:
    """Return seconds of an update and numbers kept for a weight, by rule."""
    contenders = {name: Contender(name, model) for name in RULES}
    times: dict[str, list[float]] = {name: [] for name in RULES}
    for each in contenders.values():
        each.update_s(2)  # makes the state and picks kernels
    for _ in range(rounds):
        for name, each in contenders.items():
            times[name].append(each.update_s(num_updates))
    return {name: (statistics.median(times[name]), each.state_per_weight()) for name, each in contenders.items()}


def report(found: dict[str, dict[str, tuple[float, float]]], *, command: str) -> str:
    """Return the Markdown file."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    lines = [
        "# What the optimizers cost",
        "",
        f"{datetime.date.today()}, `{command}`: torch {torch.__version__}, {cpu}, one thread, float32",
        "",
        f"| rule | {' | '.join(f'update, {name} | / AdamW | state per weight' for name in found)} |",
        f"|---|{'---:|---:|---:|' * len(found)}",
    ]
    for name in RULES:
        cells = []
        for each in found.values():
            seconds, state = each[name]
            cells.append(f"{seconds * 1e3:.1f} ms | {seconds / each['adamw'][0]:.1f}x | {state:.2f}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file to write; default: standard output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(model, rounds=args.rounds, num_updates=args.updates) for name, model in MODELS.items()}
    text = report(found, command=f"python benchmarks/rules.py --rounds {args.rounds} --updates {args.updates}")
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
