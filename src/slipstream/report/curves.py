"""Loss curves, raw and smoothed."""

from collections.abc import Sequence

import numpy as np

from slipstream.report.figures import Chart, LegendEntry, Palette, Section, arm_text
from slipstream.report.grid import NONE
from slipstream.report.statistics import smoothed
from slipstream.report.svg import WIDTH, Canvas, Scale, draw_axes, padded, tick_format
from slipstream.report.table import TableRow, by_rule, figure, has_delays, whole_reads
from slipstream.train.metrics import quantity

MAX_CURVES = 7
"""Arms in one picture of loss curves; more could not be told apart."""

MAX_POINTS = 500
"""Points of one curve; a longer one is thinned."""

SMOOTHING = 0.05
"""Span of the smoothing, as a share of the run."""


def curve_section(best: Sequence[TableRow], palette: Palette) -> Section:
    """Return the training loss of each rule's arms over tokens, raw and smoothed."""
    charts: list[Chart] = []
    for name, rows in by_rule(whole_reads(best)).items():
        shown = sorted((row for row in rows if row.result.val_loss), key=_curve_order)[:MAX_CURVES]
        if shown:
            charts.append(_curves(name, shown, palette, clip=f"clip-{len(charts)}", several=has_delays(rows)))
    left_out = any(len(rows) > MAX_CURVES for rows in by_rule(whole_reads(best)).values())
    return Section(
        title="Training loss",
        text="Mean over seeds against tokens, each arm at its best learning rate; beside each name its learning rate "
        "and final validation loss." + (f" The {MAX_CURVES} most telling arms of each rule." if left_out else ""),
        charts=charts,
        has_smoothing=True,
    )


def _curve_order(row: TableRow) -> tuple[bool, bool, bool, float]:
    """Synchronous first, plain delay next, then remedies by loss, then their controls without delay."""
    arm = row.arm
    return not arm.is_plain_synchronous, arm.remedy != NONE, arm.is_synchronous, row.result.mean_val_loss


def _curves(name: str, rows: Sequence[TableRow], palette: Palette, *, clip: str, several: bool) -> Chart:
    curves = {row.arm: row.result.mean_losses for row in rows}
    longest = max(len(curve) for curve in curves.values())
    span = max(round(SMOOTHING * longest), 2)
    soft = {arm: np.array(smoothed(curve.tolist(), span=span)) for arm, curve in curves.items()}
    # The first part falls from far above: the axis begins where the curves have come down.
    settled = [value for curve in soft.values() for value in curve[len(curve) // 6 :]]
    low, high = padded(settled)
    canvas = Canvas(270, label=f"{name}: training loss against tokens")
    tokens = max(row.result.tokens_per_step for row in rows) * longest
    x = Scale(low=0, high=tokens, start=46, end=WIDTH - 12)
    y = Scale(low=low, high=high, start=228, end=8)
    draw_axes(
        canvas,
        x,
        y,
        x_label="tokens",
        y_label="nats per token",
        x_ticks=[(value, quantity(value).replace(".0", "")) for value in x.ticks(4)],
        y_format=tick_format(y.ticks(6)),
    )
    canvas.window(clip, x, y)
    for kind, drawn in (("raw", curves), ("smoothed", soft)):
        for row in reversed(rows):
            per_step = row.result.tokens_per_step
            points = [(x(step * per_step), y(loss)) for step, loss in thinned(drawn[row.arm])]
            canvas.line(points, f"curve {kind} {palette.css(row.arm)}", clip=clip)
    legend = [
        LegendEntry(
            css=palette.css(row.arm),
            label=f"{arm_text(row.arm, several_delays=several)}, lr {row.arm.lr:g}",
            figure=figure(row.val_loss),
        )
        for row in rows
    ]
    return Chart(title=name, svg=str(canvas), legend=legend)


def thinned(curve: np.ndarray, *, max_points: int = MAX_POINTS) -> list[tuple[int, float]]:
    """Return (step from 1, value) of a curve; of a long one the smallest and the largest value of each stretch.

    Example:
        >>> thinned(np.array([3.0, 1.0, 2.0, 9.0, 0.0, 5.0, 5.0, 6.0]), max_points=4)
        [(2, 1.0), (4, 9.0), (5, 0.0), (8, 6.0)]
    """
    if len(curve) <= max_points:
        return [(step, float(value)) for step, value in enumerate(curve, start=1)]
    kept = []
    for stretch in np.array_split(np.arange(len(curve)), max_points // 2):
        ends = {int(stretch[np.argmin(curve[stretch])]), int(stretch[np.argmax(curve[stretch])])}
        kept += [(index + 1, float(curve[index])) for index in sorted(ends)]
    return kept
