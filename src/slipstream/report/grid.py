"""The grid of a comparison: a TOML file in, one training run a cell out.

A grid is a base of settings and six lists: rules, remedies, reads, batches (each a row of changes to the base), delays
and seeds. A cell takes one of each; or, where the grid has workers, a row of workers in place of read and delay: then
asynchronous workers make the delay. Every row is a name and tables of :class:`~slipstream.config.Config`, so whatever a
run can be told, a row can vary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import Config, to_dict

Tables = Mapping[str, Any]
"""Tables of a config as TOML gives them."""

NONE = "none"
"""Name of the remedy that is none: plain delay, and at delay 0 plain synchronous training."""

ALL = "all"
"""Name of the read in which every parameter has the delay; always there."""

TABLES = tuple(field.name for field in dataclasses.fields(Config) if field.name not in ("run_dir", "executor"))
"""Tables that a row may set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Only:
    """Which cells a row takes part in; empty: all of them.

    Delays and workers are two kinds of one thing: where a row names some of either, it takes part in those alone.
    """

    rules: tuple[str, ...] = ()
    """Names of rules."""
    remedies: tuple[str, ...] = ()
    """Names of remedies."""
    delays: tuple[int, ...] = ()
    """Delays."""
    workers: tuple[str, ...] = ()
    """Names of workers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A named change to the base."""

    name: str
    """What tables and pictures call it. Of a rule without `optim.name` also the optimizer."""
    tables: Tables = dataclasses.field(default_factory=dict)
    """Tables of a config: what the row sets."""
    lr: tuple[float, ...] = ()
    """Of a rule: its learning rates; empty: the base's."""
    only: Only = dataclasses.field(default_factory=Only)
    """Which cells it takes part in."""
    against: str = ""
    """Of a remedy: another remedy, to which the table shows the difference, such as all parts of a method without one
    of them against the whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """What to compare."""

    source: str
    """Where it was read from, for messages."""
    title: str = ""
    """Heading of the report."""
    description: str = ""
    """What the grid is to find out."""
    base: Tables = dataclasses.field(default_factory=dict)
    """Tables of a config: what all cells share."""
    rules: tuple[Row, ...]
    """Optimizers, each with its learning rates."""
    remedies: tuple[Row, ...] = (Row(name=NONE),)
    """What is done about the delay; `none` is always there."""
    reads: tuple[Row, ...] = (Row(name=ALL),)
    """What has the delay: `all` is always there; rows set `delay_roles`, `delay_blocks`, `delay_stages`, ..."""
    batches: tuple[Row, ...] = (Row(name=""),)
    """Batch sizes, and what goes with them."""
    delays: tuple[int, ...] = (0, 1)
    """Updates of delay; 0 must be among them."""
    workers: tuple[Row, ...] = ()
    """Asynchronous workers, on the virtual clock of the engine `inline`; rows set `dataparallel`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each sets initial weights and data order alike in every arm."""
    keep_checkpoints: bool = False
    """Keep the last checkpoint of every cell."""


def grid_of_config(config: Config, *, seeds: Sequence[int], source: str) -> Grid:
    """Return the grid that asks of a training config: what would a step of delay cost, and with error feedback?

    Args:
        config: As read; its own seeds, run directory and staleness take no part, but for its coefficient of error
            feedback where it has one. A pipeline is compared in one process, which gives bitwise the same weights.
        seeds: To train with.
        source: Where the config was read from.
    """
    base = to_dict(config)
    coefficient = config.staleness.error_feedback or 1.0
    for key in ("run_dir", "executor", "staleness"):
        base.pop(key)
    feedback = Row(name="error_feedback", tables={"staleness": {"error_feedback": coefficient}}, only=Only(delays=(1,)))
    return Grid(
        source=source,
        title=f"Would {Path(source).name} stand one step of delay?",
        base=base,
        rules=(Row(name=config.optim.name),),
        remedies=(Row(name=NONE), feedback),
        seeds=tuple(seeds),
    )


def merged(first: Tables, second: Tables) -> dict[str, Any]:
    """Return nested tables with the values of ``second`` over those of ``first``.

    Example:
        >>> merged({"optim": {"lr": 1, "name": "adamw"}}, {"optim": {"lr": 2}})
        {'optim': {'lr': 2, 'name': 'adamw'}}
    """
    both = dict(first)
    for key, value in second.items():
        held = both.get(key)
        both[key] = merged(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
    return both
