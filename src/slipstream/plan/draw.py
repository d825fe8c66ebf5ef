"""Drawings of timelines: in the terminal, and as one self-contained SVG file.

Forward and backward differ in hue and in form (a line at the top or at the bottom of the bar), so neither a
terminal without colours nor a reader who does not see the hues loses anything.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from rich.text import Text

from slipstream.plan.simulate import Span, Timeline

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_STYLES = {
    "F0": "white on color(25)",
    "F1": "black on color(117)",
    "B0": "black on color(214)",
    "B1": "black on color(223)",
    "O": "reverse",
    "idle": "dim",
}


def draw_text(timeline: Timeline, *, width: int = 100) -> str:
    """Draw a timeline with plain characters, one row a rank.

    Numbers are microbatches: ``7▔▔`` a forward, ``₇▁▁`` a backward, ``█`` an optimizer step, ``·`` idle.

    Args:
        timeline: What to draw.
        width: Columns; what does not fit is cut off at the right.

    Example:
        >>> from slipstream.plan.simulate import SimulateConfig, build_timeline
        >>> print(draw_text(build_timeline(SimulateConfig(num_stages=2, num_microbatches=2, num_batches=2)), width=80))
        stage 0  0▔▔1▔▔······₀▁▁▁▁▁2▔▔₁▁▁▁▁▁3▔▔₂▁▁▁▁▁···₃▁▁▁▁▁
        stage 1  ···0▔▔₀▁▁▁▁▁1▔▔₁▁▁▁▁▁2▔▔₂▁▁▁▁▁3▔▔₃▁▁▁▁▁······
        0▔ forward  ₀▁ backward  █ optimizer step  · idle   20.0 % idle, 7.5 ms a step
    """
    return draw_rich(timeline, width=width).plain


def draw_rich(timeline: Timeline, *, width: int = 100) -> Text:
    """Draw what :func:`draw_text` draws in colours, batches in alternate shades, for a rich console."""
    names = _row_names(timeline)
    title = len(names[-1]) + 2 if names else 0
    scale, columns = _columns(timeline, width - title)
    text = Text(no_wrap=True, overflow="crop")
    for name, spans in zip(names, timeline.ranks):
        text.append(name.ljust(title))
        at = 0
        for span in spans:
            begin = min(columns, round((span.start_ms - timeline.start_ms) * scale))
            end = min(columns, round((span.end_ms - timeline.start_ms) * scale))
            text.append("·" * (begin - at), _STYLES["idle"])
            text.append(_bar(span, end - max(begin, at)), _STYLES[_kind(span, timeline)])
            at = max(at, end)
        text.append("·" * (columns - at), _STYLES["idle"])
        text.append("…\n" if columns < round(timeline.makespan_ms * scale) else "\n")
    legend = "0▔ forward  ₀▁ backward  █ optimizer step  · idle   "
    text.append(legend + f"{timeline.bubble_fraction:.1%} idle".replace("%", " %") + _step_text(timeline))
    return text


def _row_names(timeline: Timeline) -> list[str]:
    """Name rows after their stages where each rank holds one."""
    stages = [{span.action.stage for span in spans} for spans in timeline.ranks]
    if all(held == {rank} for rank, held in enumerate(stages)):
        return [f"stage {rank}" for rank in range(len(stages))]
    return [f"rank {rank}" for rank in range(len(stages))]


def _columns(timeline: Timeline, available: int) -> tuple[float, int]:
    """Return columns per ms, so that a forward has one to three of them, and the columns used."""
    forwards = [s.end_ms - s.start_ms for spans in timeline.ranks for s in spans if s.action.op == "F"]
    unit = statistics.median(forwards) if forwards else 0.0
    unit = unit or timeline.makespan_ms or 1.0
    each = min(3, max(1, math.floor(available * unit / timeline.makespan_ms))) if timeline.makespan_ms else 1
    scale = each / unit
    return scale, max(1, min(available - 1, round(timeline.makespan_ms * scale)))


def _bar(span: Span, width: int) -> str:
    if span.action.op == "O":
        return "█" * width
    label = str(span.action.microbatch)
    label = label if len(label) <= width else label[len(label) - width :]
    if span.action.op == "F":
        return label.ljust(width, "▔")
    return label.translate(_SUBSCRIPTS).ljust(width, "▁")


def _kind(span: Span, timeline: Timeline) -> str:
    action = span.action
    if action.microbatch is None:
        return "O"
    shade = action.microbatch // timeline.num_microbatches % 2
    return f"{'F' if action.op == 'F' else 'B'}{shade}"


def _step_text(timeline: Timeline) -> str:
    return f", {timeline.step_time_ms:.4g} ms a step"


class _Frame(NamedTuple):
    """Where things stand in the SVG, in pixels."""

    width: int
    left: float
    scale: float
    row: int = 24
    gap: int = 4

    def x(self, time_ms: float) -> float:
        return self.left + time_ms * self.scale


# Blue and orange of Okabe and Ito's palette and a lighter shade of each, with ink that reads on them.
_CSS = """
.timeline text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#24292f}
.timeline .title{font-size:15px;font-weight:600}.timeline .head{font-weight:600}.timeline .quiet{fill:#57606a}
.timeline .paper{fill:#ffffff}.timeline .track{fill:#eef0f2}.timeline .hatch{stroke:#c3c9cf;stroke-width:1.2}
.timeline .axis{stroke:#8c959f;stroke-width:1}.timeline .F0{fill:#0b62a8}.timeline .F1{fill:#8cc4ee}
.timeline .O{fill:#1b1f24}.timeline .b0{stop-color:#e69f00}.timeline .b1{stop-color:#f8d48a}
.timeline .edge{stop-color:#8a4b00}.timeline .n{font-size:11px;text-anchor:middle;fill:#1b1f24}
.timeline .nF0,.timeline .nO{fill:#ffffff}
@media (prefers-color-scheme:dark){
.timeline text{fill:#e6edf3}.timeline .quiet{fill:#9198a1}.timeline .paper{fill:#0d1117}.timeline .track{fill:#1c2229}
.timeline .hatch{stroke:#3d444d}.timeline .axis{stroke:#656c76}.timeline .F0{fill:#1f7fd1}.timeline .F1{fill:#a5d3f7}
.timeline .O{fill:#f0f3f6}.timeline .n{fill:#1b1f24}.timeline .nF0{fill:#ffffff}.timeline .nO{fill:#1b1f24}}
"""


def draw_svg(
    panels: Sequence[tuple[str, Timeline]], *, title: str, width: int = 700, end_ms: float | None = None
) -> str:
    """Draw timelines above one another on one time axis, as an SVG that needs no other file.

    It follows the reader's light or dark colour scheme. A number is the microbatch within its batch; batches
    alternate between two shades; pointing at a bar shows its action and its times.

    Args:
        panels: A heading and a timeline for each panel.
        title: Headline, and the picture's name for screen readers.
        width: Pixels; texts stay readable down to 600.
        end_ms: Time after which nothing is drawn; none: the longest timeline's end.

    Returns:
        The SVG document.
    """
    longest = max((timeline.makespan_ms for _, timeline in panels), default=0.0)
    shown_ms = min(longest, end_ms) if end_ms is not None else longest
    left = 66.0
    frame = _Frame(width, left, (width - left - 18) / (shown_ms or 1.0))
    body: list[str] = []
    y = 74.0
    for heading, timeline in panels:
        body += _panel(heading, timeline, frame, y, shown_ms)
        y += 30 + len(timeline.ranks) * (frame.row + frame.gap) + 12
    body += _axis(frame, y - 6, shown_ms)
    height = math.ceil(y + 40)
    summary = "; ".join(f"{heading}: {timeline.bubble_fraction:.1%} idle" for heading, timeline in panels)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" class="timeline" role="img" aria-label={quoteattr(f"{title}. {summary}")}>',
            f"<style>{_CSS}</style>",
            _definitions(),
            f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
            f'<text class="title" x="16" y="28">{escape(title)}</text>',
            *_legend(),
            *body,
            "</svg>\n",
        ]
    )


def _definitions() -> str:
    # A backward has a dark foot: its form, where the hue is not seen. The two stops at one place make a sharp edge.
    gradients = "".join(
        f'<linearGradient id="timeline-B{i}" x2="0" y2="1"><stop class="b{i}" offset=".8"/>'
        f'<stop class="edge" offset=".8"/></linearGradient>'
        for i in (0, 1)
    )
    return (
        f'<defs>{gradients}<pattern id="timeline-idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="track" width="6" height="6"/>'
        '<line class="hatch" y2="6"/></pattern></defs>'
    )


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    fill = f'fill="url(#timeline-{kind})"' if kind in ("B0", "B1", "idle") else f'class="{kind}"'
    return f'<rect {fill} x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" rx="2"/>'


def _legend() -> Iterator[str]:
    x = 16.0
    entries = (("F0", "F1", "forward"), ("B0", "B1", "backward"), ("O", "", "optimizer step"), ("idle", "", "idle"))
    for kind, other, name in entries:
        yield _box(kind, x, 42, 14, 14)
        if other:
            yield _box(other, x + 15, 42, 14, 14)
            x += 15
        yield f'<text x="{x + 19:g}" y="53">{name}</text>'
        x += 34 + 6.4 * len(name)
    yield f'<text class="quiet" x="{x:g}" y="53">number: microbatch; shades: batches in turn</text>'


def _panel(heading: str, timeline: Timeline, frame: _Frame, y: float, shown_ms: float) -> Iterator[str]:
    idle = f"{100 * timeline.bubble_fraction:.0f} % idle{_step_text(timeline)}"
    yield f'<text class="head" x="16" y="{y + 18:g}">{escape(heading)}</text>'
    yield f'<text x="{frame.width - 18}" y="{y + 18:g}" text-anchor="end">{idle}</text>'
    end = min(timeline.makespan_ms, shown_ms)
    for row, (name, spans) in enumerate(zip(_row_names(timeline), timeline.ranks)):
        top = y + 28 + row * (frame.row + frame.gap)
        yield f'<text class="quiet" x="16" y="{top + 16:g}">{name}</text>'
        yield _box("idle", frame.left, top, end * frame.scale, frame.row)
        for span in spans:
            start = span.start_ms - timeline.start_ms
            if span.end_ms > span.start_ms and start < end:
                yield from _span(span, timeline, frame, top, min(span.end_ms - timeline.start_ms, end))


def _span(span: Span, timeline: Timeline, frame: _Frame, top: float, end_ms: float) -> Iterator[str]:
    x = frame.x(span.start_ms - timeline.start_ms)
    width = frame.x(end_ms) - x
    kind = _kind(span, timeline)
    hint = f"{span.action} {span.start_ms:.4g} to {span.end_ms:.4g} ms"
    # A hair of paper between neighbours.
    yield f"<g><title>{hint}</title>{_box(kind, x + 0.4, top, max(width - 0.8, 0.3), frame.row)}"
    microbatch = span.action.microbatch
    label = "O" if microbatch is None else str(microbatch % timeline.num_microbatches)
    if width >= 2 + 6.2 * len(label):
        yield f'<text class="n n{kind}" x="{x + width / 2:.2f}" y="{top + 15:g}">{label}</text>'
    yield "</g>"


def _axis(frame: _Frame, y: float, shown_ms: float) -> Iterator[str]:
    yield f'<line class="axis" x1="{frame.left}" x2="{frame.x(shown_ms):.1f}" y1="{y:g}" y2="{y:g}"/>'
    if shown_ms <= 0:
        return
    rough = shown_ms / 8
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough)
    for index in range(math.floor(shown_ms / step + 1e-9) + 1):
        x = frame.x(index * step)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y:g}" y2="{y + 4:g}"/>'
        yield f'<text class="quiet" x="{x:.1f}" y="{y + 17:g}" text-anchor="middle">{index * step:g}</text>'
    yield f'<text class="quiet" x="16" y="{y + 17:g}">ms</text>'
