"""The code blocks of the documentation, and what the commands in them are.

A block marked ``sh`` is run from top to bottom by `tests/newcomer.sh` in a fresh clone, page after page; one marked
``console`` needs what a newcomer does not have (several machines, packages, data) and is only read. Every `slipstream`
line of both is parsed by `make test`.

    python docs/make/blocks.py PAGE    prints the commands of a page as a script, run lengths shortened
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NUM_STEPS = 20
"""Of a training run whose command does not say."""

LEFT_OUT = {"make train", "make test", "make lint", "make science", "make bench", "source .venv/bin/activate"}
"""The first is run before all pages; the others have a place of their own and would take too long."""


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        page: Path from the root.
        line: Of its first line in the page, from 1.
        language: After the fence.
        text: Between the fences.
    """

    page: str
    line: int
    language: str
    text: str


def pages() -> list[Path]:
    """Return every page that a reader may open, from the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT) for path in found]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    fence, language, start, lines = "", "", 0, []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1):
        mark = re.match(r"\s*(```+)(\w*)", line)
        if not fence and mark:
            fence, language, start, lines = mark[1], mark[2], number + 1, []
        elif fence and line.strip() == fence:
            yield Block(str(page), start, language, "\n".join(lines))
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        raise ValueError(f"{page}: the block at line {start} has no end")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block; comments and redirections are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((i for i, word in enumerate(words) if word in ("&&", ";", "|")), len(words))
            command = words[:end]
            if ">" in command:
                command = command[: command.index(">")]
            if command:
                yield command
            words = words[end + 1 :]


def slipstream_words(command: Sequence[str]) -> list[str] | None:
    """Return what `slipstream` is told, wherever in the command it stands; nothing where it is another program."""
    words = list(command)
    if "slipstream.cli" in words and words[words.index("slipstream.cli") - 1] == "-m":
        return words[words.index("slipstream.cli") + 1 :]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words[1:] if words and Path(words[0]).name == "slipstream" else None


def shortened(command: Sequence[str]) -> list[str]:
    """Return a command that takes minutes less and is the same otherwise."""
    told = slipstream_words(command)
    extra: list[str] = []
    if told and told[0] == "train" and "--train.num-steps" not in told:
        extra = ["--train.num-steps", str(NUM_STEPS)]
    elif told and told[:2] == ["bench", "pipeline"]:
        extra = ["--rounds", "1", "--steps", "1"]
    elif told and told[0] == "compare" and "--from" in told:
        extra = ["--num-seeds", "2"]
    elif told and told[0] == "eval" and "--limit" not in told:
        extra = ["--limit", "4"]
    return [*command, *extra]


def script(page: Path) -> str:
    """Return the commands of a page's ``sh`` blocks as a script; `step` is the caller's, and runs one."""
    lines = []
    for block in blocks(page):
        if block.language != "sh":
            continue
        lines += [
            shlex.join(["step", *shortened(command)])
            for command in commands(block.text)
            if " ".join(command) not in LEFT_OUT
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(script(Path(sys.argv[1])), end="")
