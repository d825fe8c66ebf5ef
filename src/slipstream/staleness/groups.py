"""Groups of parameters that share a statistic, and the statistics themselves.

What is measured is kept for each parameter and added up for its group when it is used. So a checkpoint knows
parameters alone, and a group has the same figures on any number of stages, as long as no stage holds half of it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence

import torch
from torch import Tensor

from slipstream.config import AgcConfig
from slipstream.errors import ConfigError

Slots = dict[str, MutableMapping[str, Tensor]]
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


class _AsTensors(MutableMapping[str, Tensor]):
    """Numbers as a checkpoint takes and gives them: float64 tensors without dimensions."""

    def __init__(self, numbers: dict[str, float]) -> None:
        self._numbers = numbers

    def __getitem__(self, name: str) -> Tensor:
        return torch.tensor(self._numbers[name], dtype=torch.float64)

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._numbers[name] = float(value)

    def __delitem__(self, name: str) -> None:
        del self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class Statistics:
    """Numbers by key and parameter.

    Args:
        keys: Names of the slots, which are made empty. A number that was never set is 0.

    Attributes:
        slots: The numbers for a checkpoint. They themselves are Python's: a tensor each takes ten times as long.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._numbers: dict[str, dict[str, float]] = {key: {} for key in keys}
        self.slots: Slots = {key: _AsTensors(numbers) for key, numbers in self._numbers.items()}

    def get(self, key: str, name: str) -> float:
        """Return a number."""
        return self._numbers[key].get(name, 0.0)

    def has(self, key: str, name: str) -> bool:
        """Return whether a number was ever set."""
        return name in self._numbers[key]

    def set(self, key: str, name: str, value: float) -> None:
        """Keep a number."""
        self._numbers[key][name] = float(value)

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
    return torch.stack(list(tensors)).double().tolist() if tensors else []
