"""Reports in a real browser: no network, no complaint, nothing beyond the edges, wide and narrow, light and dark."""

import tomllib
from pathlib import Path

import pytest
from tests.unit.report.browser import Browser, find_browser
from tests.unit.report.fake import train_by_formula
from tests.unit.report.fake_runs import expert_run, pipeline_run, worker_run
from tests.unit.report.test_report import EVERYTHING
from tests.unit.report.test_workers import GRID

from slipstream.report.compare import compare_grid
from slipstream.report.grid_file import parse_grid
from slipstream.report.run_report import write_run_report

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome is installed (Debian: apt-get install chromium)"
)

WIDTHS = (1280, 390)

OUTSIDE = """
[...document.querySelectorAll('body *')].filter(each => {
  if (each.closest('.scroll') || each.closest('pre') || each.closest('defs, clipPath')) return false;
  if (each.closest('details:not([open])') && !each.closest('summary')) return false;
  if (each.hasAttribute('clip-path')) return false;
  const box = each.getBoundingClientRect();
  return box.width > 0 && (box.left < -1 || box.right > innerWidth + 1);
}).map(each => each.tagName + ' ' + each.textContent.slice(0, 40))
"""

TEXTS_OVER_THE_EDGE = """
[...document.querySelectorAll('figure')].flatMap(figure => {
  const frame = figure.getBoundingClientRect();
  return [...figure.querySelectorAll('svg text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1;
  }).map(text => figure.querySelector('h3').textContent + ': ' + text.textContent);
})
"""

SAME_PLACE = """
[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
  const found = [];
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (across > 2 && down > 4) found.push(a + ' on ' + b);
  }));
  return found;
})
"""


@pytest.fixture(scope="module")
def browser():
    browser = Browser(find_browser() or "")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    sync = pipeline_run(folder / "sync", schedule="one_f_one_b", step_s=0.08, bubble=0.3, end_loss=1.55)
    late = pipeline_run(folder / "late", delay=1, bubble=0.03)
    workers, experts = (
        worker_run(folder / "workers"),
        expert_run(folder / "adamw_lr_3e-4_warmup_400_error_feedback_1.0_seed_0"),
    )
    (folder / "compare").mkdir()
    grid = parse_grid(tomllib.loads(EVERYTHING), source="g.toml", folder=folder)
    assert compare_grid(grid, folder / "compare", train=train_by_formula, note=lambda text: None) is not None
    (folder / "crews").mkdir()
    crews = parse_grid(tomllib.loads(GRID), source="g.toml", folder=folder)
    assert compare_grid(crews, folder / "crews", train=train_by_formula, note=lambda text: None) is not None
    return {
        "several": write_run_report([sync, late, workers, experts], folder / "several.html").out,
        "one": write_run_report([workers]).out,
        "compare": folder / "compare" / "report.html",
        "compare of workers": folder / "crews" / "report.html",
    }


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["several", "one", "compare", "compare of workers"])
def test_a_report_stands_on_its_own_at_any_width(browser, reports, name, width):
    url = reports[name].as_uri()
    page = browser.open(url, width=width)
    assert page.requests == [url]
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(TEXTS_OVER_THE_EDGE) == []
    assert page.evaluate(SAME_PLACE) == []
    page.close()


@pytest.mark.parametrize("name", ["several", "compare"])
def test_it_follows_the_colour_scheme(browser, reports, name):
    shades = {}
    for dark in (False, True):
        page = browser.open(reports[name].as_uri(), width=1280, dark=dark)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        ink = page.evaluate("getComputedStyle(document.body).color")
        shades[dark] = [sum(int(part) for part in each[4:-1].split(",")) for each in (colour, ink)]
        assert page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill") != "rgb(0, 0, 0)"
        page.close()
    assert shades[False][0] > 600 > 150 > shades[True][0]
    assert shades[False][1] < 150 < 600 < shades[True][1]


def test_pictures_say_what_they_are_and_have_their_figures_as_tables(browser, reports):
    page = browser.open(reports["several"].as_uri(), width=1280)
    assert page.evaluate("[...document.querySelectorAll('svg')].every(e => e.role == 'img' && e.ariaLabel.length > 20)")
    charts = page.evaluate("document.querySelectorAll('figure').length")
    assert charts > 10
    assert page.evaluate("document.querySelectorAll('figure details table').length") == charts
    page.evaluate("document.querySelector('figure summary').click()")
    assert page.evaluate("document.querySelector('figure details table').getBoundingClientRect().height") > 50
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    page.close()


def test_curves_turn_from_smoothed_to_raw(browser, reports):
    page = browser.open(reports["several"].as_uri(), width=1280)
    visible = "[...document.querySelectorAll('.{0}')].some(e => getComputedStyle(e).display != 'none')"
    assert page.evaluate(visible.format("smoothed"))
    assert not page.evaluate(visible.format("raw"))
    page.evaluate("document.querySelector('#show-raw').click()")
    assert not page.evaluate(visible.format("smoothed"))
    assert page.evaluate(visible.format("raw"))
    page.close()
