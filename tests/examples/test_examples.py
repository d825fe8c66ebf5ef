"""Every example runs, and shows what it says it shows; every code block of the guides runs."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUIDES = [ROOT / "docs/guides/error-feedback-in-your-own-loop.md", ROOT / "docs/models.md"]
NEEDS = {"error_feedback_hf_trainer": ["transformers", "accelerate"], "own_causal_lm": ["transformers"]}


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
    blocks = re.findall(r"^```python\n(.*?)^```", guide.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{guide.name}, block {number}", "exec"), namespace)
