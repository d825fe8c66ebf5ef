"""The executor `single` against plain PyTorch loops that share only the model and the data with it."""

import copy
import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from slipstream.config import Config, from_dict, resolve
from slipstream.data import Loader, open_data
from slipstream.device import settle
from slipstream.digests import combined_digest, tensor_digest
from slipstream.models.llama import whole_model
from slipstream.optim.muon import Muon
from slipstream.train.single import SingleExecutor

STEPS = 6
MATRICES = ("attention.", "ffn.")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


def settings(**changes) -> Config:
    tables = {
        "data": {"sequence_length": 16},
        "model": {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48},
        "optim": {"lr": 0.01, "lr_warmup_steps": 2, "lr_total_steps": 10, "max_grad_norm": 1.0},
        "pipeline": {"num_microbatches": 3},
        "train": {"num_steps": STEPS, "microbatch_size": 2},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change
    return resolve(from_dict(tables), vocab_size=257, cuda=False)


@pytest.fixture(scope="module")
def loader() -> Loader:
    return Loader(open_data("").train, sequence_length=16, batch_size=6, seed=0)


def plain_loop(
    config: Config, loader: Loader, device: str = "cpu"
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train as anyone would, keeping old weights by hand: batch b reads the weights from before update b - delay."""
    model = whole_model(config.model, device=device)
    params = dict(model.named_parameters())
    matrices = {n: p for n, p in params.items() if p.ndim == 2 and any(part in n for part in MATRICES)}
    rest = {n: p for n, p in params.items() if n not in matrices}

    def adamw(group):
        decayed = [p for p in group.values() if p.ndim == 2]
        plain = [p for p in group.values() if p.ndim != 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=config.optim.lr, betas=(0.9, 0.95))

    optimizers = [adamw(params)]
    if config.optim.name == "muon":
        optimizers = [Muon(matrices.values(), lr=config.optim.lr, weight_decay=0.1), adamw(rest)]
    delay = config.staleness.delay
    old = [copy.deepcopy(model.state_dict())]
    losses, norms = [], []
    for step in range(STEPS):
        newest = copy.deepcopy(model.state_dict())
        model.load_state_dict(old[max(step - delay, 0)])
        batch = loader.batch(step)
        inputs, targets = (torch.from_numpy(ids).to(device) for ids in (batch.inputs, batch.targets))
        loss_of_batch = 0.0
        for x, y in zip(inputs.split(2), targets.split(2), strict=True):
            logits = model(x, dropout_key=None)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / targets.numel()
            loss.backward()
            loss_of_batch += loss.item()
        losses.append(loss_of_batch)
        # On CUDA torch's default takes the norms of all parameters in one kernel, which rounds otherwise.
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False).item())
        model.load_state_dict(newest)
        done = (step + 1 - 2) / (10 - 2)
        factor = (step + 1) / 2 if step + 1 < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.optim.lr * factor
            optimizer.step()
            optimizer.zero_grad()
        for param in params.values():
            param.grad = None
        old.append(copy.deepcopy(model.state_dict()))
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_equals_a_plain_loop_bitwise(rule, delay, device, loader):
    config = settings(optim={"name": rule}, staleness={"delay": delay})
    settle(config, torch.device(device))
    executor = SingleExecutor(config, loader.batch, device=torch.device(device))
    reports = [executor.run_step() for _ in range(STEPS)]
    losses, norms, weights = plain_loop(config, loader, device)
    assert [r.loss for r in reports] == losses
    assert [r.grad_norm for r in reports] == norms
    expected = combined_digest({name: tensor_digest(tensor) for name, tensor in weights.items()})
    assert combined_digest(executor.snapshot().digests) == expected
    assert [r.staleness for r in reports] == [min(step, delay) for step in range(STEPS)]


def test_the_plain_loops_of_two_delays_differ(loader):
    """Otherwise the test above could not tell a delay that is ignored."""
    runs = [plain_loop(settings(staleness={"delay": delay}), loader)[0] for delay in (0, 1, 3)]
    assert runs[0] != runs[1] != runs[2]


@pytest.mark.parametrize("change", [{"dropout": 0.1}, {"activation_checkpointing": True}, {"tie_embeddings": True}])
def test_model_options_change_what_they_should(change, loader):
    """Recomputation changes no bit; dropout and tying do change the run."""

    def losses(**model):
        executor = SingleExecutor(settings(model=model), loader.batch, device=torch.device("cpu"))
        return [executor.run_step().loss for _ in range(3)]

    assert (losses() == losses(**change)) == ("activation_checkpointing" in change)


def test_tied_pair_stays_equal_and_counts_once(loader):
    config = settings(model={"tie_embeddings": True}, staleness={"delay": 1, "error_feedback": 1.0})
    executor = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    for _ in range(3):
        executor.run_step()
    snapshot = executor.snapshot()
    assert "embed.weight" in snapshot.digests
    assert "head.weight" not in snapshot.digests
    for leaves in executor._parts.leaves:
        assert torch.equal(leaves["embed.weight"], leaves["head.weight"])


def test_error_feedback_zero_is_plain_delay_bitwise(loader):
    plain, zero = (
        SingleExecutor(settings(staleness={"delay": 1, **extra}), loader.batch, device=torch.device("cpu"))
        for extra in ({}, {"error_feedback": 0.0})
    )
    assert [plain.run_step().loss for _ in range(4)] == [zero.run_step().loss for _ in range(4)]


def test_bfloat16_compute_keeps_float32_masters(loader):
    config = settings(train={"compute_dtype": "bfloat16"}, staleness={"delay": 1, "error_feedback": 1.0})
    executor = SingleExecutor(config, loader.batch, device=torch.device("cpu"))
    reference = SingleExecutor(
        dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype="float32")),
        loader.batch,
        device=torch.device("cpu"),
    )
    losses = [(executor.run_step().loss, reference.run_step().loss) for _ in range(4)]
    assert all(abs(narrow - wide) < 0.03 for narrow, wide in losses)
    snapshot = executor.snapshot()
    assert {str(t.dtype) for n, t in snapshot.tensors.items() if n.startswith("y/")} == {"torch.float32"}
    assert {str(t.dtype) for n, t in snapshot.tensors.items() if n.startswith("x@")} == {"torch.bfloat16"}
