"""Reads a grid from TOML, and says of a mistake in it which row it is in."""

import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import from_dict, load_toml
from slipstream.errors import ConfigError, nearest
from slipstream.report.grid import ALL, NONE, TABLES, Grid, Only, Row, Tables, merged


def load_grid(path: str | Path) -> Grid:
    """Read a grid.

    Args:
        path: A TOML file: `title`, `description`, the tables of `[base]` (over those of the config file that
            `base.from` names, beside the grid), and `[grid]` with `delays`, `seeds`, `keep_checkpoints` and the rows
            `[[grid.rules]]`, `[[grid.remedies]]`, `[[grid.reads]]`, `[[grid.batches]]`, `[[grid.workers]]`.

    Raises:
        ConfigError: It cannot be read, or holds something unknown or wrong; names the row.
    """
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the grid {path}: {error.strerror}. Give the path of a TOML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}). Give a TOML file.") from error
    except ValueError as error:  # among them whole numbers of more digits than Python reads
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    return parse_grid(document, source=str(path), folder=path.parent)


def parse_grid(document: Mapping[str, Any], *, source: str, folder: Path) -> Grid:
    """Build a grid from nested tables; see :func:`load_grid`.

    Args:
        document: What TOML gives.
        source: Where it comes from, for messages.
        folder: Where `base.from` is looked for.
    """
    if "grid" not in document and set(document) & {*TABLES, "executor", "run_dir"}:
        raise ConfigError(
            f"{source} is the config of one run, not a grid: it has no [grid]. To compare synchronous, delayed and "
            f"corrected training of it: slipstream compare --from {source}"
        )
    _check_keys(document, ("title", "description", "base", "grid"), source)
    axes = _table(document.get("grid", {}), f"{source}: [grid]")
    lists = ("rules", "remedies", "reads", "batches", "workers")
    _check_keys(axes, (*lists, "delays", "seeds", "keep_checkpoints"), f"{source}: [grid]")
    base = _base(document.get("base", {}), f"{source}: [base]", folder)
    rows = {axis: _rows(axes.get(axis, []), f"{source}: grid.{axis}", axis=axis) for axis in lists}
    if not rows["rules"]:
        raise ConfigError(f"{source}: the grid has no rules. Add a row such as [[grid.rules]] with name = 'adamw'.")
    grid = Grid(
        source=source,
        title=_text(document, "title", source),
        description=_text(document, "description", source),
        base=base,
        rules=rows["rules"],
        remedies=_with_first(rows["remedies"], NONE, f"{source}: grid.remedies"),
        reads=_with_first(rows["reads"], ALL, f"{source}: grid.reads"),
        batches=rows["batches"] or (Row(name=""),),
        workers=rows["workers"],
        delays=_numbers(axes.get("delays", [0, 1]), f"{source}: grid.delays", whole=True),
        seeds=_numbers(axes.get("seeds", [0, 1, 2]), f"{source}: grid.seeds", whole=True),
        keep_checkpoints=_switch(axes.get("keep_checkpoints", False), f"{source}: grid.keep_checkpoints"),
    )
    if 0 not in grid.delays:
        raise ConfigError(
            f"{source}: grid.delays is {list(grid.delays)}; without a delay of 0 there is no synchronous arm to "
            "compare with. Add 0."
        )
    _check_only(grid)
    _check_against(grid)
    _check_workers(grid)
    return grid


def _base(value: Any, where: str, folder: Path) -> dict[str, Any]:
    """Return the tables of the base, over those of the file it names."""
    own = dict(_table(value, where))
    file = own.pop("from", "")
    if not isinstance(file, str):
        raise ConfigError(f"{where}: from must be the path of a config file, given {file!r}.")
    from_dict(own, source=where)
    return merged(_explicit(folder / file), own) if file else own


def _explicit(path: Path) -> dict[str, Any]:
    """Return what a config file says, without the defaults."""
    load_toml(path)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _rows(value: Any, where: str, *, axis: str) -> tuple[Row, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list of rows, given {value!r}.")
    rows: list[Row] = []
    for number, each in enumerate(value, start=1):
        row = _row(each, where, number, axis=axis)
        if row.name in {other.name for other in rows}:
            raise ConfigError(f"{where} has two rows named {row.name!r}. Give each a name of its own.")
        rows.append(row)
    return tuple(rows)


def _row(value: Any, where: str, number: int, *, axis: str) -> Row:
    table = _table(value, f"{where}, row {number}")
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}, row {number} needs a name, a text; given {name!r}.")
    here = f"{where}, row '{name}'"
    own = {"rules": ["lr"], "remedies": ["against"]}.get(axis, [])
    _check_keys(table, ("name", "only", *own, *TABLES), here)
    tables = {key: each for key, each in table.items() if key in TABLES}
    from_dict(tables, source=here)
    _refuse_axes(tables, here)
    lr = table.get("lr", [])
    only = _table(table.get("only", {}), f"{here}: only")
    _check_keys(only, ("rules", "remedies", "delays", "workers"), f"{here}: only")
    return Row(
        name=name,
        tables=tables,
        lr=_numbers(lr if isinstance(lr, list) else [lr], f"{here}: lr") if "lr" in table else (),
        only=Only(
            rules=_names(only.get("rules", []), f"{here}: only.rules"),
            remedies=_names(only.get("remedies", []), f"{here}: only.remedies"),
            delays=_numbers(only["delays"], f"{here}: only.delays", whole=True) if "delays" in only else (),
            workers=_names(only.get("workers", []), f"{here}: only.workers"),
        ),
        against=_text(table, "against", here),
    )


def _refuse_axes(tables: Tables, where: str) -> None:
    """Refuse settings that the grid itself varies."""
    own = {
        ("optim", "lr"): "the rule's lr",
        ("staleness", "delay"): "grid.delays",
        ("data", "seed"): "grid.seeds",
        ("model", "seed"): "grid.seeds",
    }
    for (table, key), axis in own.items():
        if key in tables.get(table, {}):
            raise ConfigError(f"{where} sets {table}.{key}, which the grid varies by itself: set {axis} instead.")


def _with_first(rows: tuple[Row, ...], name: str, where: str) -> tuple[Row, ...]:
    """Put the row that is always there before the others, and see that it changes nothing."""
    for row in rows:
        if row.name == name and (row.tables or row.only != Only()):
            raise ConfigError(f"{where}: the row '{name}' is what the others are compared with, it must set nothing.")
    return (Row(name=name), *(row for row in rows if row.name != name))


def _check_only(grid: Grid) -> None:
    """Refuse an `only` that names what is not there."""
    known: dict[str, Iterable[Any]] = {
        "rules": [row.name for row in grid.rules],
        "remedies": [row.name for row in grid.remedies],
        "delays": grid.delays,
        "workers": [row.name for row in grid.workers],
    }
    for axis in ("rules", "remedies", "reads", "batches", "workers"):
        for row in getattr(grid, axis):
            for key, names in known.items():
                for given in getattr(row.only, key):
                    if given not in names:
                        raise ConfigError(
                            f"{grid.source}: grid.{axis}, row '{row.name}': only.{key} names {given!r}, which the grid "
                            f"does not have.{nearest(str(given), map(str, names))} It has: "
                            f"{', '.join(map(str, names))}."
                        )


def _check_against(grid: Grid) -> None:
    """Refuse a remedy that is to be compared with one that is not there."""
    names = [row.name for row in grid.remedies]
    for row in grid.remedies:
        if row.against and (row.against == row.name or row.against not in names):
            raise ConfigError(
                f"{grid.source}: grid.remedies, row '{row.name}': against names '{row.against}', no other remedy."
                f"{nearest(row.against, names)} Remedies: {', '.join(names)}."
            )


def _check_workers(grid: Grid) -> None:
    """Refuse workers that are not asynchronous, or not there."""
    for row in grid.workers:
        where = f"{grid.source}: grid.workers, row '{row.name}'"
        if row.only.delays or row.only.workers:
            raise ConfigError(f"{where}: only limits the rules and remedies of workers, which have no other delay.")
        if "engine" in row.tables or "mode" in row.tables.get("dataparallel", {}):
            raise ConfigError(
                f"{where} sets engine or dataparallel.mode. Workers of a grid are asynchronous, on the virtual clock "
                "of the engine 'inline'; the synchronous arm is a delay of 0. Leave both out."
            )


def _check_keys(table: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise ConfigError(f"{where}: unknown key '{key}'.{nearest(key, allowed)} Allowed: {', '.join(allowed)}.")


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table, given {value!r}.")
    return value


def _text(table: Mapping[str, Any], key: str, source: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{source}: {key} must be a text, given {value!r}.")
    return value.strip()


def _switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, given {value!r}.")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    return _list(value, where, "texts", lambda item: isinstance(item, str))


def _numbers(value: Any, where: str, *, whole: bool = False) -> tuple[Any, ...]:
    """Return a list of different numbers from 0 on."""
    kinds = (int,) if whole else (int, float)
    wanted = f"{'whole ' if whole else ''}numbers from 0 on"
    numbers = _list(
        value,
        where,
        wanted,
        lambda item: isinstance(item, kinds) and not isinstance(item, bool) and 0 <= item <= sys.float_info.max,
    )
    if not numbers:
        raise ConfigError(f"{where} is empty; give at least one number.")
    return numbers if whole else tuple(map(float, numbers))


def _list(value: Any, where: str, wanted: str, is_right: Callable[[Any], bool]) -> tuple[Any, ...]:
    if not isinstance(value, list) or not all(map(is_right, value)):
        raise ConfigError(f"{where} must be a list of {wanted}, given {value!r}.")
    if len(set(value)) != len(value):
        raise ConfigError(f"{where} names the same thing twice: {value!r}.")
    return tuple(value)
