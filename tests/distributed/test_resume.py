"""2N steps == N + resume + N, bitwise: in mid-flight, at another number of stages, from one executor to the other."""

import functools
import itertools
import multiprocessing
import os
import signal
import threading
import time

import pytest
from tests.distributed.harness import as_pipeline, batch_of, facts, pipeline_executor, run_config, settings
from tests.distributed.pool import CPU, shared_pool
from torch.distributed import PrefixStore

from slipstream.digests import combined_digest
from slipstream.train.checkpoint import open_checkpoint
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter
from slipstream.train.rank import gather_through
from slipstream.train.saving import CheckpointWriter
from slipstream.train.single import SingleExecutor

NUM_STEPS = 6


def run_and_save(executor, config, writer):
    """Train to the end and save after every step, without waiting for anybody but the disk."""
    steps = []
    while executor.step < config.train.num_steps:
        steps.append(facts(executor.run_step()))
        # What else a manifest of a run says is not needed to go on here.
        manifest = {"config": {}, "weights_sha256": "", "tokenizer": "", "data_sha256": ""}
        writer.save(executor.step, executor.snapshot(), manifest)
    writer.wait()
    return steps, dict(executor.snapshot().digests)


def save_on_rank(rank, config, folder):
    executor = pipeline_executor(rank, config)
    store = PrefixStore(str(folder), rank.store)  # another run of this pool saves the same steps
    gather = gather_through(store, "checkpoint", rank=rank.rank, num_ranks=rank.num_ranks)
    writer = CheckpointWriter(folder, rank=rank.rank, gather=gather, keep_last=100)
    result = run_and_save(executor, config, writer)
    executor.close()
    return result


def resume_on_rank(rank, config, checkpoint):
    executor = pipeline_executor(rank, config)
    executor.restore(open_checkpoint(checkpoint))
    steps = [facts(executor.run_step()) for _ in range(executor.step, config.train.num_steps)]
    executor.close()
    return steps, dict(executor.snapshot().digests)


def resume_here(config, checkpoint):
    executor = SingleExecutor(config, functools.partial(batch_of, config), device=CPU)
    executor.restore(open_checkpoint(checkpoint))
    steps = [facts(executor.run_step()) for _ in range(executor.step, config.train.num_steps)]
    return steps, dict(executor.snapshot().digests)


def joined(parts):
    assert all(steps == parts[0][0] for steps, _ in parts)
    return parts[0][0], combined_digest({name: digest for _, part in parts for name, digest in part.items()})


def base(rule, **model):
    return settings(
        model={"tie_embeddings": True, "dropout": 0.2, "activation_checkpointing": True} | model,
        optim={"name": rule},
        staleness={"delay": 1, "error_feedback": 1.0},
        pipeline={"num_microbatches": 4},
        train={"num_steps": NUM_STEPS},
    )


EXPERTS = {"num_experts": 5, "num_shared_experts": 1, "num_dense_layers": 1, "expert_ffn_dim": 12}


@pytest.mark.parametrize("saved_at", [0, 2])
def test_experts_saved_in_mid_flight(tmp_path, saved_at):
    config = base("muon", **EXPERTS)
    if saved_at:
        steps, weights = joined(shared_pool(2).run(save_on_rank, as_pipeline(config, 2), tmp_path))
    else:
        executor = SingleExecutor(config, functools.partial(batch_of, config), device=CPU)
        steps, weights = joined([run_and_save(executor, config, CheckpointWriter(tmp_path, keep_last=100))])
    checkpoint = tmp_path / "step-00000003"
    assert joined([resume_here(config, checkpoint)]) == (steps[3:], weights)
    found = joined(shared_pool(4).run(resume_on_rank, as_pipeline(config, 4), checkpoint))
    assert found == (steps[3:], weights)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("saved_at", [0, 2, 4])
def test_saved_in_mid_flight(tmp_path, saved_at, rule):
    """Saved after every step of one uninterrupted run, with microbatches of the next batches in flight; each
    checkpoint then continues to the same end, on any number of stages. 0 stands for the executor `single`."""
    config = base(rule)
    if saved_at:
        saving = as_pipeline(config, saved_at, extra=1)
        steps, weights = joined(shared_pool(saved_at).run(save_on_rank, saving, tmp_path))
    else:
        executor = SingleExecutor(config, functools.partial(batch_of, config), device=CPU)
        steps, weights = joined([run_and_save(executor, config, CheckpointWriter(tmp_path, keep_last=100))])

    targets = itertools.cycle([0, 1, 2, 3, 4] if saved_at else [1, 2, 3, 4])
    for step in (1, 2, 3, NUM_STEPS - 1, NUM_STEPS):
        for num_stages in itertools.islice(targets, 2):
            checkpoint = tmp_path / f"step-{step:08d}"
            if num_stages:
                resuming = as_pipeline(config, num_stages)
                found = joined(shared_pool(num_stages).run(resume_on_rank, resuming, checkpoint))
            else:
                found = joined([resume_here(config, checkpoint)])
            assert found == (steps[step:], weights), (step, num_stages)


def trajectory(run_dir):
    keys = ("step", "loss", "grad_norm", "lr", "staleness_mean", "staleness_max")
    return [tuple(row[key] for key in keys) for row in read_json_lines(run_dir / "metrics.jsonl")]


def train(run_dir, *, num_stages, num_steps, resume=False, **changes):
    """Train by the whole machinery; 0 stages: the executor `single`."""
    tables = {"staleness": {"delay": 1, "error_feedback": 1.0}, "train": {"num_steps": num_steps, "microbatch_size": 2}}
    if num_stages:
        tables |= {"executor": "pipeline", "pipeline": {"num_stages": num_stages}}
    return launch(run_config(run_dir, **tables, **changes), reporter=SilentReporter(), resume=resume)


def test_through_the_run_directory(tmp_path):
    """single -> 4 stages -> 2 stages -> single, a few steps each, against one run in one process."""
    expected = train(tmp_path / "whole", num_stages=0, num_steps=8)
    train(tmp_path / "parts", num_stages=0, num_steps=2)
    train(tmp_path / "parts", num_stages=4, num_steps=4, resume=True)
    train(tmp_path / "parts", num_stages=2, num_steps=6, resume=True)
    found = train(tmp_path / "parts", num_stages=0, num_steps=8, resume=True)
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
    for key in ("weights_sha256", "val_loss", "val_loss_y", "train_loss"):
        assert found[key] == expected[key], key


def test_resumed_at_the_last_step_ends_at_once(tmp_path):
    first = train(tmp_path, num_stages=2, num_steps=2, checkpoint={"every_steps": 1})
    again = train(tmp_path, num_stages=2, num_steps=2, resume=True, checkpoint={"every_steps": 1})
    assert {key: first[key] for key in first if key != "config_hash"} == {
        key: again[key] for key in again if key != "config_hash"
    }


def when(is_so, act):
    """Act from another thread, once something is so."""

    def watch():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if is_so():
                act()
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def num_rows(run_dir) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def kill():
    """What `kill` does: SIGTERM to the command alone."""
    os.kill(os.getpid(), signal.SIGTERM)


def rank_processes():
    return [process for process in multiprocessing.active_children() if process.name.startswith("rank-")]


def press_ctrl_c():
    """What a terminal does: SIGINT to the command and all its ranks at once."""
    for process in rank_processes():
        os.kill(process.pid, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("num_stages", "stop"), [(2, kill), (4, kill), (3, press_ctrl_c)])
def test_stopped_in_mid_run(tmp_path, num_stages, stop):
    """The stop travels with the gradient norms, so all ranks end after the same step, in mid-flight."""
    parts, num_steps, rarely = tmp_path / "parts", 60, {"evaluate": {"every_steps": 0}}
    thread = when(lambda: num_rows(parts) >= 3, stop)
    stopped = train(parts, num_stages=num_stages, num_steps=num_steps, **rarely)
    thread.join()
    assert stopped is None, "the run ended before it could be stopped"
    assert not rank_processes()
    step = num_rows(parts)
    assert 3 <= step < num_steps
    assert [path.name for path in (parts / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert not (parts / "summary.json").exists()
    found = train(parts, num_stages=2, num_steps=step + 4, resume=True, **rarely)
    expected = train(tmp_path / "whole", num_stages=0, num_steps=step + 4, **rarely)
    assert trajectory(parts) == trajectory(tmp_path / "whole")
    assert found["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.parametrize("stop", [kill, press_ctrl_c])
def test_stopped_while_the_ranks_look_for_one_another(tmp_path, stop):
    """Nobody fails of it: the ranks end after their first step, or before, and the run can go on."""
    thread = when(lambda: len(rank_processes()) == 4, stop)
    assert train(tmp_path, num_stages=4, num_steps=1000) is None
    thread.join()
    assert not rank_processes()
    step = num_rows(tmp_path)
    assert step < 1000
    found = train(tmp_path, num_stages=2, num_steps=step + 1, resume=True)
    assert found["num_steps"] == step + 1
