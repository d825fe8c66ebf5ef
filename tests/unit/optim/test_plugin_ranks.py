"""The plug-in on sharded and replicated parameters: two gloo ranks on the CPU.

This file is also the program of a rank: ``python test_plugin_ranks.py RANK WORLD_SIZE FOLDER``. All checks run in one
pair of processes, as starting those is what takes time; each leaves its results in a file.
"""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.optim.plugin import Delay, ErrorFeedback, attach

STEPS = 7
SAVED_AFTER = 3
TIMEOUT_S = 240


class Model(nn.Module):
    """Rows that two ranks cannot share evenly; the gain has one, so that the second rank's part is empty."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Parameter(torch.randn(5, 4, generator=generator))
        self.second = nn.Parameter(torch.randn(3, 5, generator=generator))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first.T) @ self.second.T * self.gain


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return model(x.chunk(world_size)[rank]).square().mean()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return attach(torch.optim.AdamW(model.parameters(), lr=0.05), Delay(1), ErrorFeedback(c=1.0))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        loss_of(model, step, rank, world_size).backward()
        optimizer.step()
        optimizer.zero_grad()


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def ddp(folder: Path) -> dict[str, Tensor]:
    """Gradients that are views of DDP's buckets, and gradients that are not."""
    from torch.nn.parallel import DistributedDataParallel

    weights = {}
    for as_view in (False, True):
        model = DistributedDataParallel(Model(), gradient_as_bucket_view=as_view)
        optimizer = build_optimizer(model)
        run(model, optimizer, range(STEPS))
        weights |= {f"{name}, view {as_view}": weight.detach() for name, weight in model.module.named_parameters()}
    return weights


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, build_optimizer(model)


def fsdp2(folder: Path) -> dict[str, Tensor]:
    """A run on sharded parameters, with a checkpoint on the way."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    model, optimizer = sharded()
    run(model, optimizer, range(SAVED_AFTER))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    weights = full_weights(model)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": whole}, folder / "whole.pt")
    run(model, optimizer, range(SAVED_AFTER, STEPS))
    return full_weights(model)


def fsdp2_resumed(folder: Path) -> dict[str, Tensor]:
    """The rest of that run, from the sharded checkpoint, flattened; any number of ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = sharded()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    run(model, optimizer, range(SAVED_AFTER, STEPS))
    return full_weights(model)


def fsdp2_resumed_from_whole(folder: Path) -> dict[str, Tensor]:
    """The rest of that run, from the unsharded checkpoint that the first rank reads and sends."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, optimizer = sharded()
    dist.barrier()
    saved = torch.load(folder / "whole.pt") if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
    set_model_state_dict(model, saved["model"], options=options)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
    run(model, optimizer, range(SAVED_AFTER, STEPS))
    return full_weights(model)


def fsdp1(folder: Path) -> dict[str, Tensor]:
    """The older sharding, on flat parameters, with a checkpoint on the way into a fresh model."""
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel

    weights = {}
    for resumed in (False, True):
        model = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = build_optimizer(model)
        run(model, optimizer, range(SAVED_AFTER))
        if resumed:
            saved = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
            model = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
            optimizer = build_optimizer(model)
            set_model_state_dict(model, saved[0])
            set_optimizer_state_dict(model, optimizer, saved[1])
        run(model, optimizer, range(SAVED_AFTER, STEPS))
        weights |= {f"{name}, resumed {resumed}": weight for name, weight in full_weights(model).items()}
    return weights


CHECKS = {2: [ddp, fsdp1, fsdp2, fsdp2_resumed, fsdp2_resumed_from_whole], 1: [fsdp2_resumed]}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'rendezvous-{world_size}'}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    for check in CHECKS[world_size]:
        weights = check(folder)
        if rank == 0:
            torch.save(weights, folder / f"{check.__name__}-{world_size}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Weights at the end of each check, by name and world size."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), "2", str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, f"rank {rank}:\n{output[-4000:]}"
    except subprocess.TimeoutExpired:
        pytest.fail(f"rank {rank} did not finish within {TIMEOUT_S} s")
    finally:
        for process in ranks:
            process.kill()
    main(0, 1, folder)  # one rank needs no process of its own
    return {path.stem: torch.load(path) for path in folder.glob("*-*.pt")}


@pytest.fixture(scope="module")
def alone():
    """The same run in one process."""
    model = Model()
    run(model, build_optimizer(model), range(STEPS))
    return {name: weight.detach() for name, weight in model.named_parameters()}


def test_gradients_that_are_views_of_ddp_buckets_are_delayed_as_any_others(results, alone):
    for name, weight in alone.items():
        assert torch.equal(results["ddp-2"][f"{name}, view True"], results["ddp-2"][f"{name}, view False"])
        torch.testing.assert_close(results["ddp-2"][f"{name}, view True"], weight, rtol=1e-4, atol=1e-5)


def test_flat_parameters_train_as_whole_ones_and_resume_exactly(results, alone):
    for name, weight in alone.items():
        assert torch.equal(results["fsdp1-2"][f"{name}, resumed True"], results["fsdp1-2"][f"{name}, resumed False"])
        torch.testing.assert_close(results["fsdp1-2"][f"{name}, resumed True"], weight, rtol=1e-4, atol=1e-5)


def test_sharded_parameters_train_as_whole_ones(results, alone):
    for name, weight in alone.items():
        torch.testing.assert_close(results["fsdp2-2"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check", ["fsdp2_resumed-2", "fsdp2_resumed_from_whole-2"])
def test_sharded_parameters_resume_exactly(results, check):
    for name, weight in results["fsdp2-2"].items():
        assert torch.equal(results[check][name], weight), name


def test_a_sharded_checkpoint_resumes_on_another_number_of_ranks(results, alone):
    for name, weight in alone.items():
        torch.testing.assert_close(results["fsdp2_resumed-1"][name], weight, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
