"""Plots as SVG text: scales, axes, lines, dots with intervals. Colours are left to the page's style sheet.

Sizes are in user units; a figure is drawn 400 wide, so that it is readable at the width of a phone, and scales.
"""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

WIDTH = 400
"""Of every figure."""

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """From figures to places on one axis.

    Attributes:
        low: Figure at ``start``.
        high: Figure at ``end``.
        start: Place, in user units.
        end: Place; smaller than ``start`` on an axis that points up.
        log: Equal ratios, not differences, are equally far; ``low`` must be above 0.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a figure; figures outside lie outside."""
        low, high, at = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    def clamped(self, value: float) -> float:
        """Return the place of a figure, at most at the end of the axis."""
        return self(min(max(value, self.low), self.high))

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round figures between both ends.

        Example:
            >>> Scale(low=0.0, high=0.4, start=0, end=100).ticks()
            [0.0, 0.1, 0.2, 0.3, 0.4]
        """
        step = nice_step((self.high - self.low) / max(count, 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [_rounded(k * step) + 0.0 for k in range(first, last + 1)]


def nice_step(at_least: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is not below a figure.

    Example:
        >>> nice_step(0.17), nice_step(3.0), nice_step(2.2e-16)
        (0.2, 5.0, 2.5e-16)
    """
    if at_least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(at_least))
    return next((_rounded(k * power) for k in (1, 2, 2.5, 5) if k * power >= at_least * (1 - 1e-9)), 10 * power)


def _rounded(value: float) -> float:
    """Return a figure without the noise of its last digits, however small it is."""
    return float(f"{value:.12g}")


def padded(values: Iterable[float], *, share: float = 0.06, include: Iterable[float] = ()) -> tuple[float, float]:
    """Return ends of an axis a little beyond the smallest and the largest figure.

    Args:
        values: Figures to show.
        share: Of their range, left free on both sides.
        include: Figures that need no room beyond them, such as 0.
    """
    values, include = list(values), list(include)
    low, high = min(values), max(values)
    extent = high - low
    # Figures that no tick could tell apart, such as 1 and 1 but for rounding, are one figure.
    if extent <= 1e-6 * max(abs(low), abs(high)):
        extent = abs(high)
    room = extent * share or 1.0
    return min([low - room, *include]), max([high + room, *include])


class Canvas:
    """Collects the parts of one figure.

    Args:
        height: In user units.
        label: What the figure shows, for those who cannot see it.
        width: In user units.
    """

    def __init__(self, height: float, *, label: str, width: float = WIDTH) -> None:
        self.width = width
        self.height = height
        self._label = label
        self._parts: list[str] = []

    def line(self, points: Sequence[Point], css: str, *, clip: str = "") -> None:
        """Draw a line through points."""
        path = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
        clipped = f' clip-path="url(#{clip})"' if clip else ""
        self._parts.append(f'<polyline class="{css}" points="{path}"{clipped}/>')

    def dot(self, at: Point, css: str, *, title: str = "", radius: float = 3.5) -> None:
        """Draw a dot that tells its title when pointed at."""
        x, y = map(_short, at)
        self._parts.append(f'<circle class="{css}" cx="{x}" cy="{y}" r="{radius}">{_title(title)}</circle>')

    def bar(self, left: float, top: float, width: float, height: float, css: str, *, title: str = "") -> None:
        """Draw a rectangle."""
        x, y, w, h = map(_short, (left, top, max(width, 0.0), max(height, 0.0)))
        self._parts.append(
            f'<rect class="{css}" x="{x}" y="{y}" width="{w}" height="{h}" rx="1.5">{_title(title)}</rect>'
        )

    def text(self, at: Point, content: str, css: str = "", *, anchor: str = "start", turned: bool = False) -> None:
        """Write a text; ``turned``: upwards."""
        x, y = map(_short, at)
        turn = f' transform="rotate(-90 {x} {y})"' if turned else ""
        self._parts.append(
            f'<text class="{css}" x="{x}" y="{y}" text-anchor="{anchor}"{turn}>{html.escape(content)}</text>'
        )

    def window(self, name: str, x: Scale, y: Scale) -> None:
        """Define a clip of the plotting area, to be named in :meth:`line`."""
        left, right = sorted((x.start, x.end))
        top, bottom = sorted((y.start, y.end))
        self._parts.append(
            f'<clipPath id="{name}"><rect x="{_short(left)}" y="{_short(top)}" width="{_short(right - left)}" '
            f'height="{_short(bottom - top)}"/></clipPath>'
        )

    def __str__(self) -> str:
        return (
            f'<svg viewBox="0 0 {_short(self.width)} {_short(self.height)}" role="img" '
            f'aria-label="{html.escape(self._label)}">{"".join(self._parts)}</svg>'
        )


def draw_axes(
    canvas: Canvas,
    x: Scale,
    y: Scale,
    *,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[tuple[float, str]],
    y_format: str = "g",
) -> None:
    """Draw grid lines, figures and names of both axes.

    Args:
        canvas: Where to.
        x: Across.
        y: Up.
        x_label: Name and unit.
        y_label: The same.
        x_ticks: Figure and text of each.
        y_format: How figures are written.
    """
    for value in y.ticks(6):
        canvas.line([(x.start, y(value)), (x.end, y(value))], "zero" if value == 0 else "rule")
        canvas.text((x.start - 6, y(value) + 4), format(value, y_format).replace("-", "\N{MINUS SIGN}"), anchor="end")
    for value, text in x_ticks:
        canvas.line([(x(value), y.start), (x(value), y.start + 4)], "rule")
        canvas.text((x(value), y.start + 16), text, anchor="middle")
    canvas.text(((x.start + x.end) / 2, y.start + 33), x_label, "name", anchor="middle")
    canvas.text((11, (y.start + y.end) / 2), y_label, "name", anchor="middle", turned=True)


def draw_across(canvas: Canvas, x: Scale, *, top: float, bottom: float, label: str) -> None:
    """Draw grid lines, figures and name of the axis below lying bars.

    Args:
        canvas: Where to.
        x: Across.
        top: Of the grid lines.
        bottom: The same.
        label: Name and unit.
    """
    ticks = x.ticks(4)
    for value in ticks:
        canvas.line([(x(value), top), (x(value), bottom)], "zero" if value == 0 else "rule")
        text = format(value, tick_format(ticks)).replace("-", "\N{MINUS SIGN}")
        canvas.text((x(value), bottom + 16), text, anchor="middle")
    canvas.text((canvas.width / 2, bottom + 33), label, "name", anchor="middle")


def draw_whisker(canvas: Canvas, low: Point, high: Point, css: str, *, cap: float = 3.5) -> None:
    """Draw an interval with caps, upright or lying."""
    canvas.line([low, high], css)
    upright = abs(low[0] - high[0]) < abs(low[1] - high[1])
    for x, y in (low, high):
        ends = [(x - cap, y), (x + cap, y)] if upright else [(x, y - cap), (x, y + cap)]
        canvas.line(ends, css)


def tick_format(ticks: Sequence[float]) -> str:
    """Return the number format with as many digits as the distance of ticks needs.

    Example:
        >>> tick_format([0.0, 0.05, 0.1]), tick_format([2.0, 2.5]), tick_format([0.0, 10.0]), tick_format([0.0, 2e-9])
        ('.2f', '.1f', '.0f', 'g')
    """
    if len(ticks) < 2:
        return "g"
    step = ticks[1] - ticks[0]
    if step < 1e-6:
        return "g"
    digits = next((n for n in range(6) if abs(step * 10**n - round(step * 10**n)) < 1e-6), 6)
    return f".{digits}f"


def _short(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>" if text else ""
