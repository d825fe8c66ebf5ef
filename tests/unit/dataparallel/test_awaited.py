"""Who has to say something by when."""

import pytest

from slipstream.dataparallel.awaited import Awaited


def test_who_is_due_first_says_how_long_to_listen_and_who_says_something_is_not_late(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    awaited: Awaited[str] = Awaited(10.0)
    assert (awaited.rest_s(None), awaited.rest_s(3.0)) == (None, 3.0)
    awaited.expect("one", by="its pipe")
    now_s = 4.0
    awaited.expect("two", by="first pipe")
    awaited.expect("two", by="second pipe")
    assert (awaited.rest_s(None), awaited.rest_s(3.0)) == (pytest.approx(6.0), 3.0)
    awaited.expect("one", by="its pipe")  # anew
    awaited.forget("first pipe")
    now_s = 13.0
    assert (awaited.rest_s(None), awaited.late()) == (pytest.approx(1.0), [])
    now_s = 14.5
    assert (awaited.rest_s(None), awaited.late()) == (0.0, ["two", "one"])
    awaited.forget("second pipe")
    awaited.forget("second pipe")
    assert awaited.late() == ["one"]
