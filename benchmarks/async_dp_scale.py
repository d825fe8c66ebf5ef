"""What asynchronous data parallelism would gain at 8 to 4,096 devices, on paper, and what that rests on.

    python benchmarks/async_dp_scale.py [--write benchmarks/results/async_dp_scale.md] [--quick]

Every asynchronous figure is a run of `slipstream simulate async-dp`: the protocol, batching and ledger of a real run
under a virtual clock. Nothing is computed and no device is timed: the tables say what the assumptions below give.
"""

import argparse
import dataclasses
import datetime
import itertools
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.plan.fleet import Fleet, FleetConfig
from slipstream.plan.simulate_async_dp import MOST_BUSY, simulate_async_dp

DEVICE_FLOPS = 312e12
EFFICIENCY = 0.5
SEQUENCE = 2048
BATCH_SEQUENCES = 2048
WIRE_BYTES = 2.0
HOST_BYTES_PER_S = 200e9
APPLY_BYTES = 10
BACKWARD_SHARE = 2 / 3
SOURCE = {"1.3B": 1.43, "7B": 1.58, "13B": 1.76}
UTILISATION_OF_SOURCE = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model and the pipeline a worker needs to hold it."""

    name: str
    num_parameters: float
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evenness:
    """How alike devices, and their steps, are: standard deviations of logarithms."""

    name: str
    speeds: float
    jitter: float


MODELS = (
    Model(name="1.3B", num_parameters=1.3e9, num_stages=1),
    Model(name="7B", num_parameters=7e9, num_stages=2),
    Model(name="13B", num_parameters=13e9, num_stages=4),
)
EVEN = Evenness(name="even", speeds=0.02, jitter=0.03)
UNEVEN = Evenness(name="uneven", speeds=0.1, jitter=0.2)
LINKS = (25.0, 100.0, 400.0)


def fleet_config(
    model: Model, *, num_devices: int, evenness: Evenness, link_gbps: float, overlap: bool, local_steps: int = 1
) -> FleetConfig:
    """Return the fleet that the assumptions make of so many devices, with as many shards as it needs."""
    num_workers = num_devices // model.num_stages
    sequences = max(BATCH_SEQUENCES // num_workers, model.num_stages)
    sequence_s = 6 * model.num_parameters * SEQUENCE / (model.num_stages * DEVICE_FLOPS * EFFICIENCY)
    config = FleetConfig(
        num_workers=num_workers,
        speeds=f"lognormal:{evenness.speeds:g}",
        jitter=f"lognormal:{evenness.jitter:g}",
        microbatch_ms=sequence_s * 1000,
        microbatches_per_worker=sequences,
        local_steps=local_steps,
        lease_deadlines=False,
        num_parameters=model.num_parameters,
        wire_bytes=WIRE_BYTES,
        link_gbps=link_gbps,
        server_ms=APPLY_BYTES * model.num_parameters / HOST_BYTES_PER_S * 1000,
        num_stages=model.num_stages,
        sync_overlap=BACKWARD_SHARE if overlap else 0.0,
        num_cycles=max(8, 1000 // num_workers),
    )
    return dataclasses.replace(config, num_shards=Fleet(config).shards_needed(most_busy=MOST_BUSY))


def sync_utilisation(config: FleetConfig) -> float:
    """Return the throughput of the synchronous twin over what its devices would do alone."""
    fleet = Fleet(config)
    steps = max(5, min(100, 10_000 // fleet.num_workers))
    return fleet.sync_units_per_s(num_steps=steps) / sum(fleet.own_units_per_s)


def free_table(sizes: Sequence[int]) -> list[str]:
    """Return throughput and staleness with links and server that cost nothing, and what a simulation takes."""
    lines = [
        "| workers | speeds | of own speeds | synchronous | speed-up | mean staleness | (K-1)/k | max | seconds |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for size, speeds in itertools.product(sizes, ("constant", "lognormal:0.3")):
        start = time.perf_counter()
        found = simulate_async_dp(FleetConfig(num_workers=size, speeds=speeds, jitter="lognormal:0.3"))
        lines.append(
            f"| {size} | {speeds} | {found['throughput_share']:.3f} | {found['sync_throughput_share']:.3f} | "
            f"{found['speedup_vs_sync']:.2f}x | {found['staleness_mean']:.3f} | "
            f"{found['staleness_mean_expected']:.3f} | {found['staleness_max']} | {time.perf_counter() - start:.1f} |"
        )
    return lines


Utilisation = dict[tuple[Model, Evenness, float], list[float]]


def utilisations(sizes: Sequence[int], *, overlap: bool) -> Utilisation:
    """Return the utilisation of synchronous training over the number of devices, by model, machines and link."""
    return {
        (model, evenness, link): [
            sync_utilisation(fleet_config(model, num_devices=size, evenness=evenness, link_gbps=link, overlap=overlap))
            for size in sizes
        ]
        for model, evenness, link in itertools.product(MODELS, (EVEN, UNEVEN), LINKS)
    }


def utilisation_table(found: Utilisation, sizes: Sequence[int]) -> list[str]:
    """Return them as a table, and how many fall below the source's figure at each size."""
    lines = [
        f"| model | machines | link | {' | '.join(map(str, sizes))} |",
        f"|---|---|---:|{'---:|' * len(sizes)}",
    ]
    for (model, evenness, link), shares in found.items():
        cells = [f"**{share:.0%}**" if share < UTILISATION_OF_SOURCE else f"{share:.0%}" for share in shares]
        lines.append(f"| {model.name} | {evenness.name} | {link:g} | {' | '.join(cells)} |")
    below = [sum(share < UTILISATION_OF_SOURCE for share in column) for column in zip(*found.values())]
    return [*lines, f"| below {UTILISATION_OF_SOURCE:.0%} | of {len(found)} | | {' | '.join(map(str, below))} |"]


def speedup_table(sizes: Sequence[int], links: Sequence[float]) -> list[str]:
    """Return the speed-up over synchronous training, its exchange hidden behind backward and not."""
    lines = [
        "| model | machines | link | devices | async, of own speeds | speed-up, hidden | not hidden | shards "
        "| shards / devices |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    gains: dict[str, list[float]] = {model.name: [] for model in MODELS}
    for model, evenness, link, size in itertools.product(MODELS, (EVEN, UNEVEN), links, sizes):
        config = fleet_config(model, num_devices=size, evenness=evenness, link_gbps=link, overlap=True)
        found = simulate_async_dp(config)
        share = found["throughput_share"]
        hidden, plain = (
            share / sync_utilisation(dataclasses.replace(config, sync_overlap=overlap))
            for overlap in (BACKWARD_SHARE, 0.0)
        )
        gains[model.name] += [hidden, plain]
        lines.append(
            f"| {model.name} | {evenness.name} | {link:g} | {size} | {share:.0%} | {hidden:.2f}x | {plain:.2f}x | "
            f"{found['num_shards']} | {found['num_shards'] / size:.2f} |"
        )
    lines += ["", "| model | the source's | here |", "|---|---:|---:|"]
    return lines + [
        f"| {name} | {SOURCE[name]:.2f}x | {min(each):.2f}x to {max(each):.2f}x |" for name, each in gains.items()
    ]


def local_steps_table(size: int, steps: Sequence[int]) -> list[str]:
    """Return what local steps make of slow links."""
    lines = [
        "| model | link | synchronous | " + " | ".join(f"H = {each}, shards" for each in steps) + " |",
        f"|---|---:|---:|{'---:|' * len(steps)}",
    ]
    for model, link in itertools.product(MODELS, (10.0, 25.0, 100.0)):
        cells, plain = [], 0.0
        for each in steps:
            config = fleet_config(
                model, num_devices=size, evenness=UNEVEN, link_gbps=link, overlap=True, local_steps=each
            )
            found = simulate_async_dp(config)
            plain = plain or found["sync_throughput_share"]
            cells.append(f"{found['throughput_share']:.0%}, {found['num_shards']}")
        lines.append(f"| {model.name} | {link:g} | {plain:.0%} | {' | '.join(cells)} |")
    return lines


def jitter_for_source(size: int) -> list[str]:
    """Return what spread of step times would give the source's speed-ups, all else as assumed."""
    lines = [
        "| model | the source's | link | without spread | spread that gives the source's |",
        "|---|---:|---:|---:|---:|",
    ]
    for model, link in itertools.product(MODELS, LINKS):

        def gain(sigma: float, *, model: Model = model, link: float = link) -> float:
            evenness = Evenness(name="", speeds=0.0, jitter=sigma)
            config = fleet_config(model, num_devices=size, evenness=evenness, link_gbps=link, overlap=True)
            fleet = Fleet(config)
            compute_s = config.microbatches_per_worker * fleet.unit_s
            return compute_s / (compute_s + 2 * fleet.transfer_s + fleet.apply_s) / sync_utilisation(config)

        target, low, high = SOURCE[model.name], 0.0, 1.5
        without = gain(0.0)
        if without > target:
            needed = "more than the source's already"
        elif gain(high) < target:
            needed = f"none up to {high:g}"
        else:
            for _ in range(9):
                middle = (low + high) / 2
                low, high = (middle, high) if gain(middle) < target else (low, middle)
            needed = f"sigma {high:.2f}"
        lines.append(f"| {model.name} | {target:.2f}x | {link:g} | {without:.2f}x | {needed} |")
    return lines


HELD_BY = ", ".join(f"{each.num_stages} for {each.name}" for each in MODELS)

ASSUMPTIONS = f"""
* A device does {DEVICE_FLOPS / 1e12:.0f} TFLOP/s in bfloat16 at its peak, {EFFICIENCY:.0%} of that while it computes;
  6 FLOP a parameter and token. 100% below is all devices computing all the time.
* A worker is a pipeline of as many devices as hold the model at 16 bytes a parameter in 80 GB: {HELD_BY}.
* A batch has {BATCH_SEQUENCES} sequences of {SEQUENCE} tokens ({BATCH_SEQUENCES * SEQUENCE / 1e6:.1f} M), whatever the
  number of devices, but at least one sequence for each stage of each worker. A microbatch is a sequence. So more
  devices mean less work for each between two exchanges: that, not size as such, is what scale costs.
* *Even* machines: speeds spread by {EVEN.speeds:g}, steps by {EVEN.jitter:g} (standard deviations of the logarithm,
  lognormal); *uneven*: {UNEVEN.speeds:g} and {UNEVEN.jitter:g}. No stragglers and no failures beside that; no worker is
  given up for being slow.
* Links in Gb/s, one a device, full speed both ways, no start-up times; {WIRE_BYTES:g} bytes a parameter on the wire.
* Synchronous: equal batches, a ring all-reduce (2 (K-1)/K times the gradient over each link) at every step, everyone
  waits for the slowest, and the pipeline drains: (m + p - 1) / m. *Hidden*: the exchange runs during backward, at best
  {BACKWARD_SHARE:.0%} of the compute time. Neither memory sharded over workers nor the optimizer's own time is counted.
* Asynchronous: each worker fetches, computes and pushes in turn, **nothing hidden**, through first-come queues; its
  pipeline never drains (2BW). A shard takes in a gradient at {APPLY_BYTES} bytes a parameter and
  {HOST_BYTES_PER_S / 1e9:.0f} GB/s, and has a link like a device's. There are as many shards as keep it below
  {MOST_BUSY:.0%} busy, and they are machines *beside* the devices, which the speed-ups do not charge for.

Nothing here says how well a model learns from stale gradients: a speed-up is one of tokens a second.
"""


def report(*, quick: bool) -> str:
    """Return the Markdown file."""
    sizes = (8, 64) if quick else (8, 64, 512, 4096)
    devices = (8, 64) if quick else (8, 64, 256, 1024, 4096)
    large = 64 if quick else 1024
    sections: list[tuple[str, str, list[str]]] = [
        (
            "Free links: does anybody wait?",
            "Jitter lognormal, sigma 0.3, a push of each worker to a step; seconds are what the simulation took.",
            free_table(sizes),
        ),
        (
            "Utilisation of synchronous training, exchange hidden",
            f"Over the number of devices; below {UTILISATION_OF_SOURCE:.0%} in bold. The source says that it falls "
            "below 60 % beyond 1,000 devices.",
            utilisation_table(utilisations(devices, overlap=True), devices),
        ),
        ("The same, not hidden", "", utilisation_table(utilisations(devices, overlap=False), devices)),
        (
            "Speed-up of asynchronous over synchronous training",
            "Against a twin whose exchange is hidden behind backward, and one whose exchange is not.",
            speedup_table((64,) if quick else (256, 1024), LINKS[1:]),
        ),
        (
            f"Slow links, {large // 4} devices, uneven machines",
            "Share of the devices' own speeds with H local steps between pushes, and the shards that takes; "
            "synchronous training exchanges at every step, hidden behind backward.",
            local_steps_table(large // 4, (1, 8) if quick else (1, 8, 64)),
        ),
        (
            f"What would give the source's figures at {large} devices",
            "All devices equally fast, exchange hidden; the spread of step times (sigma) at which the speed-up is the "
            "source's. The asynchronous side in closed form, without queues. Below 1 without spread: synchronous "
            "training hides its exchange, an asynchronous worker here does not.",
            jitter_for_source(large),
        ),
    ]
    lines = [
        "# Asynchronous data parallelism at scale, on paper",
        "",
        f"{datetime.date.today()}, `python benchmarks/async_dp_scale.py{' --quick' if quick else ''}`, Python "
        f"{platform.python_version()}. Simulated, not measured.",
        "",
        "## Assumptions",
        ASSUMPTIONS,
    ]
    for title, text, table in sections:
        lines += [f"## {title}", "", *([text, ""] if text else []), *table, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file to write; default: standard output")
    parser.add_argument("--quick", action="store_true", help="few and small fleets")
    args: Any = parser.parse_args()
    text = report(quick=args.quick)
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
