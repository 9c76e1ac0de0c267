"""Splits a sequence into batches of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["batches"]

T = TypeVar("T")


def batches(items: Iterable[T], size: Callable[[T], int], limit: float) -> Iterator[list[T]]:
    """Batches of ``items``, in their order, of at most ``limit`` in total size; a larger item comes alone."""
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
