"""`train` and `config show`: flags over a config file over the defaults."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import tyro

from slipstream.arguments import ConfigArgs, ShowArgs, TrainArgs, refuse_bytes, refuse_given
from slipstream.commands.summaries import read_summary, summary_table
from slipstream.config import Config, explicit_settings, load_toml, to_toml
from slipstream.errors import ConfigError, NonFiniteError

Args = TypeVar("Args", bound=ConfigArgs)


def train(argv: Sequence[str]) -> int:
    """Train a model."""
    from slipstream.console import Console
    from slipstream.train.launch import launch
    from slipstream.train.progress import ConsoleReporter

    args = _parse_config_args(TrainArgs, argv, prog="slipstream train")
    if not args.resume:
        refuse_given({"--allow-change": args.allow_change or None}, "without --resume")
    config = args.settings()
    refuse_bytes(to_toml(config).splitlines())
    other = read_summary(args.beside) if args.beside else None
    reporter = ConsoleReporter(Console(), every_steps=config.log.every_steps)
    summary = launch(
        config,
        reporter=reporter,
        resume=args.resume,
        overwrite=args.overwrite,
        allow_change=args.allow_change,
        init_from=_origin(args),
        given=_given_settings(argv, args.config),
    )
    if summary is None:
        return 0
    print(summary_table(summary, other, run_dir=config.run_dir))
    if not math.isfinite(summary["val_loss"]):
        raise NonFiniteError(
            f"the validation loss is {summary['val_loss']}: the last update has spoilt the weights. Lower "
            "optim.lr, and begin anew with --overwrite."
        )
    return 0


def _given_settings(argv: Sequence[str], path: str) -> set[str]:
    """Return the dotted names of the settings that were given, on the command line or in its config file."""
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return given | (explicit_settings(path) if path else set())


def _origin(args: TrainArgs) -> str:
    """Return what a new run takes its weights from, if anything.

    Raises:
        ConfigError: Two are named, or one is not of the kind its flag says.
    """
    if args.init_from and args.init_from_hf:
        raise ConfigError("--init-from and --init-from-hf exclude each other: give one model to begin with.")
    is_run = bool(args.init_from)
    path = Path(args.init_from or args.init_from_hf)
    if path != Path() and (path / "config.toml").is_file() != is_run:
        kind, other = ("run directory", "--init-from-hf") if is_run else ("model folder", "--init-from")
        raise ConfigError(f"{path} is no {kind}. Give one, or use {other}.")
    return args.init_from or args.init_from_hf


def config_show(argv: Sequence[str]) -> int:
    """Print the settings that `train` would use."""
    text = to_toml(_parse_config_args(ShowArgs, argv, prog="slipstream config show").settings())
    refuse_bytes(text.splitlines())
    print(text, end="")
    return 0


def _parse_config_args(kind: type[Args], argv: Sequence[str], *, prog: str) -> Args:
    """Parse flags over a config file over the defaults."""
    early = _early_values(argv, ("--config", "--run-dir"))
    path = early["--config"]
    if path is None and "--resume" in argv:
        own = Path(early["--run-dir"] or Config().run_dir) / "config.toml"
        path = str(own) if own.exists() else None
    base = load_toml(path) if path else Config()
    tables = {field.name: getattr(base, field.name) for field in dataclasses.fields(Config)}
    return tyro.cli(kind, args=argv, default=kind(config=path or "", **tables), prog=prog)


def _early_values(argv: Sequence[str], flags: Sequence[str]) -> dict[str, str | None]:
    """Return the values of a few flags before everything is parsed: the file they name holds the defaults."""
    values: dict[str, str | None] = dict.fromkeys(flags)
    for position, word in enumerate(argv):
        flag, equals, _ = word.replace("_", "-").partition("=")
        if flag in values:
            if equals:
                values[flag] = word.partition("=")[2]
            elif position + 1 < len(argv):
                values[flag] = argv[position + 1]
    return values
