"""What `bench pipeline` measured, for people."""

import statistics
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from slipstream.bench.pipeline import gains

_QUIET_LOAD = 0.5
"""Load average up to which a machine counts as quiet."""


def bench_table(result: dict[str, Any]) -> Table:
    """Return the step times as a table, the fastest schedule first.

    Args:
        result: As :func:`slipstream.bench.pipeline.run_bench_pipeline` returns it.
    """
    schedules = result["schedules"]
    peer = next((name for name in ("torch_1f1b", "one_f_one_b") if name in schedules), next(iter(schedules)))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("schedule")
    for title in ("step, s", "quartiles, s", "efficiency", f"gain over {peer}"):
        table.add_column(title, justify="right")
    for name, each in sorted(schedules.items(), key=lambda item: float(item[1]["step_time_s"])):
        low, _, high = each["quartiles_s"]
        gain = statistics.median(gains(each, over=schedules[peer]))
        step = f"{each['step_time_s']:.4f}"
        table.add_row(name, step, f"{low:.4f} to {high:.4f}", f"{each['efficiency']:.1%}", f"{gain:.3f}x")
    return table


def explanation(result: dict[str, Any]) -> Iterator[str]:
    """Yield sentences: what the figures are, what two_bw gains, what was left out and why."""
    settings = result["settings"]
    source = "emulated" if settings["emulated"] else "of the slowest stage alone"
    yield (
        f"step: median time between optimizer steps on rank 0, without fill and drain where there is no flush, of "
        f"{settings['rounds']} round(s) in which the schedules took turns; efficiency: m (F + B) / step with m = "
        f"{settings['num_microbatches']}, F = {result['forward_s'] * 1e3:.1f} ms and B = "
        f"{result['backward_s'] * 1e3:.1f} ms {source}."
    )
    if (gain := result["speedup_vs_torch_1f1b"]) is not None:
        ideal = result["ideal_speedup"]
        yield (
            f"two_bw is {gain:.3f}x as fast as torch_1f1b ({_spread(result, 'torch_1f1b')}), {gain / ideal:.1%} of the "
            f"ideal (m + p - 1) / m = {ideal:.3f}."
        )
    if (gain := result["speedup_vs_best_flushing"]) is not None:
        best = result["best_flushing"]
        yield f"two_bw is {gain:.3f}x as fast as the fastest flushing schedule, {best} ({_spread(result, best)})."
    for name, reason in result["left_out"].items():
        yield f"{name} was left out: {reason}"
    if (load := result["machine"]["load_average_before"]) is not None and load > _QUIET_LOAD:
        yield (
            f"warning: the load average was {load:.1f} before the measurement. Other processes use what bubbles leave "
            "idle, so that schedules look alike; measure again on a quiet machine."
        )


def _spread(result: dict[str, Any], name: str) -> str:
    rounds = result["rounds_speedup"][name]
    return f"{min(rounds):.3f}x to {max(rounds):.3f}x in single rounds"
