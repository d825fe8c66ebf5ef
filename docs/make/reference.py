"""Writes docs/reference from the dataclasses that are the settings and arguments: `make docs`.

    python docs/make/reference.py

A test holds the pages against the code, so a setting without its row, or a row without its setting, cannot stay.
"""

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import tyro

from slipstream import cli
from slipstream.config import FREE_TO_CHANGE, PIPELINE_TOO, SINGLE_ONLY, Config, Switch

FOLDER = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Written by docs/make/reference.py from the code; change the docstrings there. -->"
WORDS = {int: "whole number", float: "number", bool: "switch", str: "text", dict: "table", Path: "path"}


class _Asked(BaseException):
    """Carries what a command would have parsed its arguments into; no error, so that no command mends it."""


@functools.cache
def arguments_of(command: str) -> type:
    """Return the dataclass that a command's arguments become."""

    def ask(kind: type, **_: Any) -> None:
        raise _Asked(kind)

    with mock.patch.object(tyro, "cli", ask):
        try:
            cli.COMMANDS[command]([])
        except _Asked as asked:
            kind: type = asked.args[0]
            return kind
    raise AssertionError(f"'{command}' parses no arguments")


@functools.cache
def docstrings(kind: type) -> Mapping[str, str]:
    """Return the text below each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for line, after in zip(node.body, node.body[1:]):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(after, ast.Expr):
                found[line.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def type_text(hint: Any) -> str:
    """Return what values a setting takes, in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(part) for part in parts if part is not types.NoneType)
    if origin is tuple:
        inner = type_text(parts[0])
        return f"any of {inner}" if typing.get_origin(parts[0]) is Literal else f"{inner}s"
    return WORDS[origin or hint]


def value_text(value: Any) -> str:
    """Return a default as one writes it in a config file."""
    if value is None or value == "" or value is dataclasses.MISSING:
        return ""
    if isinstance(value, tuple):
        return f"`{list(value)}`" if value else ""
    if isinstance(value, Path):
        return f"`{value}`"
    return f"`{json.dumps(value)}`".replace('`"', "`").replace('"`', "`") if value != {} else ""


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def settings_page() -> str:
    """Return the page of all settings of a run."""
    lines = [
        "# Settings",
        NOTE,
        "",
        "One TOML file serves every command; each setting is also a flag by its dotted name, with dashes or",
        "underscores (`--optim.lr 3e-3`). Flags come before the file, the file before the defaults. `slipstream config",
        "show` prints what a run would use. An empty default means none, or what its meaning says.",
        "",
        "A *switch* is written out, `true` or `false`, on the command line too (`--model.tie-embeddings true`);",
        "several values are several words (`--staleness.delay-weights 0.5 0.3`), those of",
        "`dataparallel.emulate_speeds` also one word with commas; a *table* is JSON there",
        "(`--optim.args '{\"momentum\": 0.98}'`).",
        "",
        "**R**: free to change when a run is resumed; all others need `--allow-change`. **S**: with the executor",
        "`single` only. What a setting is for is said by the guides and [the concept pages](../README.md).",
    ]
    for prefix, kind in _tables(Config, ""):
        title = f"`[{prefix.rstrip('.')}]`" if prefix else "The run itself"
        lines += ["", f"## {title}"]
        if prefix:
            lines.append(_sentence(kind))
        lines += ["", "| setting | values | default | meaning | |", "|---|---|---|---|---|"]
        lines += [_row(*cells) for cells in _settings(kind, prefix)]
    return "\n".join(lines) + "\n"


def _tables(kind: type, prefix: str) -> Iterator[tuple[str, type]]:
    yield prefix, kind
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _tables(hint, f"{prefix}{name}.")


def _settings(kind: type, prefix: str) -> Iterator[tuple[str, ...]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        name = f"{prefix}{field.name}"
        marks = " ".join(
            mark
            for mark, holds in (
                ("R", name.startswith(FREE_TO_CHANGE)),
                ("S", prefix == "staleness." and field.name in SINGLE_ONLY and field.name not in PIPELINE_TOO),
            )
            if holds
        )
        yield (
            f"`{name}`",
            type_text(hints[field.name]),
            value_text(_default(field)),
            docstrings(kind)[field.name],
            marks,
        )


def _sentence(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


def _arguments(kind: type) -> Iterator[tuple[str, str, str, str, bool]]:
    """Yield name, values, default, meaning and whether it is positional, without the settings of a run."""
    hints, plain = typing.get_type_hints(kind, include_extras=True), typing.get_type_hints(kind)
    of_a_run = {field.name for field in dataclasses.fields(Config)} if issubclass(kind, Config) else set()
    for field in dataclasses.fields(kind):
        if field.name in of_a_run:
            continue
        extras = getattr(hints[field.name], "__metadata__", ())
        is_positional = any(extra is mark for extra in extras for mark in _positional_marks())
        renamed = next((name for extra in extras if (name := getattr(extra, "name", None))), field.name)
        shown = next((text for extra in extras if (text := getattr(extra, "metavar", None))), field.name.upper())
        name = shown if is_positional else f"--{renamed.replace('_', '-')}"
        # A switch takes its value as a word; any other bool is a bare flag, which stands for true.
        is_switch = hints[field.name] == Switch
        is_bare = plain[field.name] is bool and not is_switch
        values = "`true`, `false`" if is_switch else "" if is_bare else type_text(plain[field.name])
        default = "" if is_bare else value_text(_default(field))
        if _default(field) is dataclasses.MISSING:
            default = "required"
        yield name, values, default, docstrings(kind)[field.name], is_positional


def _positional_marks() -> tuple[Any, ...]:
    mark = tyro.conf.Positional
    return (mark, *getattr(mark, "__metadata__", ()))


def flags_of(command: str) -> frozenset[str]:
    """Return every flag that a command takes, with dashes; those of settings too."""
    kind = arguments_of(command)
    own = {name for name, _, _, _, is_positional in _arguments(kind) if not is_positional}
    if issubclass(kind, Config):
        for prefix, table in _tables(Config, ""):
            own |= {f"--{name[1:-1].replace('_', '-')}" for name, *_ in _settings(table, prefix)}
    return frozenset({*own, "--help"})


def commands_page() -> str:
    """Return the page of all commands."""
    lines = [
        "# Commands",
        NOTE,
        "",
        "`slipstream COMMAND --help` says the same. A misspelt command, flag or setting is answered with the nearest",
        "one. Exit codes: 0 done (also a run that was asked to stop and has saved), 1 a run failed, 2 bad input.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    for name in cli.COMMANDS:
        lines.append(_row(f"[`{name}`](#slipstream-{name.replace(' ', '-')})", _summary(name)))
    for name in cli.COMMANDS:
        kind = arguments_of(name)
        rows = list(_arguments(kind))
        positional = "".join(
            f" {each}" if default == "required" else f" [{each}]" for each, _, default, _, p in rows if p
        )
        more = " [--SETTING VALUE ...]" if issubclass(kind, Config) else ""
        lines += ["", f"## slipstream {name}", _sentence(kind), "", "```text"]
        lines += [f"slipstream {name}{positional} [--FLAG ...]{more}", "```", ""]
        if issubclass(kind, Config):
            lines += ["Takes every [setting](settings.md) as a flag, and these:", ""]
        lines += ["| argument | values | default | meaning |", "|---|---|---|---|"]
        lines += [_row(f"`{each}`", values, default, meaning) for each, values, default, meaning, _ in rows]
    return "\n".join(lines) + "\n"


def _summary(command: str) -> str:
    return (cli.COMMANDS[command].__doc__ or "").splitlines()[0]


PAGES = {"settings.md": settings_page, "commands.md": commands_page}
"""By file name."""


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
