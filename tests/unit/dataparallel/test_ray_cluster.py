"""Where a cluster of our own listens, and what is said if it cannot; with a stand-in for Ray."""

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest

from slipstream.config import DataParallelConfig
from slipstream.dataparallel import ray_cluster
from slipstream.errors import StageError


class FakeRay:
    """Says that it listens somewhere, or cannot."""

    exceptions = SimpleNamespace(RayError=LookupError)

    def __init__(self, *, address="127.0.0.1", error=None):
        self.address, self.error = address, error
        self.given = {}
        self.is_up = False

    def is_initialized(self):
        return self.is_up

    def init(self, **given):
        self.given = given | {"environment": dict(os.environ)}
        if self.error:
            raise self.error
        self.is_up = True

    def nodes(self):
        return [{"NodeManagerAddress": self.address}]

    def shutdown(self):
        self.is_up = False


@pytest.fixture
def start(monkeypatch):
    for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "ray", raising=False)

    @contextlib.contextmanager
    def start(ray):
        monkeypatch.setattr(ray_cluster, "import_ray", lambda: ray)
        with ray_cluster.ray_cluster(DataParallelConfig(), num_cpus=3, store_bytes=2**30):
            yield

    return start


def test_it_listens_on_loopback_with_a_secret_and_leaves_nothing(start):
    ray = FakeRay()
    with start(ray):
        assert ray.is_up
        folder = ray.given["_temp_dir"]
        assert os.path.isdir(folder)
    assert (ray.given["address"], ray.given["_node_ip_address"]) == ("local", "127.0.0.1")
    assert (ray.given["include_dashboard"], ray.given["log_to_driver"]) == (False, False)
    environment = ray.given["environment"]
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    assert not ray.is_up
    assert not os.path.exists(folder)


def test_it_ends_where_it_listens_to_others(start):
    ray = FakeRay(address="10.0.0.5")
    with pytest.raises(StageError, match=r"listen on 127\.0\.0\.1 and does on 10\.0\.0\.5"), start(ray):
        pass
    assert not ray.is_up


def test_it_says_where_it_cannot_listen(start):
    ray = FakeRay(error=OSError("Address already in use"))
    said = r"on 127\.0\.0\.1, with its files in /tmp/slipstream-\w+: Address already in use"
    with pytest.raises(StageError, match=said), start(ray):
        pass
    assert not os.path.exists(ray.given["_temp_dir"])


def test_ray_that_has_read_its_environment_is_not_used(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    ray = FakeRay()
    with pytest.raises(StageError, match="imported before this run"), start(ray):
        pass
    assert not ray.given
