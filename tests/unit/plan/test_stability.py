"""Limits under delay: the known table, formulas, a scan of the spectral radius, a simulation, the real update path."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.plan.stability import (
    StabilityConfig,
    best_error_feedback,
    characteristic,
    closed_form,
    max_stable_product,
    run_stability,
    simulated_growth,
    spectral_radius,
    stability_text,
)
from slipstream.staleness.delay import DelayLine
from slipstream.staleness.gradient import Gradient
from slipstream.staleness.publish import build_publish_method
from slipstream.staleness.updater import Updater
from slipstream.staleness.versions import VersionedWeights

COLUMNS = {
    "sync": {"delay": 0},
    "delay 1": {"delay": 1},
    "delay 1 + EF": {"delay": 1, "error_feedback": 1.0},
    "+ Nesterov": {"delay": 1, "nesterov": True},
    "+ Nesterov + EF": {"delay": 1, "error_feedback": 1.0, "nesterov": True},
}
TABLE = {
    0.0: ("2", "1", "0.618", "1", "0.618"),
    0.9: ("38", "1", "2.70", "2.53", "3.45"),
    0.95: ("78", "1", "4.00", "3.75", "6.78"),
    0.98: ("198", "1", "6.59", "6.26", "16.8"),
}


def drawn(count: int) -> list[StabilityConfig]:
    """Settings of all kinds, the extreme ones included."""
    rng = random.Random(7)
    return [
        StabilityConfig(
            momentum=rng.choice([0.0, rng.random(), 0.9, 0.98, 0.99]),
            delay=rng.choice([0, 1, 1, 2, 3, 5, 12]),
            error_feedback=rng.choice([0.0, 1.0, rng.uniform(0, 3), rng.uniform(-1, 8)]),
            nesterov=rng.random() < 0.5,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("beta", TABLE)
@pytest.mark.parametrize("column", COLUMNS)
def test_the_known_table(beta, column):
    text = TABLE[beta][list(COLUMNS).index(column)]
    digits = len(text.partition(".")[2])
    limit = max_stable_product(StabilityConfig(momentum=beta, **COLUMNS[column]))
    assert f"{limit:.{digits}f}" == text


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.9, 0.95, 0.999])
def test_a_delay_of_one_has_the_same_limit_at_every_momentum(beta):
    assert max_stable_product(StabilityConfig(momentum=beta, delay=1)) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 7, 30, 100])
def test_plain_gradient_descent_has_a_known_limit(delay):
    config = StabilityConfig(momentum=0.0, delay=delay)
    assert max_stable_product(config) == pytest.approx(2 * np.sin(np.pi / (2 * (2 * delay + 1))), rel=1e-9)


@pytest.mark.parametrize("config", [each for each in drawn(400) if closed_form(each) is not None])
def test_formulas_agree_with_the_roots(config):
    assert max_stable_product(config) == pytest.approx(closed_form(config), rel=1e-8)


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95])
def test_nesterov_is_error_feedback_by_the_momentum(beta, delay):
    nesterov = max_stable_product(StabilityConfig(momentum=beta, delay=delay, nesterov=True))
    feedback = max_stable_product(StabilityConfig(momentum=beta, delay=delay, error_feedback=beta))
    assert nesterov == pytest.approx(feedback, rel=1e-9)


@pytest.mark.parametrize("config", drawn(60))
def test_the_radius_is_below_one_all_the_way_to_the_limit_and_not_beyond(config):
    """A scan, which needs none of the algebra behind the limit; it would see a crossing that was passed over."""
    limit = max_stable_product(config)
    products = np.concatenate([np.geomspace(1e-6 * limit, 0.9 * limit, 80), limit * np.linspace(0.9, 0.9999, 80)])
    assert max(spectral_radius(config, product) for product in products) < 1
    assert spectral_radius(config, 1.0001 * limit) > 1


@pytest.mark.parametrize("config", drawn(12))
def test_a_simulated_quadratic_agrees(config):
    limit = max_stable_product(config)
    for share in (0.3, 0.98, 1.05):
        grown = simulated_growth(config, share * limit, num_steps=20000)
        assert grown == pytest.approx(spectral_radius(config, share * limit), abs=1e-3)
    assert simulated_growth(config, 0.98 * limit) < 1 < simulated_growth(config, 1.05 * limit)


def growth_of_the_update_path(config: StabilityConfig, product: float, *, num_steps: int) -> float:
    """Train 1/2 h x^2 at lr 1 with the library's own update path; return the factor a step over the second half."""
    master = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    line = DelayLine(config.delay)
    updater = Updater(
        {"w": master},
        {
            "sgd": torch.optim.SGD(
                [{"params": [master], "initial_lr": 1.0}], momentum=config.momentum, dampening=config.momentum
            )
        },
        weights=VersionedWeights({"w": master}, num_buffers=line.num_versions, dtype=torch.float64),
        publish=build_publish_method(config.error_feedback),
        lr_factor=lambda step: 1.0,
    )
    sizes = []
    for batch in range(num_steps):
        version = line.read_version(batch)
        gradient = product * updater.weights.read(version)["w"]
        updater.step(Gradient(tensors={"w": gradient}, read_version=version, num_tokens=1), gradient.norm())
        sizes.append(abs(master.item()))
    window = num_steps // 4
    early, late = max(sizes[window : 2 * window]), max(sizes[-window:])
    return (late / early) ** (1 / (2 * window))


@pytest.mark.parametrize(("delay", "c"), [(0, 0.0), (1, 0.0), (1, 1.0), (2, 1.0), (2, 2.0)])
def test_the_limit_is_that_of_the_code_that_trains(delay, c):
    config = StabilityConfig(momentum=0.9, delay=delay, error_feedback=c)
    limit = max_stable_product(config)
    assert growth_of_the_update_path(config, 0.9 * limit, num_steps=400) < 1
    assert growth_of_the_update_path(config, 1.1 * limit, num_steps=400) > 1


@pytest.mark.parametrize(
    ("beta", "nesterov", "low", "high"),
    [
        (0.9, False, 1.4, 1.6),
        (0.95, False, 1.6, 1.8),
        (0.98, False, 1.8, 2.0),
        (0.9, True, 0.45, 0.6),
        (0.95, True, 0.5, 0.7),
        (0.98, True, 0.55, 0.75),
        (0.0, False, 0.0, 0.0),
    ],
)
def test_the_best_coefficient(beta, nesterov, low, high):
    config = StabilityConfig(momentum=beta, delay=1, nesterov=nesterov)
    best, limit = best_error_feedback(config)
    assert low <= best <= high
    nearby = [max_stable_product(dataclasses.replace(config, error_feedback=c)) for c in np.linspace(0, 4, 81)]
    assert limit >= max(nearby) * (1 - 1e-3)


@pytest.mark.parametrize(("beta", "helps"), [(0.0, False), (0.4, False), (0.6, True), (0.95, True)])
def test_error_feedback_helps_only_with_momentum(beta, helps):
    with_it = max_stable_product(StabilityConfig(momentum=beta, delay=1, error_feedback=1.0))
    assert (with_it > 1) == helps


def test_two_look_aheads_are_too_many():
    both = StabilityConfig(momentum=0.9, delay=1, error_feedback=2.0, nesterov=True)
    assert max_stable_product(both) == pytest.approx(2.34, abs=0.005)
    assert max_stable_product(both) < max_stable_product(dataclasses.replace(both, error_feedback=0.0))


def test_the_polynomial_is_that_of_the_recurrence():
    """Put z^t into the recurrence with a complex z and compare."""
    config = StabilityConfig(momentum=0.7, delay=3, error_feedback=1.3, nesterov=True)
    beta, c, z, product = 0.7, 1.3, 0.4 + 0.8j, 1.7
    gradient = product * (1 + c * (1 - 1 / z)) * z**-3  # of y_t = z^t at t = 0
    average = (1 - beta) * gradient / (1 - beta / z)
    update = (1 - beta) * gradient + beta * average
    a, b = characteristic(config)
    value = np.polyval((a + product * b)[::-1], z)
    assert value == pytest.approx((z - 1 + update) * z**5 * (z - beta) / z)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"momentum": 1.0}, "momentum is 1.0; it must be from 0 to below 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"momentum": float("nan")}, "momentum is nan"),
        ({"delay": -1}, "delay is -1; it must be a whole number from 0 to 200"),
        ({"delay": 201}, "delay is 201"),
        ({"error_feedback": float("inf")}, "error_feedback is inf; give a number from -1000 to 1000"),
        ({"error_feedback": float("nan")}, "error_feedback is nan; give a number from -1000 to 1000"),
        ({"error_feedback": 1e300}, r"error_feedback is 1e\+300; give a number from -1000 to 1000"),
    ],
)
def test_numbers_out_of_range_are_refused(change, said):
    config = StabilityConfig(**change)
    for use in (max_stable_product, closed_form, run_stability, stability_text):
        with pytest.raises(ConfigError, match=said):
            use(config)


def test_the_command_prints_json(capsys):
    assert main(["stability", "--momentum", "0.9", "--delay", "1", "--error-feedback", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_stable_lr_times_curvature"] == pytest.approx(2.7016, abs=1e-4)
    assert found["growth_at_98_percent"] < 1 < found["growth_at_102_percent"]
    assert (
        main(["stability", "--momentum", "0.95", "--delay", "1", "--error-feedback", "1", "--nesterov", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["max_stable_lr_times_curvature"] == pytest.approx(6.78, abs=5e-3)


def test_a_momentum_that_no_simulation_settles_has_a_limit_all_the_same(capsys):
    assert main(["stability", "--momentum", "0.99999", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["growth_at_98_percent"] is None
    assert found["max_stable_lr_times_curvature"] == pytest.approx(found["closed_form"], rel=1e-3)
    assert "simulated quadratic: not simulated" in stability_text(StabilityConfig(momentum=0.99999))


def test_the_command_prints_a_table_around_what_was_asked(capsys):
    assert main(["stability", "--momentum", "0.9", "--delay", "6", "--error-feedback", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()[:1] and line.split()[0].isdigit()}
    assert list(rows) == ["0", "1", "2", "3", "4", "6"]
    assert rows["1"][:3] == ["1", "1.69", "2.7"]
    assert [cell for row in rows.values() for cell in row if cell.startswith("[")] == [rows["6"][5]]


def test_a_wrong_number_is_a_sentence(capsys):
    assert main(["stability", "--momentum", "1.5"]) == 2
    assert "momentum is 1.5" in capsys.readouterr().err
