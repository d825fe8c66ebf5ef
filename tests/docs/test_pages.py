"""Links lead somewhere, every page can be reached, the reference is the code's, the pictures their program's."""

import dataclasses
import math
import re
import typing
from typing import Literal

import pictures
import pytest
import reference
import torch
import tyro
from blocks import ROOT, pages
from feedback_pictures import descend

from slipstream import cli
from slipstream.config import PIPELINE_TOO
from slipstream.optim.plugin import ErrorFeedback, attach

READABLE = [*pages(), *(path.relative_to(ROOT) for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")))]


def without_code(text):
    return re.sub(r"^\s*```.*?^\s*```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """Return the names that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


def links(page):
    return re.findall(r"\]\(([^)\s]+)\)", without_code((ROOT / page).read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", READABLE, ids=str)
def test_links_lead_somewhere(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(path), f"{page}: {link}: {sorted(anchors(path))}"


def test_every_page_can_be_reached_from_the_index():
    reached, todo = set(), [ROOT / "docs" / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page.relative_to(ROOT)):
            path = (page.parent / link.partition("#")[0]).resolve()
            if path.suffix == ".md" and path.is_relative_to(ROOT / "docs"):
                todo.append(path)
    assert {ROOT / page for page in pages() if page.parts[0] == "docs"} - reached == set()
    assert "docs/README.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_is_that_of_the_code(name):
    """`make docs` writes it anew."""
    assert (reference.FOLDER / name).read_text(encoding="utf-8") == reference.PAGES[name]()


def rows_of(page):
    """Return the cells of each row of a reference page, by the name in the first."""
    rows = [line[2:-2].split(" | ") for line in reference.PAGES[page]().splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.mark.parametrize(
    "name", [name for name in cli.COMMANDS if not issubclass(reference.arguments_of(name), reference.Config)]
)
def test_a_switch_or_flag_is_taken_as_the_reference_shows_it(name):
    """Bare where no values stand beside it, with a word where some do."""
    kind = reference.arguments_of(name)
    hints = typing.get_type_hints(kind)
    by_flag = {field.name.replace("_", "-"): hints[field.name] for field in dataclasses.fields(kind)}
    arguments = list(reference._arguments(kind))
    if any(default == "required" for _, _, default, _, _ in arguments):
        return
    for flag, values, default, _, _ in arguments:
        if by_flag.get(flag.removeprefix("--")) is bool:
            tyro.cli(kind, args=[flag, "false"] if values else [flag])
            assert bool(values) == bool(default), flag


def test_switches_that_are_on_are_shown_so():
    assert rows_of("commands.md")["--lease-deadlines"][:2] == ["`true`, `false`", "`true`"]
    assert rows_of("commands.md")["--resume"][:2] == ["", ""]


def test_what_a_pipeline_follows_too_is_not_marked_as_for_one_process_alone():
    rows = rows_of("settings.md")
    assert rows["staleness.delay_weights"][-1] == "S"
    for name in PIPELINE_TOO:
        assert rows[f"staleness.{name}"][-1] == "", name


def test_kinds_of_values_are_words():
    assert reference.type_text(tuple[Literal["a", "b"], ...]) == "any of `a`, `b`"
    assert reference.type_text(tuple[int, ...]) == "whole numbers"
    page = reference.PAGES["settings.md"]()
    for kind in ("switch", "table"):
        assert f"| {kind} |" in page
        assert f"*{kind}*" in page.partition("\n## ")[0], f"what a {kind} is, the head of the page says"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_its_program_draws_and_a_page_shows_it(name):
    """`make docs` draws it anew."""
    drawn = pictures.PICTURES[name]()
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == drawn
    assert "prefers-color-scheme:dark" in drawn
    assert any(f"pictures/{name}.svg" in (ROOT / page).read_text(encoding="utf-8") for page in pages())


def test_the_picture_of_error_feedback_is_of_the_rule_that_trains():
    """The recurrence of the picture against torch's SGD with the plug-in on it."""
    curvatures, lr, momentum = (0.35, 1.3), 0.8, 0.8
    course = descend((-1.0, 1.0), curvatures, lr=lr, momentum=momentum, delay=1, c=1.0, steps=9)
    weights = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=lr * (1 - momentum), momentum=momentum)
    attach(optimizer, ErrorFeedback(c=1.0))
    read = [weights.detach().clone()]
    for step in range(9):
        weights.grad = torch.tensor(curvatures, dtype=torch.float64) * read[max(step - 1, 0)]
        optimizer.step()
        read.append(weights.detach().clone())
        for ours, theirs in zip(course.x[step + 1], weights.tolist()):
            assert math.isclose(ours, theirs, abs_tol=1e-12), step
