"""`slipstream watch`: follows a run to its end, on a terminal and into a pipe."""

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from tests.unit.report.fake_runs import worker_run, write_lines, write_run

from slipstream.config import from_dict
from slipstream.errors import CheckpointError, ConfigError
from slipstream.report.watch import Follower, Tail, end_text, watch
from slipstream.report.watch_screen import fitting, screen, sparkline
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter
from slipstream.train.rundir import RunDir
from slipstream.train.status import Claim, read_status, standing


def plain(width=200):
    return Console(file=io.StringIO(), width=width)


def text(console):
    return console.file.getvalue()


def fail_in(run_dir, message):
    """What a run does that fails."""
    with contextlib.suppress(RuntimeError), Claim(RunDir(run_dir)) as claim:
        claim.take()
        raise RuntimeError(message)


def test_lines_are_read_as_they_come_and_anew_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == ([], False)
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert tail.read() == ([{"step": 1}, {"step": 2}], True)
    assert tail.read() == ([], False)
    with path.open("a") as file:
        file.write('p": 3}\n')
    assert tail.read() == ([{"step": 3}], False)
    staged = path.with_suffix(".tmp")
    staged.write_text('{"step": 1}\n')
    staged.replace(path)
    assert tail.read() == ([{"step": 1}], True)


@pytest.mark.parametrize("damage", [b"\0\0\0", b"\xff", b"[]", b'{"loss": 1}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_bytes(b'{"step": 1}\n')
    tail.read()
    with path.open("ab") as file:
        file.write(b'{"step": 2}\n' + damage + b"\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 3 is no JSON object with a 'step'"):
        tail.read()


def test_a_finished_run_is_told_in_a_line_and_ends_well(tmp_path):
    write_run(tmp_path / "run", num_steps=40, evaluate_every=20)
    console = plain()
    assert watch(tmp_path / "run", console=console) == 0
    lines = text(console).splitlines()
    assert re.fullmatch(r"step 40/40 \| loss \d\.\d+ \| .* \| eta 0s", lines[0])
    assert lines[1].startswith("evaluation at step 40: val_loss ")
    assert lines[-1].startswith("finished at step 40 of 40, val_loss ")


def test_steps_are_followed_and_the_end_ends_it(tmp_path):
    path = write_run(tmp_path / "run", num_steps=40, finished=False)
    rows = read_json_lines(path / "metrics.jsonl")
    write_lines(path / "metrics.jsonl", rows[:4])
    console, left = plain(), iter([rows[4:11], rows[11:20], None])
    with Claim(RunDir(path)) as claim:
        claim.take()

        def sleep(seconds):
            more = next(left)
            if more is None:
                claim.stopped = True
                claim.__exit__(None, None, None)
            else:
                with (path / "metrics.jsonl").open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in more)

        assert watch(path, console=console, sleep=sleep) == 0
    steps = [int(found) for found in re.findall(r"^step (\d+)/40", text(console), re.MULTILINE)]
    assert steps == [4, 10, 20], "what is there, then what train would write"
    assert "stopped at step 20 of 40, state saved; continue with: slipstream train --run-dir" in text(console)


def test_a_failed_run_says_why(tmp_path):
    path = write_run(tmp_path / "run", num_steps=40, finished=False)
    fail_in(path, "a rank died\nof hunger")
    console = plain()
    assert watch(path, console=console) == 1
    assert "failed at step 20 of 40: of hunger" in text(console)


def test_nothing_is_known_of_a_run_without_a_word(tmp_path):
    path = write_run(tmp_path / "run", num_steps=40, finished=False)
    console = plain()
    assert watch(path, console=console) == 1
    assert "no process has left word that it trains here" in text(console)


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_bad_input_is_refused(tmp_path, interval):
    with pytest.raises(ConfigError, match=r"no run directory: it has no config\.toml"):
        watch(tmp_path, console=plain())
    path = write_run(tmp_path / "run", num_steps=4)
    with pytest.raises(ConfigError, match="give more than 0"):
        watch(path, console=plain(), interval_s=interval)


def test_the_screen_shows_figures_curves_workers_and_warnings(tmp_path):
    path = worker_run(tmp_path / "run", finished=False)
    rows = read_json_lines(path / "metrics.jsonl")
    write_lines(path / "metrics.jsonl", [*rows[:-1], rows[-1] | {"skipped": True}])
    follower = Follower(path)
    follower.update()
    for width in (120, 60):
        console = plain(width)
        console.print(screen(follower.view))
        shown = text(console)
        assert max(map(len, shown.splitlines())) <= width
        for expected in (
            "step 200 of 400",
            "tokens/s",
            "staleness",
            "worker 3",
            "7.7%",
            "1 restart of",
            "1 update skipped",
        ):
            assert expected in shown, expected
        assert re.search("[▁▂▃▄▅▆▇█]{20}", shown)


def terminal(width=80, height=24, term="xterm-256color"):
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=True,
        _environ={"TERM": term},
        legacy_windows=False,
    )


def without_colours(shown):
    return re.sub(r"\x1b\[[\d;]*m", "", shown)


@pytest.mark.parametrize("width", [120, 80, 40])
def test_a_terminal_shows_the_step_below_a_whole_bar(tmp_path, width):
    """A bar in colours fills its line, and does not end it."""
    path = write_run(tmp_path / "run", num_steps=40, finished=False)
    follower = Follower(path)
    follower.update()
    console = terminal(width)
    console.print(screen(follower.view))
    lines = without_colours(text(console)).splitlines()
    assert {len(line) for line in lines} == {width}
    assert lines[3].startswith("│ step 20 of 40"), lines[:5]


@pytest.mark.parametrize("how", ["it stops", "ctrl-c"])
def test_a_terminal_is_drawn_on_aside_and_keeps_the_last_picture(tmp_path, how):
    path = write_run(tmp_path / "run", num_steps=40, finished=False)
    rows = read_json_lines(path / "metrics.jsonl")
    write_lines(path / "metrics.jsonl", rows[:4])
    console, looks = terminal(), []
    with Claim(RunDir(path)) as claim:
        claim.take()

        def sleep(seconds):
            looks.append(seconds)
            write_lines(path / "metrics.jsonl", rows[: 4 * len(looks)])
            if len(looks) == 3 and how == "ctrl-c":
                raise KeyboardInterrupt
            if len(looks) == 3:
                claim.stopped = True
                claim.__exit__(None, None, None)

        assert watch(path, console=console, sleep=sleep) == (130 if how == "ctrl-c" else 0)
        claim.stopped = True
    before, aside, after = re.split(r"\x1b\[\?1049[hl]", text(console))
    assert not before.strip()
    assert "step 4 of 40" in aside
    assert text(console).rfind("\x1b[?25h") > text(console).rfind("\x1b[?25l"), "the cursor is back"
    assert after.count("╭") == 1
    kept = without_colours(after)
    assert ("step 8 of 40" if how == "ctrl-c" else "step 12 of 40") in kept
    assert ("state saved; continue with" in kept) == (how == "it stops")


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(tmp_path):
    write_run(tmp_path / "run", num_steps=40, evaluate_every=20)
    console = terminal(term="dumb")
    assert watch(tmp_path / "run", console=console) == 0
    assert text(console).startswith("step 40/40 | loss ")


@pytest.mark.parametrize(("missing", "shown"), [(0, 4), (1, 2), (2, 1), (3, 0), (99, 0)])
def test_workers_for_whom_there_is_no_room_are_counted(tmp_path, missing, shown):
    path = worker_run(tmp_path / "run", finished=False)
    follower = Follower(path)
    follower.update()
    console = terminal()
    whole = len(console.render_lines(screen(follower.view)))
    console.height = max(whole - missing, 1)
    lines = console.render_lines(fitting(follower.view, console))
    assert len(lines) == max(whole - missing, whole - 3)
    told = ["".join(segment.text for segment in line) for line in lines]
    assert sum(bool(re.search(r"worker \d", line)) for line in told) == shown
    assert any(f"and {4 - shown} more" in line for line in told) == (shown < 4)
    assert any("restart" in line for line in told)


def test_the_time_left_is_what_was_seen(tmp_path):
    path = write_run(tmp_path / "run", num_steps=100, finished=False, step_s=0.5)
    rows = read_json_lines(path / "metrics.jsonl")
    write_lines(path / "metrics.jsonl", rows[:10])
    now = [0.0]
    follower = Follower(path, clock=lambda: now[0])
    follower.update()
    assert follower.view.eta_s == pytest.approx(90 * 0.5)
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[10:20])
    now[0] = 20.0  # by the clock of the wall a step takes 2 s: a virtual one may say otherwise
    follower.update()
    assert follower.view.eta_s == pytest.approx(80 * 2.0)
    now[0] = 100.0
    follower.view.state = "running"
    follower._time(False)
    assert follower.view.warnings == ["no step for 80s"]


def test_sparklines_thin_long_curves():
    assert sparkline([float(value) for value in range(800)], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([float("nan"), 1.0]) == "▁"


def tiny(run_dir, **train):
    return from_dict(
        {
            "run_dir": str(run_dir),
            "data": {"sequence_length": 16},
            "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
            "pipeline": {"num_microbatches": 1},
            "train": {"num_steps": 3, "microbatch_size": 2} | train,
            "evaluate": {"num_sequences": 2},
        }
    )


def test_training_leaves_word_of_how_it_ended(tmp_path):
    during = []

    class Looking(SilentReporter):
        def on_step(self, row, *, eta_s):
            during.append(read_status(tmp_path).state)

    launch(tiny(tmp_path), reporter=Looking())
    assert set(during) == {"running"}
    assert read_status(tmp_path).state == "finished"
    (tmp_path / "status.json").unlink()
    assert standing(tmp_path).state == "finished", "a run from before there was a status"


def test_two_cannot_train_in_one_directory(tmp_path):
    class Second(SilentReporter):
        def on_step(self, row, *, eta_s):
            launch(tiny(tmp_path, num_steps=5), reporter=SilentReporter(), resume=True)

    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* trains in the run directory .* right now"):
        launch(tiny(tmp_path), reporter=Second())
    assert read_status(tmp_path).state == "failed"


def _hold(path, ready):
    with Claim(RunDir(path)) as claim:
        claim.take()
        ready.set()
        time.sleep(60)


def test_a_killed_process_is_not_waited_for(tmp_path):
    context = multiprocessing.get_context("fork")
    path = write_run(tmp_path / "run", num_steps=40, finished=False)
    ready = context.Event()
    process = context.Process(target=_hold, args=(path, ready))
    process.start()
    assert ready.wait(20)
    assert read_status(path).state == "running"
    process.kill()
    process.join()
    assert standing(path).state == "failed"
    console = plain()
    assert watch(path, console=console) == 1
    assert f"its process {process.pid} on" in text(console)


def test_an_old_summary_does_not_hide_that_a_longer_run_failed(tmp_path):
    path = write_run(tmp_path / "run", num_steps=40)
    fail_in(path, "later")
    assert standing(path).state == "failed"
    follower = Follower(path)
    follower.update()
    assert end_text(follower.view, path) == "failed at step 40 of 40: later"


def test_ctrl_c_leaves_quietly(tmp_path):
    path = write_run(tmp_path / "run", num_steps=40, finished=False)
    with Claim(RunDir(path)) as claim:
        claim.take()
        code = "from slipstream.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "watch", str(path), "--interval", "0.05"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("evaluation at step 0")
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=30)
    assert process.returncode == 130
    assert complaints == ""
