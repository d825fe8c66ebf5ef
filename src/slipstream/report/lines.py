"""Curves in one picture: of runs, and of the arms of a comparison."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from slipstream.report.figures import Chart, Curve, DataTable, LegendEntry
from slipstream.report.statistics import smoothed_run
from slipstream.report.svg import WIDTH, Canvas, Scale, draw_axes, padded, tick_format
from slipstream.train.metrics import quantity

LEFT = 58
"""Place of the axis of figures: five digits and their name fit before it."""

DIGIT = 8
"""Room that each further digit takes."""

NUM_DATA_ROWS = 10
"""Of the table below a picture."""

MAX_POINTS = 500
"""Points of one curve; a longer one is thinned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """How places across are written.

    Attributes:
        name: Name and unit.
        text: A figure for a tick or a row.
        unit: Figures are shown divided by it.
    """

    name: str
    text: Callable[[float], str]
    unit: float = 1.0


TOKENS = Axis(name="tokens", text=lambda value: quantity(value).replace(".0", ""))
STEPS = Axis(name="steps", text=lambda value: quantity(value).replace(".0", ""))


def time_axis(longest_s: float, *, is_virtual: bool = False) -> Axis:
    """Return an axis of time in a unit that fits.

    Args:
        longest_s: The largest place, in seconds.
        is_virtual: Of a virtual clock.
    """
    units = ((3600.0, "hours"), (60.0, "minutes"))
    unit, name = next(((unit, name) for unit, name in units if longest_s >= 2 * unit), (1.0, "seconds"))
    clock = " of the run's own clock" if is_virtual else " of training"
    return Axis(name=name + clock, text=lambda value: f"{value:g}", unit=unit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A curve in a picture.

    Attributes:
        label: What a legend calls it.
        css: Its colour.
        curve: Places across and figures.
        figure: Beside the label.
    """

    label: str
    css: str
    curve: Curve
    figure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A dot on a curve that says what happened there."""

    at: tuple[float, float]
    title: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    across: Axis,
    up: str,
    smooth: bool = True,
    include: Sequence[float] = (),
    settle: bool = False,
    dots: bool = False,
    marks: Sequence[Mark] = (),
    clip: str,
) -> Chart:
    """Draw curves.

    Args:
        title: Of the picture.
        lines: Drawn in turn, the first one on top.
        across: The axis of places.
        up: Name and unit of the figures.
        smooth: Draw them raw and smoothed; the page shows one of the two.
        include: Figures that the axis shows in any case, such as 0.
        settle: Leave out of the axis what lies above the curves' first sixth, where they fall from far above.
        dots: Few figures, each to be seen.
        marks: Dots to point at.
        clip: Name of the plotting area, of its own in the page.
    """
    unit, up = _readable(lines, up)
    lines = [dataclasses.replace(line, curve=(line.curve[0], line.curve[1] / unit)) for line in lines]
    soft = lines
    if smooth:
        soft = [dataclasses.replace(line, curve=(line.curve[0], smoothed_run(line.curve[1]))) for line in lines]
    low, high = _ends(soft, include=[each / unit for each in include], settle=settle)
    canvas = Canvas(270, label=f"{title}: {up} against {across.name}, of {', '.join(line.label for line in lines)}")
    end = max(float(line.curve[0].max()) for line in lines) / across.unit or 1.0
    start = min(0.0, *(float(line.curve[0].min()) for line in lines))
    y = Scale(low=low, high=high, start=228, end=8)
    y_format = tick_format(y.ticks(6))
    longest = max((len(format(tick, y_format)) for tick in y.ticks(6)), default=0)
    x = Scale(low=start, high=end, start=LEFT + DIGIT * max(longest - 5, 0), end=WIDTH - 12)
    draw_axes(
        canvas,
        x,
        y,
        x_label=across.name,
        y_label=up,
        x_ticks=[(value, across.text(value)) for value in x.ticks(4)],
        y_format=y_format,
    )
    canvas.window(clip, x, y)
    for kind, drawn in (("raw", lines), ("smoothed", soft)) if smooth else (("", soft),):
        for line in reversed(drawn):
            places, values = line.curve
            points = [(x(float(places[step - 1]) / across.unit), y(value)) for step, value in thinned(values)]
            canvas.line(points, f"curve {kind} {line.css}".replace("  ", " "), clip=clip)
            if dots or len(points) == 1:
                for at, value in points:
                    if y.end <= value <= y.start:
                        canvas.dot((at, value), f"fill {line.css}", radius=2.6)
    for mark in marks:
        at, value = mark.at
        canvas.dot((x(at / across.unit), y.clamped(value / unit)), "mark", title=mark.title)
    legend = [LegendEntry(css=line.css, label=line.label, figure=line.figure) for line in lines]
    return Chart(title=title, svg=str(canvas), legend=legend, data=_data(soft, across))


def _readable(lines: Sequence[Line], up: str) -> tuple[float, str]:
    """Return a unit in which the figures have few digits, and the axis's name with it."""
    most = max(float(np.quantile(np.abs(line.curve[1]), 0.9)) for line in lines)
    if most and not 2e-8 <= most < 5e6:
        power = 3 * math.floor(math.log10(most / 5) / 3)
        return 10.0**power, f"{up}, in 10^{power}"
    units = ((5000.0, 1e3, "thousand {}"), (0.02, 1.0, "{}"), (2e-5, 1e-3, "{}, in thousandths"))
    unit, name = next(((unit, name) for least, unit, name in units if most >= least), (1e-6, "{}, in millionths"))
    return (unit, name.format(up)) if most else (1.0, up)


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


def _ends(lines: Sequence[Line], *, include: Sequence[float], settle: bool) -> tuple[float, float]:
    """Return the ends of the axis of figures; a few far ones do not make all others flat."""
    values = [line.curve[1] for line in lines]
    if settle:
        values = [each[len(each) // 6 :] if len(each) > 6 else each[1:] if len(each) > 2 else each for each in values]
    elif any(len(each) >= 50 for each in values):
        values = [np.clip(each, None, np.quantile(each, 0.995) * 1.05) for each in values]
    everything = [float(value) for each in values for value in each]
    return padded(everything, include=include)


def _data(lines: Sequence[Line], across: Axis) -> DataTable:
    """Return the curves at a few places as a table."""
    end = max(float(line.curve[0].max()) for line in lines)
    longest = max(len(line.curve[0]) for line in lines)
    places = np.linspace(0.0, end, NUM_DATA_ROWS + 1)
    if longest <= NUM_DATA_ROWS:
        places = np.array(sorted({float(place) for line in lines for place in line.curve[0]}))
    rows = [
        [across.text(round(place / across.unit, 3)), *(_at(line.curve, place) for line in lines)] for place in places
    ]
    return DataTable(head=[across.name, *(line.label for line in lines)], rows=rows)


def _at(curve: Curve, place: float) -> str:
    places, values = curve
    if not places[0] <= place <= places[-1] * (1 + 1e-9):
        return ""
    return f"{float(np.interp(place, places, values)):.4g}"
