"""Output that nobody reads to its end, or that there is no room for."""

import errno
import io
import json
import os
import subprocess
import sys

import pytest

from slipstream.console import Console
from slipstream.train.progress import ConsoleReporter

FULL = "/dev/full"
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="no device that is always full")

SMALL = """
import sys
from slipstream.cli import main
sys.exit(main(sys.argv[1:]))
"""


def piped(*words, cwd):
    """Run a command whose reader takes one line and leaves; return exit code, that line, and standard error."""
    process = subprocess.Popen(
        [sys.executable, "-c", SMALL, *map(str, words)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": "1", "PATH": "", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    return process.wait(), line, errors


def test_a_run_goes_on_when_nobody_reads_its_lines(tmp_path):
    model = "--model.num-layers 1 --model.dim 8 --model.num-heads 2 --model.num-kv-heads 1 --model.ffn-dim 8"
    words = "--train.num-steps 9 --log.every-steps 1 --data.sequence-length 8 --evaluate.num-sequences 4"
    code, line, errors = piped("train", *model.split(), *words.split(), "--run-dir", "run", cwd=tmp_path)
    assert (code, errors) == (0, "")
    assert line.startswith("9 steps of")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_steps"] == 9


@pytest.mark.parametrize("words", ["simulate --num-stages 4 --num-batches 40", "--help"])
def test_other_commands_end_quietly(words, tmp_path):
    assert piped(*words.split(), cwd=tmp_path)[::2] == (0, "")


class FullDisk(io.StringIO):
    """Takes a few lines."""

    def write(self, text):
        if self.tell() + len(text) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_run_goes_on_when_its_log_is_full(capsys):
    file = FullDisk()
    reporter = ConsoleReporter(Console(file=file), every_steps=1)
    for text in ("step 1", "step 2", "a line too many", "step 4"):
        reporter.note(text)
    reporter.close()
    assert file.getvalue() == "step 1\nstep 2\n"
    assert capsys.readouterr().err == "the output takes no more lines (No space left on device); going on without\n"


def test_a_full_disk_is_an_error_where_the_lines_are_all_there_is(capsys):
    with pytest.raises(OSError, match="No space left"):
        Console(file=FullDisk(), is_result=True).print("a drawing that is too large")
    assert capsys.readouterr().err == ""


@needs_full
@pytest.mark.parametrize("words", ["simulate --num-stages 2", "--help"])
def test_a_result_that_cannot_be_written_is_a_sentence(words):
    with open(FULL, "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", SMALL, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: cannot write the output: No space left on device. Free space there, or send it elsewhere.\n"
    )


@needs_full
def test_the_exit_code_tells_of_an_error_that_cannot_be_said():
    with open(FULL, "w") as full:
        ended = subprocess.run([sys.executable, "-c", SMALL, "trian"], stderr=full, check=False)
    assert ended.returncode == 2
