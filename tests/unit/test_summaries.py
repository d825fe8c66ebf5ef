"""What is said of a run at its end, beside another run."""

import json

import pytest

from slipstream.commands.summaries import read_summary, summary_table
from slipstream.errors import ConfigError

SUMMARY = {
    "executor": "single",
    "delay": 1,
    "val_loss_before": 5.5,
    "val_loss": 2.5,
    "val_loss_y": 2.6,
    "val_bits_per_byte": 3.6,
    "tokens_per_s": 1000.0,
    "staleness_mean": 0.9,
    "staleness_max": 1,
    "bubble_fraction": None,
    "weights_sha256": "0123456789abcdef" * 4,
}


@pytest.fixture
def beside(tmp_path):
    def written(content):
        (tmp_path / "summary.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path)

    return written


def test_a_run_without_bits_per_byte_stands_beside_one_with_them(beside):
    """A model of one's own predicts no bytes."""
    other = read_summary(beside(SUMMARY | {"val_bits_per_byte": None, "tokens_per_s": 500.0}))
    lines = summary_table(SUMMARY, other, run_dir="here").splitlines()
    (bits,) = [line for line in lines if line.startswith("bits per byte")]
    assert bits.split()[3:] == ["3.6000", "-"]
    assert "2.00x the other run's" in lines[-2]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "null",
        "[]",
        "3",
        {},
        {key: value for key, value in SUMMARY.items() if key != "val_loss_y"},
        SUMMARY | {"val_loss": "low"},
        SUMMARY | {"val_loss": None},
        SUMMARY | {"tokens_per_s": 0},
        SUMMARY | {"weights_sha256": None},
    ],
)
def test_a_summary_that_cannot_be_shown_is_refused_before_training(content, beside):
    with pytest.raises(ConfigError, match=r"--beside .*: there is no readable .*summary\.json"):
        read_summary(beside(content))
