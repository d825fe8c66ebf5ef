"""Numbers that no run can use are refused with the name of their setting."""

import dataclasses
import datetime
import math
import typing
from collections.abc import Iterator

import pytest

from slipstream.config import Config, from_dict, load_toml, resolve, to_toml
from slipstream.errors import ConfigError


def float_settings(cls: type = Config, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the path of every setting that takes fractions, and whether it takes several."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from float_settings(hint, (*prefix, name))
        elif hint is float or float in typing.get_args(hint):
            yield (*prefix, name), typing.get_origin(hint) is tuple


SETTINGS = dict(float_settings())


def resolved(path: tuple[str, ...], value: object) -> Config:
    table = value
    for name in reversed(path):
        table = {name: table}
    return resolve(from_dict(table), vocab_size=257, cuda=False)


def test_settings_of_every_kind_are_found():
    names = {".".join(path) for path in SETTINGS}
    assert {"optim.lr", "optim.adamw_lr", "staleness.error_feedback", "staleness.agc.decay"} <= names
    assert {"staleness.delay_weights", "dataparallel.emulate_speeds", "pipeline.timeout_s"} <= names


@pytest.mark.parametrize("path", SETTINGS, ids=".".join)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_number_must_be_one(path, value):
    with pytest.raises(ConfigError, match=rf"{'.'.join(path)} is {value}; give a finite number"):
        resolved(path, [1.0, value] if SETTINGS[path] else value)


FLOATS = [path for path, is_list in SETTINGS.items() if not is_list]


@pytest.mark.parametrize("path", FLOATS, ids=".".join)
def test_a_whole_number_beyond_all_fractions_is_refused(path):
    with pytest.raises(ConfigError, match=rf"{'.'.join(path)}' is a whole number of more than 300 digits"):
        resolved(path, 10**400)


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_any_length_in_a_file_are_a_sentence(tmp_path, digits):
    (tmp_path / "big.toml").write_text(f"[optim]\nlr = 1{'0' * digits}\n")
    with pytest.raises(ConfigError, match="digits"):
        load_toml(tmp_path / "big.toml")


def test_more_threads_than_any_system_gives_are_refused():
    assert resolved(("train", "threads_per_rank"), 1024).train.threads_per_rank == 1024
    with pytest.raises(ConfigError, match=r"train\.threads_per_rank is 20000; it must be 1024 or less"):
        resolved(("train", "threads_per_rank"), 20_000)


@pytest.mark.parametrize("table", ["args", "adamw_args"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"eps": None}, r"optim\.{}\.eps is null, which no config file can say"),
        ({"eps": [None, 0.001]}, r"optim\.{}\.eps, item 0 is null"),
        ({"a": {"b": None}}, r"optim\.{}\.a\.b is null"),
        ({"eps": [0.001, math.nan]}, r"optim\.{}\.eps, item 1 is nan; give a finite number"),
        ({"since": datetime.date(2000, 1, 1)}, r"optim\.{}\.since is datetime.*; allowed are numbers, texts"),
    ],
)
def test_arguments_of_rules_that_no_file_can_say_are_refused(table, value, message):
    config = from_dict({"optim": {table: value}})
    for use in (to_toml, lambda config: resolve(config, vocab_size=257, cuda=False)):
        with pytest.raises(ConfigError, match=message.format(table)):
            use(config)


def test_arguments_of_rules_are_read_as_they_were_written(tmp_path):
    config = from_dict({"optim": {"args": {"eps": [1e-30, 0.001], "foreach": False, "mode": "a", "deep": {"n": 1}}}})
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_toml(tmp_path / "config.toml") == config


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5])
def test_an_average_must_forget_and_not_grow(decay):
    with pytest.raises(ConfigError, match=rf"staleness\.agc\.decay is {decay:g}; allowed is 0"):
        resolved(("staleness", "agc", "decay"), decay)
    assert resolved(("staleness", "agc", "decay"), 0.0).staleness.agc.decay == 0.0
