"""Draws every picture of the concept pages from the simulators, the sequencer and the update rule: `make docs`.

    python docs/make/pictures.py [--out docs/pictures]

The pictures of docs/methods come from trained runs and have a program of their own, benchmarks/methods.py.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from feedback_pictures import extrapolation
from sheet import Sheet
from worker_pictures import staleness_of_a_worker, who_waits

from slipstream.plan.draw import draw_svg
from slipstream.plan.simulate import SimulateConfig, Span, Timeline, build_timeline
from slipstream.report.svg import Scale, draw_axes

ROOT = Path(__file__).parents[2]


def flush() -> str:
    """1F1B beside PipeDream-2BW."""
    sizes = {"num_stages": 4, "num_microbatches": 4, "num_batches": 3, "optimizer_ms": 0.8}
    panels = [
        (heading, build_timeline(SimulateConfig(pipeline_schedule=name, **sizes)))
        for heading, name in (
            ("1F1B: the pipeline drains at every step", "one_f_one_b"),
            ("PipeDream-2BW: it never drains", "two_bw"),
        )
    ]
    return draw_svg(panels, title="Four stages, four microbatches a batch, three batches")


def bubbles() -> str:
    """Time of a step over its work, by microbatches, for eight stages."""
    title = "Eight stages: time of a step over the time of its work"
    stages, counts = 8, (8, 12, 16, 24, 32, 48, 64)
    lines = (
        ("l1", "1F1B and GPipe", "one_f_one_b"),
        ("l3", "interleaved, two stages a rank", "interleaved"),
        ("l2", "PipeDream-2BW", "two_bw"),
    )
    sheet = Sheet(330, title=title, label="1F1B loses most with few microbatches; 2BW loses nothing with any number.")
    x = Scale(low=8, high=64, start=62, end=680, log=True)
    y = Scale(low=0.95, high=2.0, start=250, end=46)
    ticks = [(float(count), str(count)) for count in counts]
    draw_axes(sheet, x, y, x_label="microbatches a batch", y_label="step / work", x_ticks=ticks, y_format=".1f")
    for row, (css, name, schedule) in enumerate(lines):
        points = []
        for count in counts:
            config = SimulateConfig(
                pipeline_schedule=schedule, num_stages=stages, num_microbatches=count, num_batches=6
            )
            points.append((count, build_timeline(config).step_time_ms / (3.0 * count)))
        sheet.line([(x(count), y(value)) for count, value in points], f"line {css}")
        left = (62, 212, 462)[row]
        sheet.line([(left, 308), (left + 22, 308)], f"line {css}")
        sheet.text((left + 28, 312), name)
    return sheet.file()


def _batch_version(span: Span) -> int:
    return int(span.action.version or 0)


def _timeline(sheet: Sheet, timeline: Timeline, *, top: float, left: float, scale: float, row: float) -> float:
    """Draw the bars of each stage with the version that they read; return the bottom."""
    for stage, spans in enumerate(timeline.ranks):
        y = top + stage * row
        sheet.text((16, y + 15), f"stage {stage}", "quiet")
        sheet.idle(left, y, timeline.makespan_ms * scale, 22)
        for span in spans:
            begin, width = left + span.start_ms * scale, (span.end_ms - span.start_ms) * scale
            version = _batch_version(span)
            if span.action.op == "F":
                sheet.box(begin, y, width, 22, f"c{version % 2}", text=str(version), title=f"{span.action}")
            elif span.action.op == "B":
                sheet.box(begin, y + 7, width, 15, f"c{version % 2}", text=str(version), title=f"{span.action}")
            elif span.action.op == "O":
                sheet.box(begin, y, width, 22, "step", title=f"{span.action}")
    return top + len(timeline.ranks) * row


def versions_read() -> str:
    """Which version each forward and backward reads, at two depths."""
    title = "Which version of the weights each forward and backward reads"
    sheet = Sheet(
        318, title=title, label="At any depth each batch reads one version, on every stage, one older than the newest."
    )
    sheet.legend(
        42,
        [
            ("c0", "even version"),
            ("c1", "odd version"),
            ("step", "optimizer step"),
            ("", "high: forward; low: backward"),
        ],
    )
    top = 78.0
    for stages, microbatches, batches in ((2, 2, 6), (4, 4, 3)):
        config = SimulateConfig(num_stages=stages, num_microbatches=microbatches, num_batches=batches, optimizer_ms=0.7)
        timeline = build_timeline(config)
        sheet.text((16, top + 12), f"{stages} stages, {microbatches} microbatches a batch, {batches} batches", "head")
        top = _timeline(sheet, timeline, top=top + 20, left=66, scale=616 / timeline.makespan_ms, row=27) + 16
    return sheet.file()


def staleness() -> str:
    """Who reads which version and makes which, for delays of 0, 1 and 3."""
    title = "Batches read a version of the weights, and their gradients make the next"
    rows = ((0, "delay 0: synchronous"), (1, "delay 1: PipeDream-2BW, with any number of stages"), (3, "delay 3"))
    sheet = Sheet(
        56 + 142 * len(rows), title=title, label="With a delay of tau, batch b reads version b - tau and makes b + 1."
    )
    num_batches, left, width = 6, 132.0, 89.0
    for index, (delay, name) in enumerate(rows):
        top = 52 + 142 * index
        sheet.text((16, top + 8), name, "head")
        y_version, y_batch = top + 36, top + 92
        sheet.text((16, y_version + 4), "versions", "quiet")
        sheet.text((16, y_batch + 4), "batches", "quiet")
        sheet.text((16, y_batch + 30), "staleness", "quiet")
        for batch in range(num_batches):
            read = max(batch - delay, 0)
            at = left + (batch + 0.5) * width
            late = " strong" if batch - read else ""
            sheet.arrow((left + read * width, y_version), (at, y_batch), late, gap=15)
            sheet.arrow((at, y_batch), (left + (batch + 1) * width, y_version), "dashed", gap=15)
        for batch in range(num_batches):
            at = left + (batch + 0.5) * width
            sheet.bar(at - 13, y_batch - 11, 26, 22, "c2")
            sheet.text((at, y_batch + 4), f"b{batch}", "on2", anchor="middle")
            sheet.text((at, y_batch + 30), str(batch - max(batch - delay, 0)), anchor="middle")
        for version in range(num_batches + 1):
            at = left + version * width
            sheet.dot((at, y_version), "node", radius=12)
            sheet.text((at, y_version + 4), f"v{version}", anchor="middle")
    return sheet.file()


def buffers() -> str:
    """What a stage holds: two buffers of published weights, and the optimizer's own."""
    config = SimulateConfig(num_stages=3, num_microbatches=3, num_batches=6, optimizer_ms=1.0)
    timeline = build_timeline(config)
    spans = [span for span in timeline.ranks[0] if span.end_ms <= 48]
    left, scale, top = 120.0, 562 / 48, 84.0
    title = "Stage 0 of three: two buffers of published weights, and the optimizer's own"
    sheet = Sheet(276, title=title, label="A version is written into the buffer that nobody reads any more.")
    sheet.legend(
        42,
        [("c0", "reads buffer 0"), ("c1", "reads buffer 1"), ("pale0", "kept, not read"), ("step", "optimizer step")],
    )
    sheet.text((16, top + 15), "computes")
    for span in spans:
        begin, length = left + span.start_ms * scale, (span.end_ms - span.start_ms) * scale
        high = span.action.op == "F"
        if span.action.op in "FB":
            css = f"c{_batch_version(span) % 2}"
            sheet.box(begin, top if high else top + 7, length, 22 if high else 15, css, title=f"{span.action}")
        elif span.action.op == "O":
            sheet.box(begin, top, length, 22, "step", title=f"{span.action}")
    steps = [span.end_ms for span in spans if span.action.op == "O"]
    published = [0.0, *steps]
    for buffer in (0, 1):
        y = top + 42 + 34 * buffer
        sheet.text((16, y + 15), f"buffer {buffer} (x)")
        for version in range(buffer, len(published), 2):
            begin = published[version]
            end = published[version + 2] if version + 2 < len(published) else 48.0
            sheet.box(left + begin * scale, y, (end - begin) * scale, 22, f"pale{buffer}")
            reads = [span for span in spans if span.action.op in "FB" and _batch_version(span) == version]
            if reads:
                first, last = reads[0].start_ms, reads[-1].end_ms
                sheet.box(left + first * scale, y, (last - first) * scale, 22, f"c{buffer}", text=f"version {version}")
    y = top + 42 + 68
    sheet.text((16, y + 15), "masters (y)")
    for version, begin in enumerate(published):
        end = published[version + 1] if version + 1 < len(published) else 48.0
        sheet.box(left + begin * scale, y, (end - begin) * scale, 22, "track")
        if (end - begin) * scale > 40:
            sheet.text((left + (begin + end) / 2 * scale, y + 15), f"y{version}", anchor="middle")
    sheet.text((left, y + 46), "time; high bars are forwards, low ones backwards", "quiet")
    return sheet.file()


PICTURES: Mapping[str, Callable[[], str]] = {
    "flush": flush,
    "bubbles": bubbles,
    "versions_read": versions_read,
    "staleness": staleness,
    "buffers": buffers,
    "extrapolation": extrapolation,
    "who_waits": who_waits,
    "staleness_of_a_worker": staleness_of_a_worker,
}
"""By file name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder to write into")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        path = args.out / f"{name}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
