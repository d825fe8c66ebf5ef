"""`slipstream bench pipeline`: step times of pipeline schedules, ours and torch's, and what 2BW gains over them."""

import contextlib
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.bench.rank import RankResult, bench_rank
from slipstream.bench.settings import BenchPipelineConfig, check_settings, choose_schedules, run_config
from slipstream.cores import num_cores
from slipstream.models.shapes import check_model
from slipstream.optim.build import check_optim
from slipstream.train.processes import run_processes


def run_bench_pipeline(
    config: BenchPipelineConfig, *, note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Start the ranks once, let all schedules take turns on them, and return what was measured.

    Args:
        config: What to time.
        note: Is told what is about to be timed.

    Returns:
        ``schedules`` (by name ``step_time_s``, the median over rounds of a round's median interval between optimizer
        steps on rank 0, and ``efficiency``, m (F + B) / step_time_s; with them ``rounds_s``, ``quartiles_s`` over all
        steps, ``cpu_time_s`` of the busiest rank a step, and ``grad_norms``), ``speedup_vs_torch_1f1b``,
        ``ideal_speedup`` = (m + p - 1) / m, ``speedup_vs_best_flushing``, ``best_flushing``, ``rounds_speedup`` (the
        two ratios within each round), ``forward_s`` and ``backward_s`` of the slowest stage alone, ``left_out`` (why,
        by name), ``settings`` and ``machine``. A ratio whose schedules were not timed is ``None``.

    Raises:
        ConfigError: The settings cannot be timed.
        StageError: A rank failed.
    """
    check_settings(config)
    settings = run_config(config, "one_f_one_b", num_steps=1)
    check_model(settings.model)
    check_optim(settings.optim, num_steps=1)
    names, left_out = choose_schedules(config)
    note(f"timing {', '.join(names)} on {config.num_stages} ranks: {config.rounds} rounds of {config.steps} steps each")
    load_before = load_average()
    results = run_processes(
        bench_rank,
        config,
        names,
        num_ranks=config.num_stages,
        timeout_s=config.timeout_s,
        remedy="Nothing was saved; start the measurement again.",
    )
    return summarise(config, results) | {
        "left_out": left_out,
        "settings": {
            "num_stages": config.num_stages,
            "num_microbatches": config.num_microbatches,
            "rounds": config.rounds,
            "steps": config.steps,
            "num_extra_in_flight": config.num_extra_in_flight,
            "emulated": config.emulated,
            "optimizer": config.optimizer,
            "dim": settings.model.dim,
            "num_layers": settings.model.num_layers,
            "sequence_length": settings.data.sequence_length,
            "microbatch_size": config.microbatch_size,
            "message_bytes": 4 * settings.train.microbatch_size * settings.data.sequence_length * settings.model.dim,
        },
        "machine": machine() | {"load_average_before": load_before, "load_average_after": load_average()},
    }


def summarise(config: BenchPipelineConfig, results: Sequence[RankResult]) -> dict[str, Any]:
    """Return the figures of all ranks' measurements; see :func:`run_bench_pipeline`."""
    m, p = config.num_microbatches, config.num_stages
    alone = [[statistics.median(times) for times in zip(*result.alone_s)] for result in results]
    forward_s, backward_s = max(alone, key=sum)
    schedules: dict[str, dict[str, Any]] = {}
    for name, runs in results[0].runs.items():
        rounds = [statistics.median(run.step_times_s) for run in runs]
        step_time_s = statistics.median(rounds)
        cpu = [statistics.median(s for run in result.runs[name] for s in run.cpu_times_s) for result in results]
        schedules[name] = {
            "step_time_s": step_time_s,
            "efficiency": m * (forward_s + backward_s) / step_time_s,
            "rounds_s": rounds,
            "quartiles_s": quartiles([s for run in runs for s in run.step_times_s]),
            "cpu_time_s": max(cpu),
            "grad_norms": runs[0].grad_norms,
        }
    flushing = {name: each["step_time_s"] for name, each in schedules.items() if name != "two_bw"}
    best = min(flushing, key=flushing.__getitem__) if flushing else None
    own = schedules.get("two_bw")
    by_round = {
        name: gains(own, over=schedules[name])
        for name in dict.fromkeys(("torch_1f1b", best))
        if own is not None and name is not None and name in schedules
    }
    return {
        "schedules": schedules,
        "speedup_vs_torch_1f1b": statistics.median(by_round["torch_1f1b"]) if "torch_1f1b" in by_round else None,
        "ideal_speedup": (m + p - 1) / m,
        "speedup_vs_best_flushing": statistics.median(by_round[best])
        if best is not None and best in by_round
        else None,
        "best_flushing": best,
        "rounds_speedup": by_round,
        "forward_s": forward_s,
        "backward_s": backward_s,
    }


def gains(schedule: Mapping[str, Any], *, over: Mapping[str, Any]) -> list[float]:
    """Return how many times as fast a schedule is as another, in each round.

    A round is what the two have in common: how fast the machine was at the time. So the gain to tell is the median of
    these, not the ratio of medians, which may be of different rounds.
    """
    return [other / own for other, own in zip(over["rounds_s"], schedule["rounds_s"], strict=True)]


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first, second and third quartile.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        [2.0, 3.0, 4.0]
    """
    if len(values) < 2:
        return list(values) * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def machine() -> dict[str, Any]:
    """Return what the figures depend on besides the settings."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "num_cores": num_cores(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def load_average() -> float | None:
    """Return how many processes wanted to run over the last minute; ``None`` where the system does not say.

    Before a measurement it should be near 0: what others compute hides what bubbles cost.
    """
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
