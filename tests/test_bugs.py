"""Bugs that were met, here or by others, each with its story: what went wrong, how it showed, what keeps it away.

The first group is about weights that change while a microbatch is between its forward and its backward. A pipeline
without flush makes this the normal case, and most ways of getting it wrong are silent: the loss falls, the gradients
are those of other weights. What torch does is shown beside what we do, so that a change in either is noticed.
"""

import pytest
import torch
from tests.distributed.harness import as_pipeline, batch_of, pipeline_executor, settings
from tests.distributed.pool import CPU, shared_pool
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from slipstream.assembly import StageParts
from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.errors import StalenessError
from slipstream.models.partition import stages, whole
from slipstream.pipeline.stage import StageProgram
from slipstream.staleness.gradient import Gradient


class Normed(nn.Module):
    """A norm between two matrices: the norm's own weight is what gets lost."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x)))).square().sum()


def change_in_place(parameter, new):
    with torch.no_grad():
        parameter.copy_(new)


def change_through_data(parameter, new):
    parameter.data.copy_(new)


def replace_data(parameter, new):
    parameter.data = new


def gradients_when_changed(change):
    """Forward, change every weight, backward; the gradients beside those without a change."""
    model, x = Normed(), torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    loss = model(x)
    for parameter in model.parameters():
        change(parameter, torch.full_like(parameter, 0.5))
    return torch.autograd.grad(loss, list(model.parameters())), expected


def test_an_optimizer_that_steps_in_place_is_caught_by_autograd():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_when_changed(change_in_place)


@pytest.mark.parametrize("change", [change_through_data, replace_data])
def test_writing_through_data_is_not_caught_and_wrong(change):
    """The reason why nothing here ever writes through ``.data``: no error, other gradients."""
    found, expected = gradients_when_changed(change)
    assert not all(torch.allclose(one, other) for one, other in zip(found, expected))


def test_a_functional_call_around_a_recomputing_module_is_wrong():
    """The module recomputes from the weights that lie in it by then, not from those of its forward."""

    class Recomputing(Normed):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Recomputing()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    swapped = {name: (parameter * 2).detach().requires_grad_() for name, parameter in model.named_parameters()}
    plain = Normed()
    (expected,) = torch.autograd.grad(functional_call(plain, swapped, (x,)), [x])
    (found,) = torch.autograd.grad(functional_call(model, swapped, (x,)), [x])
    assert not torch.allclose(found, expected)


# --- the same with our parts -------------------------------------------------------------------------------------


def config_of(*, again=False, dtype="float32", tied=True) -> Config:
    return settings(
        model={"num_layers": 2, "activation_checkpointing": again, "dropout": 0.2, "tie_embeddings": tied},
        staleness={"delay": 1},
        train={"compute_dtype": dtype},
    )


def program_of(config: Config, *, num_versions=2) -> StageProgram:
    parts = StageParts(config, whole(config.model), num_versions=num_versions, device=CPU)
    loss_sum = parts.model.loss_sum
    return StageProgram(parts, lambda index: batch_of(config, index), num_microbatches=3, device=CPU, loss_sum=loss_sum)


def gradient_of_microbatch(config: Config, meanwhile) -> dict[str, torch.Tensor]:
    """Gradients by leaf when something happens between forward and backward."""
    program = program_of(config)
    program.forward(0, 0, None)
    meanwhile(program.parts)
    program.backward(0, None)
    return program.take_gradients()


def update(parts: StageParts, *, read_version=0):
    """A real update, far from small, with gradients of one."""
    tensors = {name: torch.ones_like(master) for name, master in parts.updater.masters.items()}
    parts.updater.step(Gradient(tensors=tensors, read_version=read_version, num_tokens=1), torch.tensor(1.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("again", [False, True])
def test_two_module_buffers_are_exact(again, dtype):
    """The next version goes into the other buffer; recomputation finds its own version's leaves."""
    config = config_of(again=again, dtype=dtype)
    expected = gradient_of_microbatch(config, lambda parts: None)
    found = gradient_of_microbatch(config, update)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("again", [False, True])
def test_a_buffer_that_is_needed_cannot_be_overwritten_unnoticed(again):
    """Two updates come around to the buffer of the microbatch in flight. The schedule never lets this happen."""
    with pytest.raises(StalenessError, match=r"version 0 .* was overwritten while microbatch 0 .* held are 1 to 2"):
        gradient_of_microbatch(config_of(again=again), lambda parts: [update(parts), update(parts, read_version=1)])


LEAVES = [name for name, _ in program_of(config_of()).parts.modules[0].named_parameters()]


def write_to(leaf):
    def write(parts):
        with torch.no_grad():
            parts.updater.weights.buffer(0)[parts.parameter_of[leaf]].mul_(1.5)

    return write


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_stray_write_to_a_buffer_in_use_is_loud(leaf, again):
    with pytest.raises(StalenessError, match="version 0 of the weights was overwritten while microbatch 0"):
        gradient_of_microbatch(config_of(again=again), write_to(leaf))


def test_autograd_alone_would_not_notice_where_activations_are_recomputed():
    """Leaf and buffer share autograd's counter of writes, so it finds a weight that a graph has kept. A graph that is
    recomputed has kept none: it takes what is there by then, and nothing is said. Hence a count of our own."""

    def gradients(again, meanwhile):
        program = program_of(config_of(again=again))
        program.forward(0, 0, None)
        meanwhile(program.parts)
        torch.autograd.backward(program._in_flight[0].output)
        return {name: leaf.grad for name, leaf in program.parts.leaves[0].items()}

    write = write_to("blocks.1.ffn_norm.weight")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(False, write)
    found, expected = gradients(True, write), gradients(True, lambda parts: None)
    assert not all(torch.allclose(found[name], expected[name]) for name in expected)


def test_the_first_two_batches_share_a_buffer_but_no_gradient():
    """Batches 0 and 1 both read version 0. On a stage whose step is deferred, batch 1 computes its first backwards
    while batch 0's sum still waits for the norm: with sums kept in ``.grad`` they would run into one another."""
    config = config_of()
    alone = []
    for batch in (0, 1):
        program = program_of(config)
        for microbatch in range(3 * batch, 3 * batch + 3):
            program.forward(microbatch, 0, None)
            program.backward(microbatch, None)
        alone.append(program.take_gradients())

    program = program_of(config)
    for microbatch in range(3):
        program.forward(microbatch, 0, None)
        program.backward(microbatch, None)
    waiting = program.take_gradients()
    kept = {name: tensor.clone() for name, tensor in waiting.items()}
    for microbatch in range(3, 6):
        program.forward(microbatch, 0, None)
        program.backward(microbatch, None)
    later = program.take_gradients()
    for name in kept:
        assert torch.equal(waiting[name], kept[name]), "changed while it waited"
        assert torch.equal(kept[name], alone[0][name])
        assert torch.equal(later[name], alone[1][name])
    for leaves in program.parts.leaves:
        assert all(leaf.grad is None for leaf in leaves.values())


# --- buffers of messages -----------------------------------------------------------------------------------------


def test_a_receive_buffer_used_again_collects_gradients():
    """As one system did: microbatch 1 arrives in the buffer of microbatch 0, which is the leaf of its graph too, and
    what goes back for microbatch 1 holds microbatch 0's gradient as well."""
    buffer = torch.zeros(3).requires_grad_()
    went_back = []
    for scale in (1.0, 10.0):
        (buffer * scale).sum().backward()
        went_back.append(buffer.grad.clone())
    assert went_back[1].tolist() == [11.0, 11.0, 11.0]


def leaves_of_second_stage(rank, config):
    """Which memory the inputs in flight have, and what goes back for each."""
    executor = pipeline_executor(rank, config)
    if rank.rank == 0:
        executor.run_step()
        executor.close()
        return None
    program = executor._programs[1]
    addresses, sums = [], []
    forward, backward = program.forward, program.backward

    def watched_forward(microbatch, version, received):
        assert received.is_leaf
        assert received.grad is None
        addresses.append((received.data_ptr(), len(program._in_flight)))
        return forward(microbatch, version, received)

    def watched_backward(microbatch, received):
        gradient = backward(microbatch, received)
        sums.append((microbatch, gradient.clone()))
        return gradient

    program.forward, program.backward = watched_forward, watched_backward
    executor.run_step()
    executor.close()
    return addresses, sums


@pytest.mark.parametrize("schedule", ["gpipe", "two_bw"])
def test_every_microbatch_arrives_in_memory_of_its_own(schedule):
    config = as_pipeline(settings(model={"num_layers": 2}, train={"num_steps": 1}), 2, schedule)
    _, (addresses, sums) = shared_pool(2).run(leaves_of_second_stage, config)
    if schedule == "gpipe":  # all in flight at once, so no memory can have been used again
        assert [number for _, number in addresses] == [0, 1, 2]
        assert len({address for address, _ in addresses}) == 3

    cuts = stages(config.model, 2, sequence_length=config.data.sequence_length)
    parts = [StageParts(config, cut, num_versions=1, device=CPU) for cut in cuts]
    for microbatch, gradient in sums:
        batch: Batch = batch_of(config, 0)
        part = batch.microbatch(microbatch, 3)
        x = parts[0].modules[0](torch.from_numpy(part.inputs), dropout_key=(0, microbatch)).detach().requires_grad_()
        logits = parts[1].modules[0](x, dropout_key=(0, microbatch))
        targets = torch.from_numpy(part.targets).flatten()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / batch.num_tokens
        torch.testing.assert_close(gradient, torch.autograd.grad(loss, x)[0])
