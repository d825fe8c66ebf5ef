"""A simulated asynchronous data-parallel run as text for people. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from slipstream.errors import counted
from slipstream.plan.simulate_async_dp import MOST_BUSY

BAR_WIDTH = 40
MOST_BARS = 16

NOISE = 0.05
"""By which a share of all may exceed 1 by chance."""

CUT_SHORT = "  more than all: own speeds count slow cycles whole, and failures end them before they are done"


def async_dp_text(found: Mapping[str, Any]) -> str:
    """Return throughput beside synchronous training, a staleness histogram and the server's load.

    Args:
        found: What :func:`~slipstream.plan.simulate_async_dp.simulate_async_dp` returned.
    """
    lines = [
        f"{counted(found['num_workers'], 'worker')}, {found['pushes_per_step']:.4g} pushes a step, a cycle of "
        f"{found['cycle_s']:.3g} s; {_plain(found['simulated_s'])} s simulated, seed {found['seed']}",
        "",
        "throughput, of the sum of the workers' own speeds",
        f"  asynchronous  {found['throughput_share']:7.1%}  {_bar(found['throughput_share'])}",
        f"  synchronous   {found['sync_throughput_share']:7.1%}  {_bar(found['sync_throughput_share'])}",
        f"  speed-up      {_speed_up(found['speedup_vs_sync'])}",
        *([CUT_SHORT] if found["failures"] and found["throughput_share"] > 1 + NOISE else []),
        "",
        f"staleness: mean {found['staleness_mean']:.3f} (expected {found['staleness_mean_expected']:.3f}), "
        f"maximum {found['staleness_max']}",
        *histogram_bars({int(each): count for each, count in found["staleness_histogram"].items()}),
        "",
        *_server(found),
    ]
    if found["failures"] or found["pushes_rejected"]:
        lines += [
            "",
            f"{found['failures']} failures, {found['pushes_rejected']} of "
            f"{found['pushes_accepted'] + found['pushes_rejected']} pushes rejected; the ledger is "
            f"{'balanced' if found['ledger_balanced'] else 'NOT balanced'}",
        ]
    return "\n".join(lines)


def histogram_bars(counts: Mapping[int, int]) -> list[str]:
    """Return a line for each staleness, or for each range of it where there are many.

    Args:
        counts: How often each staleness occurred.

    Example:
        >>> [line.replace("█", "") for line in histogram_bars({0: 1, 1: 3})]
        ['  0   25.0%  ', '  1   75.0%  ']
    """
    total = sum(counts.values())
    span = -(-(max(counts) + 1) // MOST_BARS)
    shares: dict[int, float] = dict.fromkeys(range(min(counts) // span, max(counts) // span + 1), 0.0)
    for staleness, count in counts.items():
        shares[staleness // span] += count / total
    labels = {each: str(each) if span == 1 else f"{each * span}-{(each + 1) * span - 1}" for each in shares}
    width, tallest = max(map(len, labels.values())), max(shares.values())
    return [
        f"  {labels[each]:>{width}}  {share:6.1%}  {_bar(share / tallest)}".rstrip() for each, share in shares.items()
    ]


def _server(found: Mapping[str, Any]) -> list[str]:
    rows = {
        "link in": found["server_in_utilisation"],
        "link out": found["server_out_utilisation"],
        "applying": found["server_apply_utilisation"],
    }
    shards = f"{found['num_shards']} shard{'s' if found['num_shards'] > 1 else ''}"
    if not any(rows.values()):
        return [f"server: {found['pushes_per_s']:.4g} pushes a second; messages and applying take no time here"]
    lines = [f"server: {shards}, {found['pushes_per_s']:.4g} pushes a second"]
    lines += [f"  {name:<8}  {share:6.1%} busy  {_bar(share)}".rstrip() for name, share in rows.items()]
    verdict = "there are enough" if found["num_shards"] >= found["shards_needed"] else "give more with --num-shards"
    lines.append(f"  below {MOST_BUSY:.0%} at full speed takes {_plain(found['shards_needed'])}; {verdict}")
    return lines


def _speed_up(times: float | None) -> str:
    if times is None:
        return "without measure: failures let synchronous training get next to nothing done"
    return f"{times:6.2f}x" if times < 1e6 else f"{times:.3g}x"


def _plain(number: float) -> str:
    """Return a number in full, unless that would be many digits."""
    return f"{number:.0f}" if number < 1e6 else f"{number:.3g}"


def _bar(share: float) -> str:
    return "█" * round(BAR_WIDTH * min(max(share, 0.0), 1.0))
