"""Every inequality of docs/theory.md, on smooth problems with a known constant, through the update path that trains."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.optim.muon import Muon, newton_schulz
from slipstream.staleness.delay import DelayLine
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.publish import build_publish_method
from slipstream.staleness.updater import Updater
from slipstream.staleness.versions import VersionedWeights
from slipstream.train.curvature import polar

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"
SIDE = 4
ROUNDING = 1e-9


def spectral(x: Tensor) -> Tensor:
    """Largest singular value of each matrix."""
    return torch.linalg.matrix_norm(x, ord=2)


def dual(x: Tensor) -> Tensor:
    """Sum of singular values of each matrix."""
    return torch.linalg.matrix_norm(x, ord="nuc")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A smooth function of a matrix: dual(gradient(X) - gradient(Y)) <= smoothness spectral(X - Y), value >= 0."""

    name: str
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]
    smoothness: float
    start: Tensor


def quadratic() -> Problem:
    """1/2 <X - A, S (X - A) R> with S and R positive: L = sum s_i r_i, both sorted (von Neumann's trace inequality)."""
    generator = torch.Generator().manual_seed(1)

    def positive(values):
        basis, _ = torch.linalg.qr(torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64))
        return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T

    left, right = positive([1.0, 0.5, 0.2, 0.1]), positive([1.0, 0.8, 0.6, 0.3])
    target = 10 * torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64)
    return Problem(
        "quadratic",
        lambda x: ((x - target) * (left @ (x - target) @ right)).sum((-2, -1)) / 2,
        lambda x: left @ (x - target) @ right,
        1.0 * 1.0 + 0.5 * 0.8 + 0.2 * 0.6 + 0.1 * 0.3,
        torch.zeros(SIDE, SIDE, dtype=torch.float64),
    )


def not_convex() -> Problem:
    """Mean of p(a_k^T X b_k - z_k), p(s) = s^2 / (1 + s^2): |p''| <= 2, so L = 2 mean |a_k|^2 |b_k|^2."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(12, SIDE, generator=generator, dtype=torch.float64) / 2 for _ in range(2))
    z = torch.einsum("ki,ij,kj->k", a, torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64), b)

    def residual(x):
        return torch.einsum("ki,...ij,kj->...k", a, x, b) - z

    def gradient(x):
        s = residual(x)
        return torch.einsum("...k,ki,kj->...ij", 2 * s / (1 + s**2) ** 2, a, b) / len(z)

    return Problem(
        "not convex",
        lambda x: (residual(x) ** 2 / (1 + residual(x) ** 2)).mean(-1),
        gradient,
        2 * float((a.square().sum(1) * b.square().sum(1)).mean()),
        torch.zeros(SIDE, SIDE, dtype=torch.float64),
    )


class TrustRegion(torch.optim.Optimizer):
    """Muon with the exact polar factor: the idealisation that the bounds are about."""

    def __init__(self, params, *, lr: float, momentum: float, nesterov: bool):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta = group["momentum"]
            for w in group["params"]:
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                m.mul_(beta).add_(w.grad, alpha=1 - beta)
                d = (1 - beta) * w.grad + beta * m if group["nesterov"] else m
                w.sub_(group["lr"] * polar(d))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a bound depends on."""

    problem: Problem
    eta: float
    beta: float = 0.9
    delay: int = 0
    c: float = 0.0
    nesterov: bool = False
    sigma: float = 0.0
    num_steps: int = 600

    @property
    def age(self) -> float:
        """Theta: mean age of a gradient in the direction, in steps, from momentum alone."""
        return self.beta ** (2 if self.nesterov else 1) / (1 - self.beta)

    @property
    def noise_gain(self) -> float:
        """s: root of the summed squares of the weights that the direction gives to the gradients."""
        beta = self.beta
        if not self.nesterov:
            return math.sqrt((1 - beta) / (1 + beta))
        return (1 - beta) * math.sqrt((1 + beta) ** 2 + beta**4 / (1 - beta**2))


@dataclasses.dataclass(frozen=True)
class History:
    """Everything that happened; first axis time, second the independent runs."""

    x: Tensor
    y: Tensor
    u: Tensor
    read: list[int]
    noise: Tensor


def train(setting: Setting, *, rule: Callable[..., torch.optim.Optimizer] = TrustRegion, num_runs: int = 1) -> History:
    """Train through the library's update path; runs are the first axis of one parameter."""
    problem = setting.problem
    master = torch.nn.Parameter(problem.start.expand(num_runs, -1, -1).clone())
    group = {"params": [master], "initial_lr": setting.eta}
    line = DelayLine(setting.delay)
    updater = Updater(
        {"w": master},
        {"rule": rule([group], lr=setting.eta, momentum=setting.beta, nesterov=setting.nesterov)},
        weights=VersionedWeights({"w": master}, num_buffers=line.num_versions, dtype=torch.float64),
        publish=build_publish_method(setting.c),
        lr_factor=lambda step: 1.0,
    )
    generator = torch.Generator().manual_seed(3)
    x, y, noise, read = [updater.weights.read(0)["w"].clone()], [master.detach().clone()], [], []
    for batch in range(setting.num_steps):
        version = line.read_version(batch)
        draw = torch.randn(master.shape, generator=generator, dtype=torch.float64)
        noise.append(setting.sigma / SIDE * draw)
        gradient = problem.gradient(updater.weights.read(version)["w"]) + noise[-1]
        updater.step(Gradient(tensors={"w": gradient}, read_version=version, num_tokens=1), torch.ones(()))
        read.append(version)
        x.append(updater.weights.read(batch + 1)["w"].clone())
        y.append(master.detach().clone())
    xs, ys = torch.stack(x), torch.stack(y)
    # Publishing starts as if y_0 had been x_0 + c u_0: then x_t = y_t - c u_{t-1} from t = 0 on, with u_{-1} = u_0.
    ys[0] = xs[0] + setting.c * (xs[0] - xs[1])
    return History(xs, ys, ys[:-1] - ys[1:], read, torch.stack(noise))


def directions(setting: Setting, gradients: Tensor) -> Tensor:
    """d_t of the gradients g_t, by the definition."""
    beta, m, found = setting.beta, torch.zeros_like(gradients[0]), []
    for g in gradients:
        m = beta * m + (1 - beta) * g
        found.append((1 - beta) * g + beta * m if setting.nesterov else m)
    return torch.stack(found)


def bound(setting: Setting, *, low: float = 1.0, high: float = 1.0, lag: float | None = None) -> float:
    """Right side of the theorem, from what is known before the run: f, its gradient and L at the start.

    low, high: <d, O(d)> >= low dual(d), spectral(O(d)) <= high. lag: mean distance between where a gradient was taken
    and where it is applied, in steps; none: its bound delay + c.
    """
    problem, eta, c = setting.problem, setting.eta * high, setting.c
    L, T = problem.smoothness, setting.num_steps
    first = float(dual(problem.gradient(problem.start)))
    gap = float(problem.value(problem.start)) + c * eta * first + L * (c * eta) ** 2 / 2
    lag = setting.delay + c if lag is None else lag
    error = (
        setting.age * (first + L * c * eta) / T
        + (setting.age + lag) * L * eta
        + math.sqrt(SIDE) * setting.noise_gain * setting.sigma
    )
    return (gap / (setting.eta * T) + high * L * eta / 2 + (low + high) * error) / low


def best_eta(problem: Problem, *, beta: float, delay: int, c: float, num_steps: int) -> float:
    """The step that makes the deterministic bound (nearly) smallest."""
    factor = 0.5 + 2 * (beta / (1 - beta) + delay + c)
    return math.sqrt(float(problem.value(problem.start)) / (num_steps * problem.smoothness * factor))


def setting_of(problem: Problem, *, delay: int, c: float, num_steps: int = 600, **changes) -> Setting:
    eta = best_eta(problem, beta=changes.get("beta", 0.9), delay=delay, c=c, num_steps=num_steps)
    return Setting(problem=problem, eta=eta, delay=delay, c=c, num_steps=num_steps, **changes)


PROBLEMS = [quadratic(), not_convex()]
by_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=[problem.name for problem in PROBLEMS])
by_delay = pytest.mark.parametrize("delay", [0, 1, 2])
by_feedback = pytest.mark.parametrize("c", [0.0, 1.0])


@by_problem
def test_the_constant_is_one(problem):
    """Random pairs far and near; and on the quadratic the pair that attains it."""
    generator = torch.Generator().manual_seed(4)
    x = 3 * torch.randn(2000, SIDE, SIDE, generator=generator, dtype=torch.float64)
    step = torch.randn(2000, SIDE, SIDE, generator=generator, dtype=torch.float64)
    y = x + torch.logspace(-4, 1, 2000, dtype=torch.float64)[:, None, None] * polar(step)
    ratios = dual(problem.gradient(x) - problem.gradient(y)) / spectral(x - y)
    assert float(ratios.max()) <= problem.smoothness * (1 + ROUNDING)
    if problem.name == "quadratic":
        zero, worst = torch.zeros(SIDE, SIDE, dtype=torch.float64), polar(step[0])
        for _ in range(500):
            worst = polar(problem.gradient(worst) - problem.gradient(zero))
        attained = dual(problem.gradient(worst) - problem.gradient(zero))
        assert float(attained) == pytest.approx(problem.smoothness, rel=1e-3)


@by_problem
@by_delay
@by_feedback
@pytest.mark.parametrize(("beta", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_each_step_obeys_its_inequality_and_the_average_the_theorem(problem, delay, c, beta, nesterov):
    setting = setting_of(problem, delay=delay, c=c, beta=beta, nesterov=nesterov)
    run = train(setting)
    L, eta, T = problem.smoothness, setting.eta, setting.num_steps
    slack = 1 + ROUNDING
    # Steps: eta for the optimizer's weights, (1 + 2c) eta for the published ones.
    assert float(spectral(run.u).max()) <= eta * slack
    assert float(spectral(run.x[1:] - run.x[:-1]).max()) <= (1 + 2 * c) * eta * slack
    # Lag: from where the gradient was taken to where it is applied.
    before = torch.cat([run.u[:1], run.u])  # u_{t-1} at t
    torch.testing.assert_close(run.x, run.y - c * before, rtol=0, atol=1e-12)
    lag = run.y[:-1] - run.x[run.read]
    assert float(spectral(lag).max()) <= (delay + c) * eta * slack
    G, g = problem.gradient(run.y[:-1]), problem.gradient(run.x[run.read])
    assert float((dual(g - G) - L * spectral(lag)).max()) <= ROUNDING
    # Direction: an average is old by itself, by Theta steps; delay and error feedback add at most delay + c.
    error = dual(directions(setting, g) - G)
    powers = beta ** (torch.arange(T, dtype=torch.float64) + (2 if nesterov else 1))
    allowed = powers[:, None] * dual(G[0]) + (setting.age + delay + c) * L * eta
    assert float((error - allowed).max()) <= ROUNDING
    # Descent.
    value, norms = problem.value(run.y), dual(G)
    assert float((value[1:] - (value[:-1] - eta * norms + 2 * eta * error + L * eta**2 / 2)).max()) <= ROUNDING
    # What y_0 and the published weights add.
    start, f_start = float(dual(problem.gradient(problem.start))), float(problem.value(problem.start))
    assert float(value[0].max()) <= f_start + c * eta * start + L * (c * eta) ** 2 / 2 + ROUNDING
    assert float(norms[0].max()) <= start + L * c * eta + ROUNDING
    assert float((dual(problem.gradient(run.x[:-1])) - norms).max()) <= L * c * eta + ROUNDING
    # The theorem; its bound says something: less than half of where the run began.
    assert float(norms.mean()) <= bound(setting)
    assert float(norms[-50:].mean()) < 0.5 * start
    if problem.name == "quadratic":
        assert bound(setting) < 0.5 * start


@pytest.mark.parametrize(("delay", "c"), [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)])
def test_the_constants_cannot_be_smaller(delay, c):
    """Without momentum, on the quadratic, steps turn round and the bounds of step, lag and direction are met."""
    problem = PROBLEMS[0]
    setting = setting_of(problem, delay=delay, c=c, beta=0.0)
    run = train(setting)
    assert float(spectral(run.x[1:] - run.x[:-1]).max()) >= 0.999 * (1 + 2 * c) * setting.eta
    assert float(spectral(run.y[:-1] - run.x[run.read]).max()) >= 0.999 * (delay + c) * setting.eta
    error = dual(problem.gradient(run.x[run.read]) - problem.gradient(run.y[:-1]))
    assert float(error.max()) >= 0.7 * (delay + c) * problem.smoothness * setting.eta
    # Without the delay's share the theorem would be false.
    mean = float(dual(problem.gradient(run.y[:-1])).mean())
    assert bound(setting, lag=0.0) < mean <= bound(setting)


def documented() -> list[tuple[float, int, float, float, float]]:
    """Rows (beta, delay, c, mean, bound) of the page's table."""
    rows = re.findall(r"^\| ([\d.]+) \| (\d) \| (\d) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    return [(float(beta), int(delay), float(c), float(mean), float(limit)) for beta, delay, c, mean, limit in rows]


def test_the_page_says_what_comes_out():
    assert len(documented()) == 8
    for beta, delay, c, mean, limit in documented():
        setting = setting_of(PROBLEMS[0], delay=delay, c=c, beta=beta)
        measured = float(dual(PROBLEMS[0].gradient(train(setting).y[:-1])).mean())
        assert (measured, bound(setting)) == (pytest.approx(mean, rel=0.02), pytest.approx(limit, rel=0.005))


@by_problem
@pytest.mark.parametrize(("delay", "c"), [(1, 0.5), (1, 1.0), (2, 1.0), (2, 2.0)])
def test_with_error_feedback_the_lag_is_that_of_the_change_of_steps(problem, delay, c):
    """lag <= (delay - c + c rho_t) eta; rho_t eta is the mean distance of the missed steps from the one before."""
    setting = setting_of(problem, delay=delay, c=c)
    run = train(setting)
    eta, lags, allowed = setting.eta, [], []
    for t in range(delay + 1, setting.num_steps):
        rho = sum(spectral(run.u[j] - run.u[t - delay - 1]) for j in range(t - delay, t)) / (delay * eta)
        lags.append(spectral(run.y[t] - run.x[t - delay]))
        allowed.append((delay - c + c * rho) * eta)
    lags, allowed = torch.stack(lags), torch.stack(allowed)
    assert float((lags - allowed).max()) <= ROUNDING
    assert float(lags.max()) > 0.5 * delay * eta, "steps must have turned somewhere, or nothing was tried"


@by_problem
@by_delay
@by_feedback
@pytest.mark.parametrize("nesterov", [False, True])
def test_noise_adds_what_the_average_lets_through(problem, delay, c, nesterov):
    start = float(dual(problem.gradient(problem.start)))
    setting = setting_of(problem, delay=delay, c=c, nesterov=nesterov, sigma=start / 4, num_steps=300)
    run = train(setting, num_runs=16)
    G = problem.gradient(run.y[:-1])
    mean = dual(G).mean(0)  # of each run
    assert float(mean.mean() + 2 * mean.std() / 4) <= bound(setting)
    through = dual(directions(setting, run.noise))
    allowed = math.sqrt(SIDE) * setting.noise_gain * setting.sigma
    assert 0.7 * allowed <= float(through[100:].mean()) <= allowed
    assert float(run.noise.square().sum((-2, -1)).mean().sqrt()) == pytest.approx(setting.sigma, rel=0.05)


@by_problem
@by_delay
@by_feedback
def test_the_step_of_muon_itself(problem, delay, c):
    """Newton-Schulz leaves singular values between about 0.68 and 1.20, so it has constants of its own."""
    setting = setting_of(problem, delay=delay, c=c, nesterov=True, num_steps=300)
    run = train(setting, rule=lambda params, **options: Muon(params, weight_decay=0.0, **options))
    low, high = 0.65, newton_schulz_range()[1]
    assert float(spectral(run.u).max()) <= high * setting.eta * (1 + ROUNDING)
    G, g = problem.gradient(run.y[:-1]), problem.gradient(run.x[run.read])
    d = directions(setting, g)
    assert float(((run.u / setting.eta * d).sum((-2, -1)) / dual(d)).min()) >= low
    assert float(dual(G).mean()) <= bound(setting, low=low, high=high)


def newton_schulz_range() -> tuple[float, float]:
    """Least and largest value that the iteration gives a relative singular value between 0.01 and 1."""
    values = torch.linspace(0.0, 1.0, 100001, dtype=torch.float64)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return float(values[1000:].min()), float(values.max())


def test_the_range_of_newton_schulz():
    low, high = newton_schulz_range()
    assert (round(low, 2), round(high, 2)) == (0.68, 1.2)
    for seed in range(20):
        x = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values = torch.linalg.svdvals(newton_schulz(x))
        assert float(values.max()) <= high + 1e-6


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.9, 0.999), (0.95, 0.95)])
def test_adam_too_has_a_longest_step(beta1, beta2):
    """|m_hat| / sqrt(v_hat) is at most kappa_t, by Cauchy and Schwarz, and some gradients attain it."""
    for t in (1, 3, 10, 200):
        ages = torch.arange(t, dtype=torch.float64)
        ratio = beta1**2 / beta2
        total = float((ratio**ages).sum())
        kappa = (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(total) * math.sqrt(1 - beta2**t) / (1 - beta1**t)

        def step(gradients):
            m = ((1 - beta1) * beta1**ages * gradients).sum(-1) / (1 - beta1**t)
            v = ((1 - beta2) * beta2**ages * gradients**2).sum(-1) / (1 - beta2**t)
            return m.abs() / v.sqrt()

        random = torch.randn(1000, t, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        assert float(step(random).max()) <= kappa * (1 + ROUNDING)
        assert float(step((beta1 / beta2) ** ages)) == pytest.approx(kappa)
