"""Cores of this process."""

import os

import pytest

from slipstream.cores import num_cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell")
def test_cores_that_this_process_may_not_run_on_do_not_count(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert num_cores() == 2


def test_of_the_whole_machine_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_cores() == 1
