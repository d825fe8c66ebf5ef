"""Rotary positions: each pair of channels of a query or key is turned by an angle that grows with its position."""

import torch
from torch import Tensor


def rotary_tables(x_BTD: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    r"""Return cosine and sine of the rotary angles, :math:`t \, \theta^{-2i/C}` at position t for channel pair i.

    Angles are taken in float64, for they grow with the position. Computed anew for each forward: the tables are small,
    and a buffer would be cast with the module to bfloat16, or lost when it comes from the meta device.

    Args:
        x_BTD: Gives the number of positions, device and type.
        head_dim: C, even.
        theta: Base of the frequencies.

    Returns:
        Two tables (T, C/2), at least float32.

    Source: Su et al., RoFormer, arXiv 2104.09864, equation 15.
    """
    positions_T = torch.arange(x_BTD.shape[1], dtype=torch.float64, device=x_BTD.device)
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=x_BTD.device)
    angles = torch.outer(positions_T, theta ** (-pairs / head_dim))
    dtype = torch.promote_types(x_BTD.dtype, torch.float32)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BTHC: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the channel pairs (i, i + C/2) of each head by the angle of their position.

    Halves are paired, not neighbours: the layout of Llama weights on the Hugging Face hub.

    Args:
        x_BTHC: Queries or keys.
        rotary: As :func:`rotary_tables` gives it; its type is the one computed in.

    Returns:
        The same shape and type as ``x_BTHC``.
    """
    cos, sin = (table.unsqueeze(1) for table in rotary)  # (T, 1, C/2): the same for all heads
    first, second = x_BTHC.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHC.dtype)
