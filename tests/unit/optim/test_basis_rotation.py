import pytest
import torch
from torch import nn

from slipstream.optim import BasisRotation


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(optimizer, weight, grad):
    weight.grad = grad
    optimizer.step()


def test_bases_stay_orthogonal_and_find_the_eigenvectors():
    weight = nn.Parameter(torch.zeros(5, 4, dtype=torch.float64))
    optimizer = BasisRotation([weight], lr=0.1, frequency=2, basis_beta=0.9)
    rows, columns = (torch.linalg.qr(random(seed, size, size))[0] for seed, size in ((1, 5), (2, 4)))
    scales = torch.outer(torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5]), torch.tensor([3.0, 1.5, 0.7, 0.3])).double()
    for seed in range(300):
        step(optimizer, weight, rows @ (scales * random(100 + seed, 5, 4)) @ columns.T)
    state = optimizer.state[weight]
    for side, truth in (("rows", rows), ("columns", columns)):
        basis = state[f"{side}_basis"]
        assert torch.allclose(basis.T @ basis, torch.eye(len(basis), dtype=basis.dtype), atol=1e-12)
        alignment = (basis.T @ truth).abs().diagonal()
        assert float(alignment.min()) > 0.9, "not in the order of falling eigenvalues, or not found"


def test_steps_in_a_turned_space_are_turned_steps():
    """The point of the rule, and false of Adam: the basis in which a layer is written down does not matter."""
    turn_rows, turn_columns = torch.linalg.qr(random(1, 4, 4))[0], torch.linalg.qr(random(2, 3, 3))[0]
    plain, turned = (nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)) for _ in range(2))
    adam_plain, adam_turned = (nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)) for _ in range(2))
    ours = [BasisRotation([each], lr=0.1, weight_decay=0.0) for each in (plain, turned)]
    adams = [torch.optim.AdamW([each], lr=0.1, weight_decay=0.0) for each in (adam_plain, adam_turned)]
    for seed in range(25):
        grad = random(10 + seed, 4, 3)
        for optimizers, pair in ((ours, (plain, turned)), (adams, (adam_plain, adam_turned))):
            step(optimizers[0], pair[0], grad)
            step(optimizers[1], pair[1], turn_rows @ grad @ turn_columns.T)
    assert torch.allclose(turn_rows @ plain.detach() @ turn_columns.T, turned.detach(), atol=1e-8)
    assert not torch.allclose(turn_rows @ adam_plain.detach() @ turn_columns.T, adam_turned.detach(), atol=1e-2)


def test_the_first_gradient_moves_nothing_and_begins_the_state():
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = BasisRotation([weight], lr=0.1)
    step(optimizer, weight, torch.ones(3, 2))
    assert torch.equal(weight, torch.ones(3, 2))
    assert optimizer.state[weight]["step"] == 0
    step(optimizer, weight, torch.ones(3, 2))
    assert not torch.equal(weight, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("sides", "shape", "kept"),
    [
        ("both", (3, 2), {"rows", "columns"}),
        ("rows", (3, 2), {"rows"}),
        ("columns", (3, 2), {"columns"}),
        ("shorter", (3, 2), {"columns"}),
        ("shorter", (2, 3), {"rows"}),
        ("shorter", (2, 2), {"rows"}),
    ],
)
def test_only_the_sides_asked_for_are_kept(sides, shape, kept):
    weight = nn.Parameter(torch.ones(*shape))
    optimizer = BasisRotation([weight], sides=sides)
    step(optimizer, weight, torch.ones(*shape))
    assert {key.partition("_")[0] for key in optimizer.state[weight] if key.endswith("basis")} == kept


def test_low_precision_parameters_have_a_float32_state():
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = BasisRotation([weight], lr=0.1, frequency=1)
    for seed in range(4):
        step(optimizer, weight, random(seed, 3, 2).bfloat16())
    assert weight.dtype == torch.bfloat16
    assert {each.dtype for each in optimizer.state[weight].values() if isinstance(each, torch.Tensor)} == {
        torch.float32
    }


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match=r"takes floating-point matrices.*number 0 of its group has shape \(3,\)"):
        BasisRotation([nn.Parameter(torch.ones(3))])
    optimizer = BasisRotation([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match="lr must be at least 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
