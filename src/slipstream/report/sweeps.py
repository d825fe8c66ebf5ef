"""Dots over a setting: delay, coefficient of error feedback, learning rate, batch size."""

import dataclasses
from collections.abc import Sequence

from slipstream.config import Coefficient, config_hash
from slipstream.report.figures import Chart, LegendEntry, Palette, Section, arm_text
from slipstream.report.grid import ALL, NONE
from slipstream.report.results import ArmResult
from slipstream.report.statistics import Estimate, mean
from slipstream.report.svg import WIDTH, Canvas, Point, Scale, draw_axes, draw_whisker, padded, tick_format
from slipstream.report.table import TableRow, by_rule, figure, has_delays, signed, whole_reads

Series = list[tuple[float, Estimate, str]]
"""Place on the x axis, figure, and what to say of the point."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sweep:
    """What a picture of dots over a setting needs."""

    name: str
    x_label: str
    y_label: str
    log: bool = False


def delay_section(best: Sequence[TableRow], palette: Palette) -> Section | None:
    """Return the gap over the delay, where the grid has three delays or more."""
    best = [row for row in best if not row.arm.workers]
    if len({row.arm.delay for row in best if row.arm.read == ALL}) < 3:
        return None
    charts = []
    for name, rows in by_rule(whole_reads(best)).items():
        series: dict[str, Series] = {}
        css: dict[str, str] = {}
        for row in rows:
            if row.gap is not None:
                remedy = row.arm.remedy
                series.setdefault(remedy, []).append((row.arm.delay, row.gap, _said(row)))
                css.setdefault(remedy, palette.css(row.arm._replace(delay=_first_delay(rows, remedy))))
        what = _Sweep(name=name, x_label="delay in updates", y_label="nats above synchronous")
        charts.append(_dots(what, series, css, labels={NONE: "no remedy"}))
    return Section(title="Longer delays", text="Gap to plain synchronous training by delay.", charts=charts)


def _first_delay(rows: Sequence[TableRow], remedy: str) -> int:
    return min((row.arm.delay for row in rows if row.arm.remedy == remedy and row.arm.delay), default=0)


def coefficient_section(best: Sequence[TableRow], palette: Palette) -> Section | None:
    """Return the loss over the coefficient of error feedback, where a rule has three coefficients or more."""
    charts = []
    for name, rows in by_rule(whole_reads(best)).items():
        series: dict[str, Series] = {}
        css: dict[str, str] = {}
        for delay in dict.fromkeys(row.arm.delay for row in rows):
            plain = next((row for row in rows if row.arm.delay == delay and row.arm.remedy == NONE), None)
            alike = [row for row in rows if plain and row.arm.delay == delay and _differs_by_coefficient(row, plain)]
            placed = [(c, row) for row in alike if not isinstance(c := _coefficient(row), str)]
            if len(placed) >= 3:
                label = f"delay {delay}" if delay else "no delay"
                series[label] = [(c, row.val_loss, _said(row)) for c, row in placed if row.val_loss]
                css[label] = palette.css(placed[0][1].arm)
        if series:
            what = _Sweep(name=name, x_label="coefficient c of error feedback", y_label="validation loss")
            charts.append(_dots(what, series, css))
    if not charts:
        return None
    text = (
        "Validation loss by c at the best learning rate of each; c = 0 is no error feedback. The curve without delay "
    )
    return Section(
        title="How much error feedback",
        text=text + "shows what the same look-ahead does for synchronous training.",
        charts=charts,
    )


def _coefficient(row: TableRow) -> Coefficient:
    return row.result.cells[0].cell.config.staleness.error_feedback


def _differs_by_coefficient(row: TableRow, plain: TableRow) -> bool:
    """Whether two arms have the same settings but for learning rate and coefficient of error feedback."""

    def rest(of: TableRow) -> str:
        config = of.result.cells[0].cell.config
        return config_hash(
            dataclasses.replace(
                config,
                optim=dataclasses.replace(config.optim, lr=0.0),
                staleness=dataclasses.replace(config.staleness, error_feedback=0.0),
            )
        )

    return rest(row) == rest(plain)


def lr_section(results: Sequence[ArmResult], palette: Palette) -> Section | None:
    """Return the loss over the learning rate, where a rule has several."""
    charts = []
    groups: dict[str, list[ArmResult]] = {}
    several_batches = len({result.arm.batch for result in results}) > 1
    for result in results:
        arm = result.arm
        if arm.read == ALL:
            groups.setdefault(f"{arm.rule}, batch {arm.batch}" if several_batches else arm.rule, []).append(result)
    for name, group in groups.items():
        group = [result for result in group if result.arm.lr > 0]  # 0 has no place on an axis of ratios
        if len({result.arm.lr for result in group}) < 2:
            continue
        series: dict[str, Series] = {}
        css: dict[str, str] = {}
        several = len({(result.arm.delay, result.arm.workers) for result in group if result.arm.delay}) > 1
        for result in group:
            label = arm_text(result.arm, several_delays=several)
            css.setdefault(label, palette.css(result.arm))
            if result.val_loss:
                loss = mean(list(result.val_loss.values()))
                said = f"{result.arm.label}: {figure(loss)}"
                series.setdefault(label, []).append((result.arm.lr, loss, said))
        what = _Sweep(name=name, x_label="peak learning rate", y_label="validation loss", log=True)
        charts.append(_dots(what, series, css))
    if not charts:
        return None
    return Section(
        title="Learning rate",
        text="Validation loss by peak learning rate. Where the best rate lies lower under delay, a gap at equal rates "
        "tells of the rate as much as of the delay.",
        charts=charts,
    )


def batch_section(best: Sequence[TableRow], palette: Palette) -> Section | None:
    """Return the gap over the batch size, where the grid has several."""
    if len({row.arm.batch for row in best}) < 2:
        return None
    charts = []
    for rule in dict.fromkeys(row.arm.rule for row in best):
        series: dict[str, Series] = {}
        css: dict[str, str] = {}
        rows = [row for row in best if row.arm.rule == rule and row.arm.read == ALL and row.arm.delay]
        for row in rows:
            if row.gap is not None:
                label = arm_text(row.arm, several_delays=has_delays(rows))
                size = row.result.cells[0].cell.config.batch_tokens
                series.setdefault(label, []).append((size, row.gap, _said(row)))
                css.setdefault(label, palette.css(row.arm))
        what = _Sweep(name=rule, x_label="tokens a batch", y_label="nats above synchronous", log=True)
        charts.append(_dots(what, series, css))
    return Section(title="Batch size", text="Gap to plain synchronous training at the same batch size.", charts=charts)


def _said(row: TableRow) -> str:
    return f"{row.arm.label}: val loss {figure(row.val_loss)}, gap {signed(row.gap)}"


def _dots(
    what: _Sweep, series: dict[str, Series], css: dict[str, str], *, labels: dict[str, str] | None = None
) -> Chart:
    """Draw series of dots with intervals, joined by lines."""
    points = [point for each in series.values() for point in each]
    if not points:
        return Chart(title=what.name, svg="")
    places = sorted({place for place, _, _ in points})
    x_low, x_high = places[0], places[-1]
    if what.log:
        x_low, x_high = x_low / 1.15, x_high * 1.15
    else:
        x_low, x_high = padded(places, share=0.05)
    has_gaps = "above" in what.y_label
    y_low, y_high = padded([end for _, each, _ in points for end in each.ends], include=[0.0] if has_gaps else [])
    canvas = Canvas(270, label=f"{what.name}: {what.y_label} by {what.x_label}")
    x = Scale(low=x_low, high=x_high, start=52, end=WIDTH - 12, log=what.log)
    y = Scale(low=y_low, high=y_high, start=228, end=8)
    draw_axes(
        canvas,
        x,
        y,
        x_label=what.x_label,
        y_label=what.y_label,
        x_ticks=[(place, f"{place:g}") for place in _spaced(places, x)],
        y_format=tick_format(y.ticks(6)),
    )
    for label, each in series.items():
        each = sorted(each, key=lambda point: point[0])
        middle: list[Point] = [(x(place), y(estimate.mean)) for place, estimate, _ in each]
        canvas.line(middle, f"curve {css[label]}")
        for (place, estimate, said), at in zip(each, middle, strict=True):
            if estimate.low is not None and estimate.high is not None:
                draw_whisker(canvas, (x(place), y(estimate.low)), (x(place), y(estimate.high)), f"range {css[label]}")
            canvas.dot(at, f"fill {css[label]}", title=said)
    legend = [LegendEntry(css=css[label], label=(labels or {}).get(label, label)) for label in series]
    return Chart(title=what.name, svg=str(canvas), legend=legend)


def _spaced(places: Sequence[float], x: Scale) -> list[float]:
    """Return the places that have room for a text."""
    kept: list[float] = []
    for place in places:
        if not kept or x(place) - x(kept[-1]) > 40:
            kept.append(place)
    return kept
