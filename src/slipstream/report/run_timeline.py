"""The pipeline as it really ran beside the simulation of its schedule with the times it really took."""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.pipeline.actions import STEP_OPS, Action
from slipstream.pipeline.runtime import pipeline_spec
from slipstream.pipeline.schedules import order
from slipstream.plan.draw import draw_svg
from slipstream.plan.simulate import Span, Timeline, Times, simulate
from slipstream.report.runs import Run
from slipstream.train.rundir import RunDir

NUM_SHOWN = 4
"""Batches of a run in the picture, its last ones: the first have the machine's warm-up in them."""

WIDTH = 960
"""Pixels; the page scrolls it on a small screen."""


def timeline_svg(runs: Sequence[Run]) -> str:
    """Return the drawing of all runs that have a trace; empty where none has.

    Args:
        runs: Pipelines and others.
    """
    panels: list[tuple[str, Timeline]] = []
    for run in runs:
        measured = measured_timeline(run)
        if measured is not None:
            name = "" if len(runs) == 1 else f"{run.name}: "
            panels.append((f"{name}as it ran", _last_batches(measured)))
            panels.append(
                (f"{name}its schedule, simulated with its median times", _last_batches(_simulated(run, measured)))
            )
    return draw_svg(panels, title="What each stage did when", width=WIDTH) if panels else ""


def measured_timeline(run: Run) -> Timeline | None:
    """Return what a run's trace says its ranks computed; ``None`` where there is none that can be read and is of now.

    A run that is resumed with other stages keeps the trace of those before, unless it is traced again.
    """
    try:
        events = json.loads(RunDir(run.path).trace.read_text(encoding="utf-8"))["traceEvents"]
        ranks: dict[int, list[Span]] = defaultdict(list)
        for event in events:
            if event["ph"] == "X" and event["cat"] != "message" and event["args"]["op"] != "N":
                ranks[event["pid"]].append(_span(event))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if run.config.executor != "pipeline":
        return None
    spec, stages = pipeline_spec(run.config), {span.action.stage for spans in ranks.values() for span in spans}
    if set(ranks) != set(range(spec.num_ranks)) or stages != set(range(spec.num_stages)):
        return None
    spans = tuple(tuple(sorted(ranks[rank], key=lambda span: span.start_ms)) for rank in sorted(ranks))
    return Timeline(ranks=spans, num_microbatches=run.config.pipeline.num_microbatches)


def _span(event: Mapping[str, Any]) -> Span:
    start_ms = event["ts"] / 1000
    return Span(Action(**event["args"]), start_ms, start_ms + event["dur"] / 1000)


def _simulated(run: Run, measured: Timeline) -> Timeline:
    """Return the schedule with every stage's median times, over as many batches as were measured."""
    taken: dict[tuple[int, str], list[float]] = defaultdict(list)
    for spans in measured.ranks:
        for span in spans:
            taken[span.action.stage, span.action.op].append(span.end_ms - span.start_ms)
    num_stages = 1 + max(stage for stage, _ in taken)

    def median(op: str) -> list[float]:
        return [statistics.median(taken.get((stage, op)) or [0.0]) for stage in range(num_stages)]

    first, last = _batches(measured)
    spec = pipeline_spec(run.config)
    orders = [order(spec, rank=rank, num_batches=last - first + 1) for rank in range(spec.num_ranks)]
    times = Times(forward_ms=median("F"), backward_ms=median("B"), optimizer_ms=median("O"))
    return simulate(orders, num_microbatches=spec.num_microbatches, times=times)


def _batches(timeline: Timeline) -> tuple[int, int]:
    """Return the first and the last batch of which a microbatch was computed."""
    numbers = [
        span.action.microbatch // timeline.num_microbatches
        for spans in timeline.ranks
        for span in spans
        if span.action.microbatch is not None
    ]
    return min(numbers), max(numbers)


def _last_batches(timeline: Timeline) -> Timeline:
    """Cut off what lies before the last batches; what was under way then is cut in two."""
    first, last = _batches(timeline)
    begin = max(first, last - NUM_SHOWN + 1)
    start = min(
        span.start_ms
        for spans in timeline.ranks
        for span in spans
        if span.action.op not in STEP_OPS and (span.action.microbatch or 0) // timeline.num_microbatches == begin
    )
    kept = tuple(
        tuple(
            Span(span.action, max(span.start_ms - start, 0.0), span.end_ms - start)
            for span in spans
            if span.end_ms > start
        )
        for spans in timeline.ranks
    )
    return Timeline(ranks=kept, num_microbatches=timeline.num_microbatches)
