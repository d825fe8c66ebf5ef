"""Every example runs, and shows what it says it shows; every code block of the guides runs."""

import ast
import importlib.util
import inspect
import re
import runpy
import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from blocks import ROOT, blocks, pages

from slipstream.cli import main
from slipstream.evaluation import lm_eval_adapter

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUIDES = [ROOT / "docs/guides/error-feedback-in-your-own-loop.md", ROOT / "docs/models.md"]
EXPORTS = ROOT / "docs/guides/export-and-evaluate.md"
"""Its blocks stand for themselves, and read what its commands have made before."""
NEEDS = {"error_feedback_hf_trainer": ["transformers", "accelerate"], "own_causal_lm": ["transformers"]}


class Asked(NamedTuple):
    """A request of lm-eval."""

    args: tuple[str, str]


def programs_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def needs_of(program):
    """Return the packages that a program imports, in its order."""
    names = []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name.partition(".")[0] for name in names]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_what_it_claims_is_true(example, capsys, monkeypatch, tmp_path):
    for package in NEEDS.get(example.stem, []):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    assert "False" not in printed, printed
    if "True" not in printed:  # then it prints losses
        losses = [float(number) for number in re.findall(r"\d+\.\d+", printed)]
        assert losses
        assert all(0 < loss < 5.6 for loss in losses), "below that of a guess, log 256"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_code_of_a_guide_runs_from_top_to_bottom(guide, monkeypatch, tmp_path):
    """The blocks of a page are one program; a block that needs a package we may lack says so in its first line."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__guide__"}
    programs = programs_of(guide)
    assert programs
    for number, block in enumerate(programs, start=1):
        exec(compile(block, f"{guide.name}, block {number}", "exec"), namespace)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """What a reader has before the first program of the page: a run and its export."""
    folder = tmp_path_factory.mktemp("guide")
    words = (
        "train --train.num-steps 2 --data.sequence-length 64 --train.microbatch-size 2 --pipeline.num-microbatches 1 "
    )
    words += "--evaluate.num-sequences 2 --model.num-layers 1 --model.dim 16 --model.num-heads 2 --model.ffn-dim 16"
    assert main([*words.split(), "--run-dir", str(folder / "runs" / "demo")]) == 0
    assert main(["export", "hf", str(folder / "runs" / "demo"), str(folder / "runs" / "exported")]) == 0
    return folder


@pytest.mark.parametrize("program", programs_of(EXPORTS), ids=lambda text: needs_of(text)[0])
def test_a_program_on_an_export_runs(program, exported, monkeypatch, capsys):
    monkeypatch.chdir(exported)
    for package in needs_of(program):
        if package == "lm_eval":
            stand_in_for_lm_eval(monkeypatch)
        elif package != "slipstream":
            pytest.importorskip(package)
    exec(compile(program, EXPORTS.name, "exec"), {"__name__": "__guide__"})
    assert capsys.readouterr().out.strip()


def stand_in_for_lm_eval(monkeypatch):
    """Its tasks lie on the network: one question of one here, asked the way it asks."""
    asked = Asked(("A whale is", " a mammal"))
    real = None
    if importlib.util.find_spec("lm_eval") is None:
        monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
        monkeypatch.setattr(lm_eval_adapter, "LM", None)  # any base but the one that stands for its absence
    else:
        real = inspect.signature(importlib.import_module("lm_eval").simple_evaluate)

    def simple_evaluate(model, *, tasks):
        if real is not None:
            real.bind(model, tasks=tasks)
        ((log_likelihood, _),) = model.loglikelihood([asked])
        assert log_likelihood < 0
        return {"results": {task: {"acc,none": 1.0} for task in tasks}}

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", simple_evaluate, raising=False)


def test_every_program_of_the_documentation_is_run_by_a_test():
    languages = {(ROOT / page): {block.language for block in blocks(page)} for page in pages()}
    assert {page for page, found in languages.items() if found & {"python", "py", "pycon"}} == {*GUIDES, EXPORTS}
