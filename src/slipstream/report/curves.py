"""Loss curves of a comparison, raw and smoothed."""

from collections.abc import Sequence

import numpy as np

from slipstream.report.figures import Chart, Palette, Section, arm_text
from slipstream.report.grid import NONE
from slipstream.report.lines import TOKENS, Line, line_chart
from slipstream.report.table import TableRow, by_rule, figure, has_delays, whole_reads

MAX_CURVES = 7
"""Arms in one picture of loss curves; more could not be told apart."""


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
    lines = []
    for row in rows:
        losses = row.result.mean_losses
        line = Line(
            label=f"{arm_text(row.arm, several_delays=several)}, lr {row.arm.lr:g}",
            css=palette.css(row.arm),
            curve=(row.result.tokens_per_step * np.arange(1, len(losses) + 1), losses),
            figure=figure(row.val_loss),
        )
        lines.append(line)
    return line_chart(name, lines, across=TOKENS, up="nats per token", settle=True, clip=clip)
