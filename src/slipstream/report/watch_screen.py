"""What ``slipstream watch`` shows on a terminal."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.report.statistics import smoothed
from slipstream.report.workers import newest_figures
from slipstream.train.metrics import duration, quantity

if TYPE_CHECKING:
    from slipstream.report.watch import View

BLOCKS = "▁▂▃▄▅▆▇█"

STYLES = {"running": "green", "finished": "bold green", "stopped": "yellow", "failed": "bold red", "unknown": "yellow"}

MAX_WORKERS = 12
"""With a row of their own, where the terminal is high enough."""


def fitting(view: "View", console: Console) -> RenderableType:
    """Return the picture of a run with as many workers as the terminal has lines for."""
    picture = screen(view)
    too_many = len(console.render_lines(picture)) - console.height
    if too_many <= 0:
        return picture
    num_workers = len(newest_figures(view.rows).get("microbatches_by_worker", {}))
    told_of_more = num_workers <= MAX_WORKERS  # a line that comes in addition
    return screen(view, max_workers=max(min(num_workers, MAX_WORKERS) - too_many - told_of_more, 0))


def screen(view: "View", *, max_workers: int = MAX_WORKERS) -> RenderableType:
    """Return the picture of a run, with at most so many workers in rows of their own."""
    num_steps = view.config.train.num_steps
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1, no_wrap=True)
    head.add_column(justify="right")
    head.add_row(Text(view.name, style="bold"), Text(view.state, style=STYLES[view.state]))
    bar = Table.grid(expand=True)  # a bar alone leaves its line open, and what follows is lost beyond the edge
    bar.add_row(ProgressBar(total=num_steps, completed=view.step))
    parts: list[RenderableType] = [head, bar]
    if view.rows:
        eta = "" if view.has_ended else f", {duration(view.eta_s)} left"
        parts += [
            Text(f"step {view.step} of {num_steps}{eta}", style="dim"),
            Text(),
            _figures(view),
            Text(),
            *_curves(view),
        ]
    else:
        parts.append(Text("no step yet", style="dim"))
    if workers := _workers(view, max_workers):
        parts += [Text(), workers]
    parts += [Text(f"! {warning}", style="bold yellow") for warning in view.warnings]
    if view.message:
        parts.append(Text(view.message.strip().splitlines()[-1], style="red"))
    return Panel(Group(*parts), border_style="dim")


def _figures(view: "View") -> Table:
    row, table = view.rows[-1], Table.grid(padding=(0, 3, 0, 0))
    evaluation = next((each for each in reversed(view.evaluations) if each["step"]), None)
    best = min((each["val_loss"] for each in view.evaluations if each["step"]), default=math.nan)
    cells = [
        ("loss", f"{_recent(view, 'loss'):.3f}"),
        ("validation", "-" if evaluation is None else f"{evaluation['val_loss']:.4f} (best {best:.4f})"),
        ("tokens/s", quantity(_recent(view, "tokens_per_s"))),
        ("learning rate", f"{row['lr']:.2e}"),
        ("gradient norm", f"{row['grad_norm']:.2f}"),
        ("staleness", f"{row['staleness_mean']:.2f} / {row['staleness_max']}"),
        ("waits for data", f"{row['data_fraction']:.1%}"),
        ("memory", f"{quantity(row['peak_memory_bytes'])}B"),
    ]
    if row["bubble_fraction"] is not None:
        cells.append(("idle", f"{_recent(view, 'bubble_fraction'):.0%}"))
    if row["mfu"] is not None:
        cells.append(("of peak", f"{row['mfu']:.1%}"))
    if "router" in row:
        cells.append(("expert load", f"{row['router']['load_min']:.2f} to {row['router']['load_max']:.2f}"))
    for at in range(0, len(cells), 2):
        pair: list[Text] = []
        for name, value in cells[at : at + 2]:
            pair += [Text(name, style="dim"), Text(value)]
        table.add_row(*pair)
    return table


def _recent(view: "View", key: str) -> float:
    """Return the mean of the newest rows that have a figure."""
    values = [float(row[key]) for row in list(view.rows)[-20:] if row[key] is not None]
    return sum(values) / len(values) if values else 0.0


def _curves(view: "View") -> list[RenderableType]:
    losses = [float(row["loss"]) for row in view.rows]
    soft = smoothed(losses, span=max(len(losses) // 20, 2))
    rates = [float(row["tokens_per_s"]) for row in view.rows if row["tokens_per_s"] is not None]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(Text("loss", style="dim"), Text(sparkline(soft), style="cyan"), f"{soft[0]:.2f} to {soft[-1]:.2f}")
    if rates:
        table.add_row(Text("tokens/s", style="dim"), Text(sparkline(rates, low=0.0), style="cyan"), "")
    return [table]


def sparkline(values: Sequence[float], *, width: int = 40, low: float | None = None) -> str:
    """Return a curve as one line of blocks, each the mean of a stretch.

    Args:
        values: The curve; what is not finite is left out.
        width: Blocks at most.
        low: Figure of the lowest block; none: the smallest.

    Example:
        >>> sparkline([3.0, 2.0, 1.0, 1.0]), sparkline([1.0, 1.0]), sparkline([])
        ('█▅▁▁', '▁▁', '')
    """
    known = [value for value in values if math.isfinite(value)]
    width = min(width, len(known))
    if not width:
        return ""
    cuts = [round(position * len(known) / width) for position in range(width + 1)]
    means = [sum(known[begin:end]) / (end - begin) for begin, end in itertools.pairwise(cuts)]
    bottom, top = min(means) if low is None else low, max(means)
    span = (top - bottom) or 1.0
    return "".join(BLOCKS[min(int((mean - bottom) / span * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)


def _workers(view: "View", max_workers: int) -> RenderableType | None:
    """Return who did how much, as of the newest row that says so."""
    found = newest_figures(view.rows)
    done: Mapping[str, int] = found.get("microbatches_by_worker", {})
    if not done:
        return None
    total = max(sum(done.values()), 1)
    table = Table.grid(padding=(0, 2, 0, 0))
    for worker, count in sorted(done.items(), key=lambda item: int(item[0]))[:max_workers]:
        bar = "█" * round(20 * count / max(done.values(), default=1)) if count else ""
        table.add_row(Text(f"worker {worker}", style="dim"), Text(bar, style="cyan"), f"{count / total:.1%}")
    if len(done) > max_workers:
        table.add_row(Text(f"and {len(done) - max_workers} more", style="dim"), "", "")
    share = f"{found['throughput_share']:.1%} of the workers' own speeds, {found['pushes_rejected']} gradients rejected"
    table.add_row(Text("all", style="dim"), share, "")
    return table
