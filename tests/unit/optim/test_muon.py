import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from slipstream.optim import muon
from slipstream.optim.muon import COEFFICIENTS, Muon, compute_dtype, newton_schulz


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_newton_schulz(x, *, num_steps=5, eps=1e-7):
    """The definition, in float64, one matrix."""
    a, b, c = COEFFICIENTS
    x = x.double()
    x = x / max(float(x.norm()), eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def train(optimizer, params, gradients):
    """Give each parameter its gradients in turn."""
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad if grad is None else grad.clone()
        optimizer.step()


class TestNewtonSchulz:
    @pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1), (1, 1), (64, 33)])
    def test_equals_its_definition(self, shape):
        x = randn(*shape)
        expected = plain_newton_schulz(x)
        torch.testing.assert_close(newton_schulz(x).double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(newton_schulz(x.double()), expected, rtol=0, atol=1e-12)

    def test_singular_values_near_one_and_vectors_kept(self):
        x = randn(32, 20, dtype=torch.float64)
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        in_their_basis = u.T @ newton_schulz(x) @ vh.T
        values = in_their_basis.diagonal()
        assert ((values > 0.6) & (values < 1.3)).all()
        torch.testing.assert_close(in_their_basis, torch.diag(values), rtol=0, atol=1e-12)

    def test_packed_is_each_matrix_by_itself_to_the_bit(self):
        x = randn(2, 3, 7, 5) * torch.tensor([1e-3, 1.0, 1e3])[None, :, None, None]
        together = newton_schulz(x)
        assert together.shape == x.shape
        for i, j in itertools.product(range(2), range(3)):
            assert torch.equal(together[i, j], newton_schulz(x[i, j]))

    def test_the_batched_path_of_accelerators_agrees(self):
        x = muon._normalised(randn(4, 7, 5), eps=1e-7, dtype=torch.float32)
        batched = muon._iterate(x.clone(), coefficients=COEFFICIENTS, num_steps=5)
        torch.testing.assert_close(batched, newton_schulz(x), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
    def test_a_tall_matrix_costs_what_a_wide_one_does(self, shape):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(randn(*shape))
        assert counter.get_total_flops() == 5 * (4 * 8 * 8 * 24 + 2 * 8 * 8 * 8)

    def test_input_is_not_written_and_layout_does_not_matter(self):
        x = randn(8, 5)
        before = x.clone()
        expected = newton_schulz(x)
        assert torch.equal(x, before)
        torch.testing.assert_close(newton_schulz(x.T.contiguous().T), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(newton_schulz(x.T), expected.T, rtol=0, atol=1e-5)
        normalised = x / x.norm()
        kept = normalised.clone()
        result = newton_schulz(normalised, num_steps=0)
        result.zero_()
        assert torch.equal(normalised, kept)

    def test_zero_and_tiny_matrices(self):
        assert torch.equal(newton_schulz(torch.zeros(3, 4, 5)), torch.zeros(3, 4, 5))
        assert newton_schulz(torch.full((4, 4), 1e-12)).abs().max() < 0.01
        assert newton_schulz(torch.zeros(0, 4, 5)).shape == (0, 4, 5)

    def test_normalised_before_it_is_cast(self):
        # The squares overflow half precision, and bfloat16 would know the norm to 3 digits only.
        x = 300 * randn(16, 16, dtype=torch.float16)
        expected = plain_newton_schulz(x)
        torch.testing.assert_close(newton_schulz(x).double(), expected, rtol=0, atol=1e-5)
        as_bf16 = muon._normalised(x, eps=1e-7, dtype=torch.bfloat16)
        assert torch.equal(as_bf16, (x.float() / x.float().norm()).bfloat16())

    def test_compute_types(self):
        assert newton_schulz(randn(3, 3)).dtype == torch.float32
        assert newton_schulz(randn(3, 3).bfloat16()).dtype == torch.float32
        assert newton_schulz(randn(3, 3).double()).dtype == torch.float64
        assert newton_schulz(randn(3, 3), dtype=torch.bfloat16).dtype == torch.bfloat16

        class OnCuda:
            device = torch.device("cuda")
            dtype = torch.float32

        assert compute_dtype(OnCuda()) == torch.bfloat16

    def test_a_vector_is_refused(self):
        with pytest.raises(ValueError, match=r"given shape \(4,\)"):
            newton_schulz(torch.ones(4))


class TestMuon:
    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("momentum", [0.0, 0.95])
    @pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
    def test_equals_the_written_out_rule(self, nesterov, momentum, adjust_lr_fn):
        weight = nn.Parameter(randn(6, 4, dtype=torch.float64))
        expected, average = weight.detach().clone(), torch.zeros(6, 4, dtype=torch.float64)
        optimizer = Muon(
            [weight], lr=0.1, weight_decay=0.2, momentum=momentum, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn
        )
        ratio = 0.2 * 6**0.5 if adjust_lr_fn == "match_rms_adamw" else (6 / 4) ** 0.5
        for step in range(4):
            grad = randn(6, 4, seed=step + 1, dtype=torch.float64)
            average = momentum * average + (1 - momentum) * grad
            direction = (1 - momentum) * grad + momentum * average if nesterov else average
            expected = (1 - 0.1 * 0.2) * expected - 0.1 * ratio * plain_newton_schulz(direction)
            train(optimizer, [weight], [[grad]])
            torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], average, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(3, 5, 7), (3, 7, 5), (2, 2, 9, 3), (2, 33, 65)])
    def test_packed_steps_like_separate_matrices_to_the_bit(self, nesterov, dtype, shape):
        settings = {"lr": 0.1, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
        packed = nn.Parameter(randn(*shape, dtype=dtype))
        indices = list(itertools.product(*map(range, shape[:-2])))
        separate = [nn.Parameter(packed.detach()[index].clone()) for index in indices]
        gradients = [randn(*shape, seed=step, dtype=dtype) for step in (1, 2, 3)]
        train(Muon([packed], **settings), [packed], [[grad] for grad in gradients])
        train(Muon(separate, **settings), separate, [[grad[index] for index in indices] for grad in gradients])
        for index, matrix in zip(indices, separate, strict=True):
            assert torch.equal(packed.detach()[index], matrix.detach())
        assert packed.dtype == dtype

    def test_every_matrix_is_orthogonalised_once_a_step(self, monkeypatch):
        calls = []

        def counted(x, **settings):
            calls.append(x.shape)
            return newton_schulz(x, **settings)

        monkeypatch.setattr(muon, "newton_schulz", counted)
        params = [nn.Parameter(randn(4, 4)), nn.Parameter(randn(3, 4, 6)), nn.Parameter(randn(5, 2))]
        optimizer = Muon(params)
        train(optimizer, params, [[torch.ones_like(param) for param in params]] * 2)
        assert len(calls) == 2 * (1 + 3 + 1)
        assert {tuple(shape) for shape in calls} == {(4, 4), (4, 6), (5, 2)}

    def test_a_packed_parameter_that_is_not_contiguous_is_updated(self):
        packed = nn.Parameter(randn(5, 3, 4).permute(1, 2, 0))
        reference = nn.Parameter(packed.detach().contiguous())
        grad = randn(3, 4, 5, seed=1)
        train(Muon([packed]), [packed], [[grad]])
        train(Muon([reference]), [reference], [[grad]])
        torch.testing.assert_close(packed.detach(), reference.detach(), rtol=0, atol=1e-6)
        assert not torch.equal(packed.detach(), randn(5, 3, 4).permute(1, 2, 0))

    def test_zero_gradient_moves_nothing_and_none_is_passed_over(self):
        zero, absent = nn.Parameter(randn(4, 3)), nn.Parameter(randn(4, 3))
        kept = zero.detach().clone()
        optimizer = Muon([zero, absent], weight_decay=0.0)
        train(optimizer, [zero, absent], [[torch.zeros(4, 3), None]] * 2)
        assert torch.equal(zero.detach(), kept)
        assert torch.equal(absent.detach(), kept)
        assert absent not in optimizer.state

    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_nothing_shares_the_momentum_buffer(self, nesterov, momentum):
        weight, grad = nn.Parameter(randn(4, 3)), randn(4, 3, seed=1)
        optimizer = Muon([weight], momentum=momentum, nesterov=nesterov)
        weight.grad = grad.clone()
        optimizer.step()
        buffer = optimizer.state[weight]["momentum_buffer"]
        torch.testing.assert_close(buffer, (1 - momentum) * grad)
        assert torch.equal(weight.grad, grad)
        assert len({buffer.data_ptr(), weight.data_ptr(), weight.grad.data_ptr()}) == 3

    @pytest.mark.parametrize(("param", "says"), [(torch.ones(4), r"\(4,\)"), (torch.ones(()), r"\(\)")])
    def test_what_is_no_matrix_is_refused_by_name(self, param, says):
        with pytest.raises(ValueError, match=f"parameter norm.weight has shape {says}"):
            Muon([("norm.weight", nn.Parameter(param))])
        with pytest.raises(ValueError, match=f"number 1 of its group has shape {says}"):
            Muon([nn.Parameter(torch.ones(2, 2)), nn.Parameter(param)])

    def test_a_refused_group_is_not_added(self):
        optimizer = Muon([nn.Parameter(torch.ones(2, 2))])
        with pytest.raises(ValueError, match="floating-point matrices"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(ValueError, match="complex64"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]})
        assert len(optimizer.param_groups) == 1

    @pytest.mark.parametrize(
        "settings",
        [
            {"lr": -1.0},
            {"lr": float("nan")},
            {"lr": torch.ones(2)},
            {"weight_decay": -0.1},
            {"momentum": 1.0},
            {"momentum": -0.1},
            {"eps": 0.0},
            {"ns_steps": -1},
            {"ns_steps": 100},
            {"ns_steps": 5.0},
            {"ns_coefficients": (1.0, 2.0)},
            {"ns_coefficients": (1.0, 2.0, float("inf"))},
            {"adjust_lr_fn": "rms"},
        ],
    )
    def test_bad_settings_are_refused(self, settings):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Muon([nn.Parameter(torch.ones(2, 2))], **settings)

    def test_a_sparse_gradient_is_refused(self):
        weight = nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.ones(2, 2).to_sparse()
        with pytest.raises(ValueError, match="dense gradients only"):
            Muon([weight]).step()

    def test_closure_tensor_lr_and_deepcopy(self):
        weight = nn.Parameter(randn(3, 3))
        optimizer = Muon([weight], lr=torch.tensor(0.1))

        def closure():
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure).detach()) for _ in range(10)]
        assert losses[-1] < losses[0]
        twin = copy.deepcopy(optimizer)
        assert twin.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]

    def test_descends(self):
        target, weight = randn(8, 6), nn.Parameter(torch.zeros(8, 6))
        optimizer = Muon([weight], lr=0.05, weight_decay=0.0)
        for _ in range(100):
            optimizer.zero_grad()
            (weight - target).square().sum().backward()
            optimizer.step()
        assert (weight - target).norm() < 0.2 * target.norm()
