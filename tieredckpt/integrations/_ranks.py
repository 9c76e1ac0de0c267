"""Values and decisions that the ranks of a Trainer share, over torch.distributed where it is initialised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["of_all_ranks", "on_rank_0"]

T = TypeVar("T")


def of_all_ranks(mine: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def on_rank_0(decide: Callable[[], T]) -> T:
    """Run on rank 0 and return its result or error on all ranks, which may see other folders and tiers."""
    if not (dist.is_available() and dist.is_initialized()):
        return decide()
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [decide()]
        except Exception as error:  # the others wait
            told = [error]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], Exception):
        raise told[0]
    found: T = told[0]
    return found
