"""Digests of tensors: two runs have the same weights where these are the same."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, as 64 hex digits."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 over named digests in name order; the same however the names were spread over ranks."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name}:{digests[name]}\n".encode())
    return whole.hexdigest()
