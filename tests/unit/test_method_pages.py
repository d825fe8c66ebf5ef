"""The pages of methods: what they tell people to write works, does something, and their pictures can be drawn."""

import re
import tomllib
from pathlib import Path

import pytest
from methods import GRID, PICTURES, WORKER_PICTURES, WORKERS_GRID, Line

from slipstream.config import from_dict, resolve
from slipstream.optim.build import check_optim
from slipstream.report.cells import cells_of
from slipstream.report.grid import NONE
from slipstream.report.grid_file import load_grid
from slipstream.staleness.checks import check_staleness
from slipstream.train.delays import largest_delay

FOLDER = Path(__file__).parents[2] / "docs" / "methods"
WRITTEN = sorted(path for path in FOLDER.parent.rglob("*.md") if path.parent.name != "reference")  # not by a program
PAGES = (
    "asyncpp",
    "basis_rotation",
    "dc_asgd",
    "error_feedback",
    "gap_aware",
    "gradient_feedback",
    "inverse_staleness",
    "pipedream",
    "pipemare",
    "sync_start_and_cool_down",
    "weight_prediction",
)
"""Pages with a picture."""

BLOCKS = [
    (page, index, block)
    for page in PAGES
    for index, block in enumerate(re.findall(r"```toml\n(.*?)```", (FOLDER / f"{page}.md").read_text(), re.DOTALL))
]


@pytest.mark.parametrize(("page", "index", "block"), BLOCKS, ids=[f"{page}-{index}" for page, index, _ in BLOCKS])
def test_settings_of_a_page_are_taken_and_have_an_effect(page, index, block):
    config = resolve(from_dict(tomllib.loads(block), source=page), vocab_size=257, cuda=False)
    delay = largest_delay(config)
    assert delay
    assert check_staleness(config, delay=delay) == []
    assert check_optim(config.optim, num_steps=config.train.num_steps) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_what_every_page_has(page):
    text = (FOLDER / f"{page}.md").read_text()
    assert re.search(r"^Seams?: \*\*", text, re.MULTILINE)
    for part in ("**Source**", "**Cost**", "**Differs**", "```toml"):
        assert part in text, part
    pictures = re.findall(r"\(\.\./pictures/methods/(\w+)\.svg\)", text)
    assert pictures
    assert set(pictures) <= set(PICTURES)


def test_the_index_names_every_page():
    index = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("*.md"):
        assert path.stem == "README" or f"({path.name})" in index


def test_links_between_pages_lead_somewhere():
    for path in FOLDER.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+\.md)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.parametrize(("grid", "pictures"), [(GRID, PICTURES), (WORKERS_GRID, WORKER_PICTURES)])
def test_the_grid_has_an_arm_for_every_line_of_a_picture(grid, pictures):
    arms = {Line.of(cell.arm) for cell in cells_of(load_grid(grid))}
    for name, (_, lines) in pictures.items():
        for line in lines:
            assert line.key in arms, f"{name}: {line}"
        assert lines[0].delay == 0
        assert lines[0].remedy == NONE


def test_every_method_has_a_picture():
    for path in FOLDER.glob("*.md"):
        assert path.stem in ("README", "beyond") or "](../pictures/methods/" in path.read_text(), path.name


def test_every_picture_is_on_a_page():
    shown = "".join(path.read_text() for path in FOLDER.glob("*.md"))
    for name in (*PICTURES, *WORKER_PICTURES):
        assert f"pictures/methods/{name}.svg" in shown


@pytest.mark.parametrize(
    "page",
    sorted(path for path in FOLDER.parent.rglob("*.md") if path.parent.name != "reference"),
    ids=lambda path: path.stem,
)
def test_no_page_waits_to_be_filled_in(page):
    assert not re.findall(r"^(?:[A-Z]{3,}|TODO.*|TBD.*|<!--.*)$", page.read_text(), re.MULTILINE)
