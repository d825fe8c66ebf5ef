"""Curves in one SVG file of its own, for pages of the documentation: light and dark, readable without them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.report.svg import Canvas, Point, Scale, draw_axes, padded, tick_format

WIDTH, PLOT_BOTTOM, LEGEND_TOP, LINE = 560, 238, 312, 19

STYLE = """
text { font: 12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif; fill: #5d626b; }
.title { font-size: 14px; font-weight: 600; fill: #1b1d22; }
.label { fill: #1b1d22; }
.paper { fill: #ffffff; }
.rule, .zero { fill: none; stroke: #e3e2dc; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.other { stroke-dasharray: 5 3; }
.sync { stroke: #2b2f36; stroke-width: 2; }
.c0 { stroke: #d1383d; } .c1 { stroke: #1f6fd6; } .c2 { stroke: #1f8a4c; } .c3 { stroke: #8a4fd0; }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa0a8; } .title, .label { fill: #e8e9eb; } .paper { fill: #1a1d21; }
  .rule, .zero { stroke: #2d3238; } .sync { stroke: #e8e9eb; }
  .c0 { stroke: #ff6b6b; } .c1 { stroke: #6aa8ff; } .c2 { stroke: #58c985; } .c3 { stroke: #b892ff; }
}
"""


class Curve(NamedTuple):
    """One line of a picture.

    Attributes:
        label: What the legend calls it.
        points: Places and figures.
        css: Its classes: ``sync``, or ``c0`` to ``c3``; with ``other`` it is broken.
        note: At the right of the legend.
    """

    label: str
    points: Sequence[Point]
    css: str
    note: str = ""


def draw(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
    notes: str = "validation loss, and its gap to synchronous",
) -> str:
    """Return a picture.

    Args:
        title: Above it.
        curves: The most important first: it is drawn over the others. The first sixth of each may lie outside.
        x_label: Of the axis across.
        y_label: Of the axis up.
        x_text: A tick of the axis across.
        notes: What the notes of the curves say.
    """
    height = LEGEND_TOP + LINE * len(curves)
    shown = [y for curve in curves for _, y in curve.points[len(curve.points) // 6 :]]
    low, high = padded(shown)
    canvas = Canvas(height, label=title, width=WIDTH)
    x = Scale(low=0, high=max(curve.points[-1][0] for curve in curves), start=52, end=WIDTH - 16)
    y = Scale(low=low, high=high, start=PLOT_BOTTOM, end=34)
    canvas.bar(0, 0, canvas.width, canvas.height, "paper")
    canvas.text((10, 20), title, "title")
    draw_axes(
        canvas,
        x,
        y,
        x_label=x_label,
        y_label=y_label,
        x_ticks=[(value, x_text(value)) for value in x.ticks(5)],
        y_format=tick_format(y.ticks(6)),
    )
    canvas.window("plot", x, y)
    canvas.text((WIDTH - 16, LEGEND_TOP - LINE), notes, anchor="end")
    for index, curve in reversed(list(enumerate(curves))):
        css = f"curve {curve.css}"
        canvas.line([(x(across), y(up)) for across, up in curve.points], css, clip="plot")
        at = LEGEND_TOP + LINE * index
        canvas.line([(14, at - 4), (34, at - 4)], css)
        canvas.text((42, at), curve.label, "label")
        canvas.text((WIDTH - 16, at), curve.note, anchor="end")
    whole = str(canvas).replace(
        "<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" ', 1
    )
    end = whole.index(">") + 1
    return f"{whole[:end]}<style>{STYLE}</style>{whole[end:]}\n"
