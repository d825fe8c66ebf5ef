"""What goes wrong on one rank ends the whole run soon, with one message that names the cause."""

import functools
import multiprocessing
import os
import re
import signal
import struct
import sys
import threading
import time

import pytest
import torch
from tests.distributed.harness import (
    FACTS,
    as_pipeline,
    batch_of,
    facts,
    pipeline_executor,
    run_config,
    settings,
    validation_of,
)
from tests.distributed.pool import CPU, Pool, RankError, shared_pool
from torch.distributed import FileStore

from slipstream.config import resolve
from slipstream.data.tokenizer import ByteTokenizer
from slipstream.errors import ConfigError, NonFiniteError, StageError
from slipstream.pipeline.transport import PeerError
from slipstream.train import saving
from slipstream.train.launch import launch
from slipstream.train.processes import run_processes
from slipstream.train.progress import SilentReporter
from slipstream.train.rank import run_pipeline_rank
from slipstream.train.single import SingleExecutor


def train(run_dir, *, resume=False, **changes):
    changes = {"executor": "pipeline", "pipeline": {"num_stages": 3}} | changes
    return launch(run_config(run_dir, **changes), reporter=SilentReporter(), resume=resume)


def ranks():
    return [process for process in multiprocessing.active_children() if process.name.startswith("rank-")]


def fails(kind, run_dir, **changes) -> str:
    """Train, expect a failure, make sure that no rank is left, return the message."""
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        train(run_dir, **changes)
    assert not ranks(), f"ranks outlived the run; it took {time.monotonic() - begin:.0f} s"
    return str(caught.value)


# --- a rank raises, dies, or says nothing ------------------------------------------------------------------------


WAITED = (
    r"rank (\d) \(stage \1\) failed: waited for "
    r"(.* from rank \d|.* from all ranks|rank \d to take .*|a result of rank \d)"
    r": nothing came for 6 s \(pipeline.timeout_s\); its last action was '.*'"
)


@pytest.mark.parametrize("schedule", ["two_bw", "interleaved"])
def test_the_traceback_of_the_cause_comes_first(tmp_path, schedule):
    said = fails(
        StageError,
        tmp_path,
        optim={"name": "tests.distributed.failing.Raises"},
        model={"num_layers": 6},
        pipeline={"num_stages": 3, "pipeline_schedule": schedule},
    )
    assert said.startswith("Traceback (most recent call last):")
    assert "in go_wrong" in said.split("\nrank ")[0]
    assert said.count("Traceback") == 1, "the echoes of the other ranks are not told"
    stage = 5 if schedule == "interleaved" else 2
    assert f"rank 2 (stage {stage}) failed: ZeroDivisionError: no third step for me" in said
    assert f"its last action was '{stage}O@3'" in said
    assert "--resume" in said


def test_a_rank_that_ends_without_a_word(tmp_path):
    said = fails(StageError, tmp_path, optim={"name": "tests.distributed.failing.Exits"})
    assert re.match(r"rank 2 \(stage 2\) ended with exit code 7 and no word; its last action was '2O@3'", said)


def is_killed_in_mid_word(context):
    pipe = sys._getframe(1).f_locals["pipe"]
    os.write(pipe.fileno(), struct.pack("!i", 100_000) + b"the beginning")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_in_mid_word():
    with pytest.raises(StageError, match=r"rank 0 \(stage 0\) was killed by SIGKILL; .* Start again\."):
        run_processes(is_killed_in_mid_word, num_ranks=1, timeout_s=60.0, remedy="Start again.")


def test_a_silent_rank_is_waited_for_so_long(tmp_path):
    """Who waits for whom, after how long."""
    said = fails(
        StageError,
        tmp_path,
        optim={"name": "tests.distributed.failing.Sleeps"},
        pipeline={"num_stages": 3, "timeout_s": 6.0},
    )
    assert re.match(WAITED, said), said
    assert "Rank 2 did not answer; it was at '2O@3'" in said
    assert "Traceback" not in said


def test_a_stopped_rank_is_named_by_those_that_wait(tmp_path):
    """SIGSTOP: alive, connected and mute, as on a machine that hangs."""
    thread = threading.Thread(target=signal_rank, args=(1, signal.SIGSTOP, tmp_path), daemon=True)
    thread.start()
    said = fails(StageError, tmp_path, pipeline={"num_stages": 3, "timeout_s": 6.0}, train={"num_steps": 5000})
    assert re.match(WAITED, said), said
    assert "Rank 1 did not answer; it was at '" in said


def signal_rank(rank, number, run_dir, *, after_step=2, after_saving=False):
    """Send a signal once so many steps are noted, and, if asked, a checkpoint is whole: files are written behind."""
    deadline = time.monotonic() + 60
    metrics, manifests = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    while time.monotonic() < deadline:
        is_saved = not after_saving or any(manifests.glob("step-*/manifest.json"))
        if is_saved and metrics.exists() and metrics.read_text().count("\n") >= after_step:
            for process in ranks():
                if process.name == f"rank-{rank}":
                    os.kill(process.pid, number)
            return
        time.sleep(0.01)


@pytest.mark.parametrize("rank", [0, 2])
def test_killed_and_resumed(tmp_path, rank):
    settings = {"checkpoint": {"every_steps": 1, "keep_last": 2}, "evaluate": {"every_steps": 0}}
    kill = functools.partial(signal_rank, rank, signal.SIGKILL, tmp_path / "run", after_saving=True)
    threading.Thread(target=kill, daemon=True).start()
    said = fails(StageError, tmp_path / "run", train={"num_steps": 5000}, optim={"lr_total_steps": 40}, **settings)
    assert re.match(rf"rank {rank} \(stage {rank}\) was killed by SIGKILL; its last action was '\S+", said), said
    saved = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    found = train(tmp_path / "run", resume=True, train={"num_steps": saved + 2}, **settings)
    expected = train(tmp_path / "whole", train={"num_steps": saved + 2}, **settings)
    assert found["weights_sha256"] == expected["weights_sha256"]


def notes_of_an_evaluation(rank, config):
    said = []
    executor = pipeline_executor(rank, config)
    executor._note = lambda number, text: said.append((number, text))
    executor.evaluate(validation_of(config), "y")
    executor.close()
    return said


def test_an_evaluation_says_how_far_it_is():
    """One that takes longer than a standstill may last is none."""
    found = shared_pool(2).run(notes_of_an_evaluation, as_pipeline(settings(), 2))
    for rank, said in enumerate(found):
        assert said == [(rank, f"evaluation on y, batch {number} of 3") for number in (1, 2, 3)]


def train_alone(folder, config, checkpoint, pipe):
    """Be the one rank of a pipeline, on a disk that goes on once it was said that it is used."""
    said, digest = [], saving.file_digest

    def slow_digest(path):
        deadline = time.monotonic() + 20
        while not any(f"reading {path.name}" in text for _, text in said) and time.monotonic() < deadline:
            time.sleep(0.01)
        return digest(path)

    saving.file_digest = slow_digest
    saving.LOOK_EVERY_S = 0.01
    store = FileStore(str(folder / f"store{config.train.num_steps}"), 1)

    def note(rank, text):
        said.append((rank, text))

    run_pipeline_rank(config, rank=0, local_rank=0, store=store, checkpoint=checkpoint, note=note)
    pipe.send(said)


def test_a_rank_says_what_it_builds_reads_and_saves(tmp_path):
    context = multiprocessing.get_context("forkserver")
    for num_steps in (1, 2):
        tables = {"train": {"num_steps": num_steps}, "evaluate": {"every_steps": 0}, "executor": "pipeline"}
        config = run_config(tmp_path, pipeline={"num_stages": 1}, **tables)
        config = resolve(config, vocab_size=ByteTokenizer().vocab_size, cuda=False)
        checkpoint = tmp_path / "checkpoints" / "step-00000001" if num_steps == 2 else None
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=train_alone, args=(tmp_path, config, checkpoint, theirs), daemon=True)
        process.start()
        assert ours.poll(90)
        said = [text for _, text in ours.recv()]
        process.join(60)
        assert said[0] == "building the model"
        assert any(text.startswith("reading y/") for text in said) == (num_steps == 2)
        assert f"saving step {num_steps}: reading rank-0.safetensors again" in said


# --- numbers that are not finite ---------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_the_users_to_mend(tmp_path):
    said = fails(
        NonFiniteError, tmp_path, optim={"name": "adamw", "lr": 1e30}, checkpoint={"every_steps": 1, "keep_last": 9}
    )
    assert re.match(r"non-finite (loss|gradients): .* step \d+", said)
    assert NonFiniteError.exit_code == 2
    for folder in (tmp_path / "checkpoints").iterdir():
        assert folder.name.startswith("step-"), "what was begun to be saved was finished"


POISONED = (4, 5, 13)
"""Microbatches of three a batch: batches 1 (twice) and 4."""


def poison(all_parts):
    """Spoil one gradient of one block in a few microbatches, whichever process holds it."""
    counts = {"microbatch": -1}

    def spoil(gradient):
        counts["microbatch"] += 1
        return gradient * float("inf") if counts["microbatch"] in POISONED else gradient

    for parts in all_parts:
        for leaves in parts.leaves:
            if "blocks.2.ffn.up.weight" in leaves:
                leaves["blocks.2.ffn.up.weight"].register_hook(spoil)


def poisoned_on_rank(rank, config):
    executor = pipeline_executor(rank, config)
    poison([program.parts for program in executor._programs.values()])
    steps = [told(executor.run_step()) for _ in range(config.train.num_steps)]
    executor.close()
    skipped = [program.parts.updater.num_skipped for program in executor._programs.values()]
    return steps, dict(executor.snapshot().digests), skipped


def told(report):
    """NaN is equal to nothing, not even to itself; its text is."""
    return tuple(map(str, facts(report)))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("feedback", [0.0, 1.0])
def test_all_stages_skip_the_same_steps(num_stages, feedback):
    config = settings(staleness={"delay": 1, "error_feedback": feedback}, train={"num_steps": 7})
    alone = SingleExecutor(config, lambda index: batch_of(config, index), device=CPU)
    poison([alone._parts])
    expected = [told(alone.run_step()) for _ in range(config.train.num_steps)]
    assert [step[FACTS.index("skipped")] for step in expected] == [
        "False",
        "True",
        "False",
        "False",
        "True",
        "False",
        "False",
    ]
    results = shared_pool(num_stages).run(poisoned_on_rank, as_pipeline(config, num_stages))
    digests = {}
    for steps, part, skipped in results:
        assert steps == expected
        assert set(skipped) == {2}
        digests |= part
    assert digests == dict(alone.snapshot().digests)


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pipeline": {"num_stages": 4, "num_microbatches": 2}}, r"needs at least 3 microbatches.* given 2"),
        (
            {"pipeline": {"num_stages": 2, "num_microbatches": 3, "num_extra_in_flight": 3}},
            r"2 stages and 3 extra in flight needs at least 4 microbatches.* given 3",
        ),
        ({"pipeline": {"num_stages": 5, "num_microbatches": 8}}, r"5 pipeline stages .* the model has 4 layers"),
        (
            {"pipeline": {"num_stages": 3, "pipeline_schedule": "interleaved"}},
            r"6 pipeline stages .* the model has 4 layers",
        ),
        ({"pipeline": {"num_stages": 0}}, r"pipeline.num_stages is 0; it must be 1 or more"),
        ({"pipeline": {"timeout_s": 0.0}}, r"pipeline.timeout_s is 0.0; it must be more than 0"),
        ({"staleness": {"delay": 2}}, r"staleness.delay is 2, but .* gives a delay of 1"),
    ],
)
def test_refused_before_any_process_starts(tmp_path, changes, said):
    assert re.search(said, fails(ConfigError, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_world_of_another_size(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = fails(ConfigError, tmp_path / "run")
    assert said.startswith("torchrun started 4 ranks, pipeline.num_stages is 3.")


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(ConfigError, match="6 sequences do not make 4 equal microbatches"):
        batch_of(settings(), 0).microbatch(0, 4)


def wrong_shape(rank, config):
    """Send what the channel does not carry; every rank tries, so none waits for another."""
    executor = pipeline_executor(rank, config)
    channel = executor._flow.channels["forward"]
    sizes = [(2, 7, 15), (1, 7, 16), (2, 7)]
    said = []
    for tensor in [torch.zeros(size) for size in sizes] + [torch.zeros(2, 7, 16, dtype=torch.bfloat16)]:
        try:
            channel.send(tensor, 1 - rank.rank)
        except StageError as error:
            said.append(str(error))
    return said


def test_a_message_of_another_shape_is_never_cut():
    said = shared_pool(2).run(wrong_shape, as_pipeline(settings(), 2))[0]
    assert len(said) == 4
    assert "carries torch.float32 of shape (2, 7, 16), given torch.float32 of shape (2, 7, 15)" in said[0]
    assert "given torch.bfloat16" in said[3]


def two_tensors(rank, config):
    executor = pipeline_executor(rank, config)
    for program in executor._programs.values():
        for module in program.parts.modules:
            module.forward = lambda x, dropout_key=None: (x, x)
    executor.run_step()


def test_a_stage_that_gives_something_else_than_a_tensor():
    with Pool(2, timeout_s=20) as pool, pytest.raises(RankError) as caught:
        pool.run(two_tensors, as_pipeline(settings(), 2))
    assert re.search(
        r"StageError: the stage of blocks 0 to 1 returned a tuple; stages exchange one tensor", str(caught.value)
    )


# --- peers that cannot be reached --------------------------------------------------------------------------------


def only_rank_0_works(rank, config):
    if rank.rank:
        time.sleep(6)
        return ""
    executor = pipeline_executor(rank, config)
    try:
        executor.run_step()
    except PeerError as error:
        return str(error)


def test_a_peer_that_never_answers():
    with Pool(2, timeout_s=2) as pool:
        said = pool.run(only_rank_0_works, as_pipeline(settings(), 2))[0]
    assert re.fullmatch(r"waited for 0RECV_B0 from rank 1: nothing came for 2 s \(pipeline.timeout_s\)", said)


def connect_alone(folder, config, pipe):
    store = FileStore(str(folder / "store"), 2)
    try:
        run_pipeline_rank(config, rank=0, local_rank=0, store=store, checkpoint=None)
    except PeerError as error:
        pipe.send(str(error))


def test_a_peer_that_never_came(tmp_path):
    config = as_pipeline(settings(pipeline={"timeout_s": 1.0}), 2)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=connect_alone, args=(tmp_path, config, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    said = ours.recv()
    process.kill()
    assert re.match(r"rank 0 could not reach all of the 2 ranks in \d+ s \(pipeline.timeout_s is 1\)", said), said
