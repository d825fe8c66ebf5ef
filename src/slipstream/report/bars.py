"""Bars of the gap to synchronous training, with intervals."""

from collections.abc import Callable, Sequence

from slipstream.report.cells import Arm
from slipstream.report.figures import Chart, Palette, Section, arm_text
from slipstream.report.grid import ALL, NONE
from slipstream.report.svg import WIDTH, Canvas, Scale, draw_across, draw_whisker, padded
from slipstream.report.table import TableRow, by_rule, has_delays, signed


def gap_section(best: Sequence[TableRow], palette: Palette) -> Section:
    """Return the gap to synchronous of every arm, as bars on one scale for all rules."""
    rows = [row for row in best if row.arm.read == ALL and not row.arm.is_plain_synchronous]
    rows.sort(key=lambda row: row.arm.is_synchronous)  # controls last
    return Section(
        title="What the delay costs",
        text="Validation loss above plain synchronous training of the same rule, each arm at its best learning rate. "
        "Whiskers are 95 % intervals over paired seeds. Hollow bars are controls without delay: what a remedy gains "
        "there it gains as an optimizer, not as a cure for delay.",
        charts=_bar_charts(rows, palette, label=lambda arm: arm_text(arm, several_delays=has_delays(rows))),
    )


def read_section(best: Sequence[TableRow], palette: Palette) -> Section | None:
    """Return the gap by what has the delay, where the grid varies that."""
    if all(row.arm.read == ALL for row in best):
        return None
    rows = [row for row in best if row.arm.delay]

    def label(arm: Arm) -> str:
        what = "everything" if arm.read == ALL else arm.read
        return what if arm.remedy == NONE else f"{what}, {arm.remedy}"

    return Section(
        title="What is stale",
        text="Validation loss above plain synchronous training when only some of the weights read are stale, or not "
        "all by the same delay. Shares need not add up: what is stale together can hurt more, or less, than each "
        "alone.",
        charts=_bar_charts(rows, palette, label=label),
    )


def _bar_charts(rows: Sequence[TableRow], palette: Palette, *, label: Callable[[Arm], str]) -> list[Chart]:
    known = [row for row in rows if row.gap is not None]
    if not known:
        return []
    ends = [end for row in known if row.gap is not None for end in row.gap.ends]
    low, high = padded(ends, include=[0.0], share=0.02)
    return [
        Chart(title=name, svg=_bars(name, group, palette, label=label, low=low, high=high))
        for name, group in by_rule(known).items()
    ]


def _bars(
    name: str, rows: Sequence[TableRow], palette: Palette, *, label: Callable[[Arm], str], low: float, high: float
) -> str:
    """Draw a bar a row: its name above it, so that a long one needs no room beside it."""
    row_height, top = 34, 4
    canvas = Canvas(top + row_height * len(rows) + 38, label=f"{name}: gap to synchronous training")
    x = Scale(low=low, high=high, start=8, end=WIDTH - 12)
    bottom = top + row_height * len(rows)
    draw_across(canvas, x, top=top, bottom=bottom, label="nats per token above synchronous")
    for index, row in enumerate(rows):
        gap = row.gap
        assert gap is not None
        css, y = palette.css(row.arm), top + row_height * index
        said = f"{label(row.arm)}: {signed(gap)} at lr {row.arm.lr:g}, {len(row.result.val_loss)} seeds"
        canvas.text((x(low) + 2, y + 12), label(row.arm), "label")
        canvas.text((WIDTH - 12, y + 12), signed(gap), "label", anchor="end")
        left, right = sorted((x(0.0), x(gap.mean)))
        canvas.bar(left, y + 17, right - left, 11, f"fill {css}", title=said)
        if gap.low is not None and gap.high is not None:
            draw_whisker(canvas, (x(gap.low), y + 22.5), (x(gap.high), y + 22.5), "whisker")
    return str(canvas)
