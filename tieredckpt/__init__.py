"""Checkpoints of large-model training, stored in tiers.

::

    async with CheckpointStore.open("ckpt.toml") as store:
        restored = await store.restore(like=state)
        ckpt = await store.save(step, state)
        await ckpt.reached("disk")
"""

from __future__ import annotations

from importlib.metadata import version

from tieredckpt.checkpoint import Checkpoint, Restored
from tieredckpt.config import StoreConfig
from tieredckpt.errors import (
    Closed,
    Conflict,
    Corrupt,
    Invalid,
    NoSpace,
    NotFound,
    RanksUnavailable,
    ShortRead,
    TieredCkptError,
    TierUnavailable,
)
from tieredckpt.inventory import ArrayInfo, StepDetails, StepInfo, TierInfo
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncCheckpoint, SyncRestored, SyncStore
from tieredckpt.tree.shards import Shard, Sharded

__all__ = [
    "ArrayInfo",
    "Checkpoint",
    "CheckpointStore",
    "Closed",
    "Conflict",
    "Corrupt",
    "Invalid",
    "NoSpace",
    "NotFound",
    "RanksUnavailable",
    "Restored",
    "Shard",
    "Sharded",
    "ShortRead",
    "StepDetails",
    "StepInfo",
    "StoreConfig",
    "SyncCheckpoint",
    "SyncRestored",
    "SyncStore",
    "TierInfo",
    "TierUnavailable",
    "TieredCkptError",
    "__version__",
]

__version__ = version("tieredckpt")
