"""Cut a model into pipeline stages so that the slowest stage is as fast as can be. Imports no torch."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.shapes import block_flops, check_complete, head_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Which part of the model a stage holds."""

    blocks: range
    """Global indices of its decoder blocks."""
    embed: bool
    """Whether it holds the embedding: the first stage does."""
    head: bool
    """Whether it holds final norm and head: the last stage does."""


def whole(cfg: ModelConfig) -> StageSpec:
    """Return the one stage that holds the whole model."""
    return uncut(cfg.num_layers)


def uncut(num_blocks: int) -> StageSpec:
    """Return the one stage that holds so many blocks, which are all."""
    return StageSpec(blocks=range(num_blocks), embed=True, head=True)


def partition(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut a row of layers into contiguous, non-empty stages whose dearest one is as cheap as possible.

    Exact, by dynamic programming. The dearest stage sets the pace, but usually leaves the others free: among the
    best cuts the one with the least sum of squared stage costs is taken, and among equals the one whose early stages
    are shorter, since early stages hold the most activations in flight.

    Args:
        costs: The cost of each layer in any one unit, finite and at least 0.
        num_stages: Stages wanted, from 1 to the number of layers.

    Returns:
        The layers of each stage, in order; each layer once.

    Raises:
        ConfigError: ``num_stages`` is out of range, or a cost is negative or not finite.

    Cost: O(num_stages * layers^2) time.

    Example:
        >>> partition([1, 1, 1, 1, 1, 3], 3)
        [range(0, 2), range(2, 5), range(5, 6)]
    """
    num_layers = len(costs)
    if num_stages < 1:
        raise ConfigError(f"{num_stages} pipeline stages were asked for. Allowed: from 1 to the number of layers.")
    if num_stages > num_layers:
        raise ConfigError(
            f"{num_stages} pipeline stages were asked for, but the model has {num_layers} layers and no stage may be "
            f"empty. Use at most {num_layers} stages, or at least {num_stages} layers."
        )
    for layer, cost in enumerate(costs):
        if not (cost >= 0 and math.isfinite(cost)):
            raise ConfigError(f"the cost of layer {layer} is {cost}. Allowed: finite numbers from 0.")

    before = list(itertools.accumulate(costs, initial=0.0))
    bottleneck, _ = _best_cuts(before, num_stages, limit=math.inf, total=max)
    _, cuts = _best_cuts(before, num_stages, limit=bottleneck, total=lambda squares, cost: squares + cost * cost)
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def layer_costs(cfg: ModelConfig, *, sequence_length: int = 0) -> list[float]:
    """Return an estimate of each block's cost, in forward FLOPs per token.

    The head is added to the last block; the embedding, a look-up that copies D values, to the first.

    Args:
        cfg: The model.
        sequence_length: Tokens a sequence; 0 leaves out the attention scores, a part that grows with the length and
            makes the head weigh less beside the blocks.

    Raises:
        ConfigError: The settings do not describe a model, or ``vocab_size`` is still 0.
    """
    check_complete(cfg)
    costs = [float(block_flops(cfg, layer=layer, sequence_length=sequence_length)) for layer in range(cfg.num_layers)]
    costs[0] += cfg.dim
    costs[-1] += head_flops(cfg)
    return costs


def stages(cfg: ModelConfig, num_stages: int, *, sequence_length: int = 0) -> list[StageSpec]:
    """Cut a model into stages by :func:`layer_costs` and :func:`partition`.

    How a model is cut changes no number that it computes.

    Args:
        cfg: The model.
        num_stages: Stages wanted, from 1 to the number of layers.
        sequence_length: As for :func:`layer_costs`.

    Raises:
        ConfigError: More stages than layers, fewer than 1, or settings that do not describe a model.

    Example:
        >>> for stage in stages(ModelConfig(num_layers=4, vocab_size=257), 2):
        ...     print(stage)
        StageSpec(blocks=range(0, 2), embed=True, head=False)
        StageSpec(blocks=range(2, 4), embed=False, head=True)
    """
    return cut(layer_costs(cfg, sequence_length=sequence_length), num_stages)


def cut(costs: Sequence[float], num_stages: int) -> list[StageSpec]:
    """Cut a row of blocks of known costs into stages by :func:`partition`.

    Raises:
        ConfigError: As :func:`partition`.
    """
    parts = partition(costs, num_stages)
    return [StageSpec(blocks=blocks, embed=blocks.start == 0, head=blocks.stop == len(costs)) for blocks in parts]


def _best_cuts(
    before: Sequence[float], num_stages: int, *, limit: float, total: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Minimise ``total`` over the stage costs, none of which may exceed ``limit``.

    Args:
        before: ``before[j]`` is the cost of all layers before j, so that layers i to j-1 cost before[j] - before[i].
        num_stages: Stages wanted.
        limit: Largest stage cost allowed.
        total: Adds a stage's cost to the total of the stages before it; must not fall when either grows.

    Returns:
        The least total, and the cuts from 0 to the number of layers.
    """
    num_layers = len(before) - 1
    best = [0.0] + [math.inf] * num_layers  # best[j]: least total of the first j layers in the stages so far
    choices: list[list[int]] = []
    for stage in range(num_stages):
        extended = [math.inf] * (num_layers + 1)
        choice = [0] * (num_layers + 1)
        for stop in range(stage + 1, num_layers + 1):
            for start in range(stage, stop):
                cost = before[stop] - before[start]
                if cost <= limit and (value := total(best[start], cost)) < extended[stop]:
                    extended[stop], choice[stop] = value, start  # strictly better only: the earliest cut wins a tie
        best = extended
        choices.append(choice)
    cuts = [num_layers]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return best[-1], cuts[::-1]
