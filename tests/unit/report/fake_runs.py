"""Run directories without training: of every executor, with everything a report may find in them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from slipstream.config import from_dict, resolve, to_toml
from slipstream.pipeline.actions import Action
from slipstream.plan.simulate import SimulateConfig, build_timeline
from slipstream.train.trace import trace_events, write_trace
from slipstream.train.trainer import WORKER_FIGURES


def write_run(
    path: Path,
    tables: Mapping | None = None,
    *,
    num_steps: int = 400,
    end_loss: float = 1.6,
    step_s: float = 0.05,
    delay: int = 0,
    bubble: float = 0.0,
    evaluate_every: int = 50,
    extras=None,
    finished: bool = True,
    summary: Mapping | None = None,
) -> Path:
    """Leave a run whose loss falls to ``end_loss``.

    ``extras(step)``: more fields of a row.
    """
    config = from_dict({"run_dir": str(path), "train": {"num_steps": num_steps}} | dict(tables or {}))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(to_toml(resolve(config, vocab_size=257, cuda=False)))
    generator = np.random.default_rng(num_steps)
    rows, made = [], num_steps if finished else num_steps // 2
    for step in range(1, made + 1):
        loss = end_loss + 4.0 * math.exp(-step / (num_steps / 12)) + 0.05 * generator.standard_normal()
        row = {
            "step": step,
            "loss": loss,
            "grad_norm": 0.8 + 0.1 * generator.standard_normal(),
            "lr": 1e-3 * min(step / 20, 1.0),
            "tokens_per_s": 1024 / step_s,
            "staleness_mean": float(min(delay, step - 1)),
            "staleness_max": min(delay, step - 1),
            "bubble_fraction": bubble,
            "step_s": step_s,
            "num_tokens": 1024,
            "data_fraction": 0.001,
            "mfu": None,
            "peak_memory_bytes": 123_000_000,
            "skipped": False,
        }
        rows.append(row | (extras(step) if extras else {}))
    evaluations = [
        {"step": step, "val_loss": loss, "val_loss_y": loss + 0.01, "val_bits_per_byte": loss / math.log(2)}
        for step in range(0, made + 1, evaluate_every)
        for loss in [end_loss + 0.05 + 4.0 * math.exp(-step / (num_steps / 12))]
    ]
    write_lines(path / "metrics.jsonl", rows)
    write_lines(path / "evaluations.jsonl", evaluations)
    if finished:
        found = {"num_steps": made, "val_loss": evaluations[-1]["val_loss"]} | dict(summary or {})
        (path / "summary.json").write_text(json.dumps(found))
    return path


def write_lines(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def pipeline_run(path: Path, *, schedule: str = "two_bw", **options) -> Path:
    """A pipeline of three stages with a trace of eight steps."""
    tables = {
        "executor": "pipeline",
        "pipeline": {"pipeline_schedule": schedule, "num_stages": 3, "num_microbatches": 3},
        "optim": {"name": "muon"},
        "model": {"num_layers": 4},
    }
    write_run(path, tables, **options)
    timeline = build_timeline(
        SimulateConfig(
            pipeline_schedule=schedule,
            num_stages=3,
            num_microbatches=3,
            num_batches=8,
            optimizer_ms=0.4,
            latency_ms=0.2,
        )
    )
    ranks = []
    for rank, spans in enumerate(timeline.ranks):
        timed = [(span.action, span.start_ms / 1000, span.end_ms / 1000) for span in spans]
        timed.append((Action(rank, "SEND_F", 0), 0.0, 0.001))
        ranks.append(trace_events(timed, rank=rank))
    write_trace(path / "trace.json", ranks)
    return path


def worker_run(path: Path, *, finished: bool = True) -> Path:
    """Four workers, the last of a quarter of the others' speed."""
    tables = {"executor": "dataparallel", "dataparallel": {"emulate_speeds": [1.0, 1.0, 1.0, 0.25]}}
    summary = worker_summary([308, 307, 308, 77])
    live = {key: summary[key] for key in WORKER_FIGURES}

    def extras(step: int) -> dict:
        more = {"staleness_mean": 0.7 + 0.2 * math.sin(step), "staleness_max": 1 + step % 2}
        return more | ({"workers": live, "method_metrics": remedy_metrics(step)} if step % 10 == 0 else {})

    return write_run(path, tables, extras=extras, finished=finished, summary=summary)


def worker_summary(microbatches: Sequence[int]) -> dict:
    """What a summary says of workers that did so much."""
    count = len(microbatches)
    return {
        "microbatches_by_worker": {str(worker): done for worker, done in enumerate(microbatches)},
        "throughput_share": 0.967,
        "pushes_accepted": 250 * count,
        "pushes_rejected": 2,
        "restarts": 1,
        "ledger_balanced": True,
        "staleness_mean": 1.1,
        "staleness_max": 2,
        "staleness_histogram": {"0": 25 * count, "1": 175 * count, "2": 50 * count},
        "staleness_histogram_by_worker": {str(worker): {"0": 25, "1": 175, "2": 50} for worker in range(count)},
        "tokens_committed": 409_600,
        "tokens_dropped": 128,
    }


def remedy_metrics(step: int) -> dict:
    """What the gradient compensator and the async-aware rate tell of themselves; they begin after step 10."""
    found = {"aalr/factor": max(1 - step / 100, 0.8)}
    for place, group in enumerate(("q.0", "ffn_down.0", "embedding")):
        figures = {"gain": 0.2 + 0.3 * place, "relative_correction": 0.04, "curvature": 2.0, "cosine": 0.99, "raw": 0.0}
        found |= {f"agc/{group}/{key}": value for key, value in figures.items()}
        found[f"agc/{group}/ramp"] = float(step > 10)
    return found


def expert_run(path: Path) -> Path:
    """Experts, a correction that tells of itself, a spike and a skipped update."""

    def extras(step: int) -> dict:
        more: dict = {"router": {"load_max": 2.5 - step / 400, "load_min": 0.1, "entropy": 2.0, "aux_share": 0.01}}
        if step % 10 == 0:
            more["method_metrics"] = {"error_feedback/q": 1 - 1 / step, "aalr/factor": 0.9}
        if step == 300:
            more |= {"grad_norm": 9.0, "loss": 6.0, "staleness_max": 3}
        if step == 310:
            more |= {"grad_norm": math.inf, "skipped": True}
        return more

    tables = {"model": {"num_experts": 8}, "staleness": {"delay": 1, "error_feedback": "auto"}}
    return write_run(path, tables, delay=1, extras=extras)
