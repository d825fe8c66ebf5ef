"""How stale gradients were: counts, and their course."""

from collections.abc import Mapping, Sequence

import numpy as np

from slipstream.report.figures import Chart, DataTable, LegendEntry, Section
from slipstream.report.histograms import bar_names, capped, from_json, mean
from slipstream.report.lines import STEPS, Line, line_chart
from slipstream.report.runs import Run, colour, every
from slipstream.report.svg import WIDTH, Canvas, Scale, draw_axes, tick_format


def staleness_section(runs: Sequence[Run]) -> Section:
    """Return the histogram of staleness, and its course where it has one."""
    charts = [_histogram(runs)]
    courses = every(runs, lambda run: (run.figures("step"), run.figures("staleness_mean")))
    if any(len(curve[1]) > 2 and float(np.ptp(curve[1][len(curve[1]) // 10 :])) > 0 for _, curve in courses):
        lines = [
            Line(label=run.name, css=colour(runs, run), curve=curve, figure=f"mean {float(curve[1].mean()):.2f}")
            for run, curve in courses
        ]
        up = "updates, mean of the step"
        charts.append(line_chart("Course", lines, across=STEPS, up=up, include=[0.0], clip="clip-staleness"))
    return Section(
        title="Staleness",
        text="Updates between the weights that a gradient was computed on and those it was applied to: of every "
        "gradient where workers push them, otherwise of every step.",
        charts=charts,
    )


def staleness_counts(run: Run) -> dict[int, int]:
    """Return how often each staleness occurred: of gradients where the run counted them, otherwise of steps."""
    counted = run.summary.get("staleness_histogram")
    if isinstance(counted, Mapping):
        return from_json(counted)
    values, counts = np.unique([int(row["staleness_max"]) for row in run.rows], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _histogram(runs: Sequence[Run]) -> Chart:
    counted = {run.name: staleness_counts(run) for run in runs}
    names = bar_names(max(value for counts in counted.values() for value in counts))
    shown = len(names) - 1
    shares = {name: _shares(counts, shown) for name, counts in counted.items()}
    canvas = Canvas(270, label=f"Histogram of staleness of {', '.join(counted)}")
    x = Scale(low=-0.5, high=shown + 0.5, start=46, end=WIDTH - 12)
    y = Scale(low=0.0, high=max(max(each) for each in shares.values()) * 1.05, start=228, end=8)
    step = max(1, (shown + 1) // 9)
    draw_axes(
        canvas,
        x,
        y,
        x_label="staleness in updates",
        y_label="share",
        x_ticks=[(value, names[value]) for value in range(0, shown + 1, step)],
        y_format=tick_format(y.ticks(6)),
    )
    slot = (x(1) - x(0)) * 0.8
    width = min(slot / len(runs), 40.0)
    for position, run in enumerate(runs):
        for value, share in ((value, share) for value, share in enumerate(shares[run.name]) if share):
            left = x(value) + (position - len(runs) / 2) * width
            title = f"{run.name}: {share:.1%} with a staleness of {names[value]}"
            canvas.bar(left + 0.5, y(share), width - 1, y(0) - y(share), f"fill {colour(runs, run)}", title=title)
    legend = [
        LegendEntry(css=colour(runs, run), label=run.name, figure=f"mean {mean(counted[run.name]) or 0.0:.2f}")
        for run in runs
    ]
    rows = [[names[value], *(f"{shares[run.name][value]:.1%}" for run in runs)] for value in range(shown + 1)]
    return Chart(
        title="Histogram", svg=str(canvas), legend=legend, data=DataTable(head=["staleness", *counted], rows=rows)
    )


def _shares(counts: Mapping[int, int], shown: int) -> list[float]:
    total = max(sum(counts.values()), 1)
    return [count / total for count in capped(counts, shown)]
