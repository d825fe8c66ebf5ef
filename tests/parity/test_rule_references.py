"""Every rule against its paper's formulas, written out plainly in float64.

A reference is a function of the gradients so far that gives the weights, over enough steps to see refreshes, bias
corrections and clipping at work. The rate falls from step to step, so that what should scale with it is seen to.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from slipstream.config import OptimConfig
from slipstream.models.roles import role
from slipstream.optim import build_optimizers

LR, DECAY, NUM_STEPS = 0.05, 0.1, 34
NAMES = {"matrix": "blocks.0.ffn.up.weight", "wide": "blocks.0.ffn.down.weight", "vector": "head.norm.weight"}
# Sides that differ by one: of the longer side's covariance a first gradient leaves one eigenvector to the null space,
# which is unique up to its sign. Two of them would be any two.
SHAPES = {"matrix": (5, 4), "wide": (3, 4), "vector": (4,)}
MATRICES = ("matrix", "wide")

Reference = Callable[[Tensor, list[Tensor]], Iterator[Tensor]]


def rate(step: int) -> float:
    return LR * (1 - 0.02 * step)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(what: str) -> list[Tensor]:
    """With norms on both sides of 1, since MARS clips there, and a drift, so that momentum does something."""
    shape, seed = SHAPES[what], sum(SHAPES[what])
    drift = random(seed, *shape)
    return [(drift + random(1000 * seed + step, *shape)) * (0.05 + 0.4 * (step % 3)) for step in range(NUM_STEPS)]


def trained(cfg: OptimConfig, what: str) -> list[Tensor]:
    """Weights after each step of the rule as a run would build it."""
    param = nn.Parameter(random(1, *SHAPES[what]))
    (optimizer,) = build_optimizers({NAMES[what]: param}, cfg, role=role).values()
    history = []
    for step, grad in enumerate(gradients(what), start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        param.grad = grad.clone()
        optimizer.step()
        history.append(param.detach().clone())
    return history


def largest_difference(cfg: OptimConfig, what: str, reference: Reference, steps: slice = slice(None)) -> float:
    expected = list(reference(random(1, *SHAPES[what]), gradients(what)))
    pairs = list(zip(trained(cfg, what), expected, strict=True))[steps]
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def decay_of(weight: Tensor) -> float:
    return DECAY if weight.ndim == 2 else 0.0


def adams_root(v: Tensor, beta2: float, t: int) -> Tensor:
    return (v / (1 - beta2**t)).sqrt() + 1e-8


def packaged_root(v: Tensor, beta2: float, t: int) -> Tensor:
    """Adam's, but for where the package of MARS puts its small numbers."""
    return ((v + 1e-15).sqrt() + 1e-8) / math.sqrt(1 - beta2**t)


def adamw(
    w: Tensor, grads: list[Tensor], *, root: Callable[[Tensor, float, int], Tensor] = adams_root
) -> Iterator[Tensor]:
    (beta1, beta2), m, v = (0.9, 0.95), torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - rate(t) * (m / (1 - beta1**t) / root(v, beta2, t) + decay_of(w) * w)
        yield w


def nadamw(beta1: float, beta2: float) -> Reference:
    def run(w: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
        m, v, product = torch.zeros_like(w), torch.zeros_like(w), 1.0
        for t, g in enumerate(grads, start=1):
            mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (k * 0.004)) for k in (t, t + 1))
            product *= mu
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            ahead = mu_next * m / (1 - product * mu_next) + (1 - mu) * g / (1 - product)
            w = w - rate(t) * (ahead / adams_root(v, beta2, t) + decay_of(w) * w)
            yield w

    return run


def sgd(w: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
    momentum = torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        momentum = 0.9 * momentum + g + decay_of(w) * w  # the one rule whose decay is coupled
        w = w - rate(t) * momentum
        yield w


def lion(w: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
    m = torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        w = w - rate(t) * (torch.sign(0.9 * m + 0.1 * g) + decay_of(w) * w)
        m = 0.99 * m + 0.01 * g
        yield w


def adan(w: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
    """The paper's algorithm 1 without restart; betas are weights of the past, as in the authors' code."""
    (beta1, beta2, beta3), previous = (0.98, 0.92, 0.99), grads[0]
    m, v, n = (torch.zeros_like(w) for _ in range(3))
    for t, g in enumerate(grads, start=1):
        difference, previous = g - previous, g
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * difference
        n = beta3 * n + (1 - beta3) * (g + beta2 * difference) ** 2
        ahead = m / (1 - beta1**t) + beta2 * v / (1 - beta2**t)
        w = (w - rate(t) * ahead / adams_root(n, beta3, t)) / (1 + rate(t) * decay_of(w))
        yield w


def mars(w: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
    """MARS-AdamW with gamma 0.025, approximate (one gradient a step); clipped for each parameter, as the authors do."""
    (beta1, beta2), previous, num_clipped = (0.95, 0.99), torch.zeros_like(w), 0
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        c = g + 0.025 * beta1 / (1 - beta1) * (g - previous)
        num_clipped += float(c.norm()) > 1
        c, previous = c / max(1.0, float(c.norm())), g
        m, v = beta1 * m + (1 - beta1) * c, beta2 * v + (1 - beta2) * c * c
        w = w - rate(t) * (m / (1 - beta1**t) / packaged_root(v, beta2, t) + DECAY * w)
        yield w
    assert 0 < num_clipped < len(grads)


def power(symmetric: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(symmetric)
    return vectors @ torch.diag(values**exponent) @ vectors.T


def shampoo(w: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
    left, right = (1e-6 * torch.eye(size, dtype=w.dtype) for size in w.shape)
    for t, g in enumerate(grads, start=1):
        left, right = left + g @ g.T, right + g.T @ g
        w = w - rate(t) * (power(left, -0.25) @ g @ power(right, -0.25) + DECAY * w)
        yield w


def muon_direction(x: Tensor) -> Tensor:
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def normuon(*, nesterov: bool, paper_scale: bool) -> Reference:
    def run(w: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
        m, v, (num_rows, num_columns) = torch.zeros_like(w), torch.zeros(len(w), 1, dtype=w.dtype), w.shape
        for t, g in enumerate(grads, start=1):
            m = 0.95 * m + 0.05 * g
            o = muon_direction(0.95 * m + 0.05 * g if nesterov else m)
            v = 0.95 * v + 0.05 * (o * o).mean(1, keepdim=True)
            even = o / (v.sqrt() + 1e-10)
            if paper_scale:
                even = even * 0.2 * math.sqrt(w.numel()) / even.norm()
            else:
                even = even * o.norm() / even.norm() * math.sqrt(max(1, num_rows / num_columns))
            w = w - rate(t) * (even + DECAY * w)
            yield w

    return run


def rotated_adam(
    *, betas: tuple[float, float], sides: str = "both", qr_dtype: torch.dtype = torch.float64, decay_last: bool = False
) -> Reference:
    """SOAP's algorithms 3 and 4, with the momentum kept in the parameter's own coordinates."""
    beta1, beta2 = betas

    def refreshed(basis: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.diag(basis.T @ covariance @ basis).argsort(descending=True)
        return torch.linalg.qr((covariance @ basis[:, order]).to(qr_dtype))[0].to(basis.dtype), order

    def run(w: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        left, right = (1 - beta2) * grads[0] @ grads[0].T, (1 - beta2) * grads[0].T @ grads[0]
        u, z = (torch.linalg.eigh(covariance)[1].flip(1) for covariance in (left, right))
        if sides == "rows":
            z = torch.eye(len(z), dtype=w.dtype)
        if sides == "columns":
            u = torch.eye(len(u), dtype=w.dtype)
        yield w
        for t, g in enumerate(grads[1:], start=1):
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * (u.T @ g @ z) ** 2
            inner = (u.T @ m @ z) / (1 - beta1**t) / adams_root(v, beta2, t)
            step = rate(t + 1) * u @ inner @ z.T
            w = (w - step) * (1 - rate(t + 1) * DECAY) if decay_last else w * (1 - rate(t + 1) * DECAY) - step
            left, right = beta2 * left + (1 - beta2) * g @ g.T, beta2 * right + (1 - beta2) * g.T @ g
            if t % 10 == 0:
                if sides in ("both", "rows"):
                    u, order = refreshed(u, left)
                    v = v[order]
                if sides in ("both", "columns"):
                    z, order = refreshed(z, right)
                    v = v[:, order]
            yield w

    return run


EXACT: dict[str, tuple[OptimConfig, Reference, tuple[str, ...]]] = {
    "adamw": (OptimConfig(name="adamw"), adamw, tuple(SHAPES)),
    "nadamw": (OptimConfig(name="nadamw"), nadamw(0.9, 0.95), tuple(SHAPES)),
    "nadamw of AsyncPP": (OptimConfig(name="nadamw", args={"betas": [0.99, 0.999]}), nadamw(0.99, 0.999), MATRICES),
    "sgd": (OptimConfig(name="sgd"), sgd, tuple(SHAPES)),
    "lion": (OptimConfig(name="lion"), lion, tuple(SHAPES)),
    "adan": (OptimConfig(name="adan"), adan, tuple(SHAPES)),
    "mars": (OptimConfig(name="mars"), mars, MATRICES),
    "mars, vectors": (OptimConfig(name="mars"), partial(adamw, root=packaged_root), ("vector",)),
    "shampoo": (OptimConfig(name="shampoo"), shampoo, MATRICES),
    "normuon": (OptimConfig(name="normuon"), normuon(nesterov=True, paper_scale=False), MATRICES),
    "normuon of the paper": (
        OptimConfig(name="normuon", args={"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
        normuon(nesterov=False, paper_scale=True),
        MATRICES,
    ),
    "basis_rotation": (OptimConfig(name="basis_rotation"), rotated_adam(betas=(0.9, 0.95)), MATRICES),
    "basis_rotation, rows": (
        OptimConfig(name="basis_rotation", args={"sides": "rows"}),
        rotated_adam(betas=(0.9, 0.95), sides="rows"),
        MATRICES,
    ),
    "basis_rotation, shorter": (
        OptimConfig(name="basis_rotation", args={"sides": "shorter"}),
        rotated_adam(betas=(0.9, 0.95), sides="columns"),
        ("matrix",),
    ),
}
SETTINGS = {"lr": LR, "weight_decay": DECAY}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(("row", "what"), [(row, what) for row in EXACT for what in EXACT[row][2]])
def test_rule_is_its_papers(row, what):
    cfg, reference, _ = EXACT[row]
    cfg = OptimConfig(name=cfg.name, args=cfg.args, **SETTINGS)
    tolerance = 1e-7 if cfg.name == "nadamw" else 1e-9  # torch keeps NAdam's product of momenta in float32
    assert largest_difference(cfg, what, reference) < tolerance


@pytest.mark.parametrize("what", MATRICES)
def test_soap(what):
    """Exact until the first refresh after 10 updates; from there on the package, like the authors, rounds the basis to
    float32."""
    cfg = OptimConfig(name="soap", **SETTINGS)
    reference = rotated_adam(betas=(0.95, 0.95), qr_dtype=torch.float32, decay_last=True)
    assert largest_difference(cfg, what, reference, slice(11)) < 1e-7  # eps stands beside another root
    assert largest_difference(cfg, what, reference) < 1e-5
    never = rotated_adam(betas=(0.95, 0.95), decay_last=True)
    late = OptimConfig(name="soap", args={"precondition_frequency": 5}, **SETTINGS)
    assert largest_difference(late, what, never, slice(6)) < 1e-7
    assert largest_difference(late, what, never) > 1e-3, "the frequency has no effect"


@pytest.mark.parametrize("what", MATRICES)
def test_two_sided_basis_rotation_is_soap(what):
    """Two codes of different hands agree."""
    soap = OptimConfig(name="soap", lr=LR, weight_decay=0.0)
    ours = OptimConfig(name="basis_rotation", lr=LR, weight_decay=0.0, args={"betas": [0.95, 0.95]})
    pairs = zip(trained(soap, what), trained(ours, what), strict=True)
    assert max(float((theirs - mine).abs().max()) for theirs, mine in pairs) < 1e-5
