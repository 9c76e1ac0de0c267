"""The row-major bytes of a tensor of a device that has no memory left, not even to make it contiguous."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["raw_bytes"]

_WASTE = 4
"""Bytes that are brought to the host at most for each that is wanted, where a tensor can be divided."""


def raw_bytes(source: Any) -> Any:
    """Those of ``source`` as a tensor of bytes on the host, by copies of memory as it lies. Blocking, and slow."""
    plain = source.detach()
    if conjugate := plain.is_conj():
        plain = plain.conj()
    if negative := plain.is_neg():
        plain = torch._neg_view(plain)
    found = _brought(plain)
    if conjugate:
        found = found.conj().resolve_conj()
    if negative:
        found = found.neg()
    return found.contiguous().reshape(-1).view(torch.uint8)


def _brought(plain: Any) -> Any:
    """The tensor on the host: by the memory between its first and last item, or along its longest stride in parts."""
    if not plain.numel():
        return torch.empty(plain.shape, dtype=plain.dtype)
    reach = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True)) + 1
    if reach <= _WASTE * plain.numel():
        lies = plain.as_strided((reach,), (1,)).cpu()
        return lies.as_strided(plain.shape, plain.stride())
    along = max(range(plain.dim()), key=lambda axis: plain.stride(axis) * (plain.shape[axis] > 1))
    return torch.stack([_brought(part) for part in plain.unbind(along)], along)
