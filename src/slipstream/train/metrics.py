"""Metrics: JSON lines on disk, running figures, and the log line."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.models.moe import RouterReport
from slipstream.train.disk import write_whole, writing

PEAK_FLOPS_BF16: Mapping[str, float] = {
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "4090": 165e12,
}
"""Dense bfloat16 peak in FLOP/s by words of the device's name, of which the first that match hold; from the makers'
data sheets."""


class JsonLines:
    """An append-only file of JSON objects, one a line, each flushed as it is written.

    Args:
        path: Created when missing.
        resume_step: Rows with a larger ``step`` are removed first: a resumed run makes them anew.

    Raises:
        CheckpointError: The file cannot be read or written.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        kept = [row for row in read_json_lines(path) if row["step"] <= resume_step] if path.exists() else []
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._path = path
        self.num_kept = len(kept)
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object; floats keep full precision.

        Raises:
            CheckpointError: It cannot be written.
        """
        with writing(self._path):
            try:
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()
            except OSError:
                with contextlib.suppress(OSError):  # or Python tries again, and complains, when the process ends
                    self._file.close()
                raise

    def sync(self) -> None:
        """Wait until all rows are on the disk, so that no checkpoint that follows is ahead of them."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file of a run; a last line cut short by a crash is left out.

    Raises:
        CheckpointError: The file cannot be read, or a line before the last is no object with a ``step``.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Restore it, or remove it.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(read_row(line, path=path, number=number))
        except CheckpointError:
            if number < len(lines):
                raise
    return rows


def read_row(line: str | bytes, *, path: Path, number: int) -> dict[str, Any]:
    """Return the object of a line of a JSON-lines file of a run.

    Raises:
        CheckpointError: It is no object with a ``step``.
    """
    try:
        row: dict[str, Any] = json.loads(line)
        _ = int(row["step"])
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path}, line {number} is no JSON object with a 'step'; mend or remove the line."
        ) from error
    return row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Figures over all steps of a run, also over its resumptions, from the rows of ``metrics.jsonl``."""

    tokens_per_s: float
    bubble_fraction: float | None
    """``None``: nobody counted how long ranks waited."""
    staleness_mean: float
    staleness_max: int

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], *, num_warmup_rows: int = 2) -> "Totals":
        """Sum up.

        Args:
            rows: One a step.
            num_warmup_rows: Leading rows left out of the throughput where there are more than twice as many.
        """
        rows = list(rows)
        timed = rows[num_warmup_rows:] if len(rows) > 2 * num_warmup_rows else rows
        time_s = max(sum(row["step_s"] for row in timed), 1e-9)
        counted = [row for row in timed if row["bubble_fraction"] is not None]
        idle_s = sum(row["bubble_fraction"] * row["step_s"] for row in counted)
        counted_s = max(sum(row["step_s"] for row in counted), 1e-9)
        return cls(
            tokens_per_s=sum(row["num_tokens"] for row in timed) / time_s,
            # A share of the time, so a long step counts for as long as it took.
            bubble_fraction=idle_s / counted_s if counted else None,
            staleness_mean=statistics.fmean(row["staleness_mean"] for row in rows) if rows else 0.0,
            staleness_max=max((row["staleness_max"] for row in rows), default=0),
        )


def router_figures(router: Sequence[RouterReport], *, loss: float) -> dict[str, Any]:
    """Return the figures of a batch's routers for ``metrics.jsonl``.

    Args:
        router: Of each layer with experts.
        loss: Cross-entropy of the batch, in which the auxiliary losses are not.

    Example:
        >>> router_figures([RouterReport(2.0, 0.0, 1.0, 0.5), RouterReport(1.5, 0.5, 2.0, 0.5)], loss=3.0)["aux_share"]
        0.25
    """
    aux_loss = sum(each.aux_loss for each in router)
    return {
        "load_max": max(each.load_max for each in router),
        "load_min": min(each.load_min for each in router),
        "entropy": statistics.fmean(each.entropy for each in router),
        "aux_loss": aux_loss,
        "aux_share": aux_loss / (loss + aux_loss),
        "dropped": 0,
        "load_max_by_layer": [each.load_max for each in router],
        "entropy_by_layer": [each.entropy for each in router],
    }


def model_flops_utilisation(
    tokens_per_s: float, flops_per_token: float | None, device: torch.device, *, num_devices: float
) -> float | None:
    """Return the share of the devices' peak, or ``None`` where the peak is not known.

    Args:
        tokens_per_s: Of all devices together.
        flops_per_token: Of the whole model.
        device: One of them; the others are taken to be like it.
        num_devices: How many.
    """
    if device.type != "cuda" or flops_per_token is None:
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for part, peak in PEAK_FLOPS_BF16.items() if re.search(rf"\b{part}\b", name)]
    return tokens_per_s * flops_per_token / (num_devices * peaks[0]) if peaks else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held: on the device, or of the process itself on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def log_line(row: Mapping[str, Any], *, num_steps: int, eta_s: float) -> str:
    """Return one step's line.

    Args:
        row: A row of ``metrics.jsonl``.
        num_steps: Steps of the run.
        eta_s: Expected seconds to its end.
    """
    mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "n/a"
    bubble = f"{row['bubble_fraction']:.0%}" if row["bubble_fraction"] is not None else "n/a"
    rate = quantity(row["tokens_per_s"]) if row["tokens_per_s"] is not None else "n/a"
    parts = [
        f"step {row['step']}/{num_steps}",
        f"loss {row['loss']:.3f}",
        f"lr {row['lr']:.1e}",
        f"gnorm {row['grad_norm']:.2f}",
        f"tok/s {rate}",
        f"mfu {mfu}",
        f"mem {quantity(row['peak_memory_bytes'])}",
        f"staleness {row['staleness_mean']:.1f}/{row['staleness_max']}",
        f"bubble {bubble}",
        f"data {row['data_fraction']:.1%}",
        f"eta {duration(eta_s)}",
    ]
    if "router" in row:
        parts.insert(4, f"load {row['router']['load_max']:.1f}x")
    return " | ".join(parts) + (" | SKIPPED (non-finite gradient)" if row["skipped"] else "")


def quantity(value: float) -> str:
    """Return a number with a decimal prefix.

    Example:
        >>> quantity(51234.0), quantity(1.9e9), quantity(12.0)
        ('51.2k', '1.9G', '12')
    """
    for factor, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f}{sign}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return a span of time to two places.

    Example:
        >>> duration(45), duration(725), duration(7300)
        ('45s', '12m05s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
