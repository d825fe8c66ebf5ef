"""What each rank of a pipeline really did when, as a trace that Perfetto and chrome://tracing draw."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.pipeline.actions import COMMUNICATION_OPS, STEP_OPS, Action
from slipstream.train.disk import write_whole

Event = dict[str, Any]
"""A complete event of the trace format: name, category, begin and length in microseconds, process, thread."""

_COMPUTING, _MESSAGES = 0, 1
"""Rows of a rank."""


def trace_events(spans: Sequence[tuple[Action, float, float]], *, rank: int) -> list[Event]:
    """Return one rank's actions as events.

    Args:
        spans: Action, begin and end in seconds of ``time.perf_counter``.
        rank: Becomes the process of the trace; its messages have a row of their own.
    """
    # Ranks on several machines share no clock but the wall's; how well those agree is how well the rows line up.
    offset = time.time() - time.perf_counter()
    names = {_COMPUTING: "computes", _MESSAGES: "sends and waits"}
    events: list[Event] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    events += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        for row, name in names.items()
    ]
    for action, begin, end in spans:
        events.append(
            {
                "ph": "X",
                "name": str(action),
                "cat": "message" if action.op in COMMUNICATION_OPS else "step" if action.op in STEP_OPS else "compute",
                "pid": rank,
                "tid": _MESSAGES if action.op in COMMUNICATION_OPS else _COMPUTING,
                "ts": (begin + offset) * 1e6,
                "dur": (end - begin) * 1e6,
                "args": action._asdict(),
            }
        )
    return events


def write_trace(path: Path, ranks: Sequence[Sequence[Event]]) -> None:
    """Write the events of all ranks as one file; the first action begins at 0.

    Args:
        path: The file.
        ranks: Events of each rank.
    """
    start = min((event["ts"] for events in ranks for event in events if "ts" in event), default=0.0)
    moved = [event | {"ts": event["ts"] - start} if "ts" in event else event for events in ranks for event in events]
    write_whole(path, json.dumps({"traceEvents": moved, "displayTimeUnit": "ms"}) + "\n")
