"""The command line: finds the command that the words name, runs it, and turns errors into exit codes."""

import sys
from collections.abc import Callable, Sequence

from slipstream import __version__
from slipstream.commands.benches import bench_exchange, bench_pipeline
from slipstream.commands.data import data_inspect, data_prepare
from slipstream.commands.models import evaluate, export_hf, generate
from slipstream.commands.planning import doctor, simulate, simulate_async_dp, stability
from slipstream.commands.reports import compare, report, watch
from slipstream.commands.training import config_show, train
from slipstream.console import silence
from slipstream.errors import ConfigError, SlipstreamError, nearest

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "data prepare": data_prepare,
    "data inspect": data_inspect,
    "config show": config_show,
    "simulate": simulate,
    "simulate async-dp": simulate_async_dp,
    "stability": stability,
    "bench pipeline": bench_pipeline,
    "bench exchange": bench_exchange,
    "compare": compare,
    "report": report,
    "watch": watch,
    "eval": evaluate,
    "generate": generate,
    "export hf": export_hf,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (``sys.argv`` without the program) names; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()  # a reader that is gone shows here, not when the process ends
    except BrokenPipeError:
        silence()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as shells have it: 128 and the number of the signal
    return code


def _run(words: Sequence[str]) -> int:
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_overview())
            return 0 if words else 2
        if words[0] == "--version":
            print(f"slipstream {__version__}")
            return 0
        name = _command_name(words)
        return COMMANDS[name](words[len(name.split()) :])
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _command_name(words: Sequence[str]) -> str:
    """Return the command that the first one or two words name.

    Raises:
        ConfigError: They name none.
    """
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    # After `simulate`, a command and the first word of another, a word that is no flag is meant for the other's second.
    is_of_group = bool(group) and len(words) > 1 and not words[1].startswith("-")
    for length in (2,) if is_of_group else (2, 1):
        if (name := " ".join(words[:length])) in COMMANDS:
            return name
    given = " ".join(words[: 2 if group else 1])
    if group and len(words) > 1 and words[1] in ("-h", "--help"):
        print(_overview(group))
        raise SystemExit(0)
    raise ConfigError(
        f"there is no command '{given}'.{nearest(given, COMMANDS)} Commands: {', '.join(group or COMMANDS)}. "
        "Each explains itself with --help."
    )


def _overview(names: Sequence[str] | None = None) -> str:
    lines = [f"slipstream {__version__}: asynchronous pre-training of language models", "", "commands:"]
    shown = list(names or COMMANDS)
    width = max(map(len, shown))
    lines += [f"  {name:<{width}}  {(COMMANDS[name].__doc__ or '').splitlines()[0]}" for name in shown]
    return "\n".join([*lines, "", "slipstream COMMAND --help explains one."])


if __name__ == "__main__":
    sys.exit(main())
