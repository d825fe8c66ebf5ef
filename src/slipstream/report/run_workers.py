"""Workers of data-parallel runs: who did how much, how stale, and whether every token is accounted for."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.report.figures import Chart, DataTable
from slipstream.report.runs import Run, counted
from slipstream.report.svg import WIDTH, Canvas, Scale, tick_format


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """What one worker did.

    Attributes:
        worker: Its number.
        microbatches: Committed.
        share: Of all microbatches.
        fair: Its speed over the sum of all speeds, where the run emulates speeds; otherwise ``None``.
        staleness: Of its gradients, in the mean; ``None`` where the run has not counted it yet.
        stalest: The largest.
    """

    worker: int
    microbatches: int
    share: float
    fair: float | None
    staleness: float | None
    stalest: int | None


def worker_shares(run: Run) -> list[WorkerShare]:
    """Return what each worker did; empty where the run has none, or has not told yet."""
    figures = worker_figures(run)
    done = {int(worker): int(count) for worker, count in figures.get("microbatches_by_worker", {}).items()}
    stale: Mapping[str, Mapping[str, int]] = figures.get("staleness_histogram_by_worker", {})
    speeds = run.config.dataparallel.emulate_speeds
    total = max(sum(done.values()), 1)
    shares = []
    for worker, count in sorted(done.items()):
        counts = {int(value): number for value, number in stale.get(str(worker), {}).items()}
        pushes = sum(counts.values())
        shares.append(
            WorkerShare(
                worker=worker,
                microbatches=count,
                share=count / total,
                fair=speeds[worker] / sum(speeds) if worker < len(speeds) and len(done) == len(speeds) else None,
                staleness=sum(value * number for value, number in counts.items()) / pushes if pushes else None,
                stalest=max(counts, default=None),
            )
        )
    return shares


def worker_figures(run: Run) -> Mapping[str, Any]:
    """Return what the summary of a run says of its workers; before its end, what its newest row does."""
    if "microbatches_by_worker" in run.summary:
        return run.summary
    found: Mapping[str, Any] = next((row["workers"] for row in reversed(run.rows) if "workers" in row), {})
    return found


def worker_chart(run: Run, css: str) -> Chart | None:
    """Return the workers' shares as bars, with a line where each would be by its speed alone."""
    shares = worker_shares(run)
    if not shares:
        return None
    shown = shares[:64]
    row, top = 22, 4
    bottom = top + row * len(shown)
    canvas = Canvas(bottom + 38, label=f"{run.name}: share of the work by worker")
    most = max(max(each.share, each.fair or 0.0) for each in shown)
    x = Scale(low=0.0, high=most * 1.12, start=46, end=WIDTH - 52)
    ticks = x.ticks(4)
    for value in ticks:
        canvas.line([(x(value), top), (x(value), bottom)], "zero" if value == 0 else "rule")
        canvas.text((x(value), bottom + 16), format(value, tick_format(ticks)), anchor="middle")
    canvas.text((WIDTH / 2, bottom + 33), "share of all microbatches", "name", anchor="middle")
    for position, each in enumerate(shown):
        y = top + row * position
        canvas.text((40, y + 15), f"{each.worker}", anchor="end")
        title = f"worker {each.worker}: {each.microbatches} microbatches, {each.share:.1%}"
        canvas.bar(x(0), y + 4, x(each.share) - x(0), row - 8, f"fill {css}", title=title)
        if each.fair is not None:
            canvas.line([(x(each.fair), y + 1), (x(each.fair), y + row - 1)], "whisker")
        canvas.text((WIDTH - 4, y + 15), f"{each.share:.1%}", anchor="end")
    return Chart(title=run.name, svg=str(canvas), data=_table(shares))


def _table(shares: Sequence[WorkerShare]) -> DataTable:
    head = ["worker", "microbatches", "share", "share by speed", "staleness, mean", "staleness, most"]
    rows = [
        [
            str(each.worker),
            f"{each.microbatches:,}",
            f"{each.share:.1%}",
            "" if each.fair is None else f"{each.fair:.1%}",
            "" if each.staleness is None else f"{each.staleness:.2f}",
            "" if each.stalest is None else str(each.stalest),
        ]
        for each in shares
    ]
    return DataTable(head=head, rows=rows)


def worker_sentence(run: Run) -> str:
    """Return what became of the tokens and of the workers' speed; empty where the run has no workers."""
    figures = worker_figures(run)
    if "throughput_share" not in figures:
        return ""
    workers = run.config.dataparallel.num_workers
    parts = [f"{workers} workers trained at {figures['throughput_share']:.1%} of the sum of their own speeds"]
    if "tokens_committed" in figures:
        holds = "balances" if figures["ledger_balanced"] else "DOES NOT BALANCE"
        done, dropped = figures["tokens_committed"], figures["tokens_dropped"]
        parts.append(f"the ledger {holds}: {done:,} tokens committed, {dropped:,} dropped")
    if figures.get("pushes_rejected"):
        parts.append(f"{counted(figures['pushes_rejected'], 'gradient')} rejected")
    if figures.get("restarts"):
        parts.append(f"{counted(figures['restarts'], 'restart')} of workers")
    return "; ".join(parts) + "."
