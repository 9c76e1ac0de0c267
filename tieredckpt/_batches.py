"""Cuts a sequence into what is worked on together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["batches"]

T = TypeVar("T")


def batches(items: Iterable[T], size: Callable[[T], int], limit: float) -> Iterator[list[T]]:
    """``items`` in their order, as many together as are of ``limit`` in sum; one that is larger comes alone."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
