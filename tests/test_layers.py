"""Imports point one way; the folders keep to what they may touch."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "slipstream"

CONTROL_PLANE = (
    "batching",
    "checks",
    "cycles",
    "emulation",
    "events",
    "faults",
    "ledger",
    "ranges",
    "members",
    "messages",
    "router_tally",
    "sequencer",
    "tally",
)
"""Of asynchronous data parallelism: what decides, without tensors, so that thousands of workers can be simulated."""

SCHEDULES = ("actions", "cycle_order", "schedules", "validation")
"""Of the pipeline: what decides, without tensors."""

LAYERS = (
    ("errors", "console", "digests", "cores", "folders", "heap", "strict_json"),
    ("settings",),
    ("config",),
    ("compiled",),
    ("data", "models", "optim", "staleness", *(f"pipeline.{name}" for name in SCHEDULES)),
    tuple(f"dataparallel.{name}" for name in CONTROL_PLANE),
    ("device", "executor", "microbatches"),
    ("assembly",),
    ("pipeline",),
    ("dataparallel",),
    ("plan",),
    ("train", "doctor"),
    ("evaluation", "own"),
    ("bench",),
    ("report",),
    ("arguments",),
    ("commands",),
    ("cli",),
)
"""From the bottom up. A part may import what lies below it, and itself."""

WITHOUT_TORCH = (
    *(f"pipeline.{name}" for name in SCHEDULES),
    *(f"dataparallel.{name}" for name in CONTROL_PLANE),
    "plan",
    "bench.settings",
    "arguments",
    "settings",
    "config",
    "errors",
)


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


def place(module: str) -> tuple[int, str] | None:
    """Layer and part of a module; the most specific part wins."""
    best = None
    for level, parts in enumerate(LAYERS):
        for part in parts:
            if (module == part or module.startswith(part + ".")) and (best is None or len(part) > len(best[1])):
                best = (level, part)
    return best


MODULES = {name: path for name, path in modules().items() if name != "__init__"}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    here = place(name)
    assert here is not None, f"{name} has no layer; add it to LAYERS"
    for target in imported(MODULES[name]):
        if not target.startswith("slipstream."):
            continue
        there = place(target.removeprefix("slipstream."))
        assert there is not None, target
        same_part = there[1].split(".")[0] == here[1].split(".")[0]
        assert there[0] < here[0] or (there[0] <= here[0] and same_part), f"{name} imports {target}"


@pytest.mark.parametrize("name", [name for name in MODULES if (place(name) or (0, ""))[1] in WITHOUT_TORCH])
def test_no_torch_where_integers_are_enough(name):
    assert not {target for target in imported(MODULES[name]) if target.split(".")[0] == "torch"}


@pytest.mark.parametrize("name", MODULES)
def test_only_the_pipeline_talks_to_other_ranks(name):
    part = (place(name) or (0, ""))[1].split(".")[0]
    if part in ("models", "optim", "staleness", "data"):
        assert not {target for target in imported(MODULES[name]) if "distributed" in target or target == "ray"}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "cli" and not name.startswith("commands.")])
def test_print_only_in_the_command_line(name):
    calls = [
        node
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not calls


def test_only_the_adapter_imports_lm_eval():
    users = {name for name, path in MODULES.items() if any(each.split(".")[0] == "lm_eval" for each in imported(path))}
    assert users == {"evaluation.lm_eval_adapter"}
