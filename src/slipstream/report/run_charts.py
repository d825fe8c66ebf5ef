"""Which pictures a report of runs has, in their order."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from slipstream.errors import counted
from slipstream.report.figures import Chart, Curve, Section
from slipstream.report.lines import STEPS, TOKENS, Axis, Line, Mark, line_chart, time_axis
from slipstream.report.run_staleness import staleness_section
from slipstream.report.runs import Run, colour, every, finite, loss_units_of, units_of
from slipstream.report.statistics import SPIKE_TEXT, spikes
from slipstream.report.worker_charts import Shown, gain_section, rate_section, worker_section, worker_sentence
from slipstream.report.workers import RATE_FACTOR, group_figures, rate_factors

MAX_METHOD_CHARTS = 12
"""Of what methods tell of themselves."""


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """Return all pictures that runs have something to show in."""
    found = [
        _loss_section(runs),
        _validation_section(runs),
        _speed_section(runs),
        staleness_section(runs),
        _gradient_section(runs),
        _router_section(runs),
        _method_section(runs),
        *_worker_sections(runs),
    ]
    return [section for section in found if section.charts]


def _both_ways(runs: Sequence[Run]) -> Iterator[tuple[str, Axis, Callable[[Run], np.ndarray]]]:
    """Return progress in tokens and in time: what a delay costs, and what it gains."""
    units = units_of(runs)
    yield f"against {units}", dataclasses.replace(TOKENS, name=units), lambda run: run.tokens
    longest = max(float(run.seconds[-1]) for run in runs)
    axis = time_axis(longest, is_virtual=any(run.is_virtual for run in runs))
    yield "against time", axis, lambda run: run.seconds


def _loss_section(runs: Sequence[Run]) -> Section:
    found = [_loss_chart(runs, way, axis, places) for way, axis, places in _both_ways(runs)]
    return Section(
        title="Loss",
        text="Of each training batch, on the weights it read. The time is that of training alone, without evaluations "
        "and checkpoints waited for.",
        charts=[chart for chart in found if chart is not None],
        has_smoothing=True,
    )


def _loss_chart(runs: Sequence[Run], way: str, axis: Axis, places: Callable[[Run], np.ndarray]) -> Chart | None:
    lines = [
        Line(label=run.name, css=colour(runs, run), curve=curve, figure=_last(run, "loss"))
        for run, curve in every(runs, lambda run: (places(run), run.figures("loss")))
    ]
    if not lines:
        return None
    title = f"Training loss {way}"
    return line_chart(title, lines, across=axis, up=loss_units_of(runs), settle=True, clip=_name("loss", axis))


def _name(what: str, axis: Axis) -> str:
    return f"clip-{what}-{axis.name.split()[0]}"


def _last(run: Run, key: str) -> str:
    """Return the mean of the last twentieth of a run."""
    values = run.figures(key)
    tail = values[-max(len(values) // 20, 1) :]
    known = tail[np.isfinite(tail)]
    return f"{float(known.mean()):.4g}" if len(known) else ""


def _validation_section(runs: Sequence[Run]) -> Section:
    found = [_validation_chart(runs, way, axis, places) for way, axis, places in _both_ways(runs)]
    return Section(
        title="Validation",
        text="On the same held-out data each time: on the published weights x, and dashed on the optimizer's own y "
        "where the two differ.",
        charts=[chart for chart in found if chart is not None],
    )


def _validation_chart(runs: Sequence[Run], way: str, axis: Axis, places: Callable[[Run], np.ndarray]) -> Chart | None:
    """Return the evaluations of runs; two points, before and after, are no picture."""
    lines = []
    for run, curve in every(runs, lambda run: run.validation(places(run))):
        css = colour(runs, run)
        lines.append(Line(label=run.name, css=css, curve=curve, figure=f"{curve[1][-1]:.4f}"))
        y = finite(run.validation(places(run), "val_loss_y"))
        if len(y[1]) == len(curve[1]) and not np.allclose(y[1], curve[1], atol=5e-4):
            lines.append(Line(label=f"{run.name}, on y", css=f"{css} control", curve=y, figure=f"{y[1][-1]:.4f}"))
    if not lines or max(len(line.curve[0]) for line in lines) < 3:
        return None
    return line_chart(
        f"Validation loss {way}",
        lines,
        across=axis,
        up=loss_units_of(runs),
        smooth=False,
        settle=True,
        dots=True,
        clip=_name("validation", axis),
    )


def _speed_section(runs: Sequence[Run]) -> Section:
    charts = []
    rates = every(runs, lambda run: (run.figures("step"), run.figures("tokens_per_s")))
    if rates:
        lines = [
            Line(label=run.name, css=colour(runs, run), curve=curve, figure=f"{float(np.median(curve[1])):,.0f}")
            for run, curve in rates
        ]
        charts.append(
            line_chart(
                "Throughput", lines, across=STEPS, up=f"{units_of(runs)} a second", include=[0.0], clip="clip-rate"
            )
        )
    charts += _step_chart(runs, "Idle time", "bubble_fraction", up="share of ranks' time", unless=0.0)
    charts += _step_chart(runs, "Time waiting for data", "data_fraction", up="share of the step", unless=0.02)
    charts += _step_chart(runs, "Share of the GPUs' peak", "mfu", up="share", unless=0.0)
    return Section(
        title="Speed",
        text="Of each step; beside a name the median over all.",
        charts=charts,
    )


def _step_chart(runs: Sequence[Run], title: str, key: str, *, up: str, unless: float | None = None) -> list[Chart]:
    """Return a figure of the rows against steps, where it is ever above a bound."""
    found = every(runs, lambda run: (run.figures("step"), run.figures(key)))
    if not found or (unless is not None and all(float(np.median(curve[1])) <= unless for _, curve in found)):
        return []
    lines = [
        Line(label=run.name, css=colour(runs, run), curve=curve, figure=f"{float(np.median(curve[1])):.3g}")
        for run, curve in found
    ]
    return [line_chart(title, lines, across=STEPS, up=up, include=[0.0], clip=f"clip-{key}")]


def _gradient_section(runs: Sequence[Run]) -> Section:
    found = every(runs, lambda run: (run.figures("step"), run.figures("grad_norm")))
    charts = []
    if found:
        marks = [mark for run, curve in found for mark in _spike_marks(run, curve)]
        lines = [
            Line(label=run.name, css=colour(runs, run), curve=curve, figure=_spike_text(run, curve))
            for run, curve in found
        ]
        chart = line_chart(
            "Gradient norm",
            lines,
            across=STEPS,
            up="norm before clipping",
            include=[0.0],
            marks=marks,
            clip="clip-norm",
        )
        charts.append(chart)
    charts += _step_chart(runs, "Learning rate", "lr", up="rate of the update")
    return Section(
        title="Stability",
        text=f"Rings mark spikes: a gradient norm or a loss {SPIKE_TEXT}. Point at one for its staleness.",
        charts=charts,
    )


def spike_steps(run: Run) -> dict[int, str]:
    """Return the steps at which the loss or the gradient norm spikes, and which of the two."""
    found: dict[int, str] = {}
    for key, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        steps, values = finite((run.figures("step"), run.figures(key)))
        for position in spikes(values.tolist()):
            step = int(steps[position - 1])
            found[step] = f"{found[step]} and {name}" if step in found else name
    return dict(sorted(found.items()))


def _spike_marks(run: Run, curve: Curve) -> list[Mark]:
    rows = {row["step"]: row for row in run.rows}
    norms = dict(zip(map(int, curve[0]), curve[1].tolist()))
    marks = []
    for step, what in spike_steps(run).items():
        row, norm = rows[step], norms.get(step, 0.0)
        title = (
            f"{run.name}, step {step}: {what} spikes. Loss {row['loss']:.3f}, gradient norm {norm:.3g}, "
            f"staleness {row['staleness_mean']:.1f} in the mean, {row['staleness_max']} at most"
        )
        marks.append(Mark(at=(step, norm), title=title))
    return marks


def _spike_text(run: Run, curve: Curve) -> str:
    return f"median {float(np.median(curve[1])):.3g}, {counted(len(spike_steps(run)), 'spike')}"


def _router_section(runs: Sequence[Run]) -> Section:
    charts = []
    for key, title, up in (
        ("load_max", "Busiest expert", "load over the mean"),
        ("load_min", "Idlest expert", "load over the mean"),
        ("entropy", "Entropy of the router", "nats"),
        ("aux_share", "Balance loss", "share of all loss"),
    ):
        charts += _nested_chart(runs, "router", key, title=title, up=up)
    return Section(
        title="Experts",
        text="Over the layers of a batch: the most and the least loaded expert beside an even load of 1, the router's "
        "mean entropy, and what the balance loss is of the whole.",
        charts=charts,
    )


def _method_section(runs: Sequence[Run]) -> Section:
    keys = dict.fromkeys(key for run in runs for key in run.keys("method_metrics"))
    shown = [key for key in keys if key != RATE_FACTOR]  # it has a section of its own
    charts = [chart for key in shown for chart in _nested_chart(runs, "method_metrics", key, title=key, up="value")]
    left_out = f" The first {MAX_METHOD_CHARTS} of {len(charts)}." if len(charts) > MAX_METHOD_CHARTS else ""
    return Section(
        title="Methods against staleness",
        text="What corrections, discounts and error feedback that finds its coefficient tell of themselves." + left_out,
        charts=charts[:MAX_METHOD_CHARTS],
    )


def _worker_sections(runs: Sequence[Run]) -> list[Section]:
    """Return what workers did, and what their remedies found; those a run without workers may have, too."""
    shown = [Shown(run.name, colour(runs, run), run.workers) for run in runs if run.workers is not None]
    rates = [(run.name, colour(runs, run), rate_factors(run.rows)) for run in runs]
    return [
        # Of a lone run the report begins with that sentence.
        worker_section(shown, said=worker_sentence([each.run for each in shown]) if len(runs) > 1 else ""),
        gain_section((run.name, colour(runs, run), group_figures(run.rows)) for run in runs),
        rate_section({"Factor": rates}),
    ]


def _nested_chart(runs: Sequence[Run], table: str, key: str, *, title: str, up: str) -> list[Chart]:
    lines = [
        Line(label=run.name, css=colour(runs, run), curve=curve, figure=f"{curve[1][-1]:.3g}")
        for run, curve in every(runs, lambda run: run.nested(table, key))
    ]
    clip = f"clip-{table}-{key}".replace("/", "-").replace(" ", "-")
    return [line_chart(title, lines, across=STEPS, up=up, smooth=False, clip=clip)] if lines else []
