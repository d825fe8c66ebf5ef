"""The table of a comparison as text: its columns, in Markdown and for a terminal."""

from collections.abc import Sequence

from slipstream.report.grid import ALL, NONE
from slipstream.report.table import TableRow, figure, percent, signed


def markdown(rows: Sequence[TableRow]) -> str:
    """Return rows as a Markdown table; columns that would say the same in every row are left out."""
    columns = table_columns(rows)
    lines = [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---" if name in TEXT_COLUMNS else "---:" for name in columns) + " |",
    ]
    for index in range(len(rows)):
        lines.append("| " + " | ".join(column[index].replace("|", "\\|") for column in columns.values()) + " |")
    return "\n".join(lines) + "\n"


def aligned(rows: Sequence[TableRow]) -> str:
    """Return rows as lines of plain text, column under column."""
    columns = table_columns(rows)
    lines = [""] * (len(rows) + 1)
    for name, column in columns.items():
        width = max(map(len, (name, *column)))
        for index, text in enumerate((name, *column)):
            lines[index] += (text.ljust(width) if name in TEXT_COLUMNS else text.rjust(width)) + "  "
    return "\n".join(line.rstrip() for line in lines)


TEXT_COLUMNS = ("rule", "workers", "remedy", "delayed", "batch")
"""Columns of names; the others are figures."""


def table_columns(rows: Sequence[TableRow]) -> dict[str, list[str]]:
    """Return the cells of the table for people, by the name of the column."""
    columns = {
        "rule": [row.arm.rule for row in rows],
        "workers": [row.arm.workers for row in rows],
        "remedy": [row.arm.remedy for row in rows],
        "delayed": [row.arm.read if row.arm.delay else "" for row in rows],
        "batch": [row.arm.batch for row in rows],
        "delay": ["" if row.arm.workers else str(row.arm.delay) for row in rows],
        "staleness (max)": [_staleness(row) for row in rows],
        "lr": [f"{row.arm.lr:g}" for row in rows],
        "val loss": [figure(row.val_loss) for row in rows],
        "perplexity": [figure(row.perplexity, digits=2) for row in rows],
        "gap to sync": [signed(row.gap) if not row.arm.is_plain_synchronous else "" for row in rows],
        "gap to best sync": [signed(row.gap_to_best) if row.best_sync != row.arm else "" for row in rows],
        "in perplexity": [
            signed(row.perplexity_gap, digits=2) if not row.arm.is_plain_synchronous else "" for row in rows
        ],
        "gap closed": [_closed(row) for row in rows],
        _against(rows): ["" if row.against is None else signed(row.against) for row in rows],
        "seeds": [str(len(row.result.val_loss)) for row in rows],
        "diverged": [str(row.result.count("diverged") or "") for row in rows],
        "crashed": [str(row.result.count("crashed") or "") for row in rows],
        "spikes": [str(row.result.num_spikes or "") for row in rows],
    }
    has_workers = any(columns["workers"])
    is_idle = {
        "workers": not has_workers,
        "delay": has_workers and not any(row.arm.delay for row in rows if not row.arm.workers),
        "perplexity": not has_workers,
        "in perplexity": not has_workers,
        "delayed": all(row.arm.read == ALL for row in rows),
        "batch": len(set(columns["batch"])) == 1,
        # Where plain synchronous training is the best, both gaps are the same.
        "gap to best sync": columns["gap to best sync"] == columns["gap to sync"],
        **{name: not any(columns[name]) for name in _MAY_BE_EMPTY if name in columns},
    }
    return {name: column for name, column in columns.items() if not is_idle.get(name)}


_MAY_BE_EMPTY = ("staleness (max)", "gap closed", "against", "diverged", "crashed", "spikes")


def _against(rows: Sequence[TableRow]) -> str:
    """Return the name of the column with the difference to another remedy: where all have the same one, with it."""
    names = {row.against_remedy for row in rows if row.against is not None}
    return f"against {names.pop()}" if len(names) == 1 else "against"


def _staleness(row: TableRow) -> str:
    found = row.staleness
    return f"{found['staleness_mean']:.2f} ({found['staleness_max']})" if found else ""


def _closed(row: TableRow) -> str:
    """Return the share closed; a share of a gap that cannot be told from 0 says nothing."""
    if row.arm.remedy == NONE or row.closed is None or (row.closed.interval is None and len(row.gaps) > 1):
        return ""
    return percent(row.closed)
