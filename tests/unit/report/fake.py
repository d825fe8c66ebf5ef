"""Results without training."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tests.unit.report.fake_runs import remedy_metrics, worker_summary

from slipstream.config import Config, from_dict, resolve, to_toml
from slipstream.report.cells import Arm, Cell
from slipstream.report.results import ArmResult, CellResult


def arm(rule="adamw", remedy="none", *, delay=0, lr=0.01, read="all", batch="") -> Arm:
    return Arm(rule, remedy, read, batch, delay, lr)


def result(of: Arm, losses: Mapping[int, float | str], *, tables: Mapping | None = None) -> ArmResult:
    """An arm whose seeds ended with a loss, or as a word says."""
    config = from_dict({"optim": {"lr": of.lr}, "staleness": {"delay": of.delay}} | dict(tables or {}))
    cells = []
    for seed, end in losses.items():
        cell = Cell(arm=of, seed=seed, config=config, folder=f"{of.label}-{seed}")
        if isinstance(end, str):
            cells.append(CellResult(cell=cell, kind=end, message="because"))
        else:
            curve = np.linspace(5.0, end, 40)
            cells.append(
                CellResult(cell=cell, kind="finished", val_loss=end, val_bits_per_byte=end / 0.6931, losses=curve)
            )
    return ArmResult(arm=of, cells=cells)


def train_by_formula(configs: Mapping[str, Config], *, keep_checkpoints: bool = False, num_steps: int = 150) -> bool:
    """Leave run directories as if they had been trained: a loss by rule, delay, coefficient, rate and seed."""
    for config in configs.values():
        folder = Path(config.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(resolve(config, vocab_size=257, cuda=False)))
        gap = {"adamw": 0.4}.get(config.optim.name, 0.1) * (config.staleness.delay or 0)
        seed = config.data.seed
        loss = 2.0 + gap * (1 - 0.5 * config.staleness.error_feedback) + 0.01 * seed + 0.001 * seed * gap
        loss += 10 * abs(config.optim.lr - 0.01)
        rows = [{"step": step, "loss": loss + 3 / step, "step_s": 0.1} for step in range(1, num_steps + 1)]
        summary = {"val_loss": loss, "val_bits_per_byte": loss / 0.6931}
        if config.executor == "dataparallel":
            summary |= worker_summary([200, 800])
            if config.staleness.correction == "agc":
                rows = [row | {"method_metrics": remedy_metrics(row["step"])} for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").write_text(json.dumps(summary))
    return True
