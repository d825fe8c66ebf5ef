"""Reading a grid: what it means, and what a mistake in it says."""

import re
import tomllib
from pathlib import Path

import pytest

from slipstream.config import Config, StalenessConfig, from_dict
from slipstream.errors import ConfigError
from slipstream.report.cells import cells_of, effective_staleness, repeats
from slipstream.report.grid import Grid, grid_of_config
from slipstream.report.grid_file import load_grid, parse_grid

RULES = "[[grid.rules]]\nname = 'adamw'\nlr = 0.01\n"


def grid(text: str, folder: Path = Path()) -> Grid:
    return parse_grid(tomllib.loads(text), source="g.toml", folder=folder)


def test_a_grid_takes_one_of_each_and_a_seed_sets_weights_and_order_alike():
    cells = cells_of(
        grid(
            "[grid]\ndelays = [0, 1]\nseeds = [3, 4]\n[[grid.rules]]\nname = 'adamw'\nlr = [0.01, 0.02]\n"
            "[[grid.rules]]\nname = 'muon'\nlr = 0.02\noptim = { adamw_lr = 0.004 }\n"
            "[[grid.remedies]]\nname = 'error_feedback'\nstaleness = { error_feedback = 1.0 }\n"
        )
    )
    assert len(cells) == 2 * 2 * 2 * 3
    assert [cell.seed for cell in cells] == [3] * 12 + [4] * 12, "seed by seed"
    for cell in cells:
        config = cell.config
        assert (config.data.seed, config.model.seed) == (cell.seed, cell.seed)
        assert (config.optim.name, config.optim.lr) == (cell.arm.rule, cell.arm.lr)
        assert config.staleness.delay == cell.arm.delay
        assert config.staleness.error_feedback == (1.0 if cell.arm.remedy == "error_feedback" else 0.0)
        assert config.optim.adamw_lr == (0.004 if cell.arm.rule == "muon" else None)
        assert config.executor == "single"
    assert len({cell.folder for cell in cells}) == 24


def test_rows_are_applied_over_the_base_in_order():
    cell = cells_of(
        grid(
            "[base.optim]\nlr = 0.3\nargs = { eps = 1e-6 }\n[base.train]\nnum_steps = 7\nmicrobatch_size = 4\n"
            "[grid]\nseeds = [0]\ndelays = [0]\n"
            "[[grid.rules]]\nname = 'adamw long'\noptim = { name = 'adamw', args = { betas = [0.98, 0.99] } }\n"
            "[[grid.batches]]\nname = 'small'\ntrain = { microbatch_size = 2 }\n"
        )
    )[0]
    assert cell.arm.rule == "adamw long"
    assert cell.config.optim.args == {"eps": 1e-6, "betas": [0.98, 0.99]}
    assert cell.config.optim.lr == 0.3
    assert (cell.config.train.num_steps, cell.config.train.microbatch_size) == (7, 2)
    assert cell.folder == "adamw-long--none--batch-small--delay-0--lr-0.3--seed-0"


def test_a_base_may_take_a_config_file_beside_the_grid(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "b.toml").write_text("[train]\nnum_steps = 9\nmicrobatch_size = 3\n")
    found = grid("[base]\nfrom = 'base/b.toml'\ntrain = { num_steps = 5 }\n[grid]\n" + RULES, tmp_path)
    assert found.base == {"train": {"num_steps": 5, "microbatch_size": 3}}


def test_only_limits_a_row():
    cells = cells_of(
        grid(
            "[grid]\nseeds = [0]\ndelays = [0, 1, 2]\n[[grid.rules]]\nname = 'adamw'\n[[grid.rules]]\nname = 'muon'\n"
            "[[grid.remedies]]\nname = 'error_feedback'\nstaleness = { error_feedback = 2.0 }\n"
            "only = { rules = ['adamw'], delays = [2] }\n"
        )
    )
    with_feedback = [(cell.arm.rule, cell.arm.delay) for cell in cells if cell.arm.remedy == "error_feedback"]
    assert with_feedback == [("adamw", 2)]
    assert len(cells) == 6 + 1


def test_what_is_read_does_not_matter_without_delay():
    cells = cells_of(
        grid(
            "[grid]\nseeds = [0]\ndelays = [0, 1]\n" + RULES + "[[grid.reads]]\nname = 'q, k'\n"
            "staleness = { delay_roles = ['q', 'k'] }\n[[grid.reads]]\nname = 'pipedream'\n"
            "staleness = { delay_stages = 4 }\n"
        )
    )
    assert [(cell.arm.read, cell.arm.delay) for cell in cells] == [
        ("all", 0),
        ("all", 1),
        ("q, k", 1),
        ("pipedream", 3),
    ], "a delay by stage says by itself what the delay is"


def test_a_remedy_without_effect_is_not_trained_twice():
    cells = cells_of(
        grid(
            "[grid]\nseeds = [0, 1]\n" + RULES + "[[grid.remedies]]\nname = 'dc_asgd'\n"
            "staleness = { correction = 'dc_asgd', correction_strength = 0.5 }\n"
            "[[grid.remedies]]\nname = '1/tau'\nstaleness = { lr_discount = 'inverse_staleness' }\n"
        )
    )
    same = {(arm.remedy, arm.delay): (other.remedy, other.delay) for arm, other in repeats(cells).items()}
    assert same == {("dc_asgd", 0): ("none", 0), ("1/tau", 0): ("none", 0), ("1/tau", 1): ("none", 1)}
    assert len(cells) == 12
    assert len({cell.folder for cell in cells}) == 6


@pytest.mark.parametrize("idle", [{"error_feedback": "auto"}, {"backward_weights": "pipemare"}])
def test_what_does_nothing_without_delay_is_left_out_there(idle):
    delayed, fresh = (from_dict({"staleness": {"delay": delay, **idle}}).staleness for delay in (1, 0))
    assert effective_staleness(fresh) == StalenessConfig(delay=0)
    assert effective_staleness(delayed) == delayed


@pytest.mark.parametrize(
    "kept",
    [
        {"delay": 0, "error_feedback": 1.0, "sync_from_step": 5},
        {"delay": 0, "prediction": "xpipe", "prediction_steps": 1.0},
        {"delay": 1, "correction": "dc_asgd", "correction_strength": 0.1},
        {"delay": 2, "lr_discount": "inverse_staleness"},
        {"delay": 1, "delay_stages": 4, "lr_discount": "pipemare", "lr_discount_steps": 9},
    ],
)
def test_what_acts_is_kept(kept):
    staleness = from_dict({"staleness": kept}).staleness
    assert effective_staleness(staleness) == staleness


def test_a_config_becomes_a_grid_of_three_arms():
    config = from_dict(
        {
            "executor": "pipeline",
            "optim": {"name": "muon", "lr": 0.02},
            "staleness": {"error_feedback": 1.5, "correction": "gap_aware"},
            "train": {"num_steps": 9},
        }
    )
    cells = cells_of(grid_of_config(config, seeds=range(2), source="mine.toml"))
    assert [(cell.arm.remedy, cell.arm.delay) for cell in cells[:3]] == [
        ("none", 0),
        ("none", 1),
        ("error_feedback", 1),
    ]
    assert len(cells) == 6
    feedback = cells[2].config
    assert feedback.staleness == StalenessConfig(delay=1, error_feedback=1.5)
    assert (feedback.executor, feedback.train.num_steps, feedback.optim.lr) == ("single", 9, 0.02)
    assert Config().staleness.error_feedback == 0.0


REMEDY = "[[grid.remedies]]\nname = 'ef'\n"
WRONG = {
    "no rules": ("[grid]\n", r"g\.toml: the grid has no rules"),
    "top": ("grad = 1\n[grid]\n" + RULES, r"g\.toml: unknown key 'grad'\. Did you mean 'grid'\?"),
    "axis": ("[grid]\nremedys = []\n" + RULES, r"\[grid\]: unknown key 'remedys'\. Did you mean 'remedies'\?"),
    "base": ("[base.model]\ndmi = 3\n[grid]\n" + RULES, r"\[base\]: unknown key 'model\.dmi'\. Did you mean 'dim'\?"),
    "row key": (
        RULES + REMEDY + "stalness = {}\n",
        r"grid\.remedies, row 'ef': unknown key 'stalness'\. .*'staleness'",
    ),
    "row setting": (
        RULES + REMEDY + "staleness = { error_feedbak = 1.0 }\n",
        r"grid\.remedies, row 'ef': unknown key 'staleness\.error_feedbak'\. Did you mean 'error_feedback'\?",
    ),
    "row type": (
        RULES + REMEDY + "staleness = { error_feedback = 'x' }\n",
        r"row 'ef': .* must be a number or 'auto', given 'x'",
    ),
    "row name": ("[[grid.rules]]\nlr = 0.1\n", r"grid\.rules, row 1 needs a name"),
    "twice": (RULES + RULES, r"grid\.rules has two rows named 'adamw'"),
    "lr": ("[[grid.rules]]\nname = 'adamw'\nlr = ['a']\n", r"row 'adamw': lr must be a list of numbers"),
    "lr of a remedy": (RULES + REMEDY + "lr = 0.1\n", r"row 'ef': unknown key 'lr'"),
    "lr twice": ("[[grid.rules]]\nname = 'adamw'\nlr = [0.1, 0.1]\n", r"row 'adamw': lr names the same thing twice"),
    "axis in a row": (RULES + REMEDY + "staleness = { delay = 2 }\n", r"row 'ef' sets staleness\.delay.*grid\.delays"),
    "no zero": ("[grid]\ndelays = [1]\n" + RULES, r"delays is \[1\]; without a delay of 0 there is no synchronous arm"),
    "delay": ("[grid]\ndelays = [0, -1]\n" + RULES, r"grid\.delays must be a list of whole numbers from 0 on"),
    "none": (RULES + "[[grid.remedies]]\nname = 'none'\nstaleness = { error_feedback = 1.0 }\n", r"must set nothing"),
    "only": (
        RULES + REMEDY + "only = { rules = ['adam'] }\n",
        r"row 'ef': only\.rules names 'adam'.* Did you mean 'adamw'\?",
    ),
    "a run's config": ("[train]\nnum_steps = 3\n", r"config of one run, not a grid.*compare --from g\.toml"),
    "same cells": (
        RULES + REMEDY + "staleness = { error_feedback = 1.0 }\n[[grid.remedies]]\nname = 'fe'\n"
        "staleness = { error_feedback = 1.0 }\n",
        r"cells 'adamw, ef, delay 0, lr 0\.01, seed 0' and 'adamw, fe, .*' have the same settings",
    ),
    "same folders": (
        RULES + REMEDY.replace("'ef'", "'c 1'") + "staleness = { error_feedback = 1.0 }\n"
        "[[grid.remedies]]\nname = 'c/1'\nstaleness = { error_feedback = 2.0 }\n",
        r"would have the same folder",
    ),
    "recording": (
        RULES + "[[grid.reads]]\nname = 'again'\nstaleness = { delay_replay = 'nowhere.jsonl' }\n",
        r"cell 'adamw, none, again': staleness\.delay_replay: nowhere\.jsonl is no metrics\.jsonl",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_mistake_names_the_row_or_cell_and_the_nearest_name(fault):
    text, said = WRONG[fault]
    with pytest.raises(ConfigError) as caught:
        cells_of(grid(text))
    assert re.search(said, str(caught.value)), caught.value


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_any_length_are_a_sentence(tmp_path, digits):
    (tmp_path / "grid.toml").write_text(RULES.replace("0.01", "1" + "0" * digits))
    with pytest.raises(ConfigError, match=r"must be a list of numbers from 0 on|digits"):
        load_grid(tmp_path / "grid.toml")


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the grid"):
        load_grid(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("[grid\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_grid(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"cannot read the config file .*none\.toml"):
        grid("[base]\nfrom = 'none.toml'\n[grid]\n" + RULES, tmp_path)
