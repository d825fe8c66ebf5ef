"""Where processes compute."""

import os
from unittest import mock

import pytest
import torch

from slipstream.config import Config, OptimConfig, from_dict
from slipstream.dataparallel.crew import ProcessCrew
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.worker_process import Workplace, work
from slipstream.device import choose_device, device_of
from slipstream.errors import ConfigError
from slipstream.train import launch, trial
from slipstream.train.progress import SilentReporter
from slipstream.train.trial import try_optim


def test_on_the_processor_all_compute():
    assert {device_of(torch.device("cpu"), index) for index in range(3)} == {torch.device("cpu")}


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_processes_take_turns_over_the_gpus():
    places = [device_of(torch.device("cuda", 0), index) for index in range(5)]
    assert [place.index for place in places] == [0, 1, 0, 1, 0]


@pytest.mark.usefixtures("two_gpus")
def test_workers_of_one_machine_do_not_crowd_on_the_first_gpu(monkeypatch):
    places: list[Workplace] = []
    monkeypatch.setattr(ProcessCrew, "_run", lambda self, place, name: places.append(place) or mock.MagicMock())
    layout = Layout(shapes={"w": (2, 2)}, dtype=torch.float32)
    crew = ProcessCrew(Config(), weights=None, gradient=layout, device=torch.device("cuda", 0), main=work)
    for worker in range(3):
        crew.start(worker)
    crew.close()
    assert [place.device for place in places] == [torch.device("cuda", index) for index in (0, 1, 0)]


class StopHereError(Exception):
    """Ends a launch at its trial step."""


@pytest.fixture
def trials(monkeypatch):
    """Where the optimizer was tried, and what cuBLAS would have read by then; on a machine with GPUs, seemingly."""
    found = []

    def check(cfg, *, num_steps=None, device="cpu"):
        found.append((str(device), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        if cfg.args.get("capturable") and str(device) == "cpu":
            raise ConfigError("only on CUDA")
        return ["tried"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(trial, "check_optim", check)
    # Set and removed, so that what is set meanwhile goes when the test ends.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    return found


@pytest.mark.parametrize(("executor", "where"), [("single", "cuda:0"), ("dataparallel", "cuda:0"), ("pipeline", "cpu")])
def test_cublas_is_set_up_before_anything_computes_and_a_mere_launcher_keeps_off_the_gpu(
    trials, monkeypatch, tmp_path, executor, where
):
    real = trial.check_optim

    def check(*args, **kwargs):
        real(*args, **kwargs)
        raise StopHereError

    monkeypatch.setattr(trial, "check_optim", check)
    staleness = {} if executor == "pipeline" else {"delay": 0}
    config = from_dict({"executor": executor, "staleness": staleness, "run_dir": str(tmp_path / "run")})
    with pytest.raises(StopHereError):
        launch.launch(config, reporter=SilentReporter())
    assert trials == [(where, ":4096:8")]


def test_what_cublas_was_told_is_left(trials, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    choose_device(Config())
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_rule_for_cuda_alone_is_tried_there(trials):
    config = Config(optim=OptimConfig(args={"capturable": True}))
    assert try_optim(config, device=torch.device("cuda", 0), trains_here=False) == ["tried"]
    assert [where for where, _ in trials] == ["cpu", "cuda:0"]
    with pytest.raises(ConfigError, match="only on CUDA"):
        try_optim(config, device=torch.device("cpu"), trains_here=False)
