"""Output that nobody reads to its end."""

import json
import subprocess
import sys

import pytest

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
