import dataclasses
import json

import pytest
import torch

from slipstream.config import Config, from_dict, resolve
from slipstream.data import Loader, open_data
from slipstream.dataparallel.checks import check_dataparallel
from slipstream.dataparallel.faults import Fault
from slipstream.dataparallel.inline import InlineEngine
from slipstream.dataparallel.ledger import Lease
from slipstream.dataparallel.local_steps import cut
from slipstream.digests import combined_digest
from slipstream.errors import ConfigError
from slipstream.train.single import SingleExecutor

CPU = torch.device("cpu")
PLAIN = {"unit": "pseudo_gradient", "outer_lr": 1.0, "outer_momentum": 0.0, "outer_momentum_every": 1}
"""The server adds up what it gets."""


def settings(**changes) -> Config:
    tables = {
        "executor": "dataparallel",
        "engine": "inline",
        "data": {"sequence_length": 8},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "dropout": 0.1},
        "optim": {"lr": 0.01, "lr_warmup_steps": 2, "lr_total_steps": 40},
        "pipeline": {"num_microbatches": 4},
        "dataparallel": {"unit": "pseudo_gradient", "local_steps": 3, "emulate_speeds": (1.0, 0.5, 1.0)},
        "train": {"num_steps": 20, "microbatch_size": 1},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    return resolve(from_dict(tables), vocab_size=257, cuda=False)


def engine(*, faults=(), **changes) -> InlineEngine:
    torch.set_num_threads(1)
    loader = Loader(open_data("").train, sequence_length=8, batch_size=1, seed=0)
    return InlineEngine(settings(**changes), loader.batch, device=CPU, faults=faults)


def alone(config: Config, num_steps: int):
    config = dataclasses.replace(config, executor="single")
    loader = Loader(open_data("").train, sequence_length=8, batch_size=config.batch_size, seed=0)
    executor = SingleExecutor(config, loader.batch, device=CPU)
    return executor, [executor.run_step() for _ in range(num_steps)]


def masters(executor) -> dict[str, torch.Tensor]:
    return {name: each for name, each in executor.snapshot().tensors.items() if name.startswith("y/")}


def distance(first, second) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


RULES = {
    "adamw": {},
    "muon": {"name": "muon"},
    "sgd with momentum and decay": {"name": "sgd", "lr": 0.1, "weight_decay": 0.1},
    "unclipped": {"max_grad_norm": 0.0},
}


@pytest.mark.parametrize("rule", RULES)
def test_one_worker_that_takes_all_steps_itself_is_one_process(rule):
    """Its optimizer keeps its state, its schedule and its clipping from lease to lease; only x - (x - y) rounds."""
    changes = {"optim": RULES[rule]}
    ours = engine(dataparallel=PLAIN | {"emulate_speeds": (1.0,)}, **changes)
    reports = [ours.run_step() for _ in range(4)]
    theirs, rows = alone(settings(**changes), 12)
    assert distance(masters(ours), masters(theirs)) < 1e-6
    assert [report.num_tokens for report in reports] == [3 * 4 * 8] * 4
    assert reports[0].loss == sum(row.loss for row in rows[:3]) / 3
    assert reports[3].loss == pytest.approx(sum(row.loss for row in rows[9:]) / 3, rel=1e-5)


@pytest.mark.parametrize("pushes_per_step", [0, 1])
def test_one_plain_step_is_a_gradient(pushes_per_step):
    """With any workers, stale or not: x - (x - (x - lr g)) is x - lr g."""
    optim = {"name": "sgd", "args": {"momentum": 0.0}, "lr": 0.5, "weight_decay": 0.0, "lr_schedule": "constant"}
    optim |= {"lr_warmup_steps": 0}
    shared = {"pushes_per_step": pushes_per_step, "emulate_jitter": 0.2}
    ours = engine(optim=optim, dataparallel=PLAIN | shared | {"local_steps": 1})
    theirs = engine(optim=optim, dataparallel=shared | {"unit": "gradient", "local_steps": 1})
    for _ in range(12):
        mine, other = ours.run_step(), theirs.run_step()
        assert (mine.staleness, mine.num_tokens) == (other.staleness, other.num_tokens)
        assert mine.loss == pytest.approx(other.loss, rel=1e-5)
        if optim["lr"] * other.grad_norm < 0.5:  # of unclipped gradients, the pushes differ by the rate
            assert mine.grad_norm == pytest.approx(optim["lr"] * other.grad_norm, rel=1e-3)
    assert ours.figures()["staleness_max"] >= 1
    assert distance(masters(ours), masters(theirs)) < 1e-6


def test_the_server_does_not_clip_what_workers_have_clipped():
    ours = engine(optim={"max_grad_norm": 1e-3, "name": "sgd", "lr": 100.0}, dataparallel=PLAIN)
    norms = [ours.run_step().grad_norm for _ in range(3)]
    assert max(norms) > 0.05
    assert ours.server.parts[0].updater._max_grad_norm == 0


def test_the_same_run_twice_is_the_same_to_the_bit_and_learns():
    first, second = engine(), engine()
    losses = [first.run_step().loss for _ in range(15)]
    assert losses == [second.run_step().loss for _ in range(15)]
    assert combined_digest(first.snapshot().digests) == combined_digest(second.snapshot().digests)
    assert losses[-1] < losses[0] - 0.5
    figures = first.figures()
    assert figures["ledger_balanced"]
    assert figures["tokens_committed"] >= 15 * 3 * 4 * 8


@pytest.mark.parametrize("pushes_per_step", [0, 1])
def test_momentum_moves_once_in_a_round_of_workers(pushes_per_step):
    (optimizer,) = engine(dataparallel={"pushes_per_step": pushes_per_step}).server.parts[0].updater.optimizers.values()
    assert optimizer.param_groups[0]["every"] == (3 if pushes_per_step else 1)
    assert optimizer.param_groups[0]["initial_lr"] == 0.7


def test_workers_have_optimizers_of_their_own():
    ours = engine()
    for _ in range(6):
        ours.run_step()
    tensors = ours.snapshot().tensors
    steps = {name.split("/")[0]: float(tensors[name]) for name in tensors if name.endswith("head.weight/step")}
    assert set(steps) == {"local@0", "local@1", "local@2"}
    assert steps["local@1"] < steps["local@0"]


class Memory:
    """A snapshot as a resumed run reads it."""

    def __init__(self, snapshot, step):
        self.snapshot, self.step = snapshot, step
        self.scalars = json.loads(json.dumps(dict(snapshot.scalars)))
        self.tensor_names = frozenset(snapshot.tensors)

    def tensor(self, name):
        return self.snapshot.tensors[name].clone()


@pytest.mark.parametrize("options", [{}, {"pushes_per_step": 1, "wire": "int8", "outer_momentum_spread": 0.2}])
def test_resumed_is_continuous_bitwise(options):
    faults = [Fault(kind="kill", worker=2, at_s=2.5), Fault(kind="join", worker=2, at_s=4.0)]
    whole, half, resumed = (engine(dataparallel=options, faults=faults, optim={"name": "muon"}) for _ in range(3))
    rows = [whole.run_step() for _ in range(10)]
    assert [half.run_step() for _ in range(4)] == rows[:4]
    resumed.restore(Memory(half.snapshot(), 4))
    assert [resumed.run_step() for _ in range(6)] == rows[4:]
    assert combined_digest(resumed.snapshot().digests) == combined_digest(whole.snapshot().digests)
    assert resumed.figures() == whole.figures()


def test_resume_with_other_workers_begins_their_optimizers_anew():
    half, resumed = engine(), engine(dataparallel={"emulate_speeds": (1.0, 1.0)})
    for _ in range(4):
        half.run_step()
    resumed.restore(Memory(half.snapshot(), 4))
    while resumed.step < 10:
        resumed.run_step()
    assert resumed.figures()["ledger_balanced"]


def test_a_worker_that_comes_back_begins_anew():
    faults = [Fault(kind="kill", worker=0, at_s=3.0), Fault(kind="join", worker=0, at_s=3.1)]
    ours = engine(faults=faults)
    while ours.now_s < 3.0:
        ours.run_step()
    before = ours._worker._local[0]
    for _ in range(3):
        ours.run_step()
    assert ours._worker._local[0] is not before
    assert (before.incarnation, ours._worker._local[0].incarnation) == (1, 2)


def test_a_step_that_is_not_finite_spoils_the_whole_push():
    """Worker 1 computes the microbatches 3, 4 and 5 first, one a step; the weights of its last step are spoiled."""
    loader = Loader(open_data("").train, sequence_length=8, batch_size=1, seed=0)
    spoiled = []

    def source(number):
        if number == 5 and not spoiled:
            spoiled.append(ours._worker._local[1]._parts.leaves[0]["head.weight"])
            with torch.no_grad():
                spoiled[0].fill_(float("nan"))
        return loader.batch(number)

    torch.set_num_threads(1)
    ours = InlineEngine(settings(), source, device=CPU)
    for _ in range(6):
        ours.run_step()
    assert ours.figures()["pushes_rejected_by_reason"] == {"non_finite": 1}
    assert ours.figures()["ledger_balanced"]
    assert ours.server.sequencer.members[1].microbatches > 0, "one is forgiven"
    assert all(bool(torch.isfinite(each).all()) for each in masters(ours).values())


@pytest.mark.parametrize(("count", "sizes"), [(6, [2, 2, 2]), (7, [2, 2, 3]), (2, [1, 1])])
def test_a_lease_is_cut_evenly_and_in_order(count, sizes):
    lease = Lease(id=0, worker=0, incarnation=1, ranges=((3, 4), (10, 9 + count)), deadline_s=0.0)
    parts = cut(lease, 3)
    assert [part.num_microbatches for part in parts] == sizes
    assert [number for part in parts for number in part.microbatches()] == list(lease.microbatches())


def test_the_schedule_counts_local_steps():
    tables = {"executor": "dataparallel", "dataparallel": {"unit": "pseudo_gradient", "local_steps": 5}}
    config = resolve(from_dict(tables | {"train": {"num_steps": 8}}), vocab_size=257, cuda=False)
    assert config.optim.lr_total_steps == 40
    assert dataclasses.replace(config, executor="single").local_steps == 1
    ours = engine(dataparallel=PLAIN | {"emulate_speeds": (1.0,)})
    for _ in range(2):
        ours.run_step()
    (group, *_) = ours._worker._local[0]._parts.updater.optimizers["adamw"].param_groups
    (_, rows) = alone(settings(), 6)
    assert group["lr"] == rows[5].lr


REFUSED = {
    "local_steps is 4, but dataparallel.unit is 'gradient'": {"dataparallel": {"unit": "gradient", "local_steps": 4}},
    "outer_lr is 1, but dataparallel.unit is 'gradient'": {
        "dataparallel": {"unit": "gradient", "local_steps": 1, "outer_lr": 1.0}
    },
    "mode 'sync' all workers make one gradient": {
        "pipeline": {"num_microbatches": 6},
        "dataparallel": {"mode": "sync"},
    },
    "outer_momentum is 1; allowed is 0": {"dataparallel": {"outer_momentum": 1.0}},
    "outer_momentum_spread is 0.5; with momentum once in 3": {
        "dataparallel": {"outer_momentum_spread": 0.5, "pushes_per_step": 1}
    },
    "staleness.correction is 'agc', which takes": {"staleness": {"correction": "agc"}},
    "staleness.correction is 'dc_asgd', which takes": {
        "staleness": {"correction": "dc_asgd", "correction_strength": 0.1}
    },
    "staleness.error_feedback is 1.0, which foretells": {"staleness": {"error_feedback": 1.0}},
    "staleness.prediction is 'xpipe', which reads": {"staleness": {"prediction": "xpipe", "prediction_steps": 1.0}},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_settings_that_make_no_sense_are_refused_by_name(sentence):
    with pytest.raises(ConfigError) as caught:
        check_dataparallel(settings(**REFUSED[sentence]))
    assert sentence in str(caught.value)


def test_settings_that_make_sense_pass():
    check_dataparallel(settings())
    check_dataparallel(settings(staleness={"lr_discount": "aalr"}, dataparallel={"wire": "int8"}))
    with pytest.raises(ConfigError, match="local_steps is 0; it must be 1 or more"):
        settings(dataparallel={"local_steps": 0})
