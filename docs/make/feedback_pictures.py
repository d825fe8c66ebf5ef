"""Error feedback as extrapolation, on a quadratic: steps of an averaged gradient that comes one step late."""

from collections.abc import Sequence
from typing import NamedTuple

from sheet import Sheet

from slipstream.report.svg import Scale, draw_axes

Vector = tuple[float, ...]


class Course(NamedTuple):
    """Both sets of weights, by version."""

    y: list[Vector]
    x: list[Vector]


def descend(
    start: Vector, curvatures: Vector, *, lr: float, momentum: float, delay: int, c: float, steps: int
) -> Course:
    """Minimise sum h w^2 / 2 with momentum m = EMA(g), a delay, and x_{t+1} = y_{t+1} + c (y_{t+1} - y_t).

    The first update is ordinary: x_1 = y_1, and y then stands where the rule x_{t+1} = x_t - u_t - c (u_t - u_{t-1})
    would have it, as in the package.
    """
    average = tuple(0.0 for _ in start)
    course = Course([start], [start])
    for step in range(steps):
        read = course.x[max(step - delay, 0)]
        average = tuple(momentum * m + (1 - momentum) * h * w for m, h, w in zip(average, curvatures, read))
        update = tuple(lr * m for m in average)
        y = tuple(a - u for a, u in zip(course.y[-1], update))
        if step == 0:
            course.x.append(y)
            y = tuple(a + c * u for a, u in zip(y, update))
        else:
            course.x.append(tuple(a - c * u for a, u in zip(y, update)))
        course.y.append(y)
    return course


def extrapolation() -> str:
    """Left: x one step ahead of y. Right: what that does where a step of delay is one too many."""
    title = "Error feedback: publish one step further than the optimizer has come"
    label = "x lies one step beyond y; training that a delay makes unstable is stable again."
    sheet = Sheet(356, title=title, label=label)
    _steps(sheet)
    _courses(sheet)
    return sheet.file()


def _steps(sheet: Sheet) -> None:
    course = descend((-1.0, 1.0), (0.35, 1.3), lr=0.8, momentum=0.8, delay=1, c=1.0, steps=9)
    x, y = Scale(low=-1.06, high=0.12, start=16, end=352), Scale(low=-0.56, high=1.06, start=272, end=52)
    shown = range(3, 9)
    for t in shown:
        begin, end, ahead = course.y[t - 1], course.y[t], course.x[t]
        sheet.arrow((x(begin[0]), y(begin[1])), (x(end[0]), y(end[1])), gap=4)
        sheet.arrow((x(end[0]), y(end[1])), (x(ahead[0]), y(ahead[1])), "strong dashed", gap=5, bend=9)
    for t in range(2, 9):
        at = course.y[t]
        sheet.dot((x(at[0]), y(at[1])), "d0", radius=3.6)
    for t in shown:
        ahead = course.x[t]
        sheet.dot((x(ahead[0]), y(ahead[1])), "d2", radius=3.6)
    sheet.dot((24, 316), "d0", radius=3.6)
    sheet.text((34, 320), "y: the optimizer's own weights")
    sheet.dot((24, 338), "d2", radius=3.6)
    sheet.text((34, 342), "x = y + c (y - last y): what batches read, c = 1")


def _courses(sheet: Sheet) -> None:
    steps = 45
    x, y = Scale(low=0, high=steps, start=420, end=684), Scale(low=-3, high=3, start=252, end=64)
    sheet.text((396, 54), "distance to the minimum", "head")
    ticks = [(float(value), str(value)) for value in (0, 15, 30, 45)]
    draw_axes(sheet, x, y, x_label="updates", y_label="", x_ticks=ticks, y_format=".0f")
    sheet.window("plot", x, y)
    arms: Sequence[tuple[str, int, float, str]] = (
        ("l1", 1, 0.0, "delay 1"),
        ("l0", 0, 0.0, "synchronous"),
        ("l2", 1, 1.0, "delay 1, c = 1"),
    )
    for row, (css, delay, c, name) in enumerate(arms):
        course = descend((1.0,), (1.0,), lr=1.4, momentum=0.9, delay=delay, c=c, steps=steps)
        sheet.line([(x(t), y(point[0])) for t, point in enumerate(course.y)], f"line {css}", clip="plot")
        left = (396, 472, 576)[row]
        sheet.line([(left, 316), (left + 14, 316)], f"line {css}")
        sheet.text((left + 18, 320), name)
    sheet.text((396, 342), "lr times curvature 1.4, momentum 0.9", "quiet")
