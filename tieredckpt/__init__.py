"""Checkpoints of large-model training, stored in tiers.

::

    async with CheckpointStore.open("ckpt.toml") as store:
        restored = await store.restore(like=state)
        ckpt = await store.save(step, state)
        await ckpt.reached("disk")

The import loads nothing but the errors; every other name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tieredckpt.errors import (
    Closed,
    Conflict,
    Corrupt,
    DeviceUnavailable,
    Invalid,
    NoSpace,
    NotFound,
    RanksUnavailable,
    ShortRead,
    TieredCkptError,
    TierUnavailable,
)

if TYPE_CHECKING:
    from tieredckpt._copying import Copied, copy_steps
    from tieredckpt.checkpoint import Checkpoint, Restored, SyncCheckpoint, SyncRestored
    from tieredckpt.config import (
        ChfsTier,
        ExportConfig,
        KvstoreTier,
        LustreTier,
        NfsTier,
        PosixTier,
        RamTier,
        StoreConfig,
        Striping,
        TierConfig,
    )
    from tieredckpt.engine.exporting.export import ExportInfo
    from tieredckpt.engine.inventory import ArrayInfo, DamagedStep, Pin, Scalar, StepDetails, StepInfo, TierInfo
    from tieredckpt.engine.keeping.collector import Collected
    from tieredckpt.engine.ranks.communicator import Communicator
    from tieredckpt.engine.repairing.verify import Verified
    from tieredckpt.engine.saving.save import Saved
    from tieredckpt.engine.transport.jax import JaxCommunicator as JaxCommunicator
    from tieredckpt.engine.transport.mpi import MpiCommunicator as MpiCommunicator
    from tieredckpt.engine.transport.torch import TorchCommunicator as TorchCommunicator
    from tieredckpt.events import (
        ChunkRepaired,
        CommitFailed,
        Event,
        ExportFailed,
        FrozenChanged,
        OriginIgnored,
        RamLeftAlone,
        ReplicasDiffer,
        ReplicationFailed,
        RetentionCut,
        SaveFailed,
        SaveSkipped,
        StepCommitted,
        StepEvicted,
        StepExported,
        StepPromoted,
        StepReplicated,
        StepRestored,
        StepSaved,
        TierFailed,
        TierHangs,
        TierRecovered,
    )
    from tieredckpt.format.manifest import StepId
    from tieredckpt.policy import Observed
    from tieredckpt.preempt import Preemption, preemption
    from tieredckpt.store import CheckpointStore
    from tieredckpt.sync import SyncStore
    from tieredckpt.tree.leaf import ArraySpec
    from tieredckpt.tree.match import AS_SAVED
    from tieredckpt.tree.shards import Shard, Sharded

    __version__: str

# Without JaxCommunicator, MpiCommunicator and TorchCommunicator: they import what need not be installed, and mpi4py
# initialises MPI.
__all__ = [
    "AS_SAVED",
    "ArrayInfo",
    "ArraySpec",
    "Checkpoint",
    "CheckpointStore",
    "ChfsTier",
    "ChunkRepaired",
    "Closed",
    "Collected",
    "CommitFailed",
    "Communicator",
    "Conflict",
    "Copied",
    "Corrupt",
    "DamagedStep",
    "DeviceUnavailable",
    "Event",
    "ExportConfig",
    "ExportFailed",
    "ExportInfo",
    "FrozenChanged",
    "Invalid",
    "KvstoreTier",
    "LustreTier",
    "NfsTier",
    "NoSpace",
    "NotFound",
    "Observed",
    "OriginIgnored",
    "Pin",
    "PosixTier",
    "Preemption",
    "RamLeftAlone",
    "RamTier",
    "RanksUnavailable",
    "ReplicasDiffer",
    "ReplicationFailed",
    "Restored",
    "RetentionCut",
    "SaveFailed",
    "SaveSkipped",
    "Saved",
    "Scalar",
    "Shard",
    "Sharded",
    "ShortRead",
    "StepCommitted",
    "StepDetails",
    "StepEvicted",
    "StepExported",
    "StepId",
    "StepInfo",
    "StepPromoted",
    "StepReplicated",
    "StepRestored",
    "StepSaved",
    "StoreConfig",
    "Striping",
    "SyncCheckpoint",
    "SyncRestored",
    "SyncStore",
    "TierConfig",
    "TierFailed",
    "TierHangs",
    "TierInfo",
    "TierRecovered",
    "TierUnavailable",
    "TieredCkptError",
    "Verified",
    "__version__",
    "copy_steps",
    "preemption",
]

_HOMES = {
    "tieredckpt._copying": "Copied copy_steps",
    "tieredckpt.checkpoint": "Checkpoint Restored SyncCheckpoint SyncRestored",
    "tieredckpt.config": (
        "ChfsTier ExportConfig KvstoreTier LustreTier NfsTier PosixTier RamTier StoreConfig Striping TierConfig"
    ),
    "tieredckpt.engine.exporting.export": "ExportInfo",
    "tieredckpt.engine.inventory": "ArrayInfo DamagedStep Pin Scalar StepDetails StepInfo TierInfo",
    "tieredckpt.engine.keeping.collector": "Collected",
    "tieredckpt.engine.ranks.communicator": "Communicator",
    "tieredckpt.engine.repairing.verify": "Verified",
    "tieredckpt.engine.saving.save": "Saved",
    "tieredckpt.engine.transport.jax": "JaxCommunicator",
    "tieredckpt.engine.transport.mpi": "MpiCommunicator",
    "tieredckpt.engine.transport.torch": "TorchCommunicator",
    "tieredckpt.events": (
        "ChunkRepaired CommitFailed Event ExportFailed FrozenChanged OriginIgnored RamLeftAlone ReplicasDiffer "
        "ReplicationFailed RetentionCut SaveFailed SaveSkipped StepCommitted StepEvicted StepExported StepPromoted "
        "StepReplicated StepRestored StepSaved TierFailed TierHangs TierRecovered"
    ),
    "tieredckpt.format.manifest": "StepId",
    "tieredckpt.policy": "Observed",
    "tieredckpt.preempt": "Preemption preemption",
    "tieredckpt.store": "CheckpointStore",
    "tieredckpt.sync": "SyncStore",
    "tieredckpt.tree.leaf": "ArraySpec",
    "tieredckpt.tree.match": "AS_SAVED",
    "tieredckpt.tree.shards": "Shard Sharded",
}
"""By module, the names that are imported from it at their first use."""

_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
_MODULES = frozenset(
    {"checkpoint", "concurrency", "config", "events", "policy", "preempt", "settings", "store", "sync", "units"}
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in _MODULES:
        return import_module(f"tieredckpt.{name}")  # which makes it an attribute
    elif name == "__version__":
        from importlib.metadata import version

        value = version("tieredckpt")
    else:
        raise AttributeError(f"module 'tieredckpt' has no attribute {name!r}")
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOME, *_MODULES})
