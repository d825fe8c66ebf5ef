"""The trace that Perfetto draws."""

import json

import pytest

from slipstream.pipeline.actions import parse
from slipstream.train.trace import trace_events, write_trace


def test_the_first_action_begins_at_zero_and_times_are_microseconds(tmp_path):
    first = trace_events([(parse("0F0@0"), 5.0, 5.25), (parse("0SEND_F0"), 5.25, 5.5)], rank=0)
    second = trace_events([(parse("1F0@0"), 5.5, 6.0), (parse("1N@1"), 6.0, 6.0)], rank=1)
    write_trace(tmp_path / "trace.json", [first, second])
    events = [each for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if each["ph"] == "X"]
    assert [(each["name"], each["pid"], each["cat"]) for each in events] == [
        ("0F0@0", 0, "compute"),
        ("0SEND_F0", 0, "message"),
        ("1F0@0", 1, "compute"),
        ("1N@1", 1, "step"),
    ]
    # Two ranks read two clocks, a moment after one another; times of that size hold a microsecond.
    assert [each["ts"] for each in events] == pytest.approx([0.0, 250e3, 500e3, 1000e3], abs=20e3)
    assert [each["dur"] for each in events] == pytest.approx([250e3, 250e3, 500e3, 0.0])
    assert events[0]["ts"] == 0.0


def test_nothing_recorded_is_an_empty_trace(tmp_path):
    write_trace(tmp_path / "trace.json", [trace_events([], rank=0)])
    assert {each["ph"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]} == {"M"}
