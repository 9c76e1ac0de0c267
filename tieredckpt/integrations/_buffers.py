"""Buffers of modules under DDP that may differ, such as the statistics of BatchNorm: the first rank saves its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tieredckpt import Shard

__all__ = ["is_wrapper", "with_buffers_of_first"]


def with_buffers_of_first(module: torch.nn.Module, stored: Mapping[str, Any], *, replicated: bool) -> dict[str, Any]:
    """The ``stored`` state of a module, without the buffers that another rank saves.

    ``replicated``: all ranks have replicas of the module, whether it has the wrapper of DDP or not.
    """
    first = _first_ranks(module, replicated=replicated) if dist.is_available() and dist.is_initialized() else {}
    return {
        key: value if (rank := first.get(_storage(value))) is None else _of_first(value, rank)
        for key, value in stored.items()
    }


def _first_ranks(module: torch.nn.Module, *, replicated: bool) -> dict[int, int]:
    """The first rank of those that have replicas of a buffer, by the `_storage` of the buffer."""
    found: dict[int, int] = {}
    wrapped = [child for child in module.modules() if isinstance(child, DistributedDataParallel)]
    for child, group in ((module, None),) if replicated else ((each, each.process_group) for each in wrapped):
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            found.update(dict.fromkeys(map(_storage, child.buffers()), min(ranks)))
    for none in (0, *map(_storage, module.parameters())):
        found.pop(none, None)
    return found


def _of_first(buffer: torch.Tensor, rank: int) -> Any:
    """This rank's share of a buffer that ``rank`` saves in full.

    It is a shard, since `replicated` would divide the buffer among ranks that all have it. The other ranks save a shard
    of no rows, so that no step is committed without the buffer of the first rank. A single number cannot be cut into
    shards.
    """
    if not buffer.ndim:
        return buffer
    return Shard(buffer if dist.get_rank() == rank else buffer[:0], buffer.shape, (0,) * buffer.ndim)


def _storage(value: Any) -> int:
    """Address of a dense tensor's data; 0 for anything else, and without data."""
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not is_wrapper(value)
    return value.untyped_storage().data_ptr() if dense else 0


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps its data in inner tensors: a DTensor, or a quantized tensor."""
    return hasattr(tensor, "__tensor_flatten__")
