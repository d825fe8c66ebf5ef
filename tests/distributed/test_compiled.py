"""torch.compile changes the rounding, and nothing else: every executor computes a block by the same code."""

import dataclasses

import pytest
from tests.distributed.harness import as_pipeline, on_rank, settings, single, whole
from tests.distributed.pool import Pool

VARIANTS = {
    "dense": {"model": {"tie_embeddings": True, "qk_norm": True, "sliding_window": 4}},
    "experts, recomputed": {
        "model": {"num_experts": 3, "expert_ffn_dim": 8, "num_dense_layers": 2, "activation_checkpointing": True}
    },
}


def compiled(config):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, compile=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_pipeline_is_bitwise_a_compiled_process(variant):
    plain = settings(staleness={"delay": 1, "error_feedback": 1.0}, **VARIANTS[variant])
    config = compiled(plain)
    alone = single(config)
    with Pool(2, timeout_s=300.0) as pool:  # one rank waits while the other compiles
        assert whole(pool.run(on_rank, as_pipeline(config, 2), timeout_s=300.0)) == alone
    uncompiled = single(plain)
    assert alone.weights != uncompiled.weights, "or nothing was compiled"
    for step, other in zip(alone.steps, uncompiled.steps, strict=True):
        assert step[1:3] == pytest.approx(other[1:3], rel=1e-3)
