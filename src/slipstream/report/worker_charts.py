"""Pictures and sentences of asynchronous workers, the same in the report of runs and in that of a comparison."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slipstream.errors import counted
from slipstream.report.figures import Chart, DataTable, Section
from slipstream.report.histograms import bar_names, capped
from slipstream.report.lines import STEPS, Line, line_chart
from slipstream.report.svg import WIDTH, Canvas, Scale, draw_across
from slipstream.report.workers import GroupFigures, RunOfWorkers, WorkerFigures
from slipstream.train.metrics import quantity

MAX_WORKERS = 64
"""In one picture; the table below it has all."""


class Shown(NamedTuple):
    """A run in the pictures: its name, its colour, and what its workers did."""

    name: str
    css: str
    run: RunOfWorkers


def worker_section(shown: Sequence[Shown], *, said: str = "") -> Section:
    """Return who did how much of the work, and how stale each worker's gradients were.

    Args:
        shown: The runs.
        said: A sentence more.
    """
    charts = []
    # Those that have not counted staleness yet come last, so that the pictures of a run stand beside each other.
    for each in sorted(shown, key=lambda each: not _has_histograms(each)):
        charts += [_share_chart(each), *([_staleness_chart(each)] if _has_histograms(each) else [])]
    most = max((len(each.run.workers) for each in shown), default=0)
    left_out = f" The first {MAX_WORKERS} of {most} workers; all are in the tables." if most > MAX_WORKERS else ""
    return Section(
        title="Workers",
        text="What each worker did of the whole, and its tokens a second by the run's clock; a line marks its share by "
        f"speed alone. Then how many of its gradients were how stale, in updates.{left_out} {said}".strip(),
        charts=charts,
        in_pairs=True,
    )


def _has_histograms(shown: Shown) -> bool:
    return any(worker.histogram for worker in shown.run.workers)


def _share_chart(shown: Shown) -> Chart:
    workers = shown.run.workers[:MAX_WORKERS]
    has_rates = any(each.tokens_per_s is not None for each in workers)
    row, top = 22, 4
    bottom = top + row * len(workers)
    canvas = Canvas(bottom + 38, label=f"{shown.name}: share of the work by worker")
    most = max(max(each.share, each.fair or 0.0) for each in workers) or 1.0
    right = WIDTH - (60 if has_rates else 4)
    x = Scale(low=0.0, high=most * 1.12, start=46, end=right - 48)
    what = "share of all microbatches" + ("; at the right, tokens a second" if has_rates else "")
    draw_across(canvas, x, top=top, bottom=bottom, label=what)
    for position, each in enumerate(workers):
        y = top + row * position
        canvas.text((40, y + 15), f"{each.number}", anchor="end")
        canvas.bar(x(0), y + 4, x(each.share) - x(0), row - 8, f"fill {shown.css}", title=_said(each))
        if each.fair is not None:
            canvas.line([(x(each.fair), y + 1), (x(each.fair), y + row - 1)], "whisker")
        canvas.text((right, y + 15), f"{each.share:.1%}", "label", anchor="end")
        if each.tokens_per_s is not None:
            canvas.text((WIDTH - 4, y + 15), quantity(each.tokens_per_s), anchor="end")
    return Chart(title=f"{shown.name}: shares", svg=str(canvas), data=_share_table(shown.run))


def _said(worker: WorkerFigures) -> str:
    rate = "" if worker.tokens_per_s is None else f", {quantity(worker.tokens_per_s)} tokens a second"
    return f"worker {worker.number}: {worker.microbatches:,} microbatches, {worker.share:.1%}{rate}"


def _share_table(run: RunOfWorkers) -> DataTable:
    rows = [
        [
            str(each.number),
            f"{each.microbatches:,}",
            f"{each.share:.1%}",
            "" if each.fair is None else f"{each.fair:.1%}",
            "" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}",
        ]
        for each in run.workers
    ]
    return DataTable(head=["worker", "microbatches", "share", "share by speed", "tokens/s"], rows=rows)


def _staleness_chart(shown: Shown) -> Chart:
    """Return a histogram a worker, one below the other on one scale."""
    workers = shown.run.workers[:MAX_WORKERS]
    row, top, height = 57, 4, 30
    names = bar_names(max(each.staleness_max or 0 for each in shown.run.workers))
    bottom = top + row * len(workers)
    canvas = Canvas(bottom + 38, label=f"{shown.name}: staleness of each worker's gradients")
    x = Scale(low=0, high=len(names), start=8, end=WIDTH - 12)
    width = min(x(1) - x(0), 60.0)
    for position, each in enumerate(workers):
        base = top + row * (position + 1) - 4
        canvas.text((10, base - height - 6), _staleness_text(each), "label")
        canvas.line([(x.start, base), (x.start + len(names) * width, base)], "rule")
        for place, count in enumerate(capped(each.histogram, len(names) - 1)):
            if count:
                up = height * count / each.num_pushes
                said = f"worker {each.number}, staleness {names[place]}: {count} of {each.num_pushes} gradients"
                canvas.bar(x.start + place * width + 1, base - up, width - 2, up, f"fill {shown.css}", title=said)
    for place in range(0, len(names), max(1, len(names) // 12)):
        canvas.text((x.start + (place + 0.5) * width, bottom + 13), names[place], anchor="middle")
    canvas.text((WIDTH / 2, bottom + 31), "staleness in updates", "name", anchor="middle")
    return Chart(title=f"{shown.name}: staleness", svg=str(canvas), data=_staleness_table(shown.run))


def _staleness_text(worker: WorkerFigures) -> str:
    mean = worker.staleness_mean
    of = "" if mean is None else f": staleness {mean:.1f}, at most {worker.staleness_max}"
    return f"worker {worker.number}, {counted(worker.num_pushes, 'gradient')}{of}"


def _staleness_table(run: RunOfWorkers) -> DataTable:
    taus = sorted({tau for each in run.workers for tau in each.histogram})
    rows = [
        [
            str(each.number),
            "" if each.staleness_mean is None else f"{each.staleness_mean:.2f}",
            "" if each.staleness_max is None else str(each.staleness_max),
            *(f"{each.histogram.get(tau, 0):,}" for tau in taus),
        ]
        for each in run.workers
    ]
    head = ["worker", "staleness, mean", "staleness, most", *(f"staleness {tau}" for tau in taus)]
    return DataTable(head=head, rows=rows)


def gain_section(shown: Iterable[tuple[str, str, Sequence[GroupFigures]]]) -> Section:
    """Return the compensator's gain of each group of parameters, where there are several.

    Args:
        shown: Name, colour and groups of each run.
    """
    return Section(
        title="The gradient compensator by group",
        text="Mean gain over the steps after its beginning: how much of what the curvature foretells is there, by "
        "pairs of gradients that did not make it; 0 switches a correction off. Percentages are the norm of the "
        "correction over that of the gradient.",
        charts=[_gain_chart(name, groups, css) for name, css, groups in shown if len(groups) > 1],
    )


def _gain_chart(title: str, groups: Sequence[GroupFigures], css: str) -> Chart:
    row, top = 19, 4
    bottom = top + row * len(groups)
    canvas = Canvas(bottom + 38, label=f"{title}: gain of the gradient compensator by group")
    x = Scale(low=0.0, high=1.0, start=92, end=WIDTH - 60)
    draw_across(canvas, x, top=top, bottom=bottom, label="gain; at the right: size of the correction")
    for position, each in enumerate(groups):
        y = top + row * position
        said = f"{each.group}: gain {each.gain:.2f}, curvature {each.curvature:.3g}, cosine {each.cosine:.3f}"
        canvas.text((x.start - 6, y + 13), each.group, "label", anchor="end")
        canvas.bar(x.start, y + 4, x(each.gain) - x.start, 11, f"fill {css}", title=said)
        canvas.text((WIDTH - 8, y + 13), f"{each.relative:.1%}", "label", anchor="end")
    rows = [
        [each.group, f"{each.gain:.2f}", f"{each.relative:.1%}", f"{each.curvature:.3g}", f"{each.cosine:.3f}"]
        for each in groups
    ]
    head = ["group", "gain", "size of the correction", "curvature", "cosine"]
    return Chart(title=title, svg=str(canvas), data=DataTable(head=head, rows=rows))


def rate_section(shown: Mapping[str, Sequence[tuple[str, str, Sequence[tuple[int, float]]]]]) -> Section:
    """Return the async-aware factor on the learning rate over steps.

    Args:
        shown: Name, colour and factors by step of each run, by picture.
    """
    charts: list[Chart] = []
    for title, runs in shown.items():
        lines = [
            Line(label=name, css=css, curve=_curve(factors), figure=f"at the end {factors[-1][1]:.2f}")
            for name, css, factors in runs
            if factors
        ]
        if lines:
            clip = f"clip-factor-{len(charts)}"
            charts.append(
                line_chart(title, lines, across=STEPS, up="factor", smooth=False, include=[0, 1.05], clip=clip)
            )
    return Section(
        title="The async-aware rate",
        text="Factor on the learning rate by the mean staleness of the last gradients.",
        charts=charts,
    )


def _curve(factors: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([step for step, _ in factors]), np.array([factor for _, factor in factors])


def worker_sentence(runs: Sequence[RunOfWorkers]) -> str:
    """Return what became of the workers' speed, of the data and of the gradients, over runs; empty of none."""
    if not runs:
        return ""
    workers = _ends([f"{len(run.workers)}" for run in sorted(runs, key=lambda run: len(run.workers))])
    speeds = _ends([f"{share:.1%}" for share in sorted(run.throughput_share for run in runs)])
    parts = [
        f"{workers} worker{'' if workers == '1' else 's'} trained at {speeds} of the sum of their own speeds",
        _ledger(runs),
    ]
    accepted = [run.pushes_accepted for run in runs if run.pushes_accepted is not None]
    rejected, restarts = sum(run.pushes_rejected for run in runs), sum(run.restarts for run in runs)
    if len(accepted) == len(runs):
        parts.append(f"{counted(sum(accepted), 'gradient')} counted, {rejected:,} rejected")
    elif rejected:
        parts.append(f"{counted(rejected, 'gradient')} rejected")
    if restarts:
        parts.append(f"{counted(restarts, 'restart')} of workers")
    return "; ".join(parts) + "."


def _ends(texts: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))


def _ledger(runs: Sequence[RunOfWorkers]) -> str:
    count, balanced = len(runs), sum(run.ledger_balanced for run in runs)
    text = "the ledger balances" if balanced else "the ledger DOES NOT BALANCE"
    if count > 1:
        text = f"the ledger balances in {'all' if balanced == count else f'ONLY {balanced}'} of {count} runs"
    tokens = [run.tokens_committed for run in runs if run.tokens_committed is not None]
    if len(tokens) < count:
        return text
    return f"{text}: {sum(tokens):,} tokens committed, {sum(run.tokens_dropped for run in runs):,} dropped"
