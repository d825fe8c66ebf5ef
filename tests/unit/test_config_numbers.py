"""Numbers that no run can use are refused with the name of their setting."""

import dataclasses
import math
import typing
from collections.abc import Iterator

import pytest

from slipstream.config import Config, from_dict, resolve
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


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5])
def test_an_average_must_forget_and_not_grow(decay):
    with pytest.raises(ConfigError, match=rf"staleness\.agc\.decay is {decay:g}; allowed is 0"):
        resolved(("staleness", "agc", "decay"), decay)
    assert resolved(("staleness", "agc", "decay"), 0.0).staleness.agc.decay == 0.0
