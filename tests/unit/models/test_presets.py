"""The models shipped as configs can be read, shown and cut, and have as many parameters as their comments say."""

import re
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import load_toml, to_toml
from slipstream.models.partition import stages
from slipstream.models.shapes import num_active_parameters, num_parameters, parameter_shapes

FOLDER = Path(__file__).parents[3] / "configs"
PRESETS = sorted((FOLDER / "models").glob("*.toml"))


def test_all_of_them_are_there():
    assert {path.stem for path in PRESETS} >= {"smollm2_135m", "smollm2_360m", "moe_2b", "moe_10b"}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_has_the_parameters_that_its_comment_counts(path):
    model = load_toml(path).model
    counted = [int(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3}){2,}", path.read_text())]
    expected = [num_parameters(model)] + ([num_active_parameters(model)] if model.num_experts else [])
    assert counted == expected
    assert len(stages(model, load_toml(path).pipeline.num_stages)) > 1


@pytest.mark.parametrize("path", [*PRESETS, FOLDER / "moe_demo.toml"], ids=lambda path: path.stem)
def test_a_preset_can_be_shown(path, capsys):
    assert main(["config", "show", "--config", str(path)]) == 0
    assert capsys.readouterr().out == to_toml(load_toml(path))


@pytest.mark.parametrize(("name", "total"), [("smollm2_135m", 134_515_008), ("smollm2_360m", 361_821_120)])
def test_the_dense_ones_have_the_published_sizes(name, total):
    """As Hugging Face's own model cards and safetensors headers count them."""
    assert num_parameters(load_toml(FOLDER / "models" / f"{name}.toml").model) == total


def test_the_experts_of_the_large_ones_are_packed():
    shapes = parameter_shapes(load_toml(FOLDER / "models" / "moe_10b.toml").model)
    assert shapes["blocks.1.ffn.expert_down.weight"] == (64, 2048, 1024)
    assert shapes["blocks.0.ffn.down.weight"] == (2048, 7168)
