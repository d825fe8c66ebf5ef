"""Asynchronous data parallelism on paper: what a simulated fleet reaches, and synchronous training beside it."""

import math
from typing import Any

from slipstream.errors import ConfigError
from slipstream.plan.async_simulation import AsyncSimulation
from slipstream.plan.fleet import Fleet, FleetConfig

MOST_BUSY = 0.8
"""Utilisation beyond which queues grow long; :meth:`Fleet.shards_needed` keeps the server below it."""

PUSHES_MEASURED = 8000
LEAST_CYCLES = 10

NEXT_TO_NOTHING = 1e-9
"""Share of the asynchronous throughput: what is less is no figure to divide by."""

LEAST_SYNC_STEPS = 20
SYNC_DRAWS = 200_000


def simulate_async_dp(config: FleetConfig) -> dict[str, Any]:
    """Simulate asynchronous data parallelism, and synchronous beside it.

    Args:
        config: The fleet.

    Returns:
        What `slipstream simulate async-dp --json` prints. Measured after a warm-up: ``throughput_share`` (work done
        over what the workers that are there would do alone, without messages; above 1 where failures end slow cycles
        of stragglers, which count whole in it), ``speedup_vs_sync`` (throughput over that of the same workers with
        equal shares, a ring all-reduce at each step, and all waiting for the slowest; ``None`` where failures let those
        get next to nothing done), ``sync_throughput_share`` (over the same work), ``staleness_mean``,
        ``staleness_max``, ``staleness_histogram``, ``staleness_mean_expected`` (:meth:`Fleet.staleness_mean_expected`),
        ``pushes_per_step`` (as counted: a push is of one step at most, so where speeds differ much it may be more than
        the setting), ``pushes_per_s``, ``cycle_s`` (a worker's, the mean),
        ``server_in_utilisation`` and ``server_out_utilisation`` (a shard's link), ``server_apply_utilisation``,
        ``shards_needed`` (the fewest that keep all three below 80 % while nobody waits for them). Over the whole run:
        ``failures``, ``pushes_accepted``, ``pushes_rejected``, ``ledger_balanced``.

    Raises:
        ConfigError: A setting is out of range, or nothing gets done.

    Cost:
        0.2 ms a cycle; 4,096 workers by default take about 10 s.
    """
    fleet = Fleet(config)
    num_cycles = config.num_cycles or max(LEAST_CYCLES, math.ceil(PUSHES_MEASURED / fleet.num_workers))
    simulation = AsyncSimulation(fleet, num_cycles=num_cycles)
    begin, end = simulation.run()
    seconds, capacity = end.now_s - begin.now_s, end.capacity - begin.capacity
    if seconds <= 0 or capacity <= 0:
        raise ConfigError(
            "some of the times are so much longer than others that a simulated clock cannot tell these from nothing. "
            "Give speeds, microbatch_ms, link_gbps, server_ms and restart_s that lie closer together."
        )
    staleness = end.staleness - begin.staleness
    num_pushes = staleness.total()
    pushes_per_step = num_pushes / (end.version - begin.version)
    units_per_s = (end.units - begin.units) / seconds
    sync_steps = max(LEAST_SYNC_STEPS, min(num_cycles, SYNC_DRAWS // fleet.num_workers))
    sync_units_per_s = fleet.sync_units_per_s(num_steps=sync_steps)
    sequencer = simulation.sequencer
    return {
        "num_workers": fleet.num_workers,
        "throughput_share": (end.units - begin.units) / capacity,
        "sync_throughput_share": sync_units_per_s * seconds / capacity,
        "speedup_vs_sync": units_per_s / sync_units_per_s if sync_units_per_s > NEXT_TO_NOTHING * units_per_s else None,
        "staleness_mean": sum(each * count for each, count in staleness.items()) / num_pushes,
        "staleness_mean_expected": fleet.staleness_mean_expected(pushes_per_step),
        "staleness_max": max(staleness),
        "staleness_histogram": {str(each): count for each, count in sorted(staleness.items())},
        "pushes_per_step": pushes_per_step,
        "pushes_per_s": num_pushes / seconds,
        "cycle_s": fleet.num_workers * seconds / num_pushes,
        "num_shards": config.num_shards,
        "server_in_utilisation": (end.in_s - begin.in_s) / seconds,
        "server_out_utilisation": (end.out_s - begin.out_s) / seconds,
        "server_apply_utilisation": (end.apply_s - begin.apply_s) / seconds,
        "shards_needed": fleet.shards_needed(most_busy=MOST_BUSY),
        "failures": simulation.num_failures,
        "pushes_accepted": sequencer.num_accepted,
        "pushes_rejected": sum(sequencer.rejected.values()),
        "ledger_balanced": sequencer.ledger.balance().holds,
        "simulated_s": end.now_s,
        "seed": config.seed,
    }
