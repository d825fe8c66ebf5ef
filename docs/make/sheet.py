"""A page to draw a concept on: the look that all concept pictures share, arrows, and a file that needs no other."""

import html
import math

from slipstream.report.svg import Canvas, Point

WIDTH = 700
"""Of every picture; texts stay readable down to 560."""

# Blue and orange of Okabe and Ito's palette, as in the drawings of timelines; what colours say is always written, too.
STYLE = """
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#24292f}
.title{font-size:15px;font-weight:600}.head{font-weight:600}.quiet,.name{fill:#57606a}
.on0,.onlate{fill:#ffffff}.on1,.on2{fill:#1b1f24}.paper{fill:#ffffff}.track{fill:#eef0f2}
.c0{fill:#0b62a8}.c1{fill:#e69f00}.c2{fill:#8cc4ee}.step{fill:#1b1f24}.late{fill:#b3261e}
.pale0{fill:#0b62a8;fill-opacity:.25}.pale1{fill:#e69f00;fill-opacity:.3}
.rule,.zero{fill:none;stroke:#d5d9dd}.axis{fill:none;stroke:#8c959f}
.arrow{fill:none;stroke:#57606a;stroke-width:1.4}.arrow.strong{stroke:#b3261e;stroke-width:2}
.dashed{stroke-dasharray:4 3}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.l0{stroke:#24292f}.l1{stroke:#b3261e}.l2{stroke:#0b62a8}.l3{stroke:#c07f00}
.d0{fill:#24292f}.d2{fill:#0b62a8}.node{fill:#ffffff;stroke:#24292f;stroke-width:1.4}
.hatch{stroke:#c3c9cf;stroke-width:1.2}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.quiet,.name{fill:#9198a1}.on0,.onlate{fill:#ffffff}.on1,.on2{fill:#1b1f24}
.paper{fill:#0d1117}.track{fill:#1c2229}.c0{fill:#1f7fd1}.c1{fill:#e69f00}.c2{fill:#a5d3f7}.step{fill:#f0f3f6}
.late{fill:#d64a42}.pale0{fill:#1f7fd1;fill-opacity:.35}.pale1{fill:#e69f00;fill-opacity:.35}
.rule,.zero{stroke:#2d333b}.axis{stroke:#656c76}.arrow{stroke:#9198a1}.arrow.strong{stroke:#ff7b72}
.l0{stroke:#e6edf3}.l1{stroke:#ff7b72}.l2{stroke:#6aa8ff}.l3{stroke:#f0b429}
.d0{fill:#e6edf3}.d2{fill:#6aa8ff}.node{fill:#0d1117;stroke:#e6edf3}.hatch{stroke:#3d444d}}
"""

LETTER = 6.4
"""Width of a letter, on average, a little too large: what is beside a text leaves it so much room."""


class Sheet(Canvas):
    """A picture of its own.

    Args:
        height: In pixels.
        title: Headline, and the picture's name for those who cannot see it.
        label: What it shows, in a sentence or two, for those.
    """

    def __init__(self, height: float, *, title: str, label: str) -> None:
        super().__init__(height, label=f"{title}. {label}", width=WIDTH)
        self.bar(0, 0, WIDTH, height, "paper")
        self.text((16, 28), title, "title")

    def arrow(self, begin: Point, end: Point, css: str = "", *, gap: float = 0.0, bend: float = 0.0) -> None:
        """Draw an arrow.

        Args:
            begin: Where from.
            end: Where to.
            css: Further classes.
            gap: Room left at both ends.
            bend: How far the middle lies beside the straight line.
        """
        (x0, y0), (x1, y1) = begin, end
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        x0, y0, x1, y1 = x0 + gap * ux, y0 + gap * uy, x1 - gap * ux, y1 - gap * uy
        middle = ((x0 + x1) / 2 - bend * uy, (y0 + y1) / 2 + bend * ux)
        lean = math.atan2(y1 - middle[1], x1 - middle[0])
        head = " ".join(
            f"{'M' if side < 0 else 'L'}{px:.1f},{py:.1f}"
            for side, (px, py) in (
                (-1, (x1 - 7 * math.cos(lean - 0.45), y1 - 7 * math.sin(lean - 0.45))),
                (0, (x1, y1)),
                (1, (x1 - 7 * math.cos(lean + 0.45), y1 - 7 * math.sin(lean + 0.45))),
            )
        )
        path = f"M{x0:.1f},{y0:.1f} Q{middle[0]:.1f},{middle[1]:.1f} {x1:.1f},{y1:.1f}"
        self._parts.append(
            f'<path class="arrow {css}" d="{path}"/><path class="arrow {css.replace("dashed", "")}" d="{head}"/>'
        )

    def idle(self, left: float, top: float, width: float, height: float) -> None:
        """Hatch where nothing is done."""
        self._parts.append(
            f'<rect fill="url(#idle)" x="{left:.1f}" y="{top:.1f}" width="{max(width, 0):.1f}" height="{height:g}" '
            'rx="2"/>'
        )

    def box(
        self, left: float, top: float, width: float, height: float, css: str, *, text: str = "", title: str = ""
    ) -> None:
        """Draw a bar with a hair of paper on both sides, and a text in it where there is room."""
        self.bar(left + 0.5, top, max(width - 1, 0.5), height, css, title=title)
        if text and width >= LETTER * len(text) + 3:
            ink = css.replace("c", "on").replace("late", "onlate")
            self.text((left + width / 2, top + height / 2 + 4), text, ink, anchor="middle")

    def legend(self, y: float, entries: list[tuple[str, str]], *, x: float = 16) -> None:
        """Say what boxes mean, in one row; a class of ``idle`` is hatched."""
        for css, name in entries:
            if css == "idle":
                self.idle(x, y, 14, 14)
            elif css:
                self.bar(x, y, 14, 14, css)
            self.text((x + (19 if css else 0), y + 11), name, "" if css else "quiet")
            x += 36 + LETTER * len(name)

    def file(self) -> str:
        """Return the picture as the text of an SVG file."""
        whole = super().__str__()
        end = whole.index(">") + 1
        head = whole[:end].replace(
            "<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height:g}" ', 1
        )
        hatch = (
            '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect class="track" width="6" height="6"/><line class="hatch" y2="6"/></pattern></defs>'
        )
        return f"{head}<title>{html.escape(self._label)}</title><style>{STYLE}</style>{hatch}{whole[end:]}\n"
