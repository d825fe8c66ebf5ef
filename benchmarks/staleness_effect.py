"""What one update of delay costs a small language model, and how much of it error feedback gives back.

    python benchmarks/staleness_effect.py [--seeds 0 1 2 3 4] [--sweep] [--write benchmarks/results/staleness_effect.md]

Trains a byte-level Llama on the built-in text under each rule (AdamW, Muon) and arm (synchronous, delay 1, delay 1
with error feedback c = 1). A seed sets initial weights and data order alike in every rule and arm, so differences are
paired. Judged by the validation loss of the published weights x. Two runs at a time take about five minutes on two
free cores, the sweep some three more.
"""

import argparse
import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from slipstream.config import Config, from_dict
from slipstream.models.shapes import num_parameters
from slipstream.train.launch import launch
from slipstream.train.progress import SilentReporter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Size of every run."""

    num_layers: int = 4
    dim: int = 48
    ffn_dim: int = 128
    sequence_length: int = 32
    batch_size: int = 16
    num_steps: int = 500
    lr_warmup_steps: int = 50
    num_validation_sequences: int = 1024


LAPTOP = Scale()

Rates = Mapping[str, float]

RATES: Mapping[str, Rates] = {"adamw": {"lr": 0.004}, "muon": {"lr": 0.01, "adamw_lr": 0.004}}
"""Peak rates by rule, from the synchronous arm of the sweep: the smallest within 0.01 of the best loss. Muon's AdamW
part (embedding, head, norms) has AdamW's rate, so that only Muon's own was chosen for it."""

SWEEP: Mapping[str, Sequence[Rates]] = {
    "adamw": [{"lr": lr} for lr in (0.001, 0.002, 0.004, 0.008)],
    "muon": [{"lr": lr, "adamw_lr": 0.004} for lr in (0.005, 0.01, 0.02)],
}
SWEEP_SEED = 100
"""Not among the seeds that are compared, so the choice of the rates cannot flatter an arm there."""

SEEDS = (0, 1, 2, 3, 4)

SYNC, DELAY, FEEDBACK = "synchronous", "delay 1", "delay 1 + EF"
ARMS: Mapping[str, Mapping[str, float]] = {
    SYNC: {"delay": 0},
    DELAY: {"delay": 1},
    FEEDBACK: {"delay": 1, "error_feedback": 1.0},
}


class Run(NamedTuple):
    """One training run."""

    rule: str
    arm: str
    seed: int
    rates: Rates
    scale: Scale


Losses = dict[str, dict[str, list[float]]]
"""Validation loss by rule, arm and seed, in the order of the seeds."""


def config_of(run: Run, run_dir: str) -> Config:
    """Return the settings of a run."""
    scale = run.scale
    return from_dict(
        {
            "run_dir": run_dir,
            "data": {"sequence_length": scale.sequence_length, "seed": run.seed},
            "model": {
                "num_layers": scale.num_layers,
                "dim": scale.dim,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_dim": scale.ffn_dim,
                "seed": run.seed,
            },
            "optim": {
                "name": run.rule,
                "weight_decay": 0.1,
                "max_grad_norm": 1.0,
                "lr_schedule": "cosine",
                "lr_warmup_steps": scale.lr_warmup_steps,
                "lr_final_fraction": 0.1,
                **run.rates,
            },
            "staleness": dict(ARMS[run.arm]),
            "pipeline": {"num_microbatches": 1},
            "train": {"num_steps": scale.num_steps, "microbatch_size": scale.batch_size, "device": "cpu"},
            "evaluate": {"num_sequences": scale.num_validation_sequences},
        }
    )


def train(run: Run) -> float:
    """Train in a temporary run directory; return the validation loss of the published weights."""
    with tempfile.TemporaryDirectory() as folder:
        summary = launch(config_of(run, str(Path(folder) / "run")), reporter=SilentReporter())
    if summary is None:
        raise KeyboardInterrupt  # the trainer takes Ctrl-C as a request to save and stop
    return float(summary["val_loss"])


def train_all(runs: Sequence[Run], *, num_workers: int) -> list[float]:
    """Train every run, ``num_workers`` at a time in processes of their own (1: in this one); tell progress."""
    if num_workers == 1:
        return list(_told(runs, map(train, runs)))
    # Workers are spawned: a forked child of a process that has used torch's threads can hang.
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(_told(runs, pool.map(train, runs)))


def _told(runs: Sequence[Run], losses: Iterable[float]) -> Iterable[float]:
    for i, (run, loss) in enumerate(zip(runs, losses, strict=True), start=1):
        print(f"[{i}/{len(runs)}] {run.rule} {label(run.rates)} {run.arm} seed {run.seed}: {loss:.4f}", file=sys.stderr)
        yield loss


def measure(
    *,
    seeds: Sequence[int] = SEEDS,
    scale: Scale = LAPTOP,
    rates: Mapping[str, Rates] = RATES,
    arms: Sequence[str] = tuple(ARMS),
    num_workers: int = 2,
) -> Losses:
    """Train every rule and arm on every seed."""
    runs = [Run(rule, arm, seed, rates[rule], scale) for seed in seeds for rule in rates for arm in arms]
    losses: Losses = {rule: {arm: [] for arm in arms} for rule in rates}
    for run, loss in zip(runs, train_all(runs, num_workers=num_workers), strict=True):
        losses[run.rule][run.arm].append(loss)
    return losses


def sweep(*, scale: Scale = LAPTOP, num_workers: int = 2) -> list[tuple[Run, float]]:
    """Train every rate of the grid under every arm, on one seed that is not compared."""
    runs = [Run(rule, arm, SWEEP_SEED, rates, scale) for rule, grid in SWEEP.items() for rates in grid for arm in ARMS]
    return list(zip(runs, train_all(runs, num_workers=num_workers), strict=True))


# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval by Student's t."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Return the interval of the mean of 2 to 10 values."""
        mean = statistics.fmean(values)
        half = T_QUANTILES[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.high - self.mean:.3f}"


def difference(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return ``first - second``, seed by seed."""
    return [a - b for a, b in zip(first, second, strict=True)]


class Effect(NamedTuple):
    """Paired differences of one rule's validation losses."""

    delay_gap: list[float]
    feedback_gap: list[float]
    improvement: list[float]

    @classmethod
    def of(cls, losses: Mapping[str, Sequence[float]]) -> "Effect":
        """Compare the arms of a rule."""
        return cls(
            delay_gap=difference(losses[DELAY], losses[SYNC]),
            feedback_gap=difference(losses[FEEDBACK], losses[SYNC]),
            improvement=difference(losses[DELAY], losses[FEEDBACK]),
        )

    @property
    def share_closed(self) -> float:
        """Part of the mean gap that error feedback closes."""
        return sum(self.improvement) / sum(self.delay_gap)


def effect_table(losses: Losses) -> list[str]:
    """Return the lines of a Markdown table of means and paired differences."""
    lines = [
        f"| rule | {SYNC} | {DELAY} | {FEEDBACK} | gap at delay 1 | gap with EF | improvement by EF | gap closed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rule, by_arm in losses.items():
        effect = Effect.of(by_arm)
        means = " | ".join(f"{statistics.fmean(by_arm[arm]):.3f}" for arm in ARMS)
        intervals = " | ".join(str(Interval.of(values)) for values in effect)
        lines.append(f"| {rule} | {means} | {intervals} | {100 * effect.share_closed:.0f} % |")
    gaps = {rule: Effect.of(by_arm).delay_gap for rule, by_arm in losses.items()}
    more = Interval.of(difference(gaps["adamw"], gaps["muon"]))
    ratio = sum(gaps["muon"]) / sum(gaps["adamw"])
    return [
        *lines,
        "",
        f"AdamW's gap at delay 1 minus Muon's: {more}. Muon's is {100 * ratio:.0f} % of AdamW's.",
    ]


def seed_table(losses: Losses, seeds: Sequence[int]) -> list[str]:
    """Return the lines of a Markdown table of every run."""
    lines = [f"| rule | seed | {' | '.join(ARMS)} |", f"| --- | ---: |{' ---: |' * len(ARMS)}"]
    for rule, by_arm in losses.items():
        for i, seed in enumerate(seeds):
            lines.append(f"| {rule} | {seed} | {' | '.join(f'{by_arm[arm][i]:.4f}' for arm in ARMS)} |")
    return lines


def sweep_table(found: Sequence[tuple[Run, float]]) -> list[str]:
    """Return the lines of a Markdown table of the sweep, with each arm at its own best rate below a rule's."""
    lines = [f"| rule | rates | {' | '.join(ARMS)} |", f"| --- | --- |{' ---: |' * len(ARMS)}"]
    for rule, grid in SWEEP.items():
        arms = {arm: [loss for run, loss in found if (run.rule, run.arm) == (rule, arm)] for arm in ARMS}
        for i, rates in enumerate(grid):
            cells = " | ".join(f"{losses[i]:.3f}" for losses in arms.values())
            lines.append(f"| {rule} | {label(rates)} | {cells} |")
        cells = " | ".join(f"**{min(losses):.3f}**" for losses in arms.values())
        lines.append(f"| {rule} | each arm's best | {cells} |")
    return lines


def settings(scale: Scale, seeds: Sequence[int]) -> list[str]:
    """Describe what was run, and on what."""
    model = dataclasses.replace(config_of(Run("adamw", SYNC, 0, RATES["adamw"], scale), "").model, vocab_size=257)
    num_tokens = scale.num_steps * scale.batch_size * scale.sequence_length
    return [
        f"* Model: Llama, {num_parameters(model)} parameters ({scale.num_layers} layers, dim {scale.dim}, 4 heads, 2 "
        f"key/value heads, ffn_dim {scale.ffn_dim}), bytes, untied.",
        f"* Data: the built-in Shakespeare; {scale.num_steps} steps of {scale.batch_size} x {scale.sequence_length} "
        f"tokens ({num_tokens} in all, {num_tokens / num_parameters(model):.0f} a parameter; 20 are usual), validation "
        f"on {scale.num_validation_sequences} sequences.",
        f"* Peak rates: {'; '.join(f'{rule} {label(rates)}' for rule, rates in RATES.items())}. Linear warm-up of "
        f"{scale.lr_warmup_steps} steps, cosine to 10 %, weight decay 0.1, gradient norm clipped at 1.0; AdamW betas "
        "0.9, 0.95; Muon momentum 0.95, Nesterov. Float32.",
        f"* Seeds {', '.join(map(str, seeds))}: each sets initial weights and data order, alike in all rules and arms.",
        f"* Machine: {cpu_name()}, {os.cpu_count()} cores, one thread a run; Python {platform.python_version()}, torch "
        f"{torch.__version__}.",
    ]


def label(rates: Rates) -> str:
    """Return rates as text."""
    return ", ".join(f"{key} {value}" for key, value in rates.items())


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def report(losses: Losses, *, seeds: Sequence[int], found: Sequence[tuple[Run, float]] | None) -> list[str]:
    """Return the lines of the results file."""
    command = f"python benchmarks/staleness_effect.py --seeds {' '.join(map(str, seeds))}{' --sweep' if found else ''}"
    lines = [
        "# What one update of delay costs, and what error feedback gives back",
        "",
        f"{datetime.date.today()}, `{command}`",
        "",
        *settings(LAPTOP, seeds),
        "",
        "Validation loss in nats a byte, of the published weights x; lower is better. EF is error feedback with c = 1. "
        f"Gaps are to the synchronous arm; ± is the 95 % interval of the mean of {len(seeds)} paired differences "
        "(Student's t).",
        "",
        *effect_table(losses),
        "",
        "## Every run",
        "",
        *seed_table(losses, seeds),
    ]
    if found:
        lines += [
            "",
            "## Choice of the rates",
            "",
            f"One seed ({SWEEP_SEED}) that is not compared above. A rule's rate is the smallest within 0.01 of the "
            "best synchronous loss; every arm above uses it.",
            "",
            *sweep_table(found),
        ]
    return lines


def as_json(losses: Losses, *, seeds: Sequence[int], found: Sequence[tuple[Run, float]] | None) -> str:
    """Return the same as JSON."""
    effects = {rule: Effect.of(by_arm) for rule, by_arm in losses.items()}
    table = {
        "scale": dataclasses.asdict(LAPTOP),
        "rates": RATES,
        "seeds": seeds,
        "val_loss": losses,
        "effects": {
            rule: {name: Interval.of(values)._asdict() for name, values in effect._asdict().items()}
            | {"share_closed": effect.share_closed}
            for rule, effect in effects.items()
        },
        "sweep": [
            {"rule": run.rule, "rates": run.rates, "arm": run.arm, "seed": run.seed, "val_loss": loss}
            for run, loss in found or []
        ],
    }
    return json.dumps(table, indent=1)


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="2 to 10 seeds to compare on")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--sweep", action="store_true", help="show also how the rates were chosen")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--write", type=Path, help="Markdown file to write as well")
    args = parser.parse_args()
    if not 2 <= len(set(args.seeds)) == len(args.seeds) <= len(T_QUANTILES) + 1:
        parser.error(f"--seeds takes 2 to {len(T_QUANTILES) + 1} different seeds, given {args.seeds}")
    found = sweep(num_workers=args.workers) if args.sweep else None
    losses = measure(seeds=args.seeds, num_workers=args.workers)
    lines = report(losses, seeds=args.seeds, found=found)
    print(as_json(losses, seeds=args.seeds, found=found) if args.json else "\n".join(lines))
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
