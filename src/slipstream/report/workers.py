"""What asynchronous workers did in a run: their shares, how stale their gradients were, what the methods found.

Read from a run directory alone, finished or under way, for the report of runs and for that of a comparison.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.config import Config
from slipstream.report import histograms

RATE_FACTOR = "aalr/factor"
"""Among the metrics of methods, the async-aware factor on the learning rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFigures:
    """One worker.

    Attributes:
        number: Its number.
        microbatches: Committed.
        share: Of all microbatches that were committed.
        fair: Its speed over the sum of all speeds, where the run emulates speeds; otherwise ``None``.
        tokens_per_s: By the run's clock; ``None`` where the run's time is not known.
        histogram: Accepted gradients by staleness; empty where the run has not told yet.
    """

    number: int
    microbatches: int
    share: float
    fair: float | None
    tokens_per_s: float | None
    histogram: histograms.Histogram

    @property
    def num_pushes(self) -> int:
        """Accepted gradients."""
        return sum(self.histogram.values())

    @property
    def staleness_mean(self) -> float | None:
        """Mean over its gradients; ``None`` of none."""
        return histograms.mean(self.histogram)

    @property
    def staleness_max(self) -> int | None:
        """Largest of its gradients; ``None`` of none."""
        return max(self.histogram, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """What the gradient compensator did in one group of parameters, as means over the rows where it was at work.

    Attributes:
        group: Its name.
        gain: Kappa, 0 to 1: how much of what the curvature foretells is there, by pairs that did not make it.
        relative: Norm of the correction over the gradient's.
        curvature: Lambda.
        cosine: Between the gradient before and after.
        raw: Share of the gradients whose correction was thrown away.
    """

    group: str
    gain: float
    relative: float
    curvature: float
    cosine: float
    raw: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOfWorkers:
    """A run with the executor `dataparallel`.

    Attributes:
        workers: In the order of their numbers.
        staleness_mean: Over all accepted gradients; ``None`` of this and the others: the run has not told yet.
        staleness_max: Largest.
        throughput_share: Tokens a second over the sum of the workers' own speeds.
        pushes_accepted: Gradients that counted.
        pushes_rejected: That did not.
        ledger_balanced: Whether all data handed out is in one of the ledger's accounts.
        tokens_committed: Of data that was trained on.
        tokens_dropped: Of data that nobody could use.
        restarts: Of workers that were lost.
        lr_factor: ``(step, factor)`` of the async-aware rate, where it was on.
        groups: Of the gradient compensator, where it was on.
    """

    workers: Sequence[WorkerFigures]
    staleness_mean: float | None
    staleness_max: int | None
    throughput_share: float
    pushes_accepted: int | None
    pushes_rejected: int
    ledger_balanced: bool
    tokens_committed: int | None
    tokens_dropped: int
    restarts: int
    lr_factor: Sequence[tuple[int, float]]
    groups: Sequence[GroupFigures]


def run_of_workers(
    config: Config, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> RunOfWorkers | None:
    """Return what a run's files say of its workers; ``None`` where it had none, or has not told of them yet.

    Args:
        config: Its settings.
        summary: Content of ``summary.json``; empty before the end of the run.
        rows: Of ``metrics.jsonl``.
    """
    found = summary if "microbatches_by_worker" in summary else newest_figures(rows)
    if "microbatches_by_worker" not in found:
        return None
    return RunOfWorkers(
        workers=_workers(config, found, rows),
        staleness_mean=found.get("staleness_mean"),
        staleness_max=found.get("staleness_max"),
        throughput_share=found["throughput_share"],
        pushes_accepted=found.get("pushes_accepted"),
        pushes_rejected=found["pushes_rejected"],
        ledger_balanced=found["ledger_balanced"],
        tokens_committed=found.get("tokens_committed"),
        tokens_dropped=found.get("tokens_dropped", 0),
        restarts=found.get("restarts", 0),
        lr_factor=rate_factors(rows),
        groups=group_figures(rows),
    )


def newest_figures(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what the newest row that tells of workers says of them; empty where none does."""
    found: Mapping[str, Any] = next((row["workers"] for row in reversed(rows) if "workers" in row), {})
    return found


def _workers(config: Config, found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[WorkerFigures]:
    done = {int(worker): int(count) for worker, count in found["microbatches_by_worker"].items()}
    stale: Mapping[str, Mapping[str, int]] = found.get("staleness_histogram_by_worker", {})
    speeds = config.dataparallel.emulate_speeds
    total, seconds = max(sum(done.values()), 1), sum(row["step_s"] for row in rows)
    tokens = found.get("tokens_committed") or sum(row.get("num_tokens", 0) for row in rows)
    return [
        WorkerFigures(
            number=worker,
            microbatches=count,
            share=count / total,
            fair=speeds[worker] / sum(speeds) if worker < len(speeds) and len(done) == len(speeds) else None,
            tokens_per_s=count / total * tokens / seconds if seconds > 0 and tokens else None,
            histogram=histograms.from_json(stale.get(str(worker), {})),
        )
        for worker, count in sorted(done.items())
    ]


def rate_factors(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return ``(step, factor)`` of the async-aware rate, of the rows that tell it."""
    return [(row["step"], metrics[RATE_FACTOR]) for row in rows if RATE_FACTOR in (metrics := _metrics(row))]


def group_figures(rows: Sequence[Mapping[str, Any]]) -> list[GroupFigures]:
    """Return the means of each group's metrics, over the rows in which its compensator had begun."""
    by_group: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        groups: dict[str, dict[str, float]] = {}
        for key, value in _metrics(row).items():
            prefix, _, rest = key.partition("/")
            group, _, name = rest.rpartition("/")
            if prefix == "agc" and group:
                groups.setdefault(group, {})[name] = value
        for group, figures in groups.items():
            by_group.setdefault(group, [])
            if figures.get("ramp", 0.0) > 0:
                by_group[group].append(figures)
    return [
        GroupFigures(
            group=group,
            gain=_mean(begun, "gain"),
            relative=_mean(begun, "relative_correction"),
            curvature=_mean(begun, "curvature"),
            cosine=_mean(begun, "cosine"),
            raw=_mean(begun, "raw"),
        )
        for group, begun in by_group.items()
        if begun
    ]


def _metrics(row: Mapping[str, Any]) -> Mapping[str, float]:
    found: Mapping[str, float] = row.get("method_metrics") or {}
    return found


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.fmean(row.get(name, 0.0) for row in rows)
