"""What the pictures of a report share: their parts, one colour an arm, and its name in a legend."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from slipstream.report.cells import Arm
from slipstream.report.grid import ALL, NONE

NUM_COLOURS = 8
"""Of the page's palette, without the one of what is synchronous."""

Curve = tuple[np.ndarray, np.ndarray]
"""Places on the axis across, and figures."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """A line of a legend: colour, what it is, and a figure."""

    css: str
    label: str
    figure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataTable:
    """Figures as text; the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture."""

    title: str
    svg: str
    legend: Sequence[LegendEntry] = ()
    data: DataTable | None = None
    """What it shows, for those who read tables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Pictures that belong together, one a rule."""

    title: str
    text: str
    charts: Sequence[Chart]
    has_smoothing: bool = False
    """Whether its curves are there twice, raw and smoothed."""
    in_pairs: bool = False
    """Whether each two pictures belong beside each other."""


class Palette:
    """Gives an arm the same colour in all pictures: by remedy and delay, a control that of its remedy, but hollow."""

    def __init__(self, arms: Iterable[Arm]) -> None:
        self._colours: dict[tuple[str, int | str], int] = {}
        self._of_remedy: dict[str, int] = {}
        for arm in arms:
            key = _key(arm)
            if arm.delay and key not in self._colours:
                self._colours[key] = len(self._colours)
                self._of_remedy.setdefault(arm.remedy, self._colours[key])

    def css(self, arm: Arm) -> str:
        """Return the classes of an arm."""
        if arm.is_plain_synchronous:
            return "sync"
        index = self._colours.get(_key(arm), self._of_remedy.get(arm.remedy, 0))
        return f"c{index % NUM_COLOURS}{' control' if arm.delay == 0 else ''}{' again' if index >= NUM_COLOURS else ''}"


def _key(arm: Arm) -> tuple[str, int | str]:
    """Return what arms of one colour share: pictures of different workers are not drawn into one another."""
    return arm.remedy, "workers" if arm.workers else arm.delay


def arm_text(arm: Arm, *, several_delays: bool = False) -> str:
    """Return what a legend calls an arm of a rule."""
    if arm.is_plain_synchronous:
        return "synchronous"
    if arm.delay == 0:
        return f"{arm.remedy}, no delay"
    if arm.workers:
        text = "asynchronous, no remedy" if arm.remedy == NONE else arm.remedy
        return f"{text}, {arm.workers}" if several_delays else text
    delay = f"delay {arm.delay}"
    read = f" of {arm.read}" if arm.read != ALL else ""
    if arm.remedy == NONE:
        return f"{delay}{read}"
    return f"{arm.remedy}{read}, {delay}" if several_delays else f"{arm.remedy}{read}"
