"""Groups of parameters that share a statistic, and the statistics themselves.

What is measured is kept for each parameter and added up for its group when it is used. So a checkpoint knows
parameters alone, and a group has the same figures on any number of stages, as long as no stage holds half of it.
"""

import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from slipstream.config import AgcConfig
from slipstream.errors import ConfigError

Slots = dict[str, dict[str, Tensor]]
"""State of a correction: by slot, then by parameter name."""

GroupOf = Callable[[str], str]
"""Gives the group of a parameter by name."""

_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


def grouping(config: AgcConfig, *, role: Callable[[str], str]) -> GroupOf:
    """Return the groups that the settings name.

    Args:
        config: ``groups`` and ``blocks_per_group``.
        role: Gives the role of a parameter by name.

    Example:
        >>> group_of = grouping(AgcConfig(blocks_per_group=4), role=lambda name: name.split(".")[-2])
        >>> group_of("blocks.5.attention.q.weight"), group_of("embed.weight")
        ('q.4-7', 'embed')
    """
    if config.groups == "global":
        return lambda name: "all"
    count = config.blocks_per_group

    def group_of(name: str) -> str:
        found = _BLOCK.search(name)
        if found is None:
            return role(name)
        first = int(found[1]) // count * count
        return f"{role(name)}.{first}" if count == 1 else f"{role(name)}.{first}-{first + count - 1}"

    return group_of


def check_cuts(config: AgcConfig, first_blocks: Iterable[int]) -> None:
    """Make sure that no group lies on two stages.

    Args:
        config: ``groups`` and ``blocks_per_group``.
        first_blocks: The first block of each stage.

    Raises:
        ConfigError: A stage would hold a part of a group, and measure another curvature than the whole group has.
    """
    cuts = [first for first in first_blocks if first > 0]
    if config.groups == "global" and cuts:
        raise ConfigError(
            f"staleness.agc.groups is 'global', but the model lies on {len(cuts) + 1} stages and no stage sees all "
            "parameters. Use 'role_depth', or --executor single."
        )
    for cut in cuts:
        if cut % config.blocks_per_group:
            raise ConfigError(
                f"staleness.agc.blocks_per_group is {config.blocks_per_group}, but a stage begins at block {cut}, "
                "inside a group. Use a number that divides the first block of every stage (1 always does), or another "
                "pipeline.num_stages."
            )


class Statistics:
    """Numbers by key and parameter, in slots of 0-dimensional tensors so that a checkpoint holds them.

    Args:
        keys: Names of the slots, which are made empty. A number that was never set is 0.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.slots: Slots = {key: {} for key in keys}

    def get(self, key: str, name: str) -> float:
        """Return a number."""
        held = self.slots[key].get(name)
        return 0.0 if held is None else held.item()

    def has(self, key: str, name: str) -> bool:
        """Return whether a number was ever set."""
        return name in self.slots[key]

    def set(self, key: str, name: str, value: float) -> None:
        """Keep a number, in float64: whole ones are exact."""
        self.slots[key][name] = torch.tensor(value, dtype=torch.float64)

    def average(self, key: str, name: str, value: float, *, decay: float) -> None:
        """Mix a number into an exponential average that begins at 0; in a ratio of two the beginning cancels."""
        self.set(key, name, decay * self.get(key, name) + (1.0 - decay) * value)

    def total(self, key: str, names: Iterable[str]) -> float:
        """Return the sum over a group."""
        return sum(self.get(key, name) for name in names)

    def largest(self, key: str, names: Iterable[str]) -> float:
        """Return the maximum over a group."""
        return max((self.get(key, name) for name in names), default=0.0)


def members(names: Iterable[str], group_of: GroupOf) -> dict[str, list[str]]:
    """Return the parameters of each group, in the order given."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    return groups


def to_floats(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of scalars that may live on a device, waiting for it once."""
    return torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else []
