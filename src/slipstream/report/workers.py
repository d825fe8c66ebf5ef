"""What asynchronous workers did in a run: their shares, how stale their gradients were, what the methods found.

Read from a run directory alone, for the report of one run and for that of a comparison.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFigures:
    """One worker.

    Attributes:
        number: Its number.
        share: Of all microbatches that were committed.
        tokens_per_s: By the engine's clock; ``None`` where the run's time is not known.
        histogram: Accepted gradients by staleness.
    """

    number: int
    share: float
    tokens_per_s: float | None
    histogram: Mapping[int, int]

    @property
    def num_pushes(self) -> int:
        """Accepted gradients."""
        return sum(self.histogram.values())

    @property
    def staleness_mean(self) -> float:
        """Mean over its gradients; 0 of none."""
        return sum(tau * count for tau, count in self.histogram.items()) / max(self.num_pushes, 1)

    @property
    def staleness_max(self) -> int:
        """Largest of its gradients; 0 of none."""
        return max(self.histogram, default=0)


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
        staleness_mean: Over all accepted gradients.
        staleness_max: Largest.
        throughput_share: Tokens a second over the sum of the workers' own speeds.
        pushes_accepted: Gradients that counted.
        pushes_rejected: That did not, by reason.
        ledger_balanced: Whether all data handed out is in one of the ledger's accounts.
        tokens_dropped: Of data that nobody could use.
        lr_factor: ``(step, factor)`` of the async-aware rate, where it was on.
        groups: Of the gradient compensator, where it was on.
        probes: Metrics of same-batch probes by name, as means, where they were made.
    """

    workers: Sequence[WorkerFigures]
    staleness_mean: float
    staleness_max: int
    throughput_share: float
    pushes_accepted: int
    pushes_rejected: Mapping[str, int]
    ledger_balanced: bool
    tokens_dropped: int
    lr_factor: Sequence[tuple[int, float]]
    groups: Sequence[GroupFigures]
    probes: Mapping[str, float]


def run_of_workers(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> RunOfWorkers | None:
    """Return what a run's files say of its workers; ``None`` where it had none.

    Args:
        summary: Content of ``summary.json``.
        rows: Of ``metrics.jsonl``.
    """
    if "staleness_histogram_by_worker" not in summary:
        return None
    microbatches = {int(worker): count for worker, count in summary["microbatches_by_worker"].items()}
    total, seconds = max(sum(microbatches.values()), 1), sum(row["step_s"] for row in rows)
    tokens_per_s = summary["tokens_committed"] / seconds if seconds > 0 else None
    workers = []
    for number, histogram in sorted(
        (int(key), value) for key, value in summary["staleness_histogram_by_worker"].items()
    ):
        share = microbatches.get(number, 0) / total
        workers.append(
            WorkerFigures(
                number=number,
                share=share,
                tokens_per_s=None if tokens_per_s is None else share * tokens_per_s,
                histogram={int(tau): count for tau, count in histogram.items()},
            )
        )
    methods = [(row["step"], row["method_metrics"]) for row in rows if row.get("method_metrics")]
    return RunOfWorkers(
        workers=workers,
        staleness_mean=summary["staleness_mean"],
        staleness_max=summary["staleness_max"],
        throughput_share=summary["throughput_share"],
        pushes_accepted=summary["pushes_accepted"],
        pushes_rejected=summary.get("pushes_rejected_by_reason", {}),
        ledger_balanced=summary["ledger_balanced"],
        tokens_dropped=summary.get("tokens_dropped", 0),
        lr_factor=[(step, found["aalr/factor"]) for step, found in methods if "aalr/factor" in found],
        groups=_groups([found for _, found in methods]),
        probes=_means({key: value for key, value in found.items() if key.startswith("probe/")} for _, found in methods),
    )


def _groups(found: Iterable[Mapping[str, float]]) -> list[GroupFigures]:
    """Return the means of each group's metrics, over the rows in which it had begun."""
    by_group: dict[str, list[dict[str, float]]] = {}
    for metrics in found:
        groups: dict[str, dict[str, float]] = {}
        for key, value in metrics.items():
            prefix, _, rest = key.partition("/")
            group, _, name = rest.rpartition("/")
            if prefix == "agc" and group:
                groups.setdefault(group, {})[name] = value
        for group, row in groups.items():
            by_group.setdefault(group, [])
            if row.get("ramp", 0.0) > 0:
                by_group[group].append(row)
    return [
        GroupFigures(
            group=group,
            gain=_mean(rows, "gain"),
            relative=_mean(rows, "relative_correction"),
            curvature=_mean(rows, "curvature"),
            cosine=_mean(rows, "cosine"),
            raw=_mean(rows, "raw"),
        )
        for group, rows in by_group.items()
        if rows
    ]


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.fmean(row.get(name, 0.0) for row in rows)


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(value)
    return {key: statistics.fmean(each) for key, each in values.items()}
