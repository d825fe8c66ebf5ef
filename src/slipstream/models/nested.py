"""Inputs and targets that may be a tensor, or tuples, lists and tables of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def map_tensors(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same tuples, lists and tables with each array or tensor changed.

    Args:
        values: A tensor or array, or tuples, lists and tables of such.
        change: Is given tensors; arrays as tensors that share their memory.

    Example:
        >>> map_tensors((np.ones(2), {"a": torch.zeros(1)}), lambda tensor: tensor + 1)
        (tensor([2., 2.], dtype=torch.float64), {'a': tensor([1.])})
    """
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, np.ndarray):
        return change(torch.from_numpy(values))
    if isinstance(values, Mapping):
        return {key: map_tensors(value, change) for key, value in values.items()}
    return type(values)(map_tensors(value, change) for value in values)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(values, note)
    yield from found


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Return the values with every tensor of floats as another type; whole numbers stay."""
    return map_tensors(values, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
