"""The report of a comparison: one HTML file that needs no network and follows the reader's light or dark scheme."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import tomli_w

from slipstream.config import Config, load_toml
from slipstream.models.shapes import num_parameters
from slipstream.report.charts import sections
from slipstream.report.columns import TEXT_COLUMNS, table_columns
from slipstream.report.comparison import Comparison
from slipstream.report.grid import NONE
from slipstream.report.page import card, escape, page, part, section_html, span, table_html
from slipstream.report.statistics import SMOOTHING, SPIKE_TEXT, Estimate
from slipstream.report.table import TableRow, figure, percent, signed
from slipstream.report.verdict import RuleVerdict, cause, rule_verdicts
from slipstream.train.metrics import duration, quantity
from slipstream.train.rundir import RunDir


def render(comparison: Comparison, folder: Path) -> str:
    """Return the report as HTML.

    Args:
        comparison: What came out of a grid.
        folder: Of its run directories; the resolved settings of one are read there.
    """
    grid, verdicts = comparison.grid, rule_verdicts(comparison.best)
    resolved = _resolved_config(comparison, folder)
    said = {each.sentence for each in verdicts}
    return page(
        kicker="Slipstream comparison",
        title=grid.title or f"Comparison of {', '.join(row.name for row in grid.rules)}",
        lead=grid.description,
        facts=_facts(comparison, resolved),
        answers=[sentence for sentence in comparison.verdict if sentence not in said],
        cards=[_card(verdict) for verdict in verdicts],
        body=[
            *map(section_html, sections(comparison.results, comparison.best)),
            part("Tables", _tables(comparison), text=_TABLE_TEXT),
            _failures(comparison),
            part("How this was made", _method(comparison, resolved), css="method"),
        ],
        footer="The numbers are in table.json, every cell is a run directory under cells.",
    )


def _resolved_config(comparison: Comparison, folder: Path) -> Config | None:
    """Return the settings of the first cell as they were resolved for training."""
    for result in comparison.results:
        for each in result.cells:
            path = RunDir(folder / each.cell.folder).config
            if path.exists():
                return load_toml(path)
    return None


def _facts(comparison: Comparison, config: Config | None) -> list[tuple[str, str]]:
    """Return what was trained, in a line."""
    runs = {each.cell.folder: each for result in comparison.results for each in result.cells}
    seconds = sum(each.training_s for each in runs.values())
    facts = [(str(len(runs)), "runs"), (str(len(comparison.grid.seeds)), "seeds")]
    if config is not None:
        steps = {result.cells[0].cell.config.train.num_steps for result in comparison.results}
        tokens = {each.cell.config.batch_tokens * each.cell.config.train.num_steps for each in runs.values()}
        facts = [
            (quantity(num_parameters(config.model)), "parameters"),
            (span(steps), "steps"),
            (span(tokens), "tokens a run"),
            *facts,
        ]
    has_workers = any(each.workers is not None for each in runs.values())
    facts.append((duration(seconds), f"of training in all{', by the clock of each' if has_workers else ''}"))
    return facts


def _card(verdict: RuleVerdict) -> str:
    """Return a rule's figures: what the delay costs, and how much of it the best remedy closes."""
    plain, remedy = verdict.plain, verdict.remedy
    if plain.gap is None:
        return card(verdict.name, rest=[verdict.sentence])
    number, _, half = signed(plain.gap).partition(" ")
    is_gap = plain.gap.excludes_zero and plain.gap.mean > 0
    more = "" if is_gap else f'<div class="cure">{_no_gap(plain.gap)}</div>'
    if is_gap and remedy is not None and remedy.closed is not None:
        name, of = escape(remedy.arm.remedy), f"best of {verdict.num_remedies}: " if verdict.num_remedies > 1 else ""
        more = f'<div class="cure">{of}<b>{name}</b> closes {escape(percent(remedy.closed))}</div>{_meter(remedy)}'
    return card(
        verdict.name,
        figure=number,
        unit=half,
        what=f"nats per token from {cause(plain.arm)}",
        more=more,
        rest=_left(verdict, remedy) if remedy is not None and remedy.gap is not None else (),
    )


def _no_gap(gap: Estimate) -> str:
    """Return why a difference is no loss."""
    if gap.interval is None:
        return "one seed: no interval"
    return "a gain" if gap.excludes_zero else "not to be told from 0 with these seeds"


def _meter(row: TableRow) -> str:
    """Return a bar of the share that is closed, with its interval as a line in it."""
    closed = row.closed
    assert closed is not None
    ends = [min(max(100 * each, 0.0), 100.0) for each in closed.ends]
    interval = f'<u style="left:{ends[1]:.1f}%;width:{ends[2] - ends[1]:.1f}%"></u>' if len(ends) == 3 else ""
    return f'<div class="meter"><i style="width:{ends[0]:.1f}%"></i>{interval}</div>'


def _left(verdict: RuleVerdict, remedy: TableRow) -> list[str]:
    """Return what is left of the gap, to plain synchronous training and to the best there is."""
    lines = [f"left: {signed(remedy.gap)} of {figure(verdict.sync.val_loss)}"]
    if remedy.best_sync is not None and remedy.best_sync.remedy != NONE:
        lines.append(f"{signed(remedy.gap_to_best)} against {remedy.best_sync.remedy} without delay")
    return lines


def _tables(comparison: Comparison) -> str:
    if not comparison.has_several_rates:
        return _table(comparison.equal)
    return (
        f'<h3 class="table-title">Best against best over learning rates</h3>{_table(comparison.best)}'
        f'<h3 class="table-title">At equal learning rate</h3>{_table(comparison.equal)}'
    )


_TABLE_TEXT = (
    "Validation loss in nats per token on the published weights; gaps to plain synchronous training of the same rule, "
    "paired by seed, with half of the 95 % interval."
)


def _table(rows: Sequence[TableRow]) -> str:
    columns = table_columns(rows)
    head = [("name" if name in TEXT_COLUMNS else "", name) for name in columns]
    body = []
    for index, row in enumerate(rows):
        is_first = index == 0 or rows[index - 1].arm.rule != row.arm.rule
        css = " ".join(["first"] * is_first + ["sync-row"] * row.arm.is_plain_synchronous)
        body.append((css, [(_css(name, column[index]), column[index]) for name, column in columns.items()]))
    return table_html(head, body)


def _css(name: str, text: str) -> str:
    if name in ("diverged", "crashed") and text:
        return "bad"
    return "name" if name in TEXT_COLUMNS else ""


def _failures(comparison: Comparison) -> str:
    """Return the cells without a result, with what went wrong."""
    failed = comparison.failures
    if not failed:
        return ""
    items = "".join(
        f"<li><b>{escape(each.cell.name)}</b>: {escape(each.kind)}. {escape(each.last_line)}</li>" for each in failed
    )
    text = (
        "A diverged cell is a result: a loss or too many gradients in a row were not finite. A crashed cell is none; "
        "the same command tries it again."
    )
    return part("Cells without a result", f'<ul class="plain">{items}</ul>', text=text)


def _method(comparison: Comparison, config: Config | None) -> str:
    """Return how figures were made, and the settings behind them."""
    paragraphs = [*_METHOD]
    if comparison.has_several_rates:
        paragraphs.append(
            "Best against best takes for each arm the learning rate with the smallest mean loss, on the same seeds "
            "that are compared; with few rates and seeds that flatters every arm a little."
        )
    verdicts = rule_verdicts(comparison.best)
    if len(verdicts) > 2 or any(verdict.num_remedies > 1 for verdict in verdicts):
        paragraphs.append(
            "The best of several remedies, and the rules that lose most and least, are picked by their means on the "
            "seeds that are compared, and keep the interval of one named beforehand: that flatters what is picked."
        )
    if comparison.same_as:
        pairs = "; ".join(f"{arm.label} is {other.label}" for arm, other in comparison.same_as.items())
        paragraphs.append(f"Remedies without effect at their delay were not trained twice: {pairs}.")
    parts = _paragraphs(paragraphs)
    settings = _settings(comparison)
    return f"{parts}<details><summary>Settings</summary><pre>{escape(settings)}</pre></details>"


_METHOD = (
    "A seed sets initial weights and data order alike in every arm, so differences are taken seed by seed. A cell "
    "trains in one process with a delay line, which gives bitwise the weights of a pipeline with that delay; workers, "
    "where the grid has them, with a server on a virtual clock, the same in every run.",
    "Intervals of means are 95 % confidence intervals by Student's t. The share of the gap closed is one minus the "
    "ratio of two paired mean gaps, with Fieller's interval, which is exact for normal differences at any number of "
    "seeds; it is left out where the gap itself cannot be told from 0.",
    f"A spike is a training loss {SPIKE_TEXT}. Smoothed curves are exponential moving averages with a span of "
    f"{100 * SMOOTHING:g} % of the run.",
)


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _settings(comparison: Comparison) -> str:
    """Return the grid as TOML."""
    grid = comparison.grid
    axes: dict[str, object] = {"delays": list(grid.delays), "seeds": list(grid.seeds)}
    for axis in ("rules", "remedies", "reads", "batches", "workers"):
        rows = [
            {"name": row.name, **({"lr": list(row.lr)} if row.lr else {}), **row.tables} for row in getattr(grid, axis)
        ]
        if len(rows) > 1 or (rows and rows[0].keys() != {"name"}):
            axes[axis] = rows
    return tomli_w.dumps({"base": dict(grid.base), "grid": axes})
