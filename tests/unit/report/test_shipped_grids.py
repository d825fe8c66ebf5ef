"""The grids of the repository can be read, and are what their comments say."""

import re
import tomllib
from pathlib import Path

import pytest

from slipstream.report.cells import cells_of
from slipstream.report.grid_file import load_grid, parse_grid

FOLDER = Path(__file__).parents[3] / "configs" / "compare"
GRIDS = sorted(path.stem for path in FOLDER.glob("*.toml"))


def test_all_of_them_are_there():
    assert set(GRIDS) >= {
        "tiny",
        "attribution",
        "c_sweep",
        "lr_sensitivity",
        "momentum",
        "batch_size",
        "delays",
        "remedies",
        "cooldown",
        "pipedream",
    }


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_has_the_runs_that_its_comment_counts(name):
    path = FOLDER / f"{name}.toml"
    cells = cells_of(load_grid(path))
    counted = re.search(r"(\d+) runs", path.read_text())
    assert counted is not None
    assert len({cell.folder for cell in cells}) == int(counted[1])
    assert len({cell.seed for cell in cells}) >= (1 if name.endswith(("search", "rates")) else 3)


def test_the_tiny_grid_is_the_promised_one():
    cells = cells_of(load_grid(FOLDER / "tiny.toml"))
    assert {cell.arm.rule for cell in cells} == {"adamw", "muon", "soap", "lion"}
    assert {cell.seed for cell in cells} == {0, 1, 2, 3, 4}
    assert {(cell.arm.remedy, cell.arm.delay) for cell in cells} >= {("none", 0), ("none", 1), ("error_feedback", 1)}


def test_every_remedy_is_in_the_grid_of_remedies():
    staleness = [cell.config.staleness for cell in cells_of(load_grid(FOLDER / "remedies.toml"))]
    assert {each.correction for each in staleness} >= {
        "none",
        "dc_asgd",
        "dc_asgd_adaptive",
        "gap_aware",
        "gradient_feedback",
    }
    assert {each.prediction for each in staleness} == {"none", "spectrain", "xpipe"}
    assert any(each.sync_until_step for each in staleness)
    assert any(each.sync_from_step for each in staleness)


def test_the_grid_of_the_guide_can_be_read():
    guide = (FOLDER.parents[1] / "docs" / "guides" / "compare.md").read_text()
    block = re.search(r"```toml\n(.*?)```", guide, re.DOTALL)
    assert block is not None
    cells = cells_of(parse_grid(tomllib.loads(block[1]), source="the guide", folder=FOLDER))
    assert {cell.arm.batch for cell in cells} == {"small"}
    assert {cell.arm.read for cell in cells} == {"all", "only query, key"}
