"""What tests of lazy saves share: arrays of one value throughout, and the values that a step has of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.scenes import CHUNK
from tieredckpt import CheckpointStore

SIZE = 6 * CHUNK


def full(value: int) -> Any:
    return np.full(SIZE, value, np.uint8)


async def values_of(store: CheckpointStore, step: int) -> tuple[int, ...]:
    """The values that a step has of each array, each of which is one value throughout."""
    restored = await store.restore(step, resume=False)
    assert restored is not None
    assert all((array == array[0]).all() for array in restored.tree.values())
    return tuple(int(restored.tree[key][0]) for key in sorted(restored.tree))
