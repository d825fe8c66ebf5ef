"""A run's summary as lines, beside another run's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, counted

Summary = dict[str, Any]


def summary_table(summary: Summary, other: Summary | None, *, run_dir: str) -> str:
    """Return a summary as lines, beside another run's where there is one."""
    runs = [summary] if other is None else [summary, other]
    rows = [
        ("executor", [_executor_text(run) for run in runs]),
        ("validation loss, before", [f"{run['val_loss_before']:.4f}" for run in runs]),
        ("validation loss, after", [f"{run['val_loss']:.4f} (x) {run['val_loss_y']:.4f} (y)" for run in runs]),
        ("bits per byte", [_bits_text(run["val_bits_per_byte"]) for run in runs]),
        ("tokens per second", [f"{run['tokens_per_s']:.0f}" for run in runs]),
        ("staleness, mean / max", [f"{run['staleness_mean']:.3f} / {run['staleness_max']}" for run in runs]),
        *_share_row(runs),
        ("bubble fraction", [_bubble_text(run["bubble_fraction"]) for run in runs]),
        ("weights sha256", [run["weights_sha256"][: 64 if other is None else 16] for run in runs]),
    ]
    name_width = max(len(name) for name, _ in rows)
    width = max(len(values[0]) for _, values in rows)
    lines = [
        f"{name:<{name_width}}  {'  '.join(f'{value:<{width}}' for value in values)}".rstrip() for name, values in rows
    ]
    if other is not None:
        gain = summary["tokens_per_s"] / other["tokens_per_s"]
        lines.append(f"{'throughput':<{name_width}}  {gain:.2f}x the other run's")
    return "\n".join([*lines, f"{'run directory':<{name_width}}  {run_dir}"])


def _share_row(runs: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    if all("throughput_share" not in run for run in runs):
        return []
    shares = [f"{run['throughput_share']:.1%}" if "throughput_share" in run else "-" for run in runs]
    return [("of the workers' own speeds", shares)]


def _bits_text(bits: float | None) -> str:
    return "-" if bits is None else f"{bits:.4f}"  # a model of one's own need not be one of text


def _bubble_text(share: float | None) -> str:
    return "not counted" if share is None else f"{share:.1%}"


def _executor_text(summary: Summary) -> str:
    if summary["executor"] == "single":
        return "single, delays that differ" if summary["delay"] is None else f"single, delay {summary['delay']}"
    if summary["executor"] == "dataparallel":
        return f"{counted(summary['num_workers'], 'worker')}, {summary['mode']}, {summary['engine']}"
    return f"{counted(summary['num_stages'], 'stage')}, {summary['pipeline_schedule']}"


def read_summary(run_dir: str) -> Summary:
    """Read another run's summary.

    Raises:
        ConfigError: The run has none that can be shown.
    """
    path = Path(run_dir) / "summary.json"
    try:
        summary: Summary = json.loads(path.read_text(encoding="utf-8"))
        # Before the training rather than after it: whether all of it is there.
        summary_table(summary, summary, run_dir=run_dir)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"--beside {run_dir}: there is no readable {path}. Give the directory of a run that reached its last step."
        ) from error
    return summary
