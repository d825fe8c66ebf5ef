"""A mixture of experts that workers train tells what its routers do, as other executors do."""

import pytest
import torch

from slipstream.config import from_dict, resolve
from slipstream.data import Loader, open_data
from slipstream.dataparallel.inline import InlineEngine
from slipstream.dataparallel.synchronous import SynchronousEngine
from slipstream.train.single import SingleExecutor

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "router_aux_loss": 0.1}


def reports(kind, *, num_steps, **dataparallel):
    torch.set_num_threads(1)
    single = kind is SingleExecutor
    tables = {
        "executor": "single" if single else "dataparallel",
        "engine": "inline",
        "data": {"sequence_length": 8},
        "model": {"num_layers": 2, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, **EXPERTS},
        "pipeline": {"num_microbatches": 4},
        "train": {"num_steps": num_steps, "microbatch_size": 1},
        "dataparallel": dataparallel,
    }
    config = resolve(from_dict(tables), vocab_size=257, cuda=False)
    loader = Loader(open_data("").train, sequence_length=8, batch_size=4 if single else 1, seed=0)
    executor = kind(config, loader.batch, device=torch.device("cpu"))
    return [executor.run_step() for _ in range(num_steps)]


def test_one_worker_reports_what_one_process_does():
    alone, single = reports(InlineEngine, num_steps=3, num_workers=1), reports(SingleExecutor, num_steps=3)
    assert [each.router for each in alone] == [each.router for each in single]
    assert len(alone[0].router) == 2


@pytest.mark.parametrize("kind", [InlineEngine, SynchronousEngine])
def test_several_report_means_over_their_gradients(kind):
    mode = {"mode": "sync"} if kind is SynchronousEngine else {}
    (found,), (whole,) = (reports(each, num_steps=1, **of) for each, of in ((kind, {"num_workers": 2, **mode}), ALONE))
    for layer, of_all in zip(found.router, whole.router, strict=True):
        assert layer.load_max >= of_all.load_max, "two halves of a batch are less even than the whole"
        assert layer.load_min <= of_all.load_min
        assert layer.entropy == pytest.approx(of_all.entropy, rel=1e-5)
        # The balance loss is a mean over microbatches, whoever computes them.
        assert layer.aux_loss == pytest.approx(of_all.aux_loss, rel=1e-5)


ALONE = (SingleExecutor, {})


def test_a_model_without_experts_has_no_figures():
    torch.set_num_threads(1)
    config = resolve(
        from_dict(
            {
                "executor": "dataparallel",
                "engine": "inline",
                "data": {"sequence_length": 8},
                "model": {"num_layers": 1, "dim": 8, "num_heads": 1, "num_kv_heads": 1, "ffn_dim": 8},
            }
        ),
        vocab_size=257,
        cuda=False,
    )
    loader = Loader(open_data("").train, sequence_length=8, batch_size=4, seed=0)
    assert InlineEngine(config, loader.batch, device=torch.device("cpu")).run_step().router == ()
