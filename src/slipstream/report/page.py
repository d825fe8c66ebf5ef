"""The page that every report is: one HTML file that needs no network and follows the reader's light or dark scheme."""

import html
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.resources import files
from string import Template

from slipstream.report.figures import Chart, DataTable, Section

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
    named = f' class="{css}"' if css else ""
    return f'<section{named}><div class="head"><h2>{escape(title)}</h2>{beside}</div>{below}{content}</section>'


def section_html(section: Section) -> str:
    """Return pictures that belong together."""
    charts = "".join(map(figure_html, section.charts))
    return part(
        section.title,
        f'<div class="charts n{len(section.charts)}">{charts}</div>',
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
    head = "".join(_cell("th", text, name=not index) for index, text in enumerate(table.head))
    rows = "".join(
        f"<tr>{''.join(_cell('td', text, name=not index) for index, text in enumerate(row))}</tr>" for row in table.rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(tag: str, text: str, *, name: bool) -> str:
    css = ' class="name"' if name else ""
    return f"<{tag}{css}>{escape(text)}</{tag}>"
