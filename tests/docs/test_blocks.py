"""Every command that the documentation shows would be taken: its flags, settings, configs and files are there.

What the commands do is tried by `tests/newcomer.sh`, which takes minutes.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import tyro
from blocks import ROOT, Block, blocks, commands, pages, script, shortened, slipstream_words
from reference import flags_of

from slipstream import cli
from slipstream.config import Config, from_dict, load_toml, to_dict
from slipstream.report.grid_file import load_grid, parse_grid

SHELL = ("sh", "console", "bash", "shell")
ALL = [(page, block) for page in pages() for block in blocks(page)]
TOP_FOLDERS = ("benchmarks/", "configs/", "docs/", "examples/", "src/", "tests/")
OTHER_FLAGS = {
    *("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),  # torchrun
    *("--max-restarts", "--shutdown-timeout"),
    *("--min-worker-port", "--max-worker-port"),  # ray
    "--shm-size",  # docker
    "--logdir",  # tensorboard
}
"""Of other programs."""

SUFFIXES = (".py", ".md", ".safetensors")
"""Of file names that look like a setting."""

OTHER_PROJECTS = "docs/guides/moving.md"
"""Names their flags and settings."""


class Parsed(BaseException):
    """A command got as far as its arguments, which are right."""


def lines_of(languages):
    """Return the blocks of some languages, with ids."""
    return [pytest.param(block, id=f"{block.page}:{block.line}") for _, block in ALL if block.language in languages]


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def check_slipstream(words, monkeypatch):
    parse = tyro.cli

    def parse_and_stop(*args, **kwargs):
        parse(*args, **kwargs)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(tyro, "cli", parse_and_stop)
        with pytest.raises(Parsed):
            raise SystemExit(cli.main(words))


@pytest.mark.parametrize("block", lines_of(SHELL))
def test_commands_of_a_block_are_taken(block, monkeypatch):
    for command in commands(block.text):
        told = slipstream_words(command)
        if told is not None and told[:1] not in (["--help"], ["--version"], ["COMMAND"]):
            check_slipstream(told, monkeypatch)
        elif command[0] == "make":
            assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        for word in command:
            if word.startswith(TOP_FOLDERS):
                assert (ROOT / word).exists(), f"{word} is not there"
            for extra in re.findall(r"slipstream\[([\w,]+)\]", word):
                project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
                assert set(extra.split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("page", pages(), ids=str)
def test_indented_commands_are_taken(page, monkeypatch):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^ {4}(slipstream (?:.*\\\n)*.*)$", text, flags=re.MULTILINE):
        for command in commands(line):
            if told := slipstream_words(command):
                check_slipstream(told, monkeypatch)


@pytest.mark.parametrize("block", lines_of(["toml"]))
def test_toml_of_a_block_is_taken(block):
    table = tomllib.loads(block.text)
    if "grid" in table:
        parse_grid(table, source=block.page, folder=ROOT / "configs" / "compare")
    else:
        from_dict(table, source=block.page)


@pytest.mark.parametrize("page", pages(), ids=str)
def test_settings_and_flags_that_the_text_names_exist(page):
    """In `code` within sentences and tables, where a whole command seldom stands."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", text)
    known = flat(to_dict(Config())) | {"optim.adamw_lr", "optim.lr_total_steps", "staleness.delay"}
    tables = {name.rpartition(".")[0] for name in known} - {""}
    flags = frozenset().union(*(flags_of(name) for name in cli.COMMANDS)) | OTHER_FLAGS
    for span in spans:
        setting = re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)*)\.([a-z_]+)(?: ?= ?.*)?", span)
        if str(page) != OTHER_PROJECTS and setting and setting[1] in tables and Path(span).suffix not in SUFFIXES:
            assert f"{setting[1]}.{setting[2]}" in known | tables, f"{page} names the setting {span}"
        if str(page) != OTHER_PROJECTS:
            for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", span):
                assert flag.rstrip(".").replace("_", "-") in flags, f"{page} names the flag {flag}"
        if re.match(r"slipstream [a-z]", span):
            check_name(span, page)


def check_name(span, page):
    words = [word for word in shlex.split(span.replace("'", ""))[1:] if not word.startswith("-")]
    first, second = words[0], (words[1:] or [""])[0].split("|")[0]
    group = [name for name in cli.COMMANDS if name.startswith(f"{first} ")]
    assert first.split("|")[0] in cli.COMMANDS or f"{first} {second}" in cli.COMMANDS or group, f"{page}: {span}"
    name = f"{first} {second}" if f"{first} {second}" in cli.COMMANDS else first
    if name in cli.COMMANDS:
        for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", span):
            assert flag.replace("_", "-") in flags_of(name), f"{page}: {span}: no flag {flag}"


def flat(table, prefix=""):
    names = set()
    for key, value in table.items():
        names |= flat(value, f"{prefix}{key}.") | {f"{prefix}{key}"} if isinstance(value, dict) else {f"{prefix}{key}"}
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.stem)
def test_configs_are_taken(path):
    if "grid" in tomllib.loads(path.read_text()):
        load_grid(path)
    else:
        load_toml(path)


def test_a_wrong_line_would_be_found(monkeypatch):
    with pytest.raises(SystemExit):
        check_slipstream(["train", "--optim.lrr", "1e-3"], monkeypatch)
    with pytest.raises(SystemExit):
        check_slipstream(["trian"], monkeypatch)
    with pytest.raises(SystemExit):
        check_slipstream(["train", "--config", "configs/absent.toml"], monkeypatch)


def test_commands_are_found_in_a_block():
    text = (
        "make train   # sets up\nA=1 .venv/bin/slipstream train --executor single \\\n  --optim.name adamw && ls > x\n"
    )
    found = list(commands(text))
    assert found == [
        ["make", "train"],
        ["A=1", ".venv/bin/slipstream", "train", "--executor", "single", "--optim.name", "adamw"],
        ["ls"],
    ]
    assert slipstream_words(found[1]) == ["train", "--executor", "single", "--optim.name", "adamw"]
    assert slipstream_words(["torchrun", "-m", "slipstream.cli", "train"]) == ["train"]
    assert slipstream_words(found[0]) is None


def test_only_run_lengths_are_shortened():
    assert shortened(["slipstream", "train", "--run-dir", "a"])[4:] == ["--train.num-steps", "20"]
    given = ["slipstream", "train", "--train.num-steps", "100"]
    assert shortened(given) == given


def test_a_page_becomes_a_script():
    text = script(Path("README.md"))
    assert "step .venv/bin/slipstream train --config configs/demo.toml" in text
    assert "make test" not in text


def test_a_block_without_end_is_found(tmp_path):
    (tmp_path / "page.md").write_text("```sh\nls\n")
    with pytest.raises(ValueError, match="has no end"):
        list(blocks(tmp_path / "page.md"))
    (tmp_path / "page.md").write_text("```sh\nls\n```\n```\nx\n```\n")
    assert [block[1:] for block in blocks(tmp_path / "page.md")] == [(2, "sh", "ls"), (5, "", "x")]
    assert isinstance(next(blocks(tmp_path / "page.md")), Block)
