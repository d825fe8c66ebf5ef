"""Pseudo-gradients and narrow wires on worker processes: the same numbers as in one process."""

import functools

import pytest
from tests.distributed import worker_mains
from tests.distributed.pool import CPU
from tests.distributed.test_process_engine import running, settings
from tests.distributed.worker_mains import microbatch

from slipstream.dataparallel.inline import InlineEngine
from slipstream.dataparallel.synchronous import SynchronousEngine
from slipstream.digests import combined_digest

FIGURES = ("wire_bytes_per_push", "wire_relative_error", "pushes_accepted", "pushes_rejected")

ONE_WORKER = {
    "pseudo-gradient": {"unit": "pseudo_gradient", "local_steps": 2},
    "pseudo-gradient, bfloat16": {"unit": "pseudo_gradient", "local_steps": 2, "wire": "bfloat16"},
    "int8": {"wire": "int8"},
    "in step, int8": {"wire": "int8", "mode": "sync"},
}


@pytest.mark.parametrize("options", ONE_WORKER)
def test_one_worker_process_is_one_inline_worker_bitwise(options):
    changes = {"num_workers": 1, "emulate_microbatch_ms": 0.0} | ONE_WORKER[options]
    config = settings(dataparallel=changes)
    kind = SynchronousEngine if config.dataparallel.mode == "sync" else InlineEngine
    inline = kind(config, functools.partial(microbatch, config), device=CPU)
    with running(config) as engine:
        rows = [[each.run_step() for _ in range(4)] for each in (engine, inline)]
        assert [(row.loss, row.grad_norm, row.lr) for row in rows[0]] == [
            (row.loss, row.grad_norm, row.lr) for row in rows[1]
        ]
        digests = [combined_digest(each.snapshot().digests) for each in (engine, inline)]
        assert digests[0] == digests[1]
        figures = [each.figures() for each in (engine, inline)]
        assert [figures[0][name] for name in FIGURES] == [figures[1][name] for name in FIGURES]


def test_workers_push_pseudo_gradients_at_their_own_speeds():
    changes = {"unit": "pseudo_gradient", "local_steps": 2, "pushes_per_step": 1, "wire": "int8"}
    with running(settings(dataparallel=changes), worker_mains.plain) as engine:
        losses = [engine.run_step().loss for _ in range(20)]
        figures = engine.figures()
        assert figures["ledger_balanced"]
        assert figures["staleness_max"] >= 1
        assert 0 < figures["wire_relative_error"] < 0.05
        assert losses[-1] == losses[-1] < losses[0] + 0.5
