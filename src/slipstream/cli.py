"""The command line: finds the command that the words name, runs it, and turns errors into exit codes."""

import errno
import os
import sys
from collections.abc import Callable, Sequence

from slipstream import __version__
from slipstream.commands.benches import bench_exchange, bench_pipeline
from slipstream.commands.data import data_inspect, data_prepare
from slipstream.commands.models import evaluate, export_hf, generate
from slipstream.commands.planning import doctor, simulate, simulate_async_dp, stability
from slipstream.commands.reports import compare, report, watch
from slipstream.commands.training import config_show, train
from slipstream.console import complain, silence
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

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_OUR_MISTAKES = (FileNotFoundError, FileExistsError)
"""What a command has not foreseen of a file's presence; whether it may be used at all is up to the system."""


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
        complain("interrupted")
        return 130  # as shells have it: 128 and the number of the signal
    except OSError as error:
        if not (text := _refusal(error)):
            raise
        silence()  # a full disk holds back what the end of the process would try to write once more
        complain(f"error: {text}")
        return 2
    return code


def _refusal(error: OSError) -> str:
    """Return what the system refused, as a sentence; empty where that may be a mistake of ours."""
    if isinstance(error.filename, str | bytes) and not isinstance(error, _OUR_MISTAKES):
        return (
            f"cannot use {os.fsdecode(error.filename)}: {error.strerror}. Check the path, and whether this user may "
            "read and write there."
        )
    # Lines that are printed go to no file of a name that we know.
    if error.filename is None and error.errno in _NO_ROOM:
        return f"cannot write the output: {error.strerror}. Free space there, or send it elsewhere."
    return ""


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
        complain(f"error: {error}")
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
