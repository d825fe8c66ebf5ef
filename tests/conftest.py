"""Fixtures of the whole suite."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Bitwise comparisons hold at a fixed thread count."""
    torch.set_num_threads(1)
