"""Where processes compute."""

from unittest import mock

import pytest
import torch

from slipstream.config import Config
from slipstream.dataparallel.crew import ProcessCrew
from slipstream.dataparallel.shared import Layout
from slipstream.dataparallel.worker_process import Workplace, work
from slipstream.device import device_of


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
