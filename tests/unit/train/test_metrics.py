"""Figures of a step."""

import pytest
import torch

from slipstream.config import Config, DataParallelConfig
from slipstream.dataparallel.engine import num_devices
from slipstream.train.metrics import PEAK_FLOPS_BF16, Totals, model_flops_utilisation

CUDA = torch.device("cuda", 0)


def test_a_share_of_the_peak_is_one_of_all_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    rate = PEAK_FLOPS_BF16["H100"] / 1e9
    assert model_flops_utilisation(0.5 * rate, 1e9, CUDA, num_devices=1) == pytest.approx(0.5)
    assert model_flops_utilisation(2 * rate, 1e9, CUDA, num_devices=4) == pytest.approx(0.5)
    assert model_flops_utilisation(rate, 1e9, torch.device("cpu"), num_devices=1) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert model_flops_utilisation(rate, 1e9, CUDA, num_devices=1) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
    ],
)
def test_a_peak_is_that_of_the_device_not_of_one_with_a_name_like_it(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert model_flops_utilisation(peak / 1e9, 1e9, CUDA, num_devices=1) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("engine", "changes", "expected"),
    [
        ("inline", {"num_workers": 4}, 1),
        ("process", {"num_workers": 2}, 2),
        ("process", {"num_workers": 5}, 3),
        ("process", {"num_workers": 1, "num_stages": 2}, 2),
        ("process", {"num_workers": 2, "num_stages": 2}, 3),
        ("ray", {"num_workers": 8}, 8),
        ("ray", {"num_workers": 8, "ray_gpus": 0.25}, 2),
        ("ray", {"num_workers": 2, "ray_gpus": 2.0}, 2),
        ("ray", {"num_workers": 2, "ray_gpus": 0.0}, 2),
    ],
)
def test_workers_take_turns_over_the_gpus_of_their_machine(monkeypatch, engine, changes, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = Config(engine=engine, dataparallel=DataParallelConfig(**changes))
    assert num_devices(config, CUDA) == expected


def test_idle_time_is_a_share_of_the_time_in_which_it_was_counted():
    row = {"num_tokens": 8, "step_s": 1.0, "staleness_mean": 0.0, "staleness_max": 0}
    rows = [row | {"bubble_fraction": None}] * 6 + [row | {"bubble_fraction": 0.25}] * 4
    assert Totals.of(rows).bubble_fraction == pytest.approx(0.25)
    assert Totals.of(rows[:6]).bubble_fraction is None
