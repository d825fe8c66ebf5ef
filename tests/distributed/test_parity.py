"""Gradients, not only losses: optimizers that normalise hide a wrong scale.

Every schedule's gradient of a batch against a plain loop in one process (bitwise), against the whole batch at once in
float64, and against torch's own pipeline schedules on the same ranks and the same model (rtol 1e-5).
"""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.distributed.harness import as_pipeline, batch_of, settings
from tests.distributed.pool import CPU, shared_pool
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from slipstream.data.loader import Batch
from slipstream.models.llama import build_stage, cross_entropy_sum, whole_model
from slipstream.models.partition import stages
from slipstream.models.shapes import tied_names
from slipstream.pipeline.runtime import PipelineExecutor

TORCH_SCHEDULES = {"gpipe": ScheduleGPipe, "one_f_one_b": Schedule1F1B}
Gradients = dict[str, np.ndarray]


def full_batch_of(config, index):
    """A batch whose every target counts."""
    batch = batch_of(config, index)
    return Batch(index=index, inputs=batch.inputs, targets=np.where(batch.targets < 0, 3, batch.targets))


def ours(rank, config, source) -> Gradients:
    """The gradients of the first batch that this rank's updates are made of."""
    executor = PipelineExecutor(config, functools.partial(source, config), transport=rank.transport)
    seen: Gradients = {}
    for program in executor._programs.values():
        updater = program.parts.updater

        def step(gradient, norm, *, update=updater.step):
            seen.update({name: tensor.numpy().copy() for name, tensor in gradient.tensors.items()})
            return update(gradient, norm)

        updater.step = step
    executor.run_step()
    executor.close()
    return seen


def gradients_of(module, config) -> Gradients:
    """By parameter: those of a tied pair added up, embedding first."""
    tied = tied_names(config.model)
    found: Gradients = {}
    for leaf, parameter in module.named_parameters():
        name = tied.get(leaf, leaf)
        found[name] = found[name] + parameter.grad.numpy() if name in found else parameter.grad.numpy().copy()
    return found


def plain(config, source, *, dtype=torch.float32, at_once=False) -> Gradients:
    """What anyone would write down for one process."""
    batch = source(config, 0)
    model = whole_model(config.model, dtype=dtype)
    parts = 1 if at_once else config.pipeline.num_microbatches
    for index in range(parts):
        part = batch.microbatch(index, parts)
        logits = model(torch.from_numpy(part.inputs), dropout_key=None if at_once else (0, index))
        (cross_entropy_sum(logits, torch.from_numpy(part.targets)) / batch.num_tokens).backward()
    return gradients_of(model, config)


def torchs(rank, config, schedule, source, loss) -> Gradients:
    """The gradients of this rank's stage under a schedule of torch's."""
    batch = source(config, 0)
    spec = stages(config.model, rank.num_ranks, sequence_length=config.data.sequence_length)[rank.rank]
    module = build_stage(config.model, spec.blocks, embed=spec.embed, head=spec.head)
    runner = TORCH_SCHEDULES[schedule](
        PipelineStage(module, rank.rank, rank.num_ranks, CPU),
        n_microbatches=config.pipeline.num_microbatches,
        loss_fn=(lambda logits, targets: cross_entropy_sum(logits, targets)) if loss == "sum" else mean_loss,
        scale_grads=loss == "mean",
    )
    inputs = (torch.from_numpy(batch.inputs),) if rank.rank == 0 else ()
    targets = {"target": torch.from_numpy(batch.targets)} if spec.head else {}
    runner.step(*inputs, **targets)
    scale = batch.num_tokens if loss == "sum" else 1
    return {name: gradient / scale for name, gradient in gradients_of(module, config).items()}


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def together(parts: list[Gradients]) -> Gradients:
    """All stages' gradients; what two stages hold (a tied pair) must be the same on both."""
    found: Gradients = {}
    for part in parts:
        for name, gradient in part.items():
            assert name not in found or np.array_equal(found[name], gradient), name
            found[name] = gradient
    return found


def same_bits(found: Gradients, expected: Gradients) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def assert_close(found: Gradients, expected: Gradients):
    assert found.keys() == expected.keys()
    for name in expected:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5 * scale, err_msg=name)


CASES = [
    ("gpipe", 3, 5),
    ("one_f_one_b", 3, 5),
    ("one_f_one_b", 4, 2),
    ("interleaved", 2, 5),
    ("interleaved", 3, 4),
    ("two_bw", 3, 5),
    ("two_bw", 4, 3),
]


@pytest.mark.parametrize(("schedule", "num_stages", "num_microbatches"), CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_schedule_has_the_gradient_of_one_process(schedule, num_stages, num_microbatches, tied):
    config = settings(
        model={"num_layers": 6, "tie_embeddings": tied, "dropout": 0.2, "activation_checkpointing": True},
        pipeline={"num_microbatches": num_microbatches},
        optim={"max_grad_norm": 0.0},
        train={"num_steps": 1},
    )
    expected = plain(config, batch_of)
    config = as_pipeline(config, num_stages, schedule)
    assert same_bits(together(shared_pool(num_stages).run(ours, config, batch_of)), expected)


def test_one_process_has_the_gradient_of_the_whole_batch_in_float64():
    """Microbatches of unequal numbers of tokens: a mean of means would be off by far more than rounding."""
    config = settings()
    assert_close(plain(config, batch_of), plain(config, batch_of, dtype=torch.float64, at_once=True))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (4, 4)])
def test_torchs_schedules_agree(schedule, num_stages, num_microbatches):
    """Summed over tokens and divided once at the end."""
    config = settings(pipeline={"num_microbatches": num_microbatches}, train={"num_steps": 1})
    config = as_pipeline(config, num_stages, schedule)
    pool = shared_pool(num_stages)
    found = together(pool.run(ours, config, batch_of))
    assert_close(found, together(pool.run(torchs, config, schedule, batch_of, "sum")))


def test_torchs_mean_agrees_where_every_target_counts_and_only_there():
    """torch's default divides by microbatches: right only where all have the same number of valid tokens."""
    config = as_pipeline(settings(train={"num_steps": 1}), 2, "one_f_one_b")
    pool = shared_pool(2)
    full = together(pool.run(ours, config, full_batch_of))
    assert_close(full, together(pool.run(torchs, config, "one_f_one_b", full_batch_of, "mean")))
    uneven = together(pool.run(ours, config, batch_of))
    with pytest.raises(AssertionError):
        assert_close(uneven, together(pool.run(torchs, config, "one_f_one_b", batch_of, "mean")))
