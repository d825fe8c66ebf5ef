"""Results as JSON that every reader takes."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any) -> str:
    """Return a result as JSON, with ``null`` for what is not a finite number: JSON has no word for it.

    Args:
        value: Mappings, sequences, texts, numbers, ``None``.

    Example:
        >>> print(json_text({"val_loss": float("nan"), "steps": [1, 2]}).replace(chr(10), ""))
        { "val_loss": null, "steps": [  1,  2 ]}
    """
    return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
