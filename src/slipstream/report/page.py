"""The page that every report is: one HTML file that needs no network and follows the reader's light or dark scheme."""

import html
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.resources import files
from string import Template

from slipstream.report.figures import Chart, DataTable, Section
from slipstream.train.metrics import quantity

escape = html.escape

GENERATOR = '<meta name="generator" content="Slipstream">'
"""By which a report is known to be one."""


def page(
    *,
    kicker: str,
    title: str,
    lead: str = "",
    facts: Sequence[tuple[str, str]] = (),
    answers: Iterable[str] = (),
    cards: Sequence[str] = (),
    body: Iterable[str] = (),
    footer: str = "",
) -> str:
    """Return a report.

    Args:
        kicker: What kind of report it is.
        title: Headline.
        lead: A sentence below it.
        facts: A number and its unit, each.
        answers: Sentences that a reader came for.
        cards: HTML of the figures beside one another.
        body: HTML of the parts below.
        footer: A sentence at the end, after the versions.
    """
    items = "".join(f"<li><b>{escape(number)}</b> {escape(unit)}</li>" for number, unit in facts)
    return Template(files(__package__).joinpath("template.html").read_text(encoding="utf-8")).substitute(
        generator=GENERATOR,
        kicker=escape(kicker),
        title=escape(title),
        lead=f'<p class="lead">{escape(lead)}</p>' if lead else "",
        facts=f'<ul class="facts">{items}</ul>' if items else "",
        answer="".join(f'<p class="answer">{escape(sentence)}</p>' for sentence in answers),
        cards=f'<div class="cards">{"".join(cards)}</div>' if cards else "",
        body="\n".join(body),
        footer=escape(f"Slipstream {version('slipstream')}, torch {version('torch')}. {footer}".strip()),
    )


def part(title: str, content: str, *, text: str = "", beside: str = "", css: str = "") -> str:
    """Return a part of a page: a heading, a sentence, and HTML below it."""
    below = f'<p class="section-text">{escape(text)}</p>' if text else ""
    return f'<section{_class(css)}><div class="head"><h2>{escape(title)}</h2>{beside}</div>{below}{content}</section>'


def section_html(section: Section) -> str:
    """Return pictures that belong together."""
    charts = "".join(map(figure_html, section.charts))
    css = "pairs" if section.in_pairs and len(section.charts) > 1 else f"n{len(section.charts)}"
    return part(
        section.title,
        f'<div class="charts {css}">{charts}</div>',
        text=section.text,
        beside=_TOGGLE if section.has_smoothing else "",
    )


_TOGGLE = (
    '<div class="toggle" role="radiogroup" aria-label="Curves">'
    '<label><input type="radio" name="curves" id="show-smoothed" checked><span>smoothed</span></label>'
    '<label><input type="radio" name="curves" id="show-raw"><span>raw</span></label></div>'
)


def figure_html(chart: Chart) -> str:
    """Return one picture with its legend, and its figures as a table to unfold where it has them."""
    items = "".join(
        f'<li><i class="{entry.css}"></i><span>{escape(entry.label)}</span>'
        f"{f'<b>{escape(entry.figure)}</b>' if entry.figure else ''}</li>"
        for entry in chart.legend
    )
    legend = f'<ul class="legend">{items}</ul>' if items else ""
    data = "" if chart.data is None else f"<details><summary>Figures</summary>{data_table(chart.data)}</details>"
    return f"<figure><h3>{escape(chart.title)}</h3>{chart.svg}{legend}{data}</figure>"


def data_table(table: DataTable) -> str:
    """Return a table whose first column names its rows and stays in sight."""
    return table_html(_named(table.head), (("", _named(row)) for row in table.rows))


def _named(texts: Sequence[str]) -> list[tuple[str, str]]:
    return [("" if index else "name", text) for index, text in enumerate(texts)]


def table_html(head: Sequence[tuple[str, str]], rows: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Return a table that is scrolled where it is wider than the page.

    Args:
        head: Class and text of each column's name.
        rows: Class of each row, and class and text of its cells.
    """
    names = "".join(f"<th{_class(css)}>{escape(text)}</th>" for css, text in head)
    body = "".join(
        f"<tr{_class(css)}>{''.join(f'<td{_class(each)}>{escape(text)}</td>' for each, text in cells)}</tr>"
        for css, cells in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def card(
    title: str,
    *,
    figure: str = "",
    unit: str = "",
    what: str = "",
    more: str = "",
    rest: Iterable[str] = (),
    css: str = "",
) -> str:
    """Return figures at a glance.

    Args:
        title: Whose they are.
        figure: The large one; empty: there is none.
        unit: Beside it.
        what: What it is of.
        more: HTML below.
        rest: Lines at the end.
        css: Classes.
    """
    big = f'<div class="big">{escape(figure)} <small>{escape(unit)}</small></div>' if figure else ""
    said = f'<div class="what">{escape(what)}</div>' if what else ""
    lines = "".join(f'<div class="rest">{escape(line)}</div>' for line in rest)
    return f'<article class="{f"card {css}".strip()}"><h3>{escape(title)}</h3>{big}{said}{more}{lines}</article>'


def span(values: Iterable[float]) -> str:
    """Return the smallest and the largest quantity, or the one there is."""
    values = sorted(values)
    return "\N{EN DASH}".join(dict.fromkeys((quantity(values[0]), quantity(values[-1]))))


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""
