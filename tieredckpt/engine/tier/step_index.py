"""Reads the index of a step on a tier, or has it from the cache."""

from __future__ import annotations

import asyncio

import msgspec

from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.index_cache import packs_of
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.format import ocdbt
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord, decode_step

__all__ = ["check_record", "is_committed", "is_replaced", "load", "load_anew", "packs", "read", "root_key"]

_MANIFEST_MAX = 1 << 20
_BTREE_MAX = 1 << 30


async def read(tier: Tier, step: StepId) -> tuple[bytes, bytes, str]:
    """The manifest of a step, its index nodes and their key. Raises `NotFound`, `Corrupt`, `TierUnavailable`."""
    manifest, root = await _manifest(tier, step)
    # Not the most that any nodes take: the limit counts as bytes in flight, and lengthens the deadline.
    nbytes = max(root.offset + root.length, root.tree_bytes)
    return manifest, await tier.store.get(root.path, limit=min(nbytes, _BTREE_MAX)), root.path


async def is_committed(tier: Tier, step: StepId) -> bool:
    """Whether the manifest of a step is there, readable or not. Raises `TierUnavailable`."""
    try:
        await tier.store.stat(step.manifest_key)
    except NotFound:
        return False
    return True


async def root_key(tier: Tier, step: StepId) -> str | None:
    """The key of the index nodes that the manifest of a step names; empty if that is damaged, None if there is none."""
    try:
        return (await _manifest(tier, step))[1].path
    except Corrupt:
        return ""
    except NotFound:
        return None


async def _manifest(tier: Tier, step: StepId) -> tuple[bytes, ocdbt.Root]:
    manifest = await tier.store.get(step.manifest_key, limit=_MANIFEST_MAX)
    root = ocdbt.read_root(manifest)
    if not root.path.startswith(step.folder):
        raise Corrupt(f"tier {tier.name!r}, {step}: the manifest points to {root.path!r}, outside the step")
    return manifest, root


def check_record(tier: Tier, step: StepId, record: StepRecord) -> None:
    """Raise `Corrupt` if a record is not of the step in whose folder it lies, or not of the tier's kind."""
    if record.id != step:
        raise Corrupt(f"tier {tier.name!r}: the folder of {step} holds {record.id}")
    if (record.derived is not msgspec.UNSET) != tier.derived:
        there, wanted = ("an exact", "derived") if tier.derived else ("a derived", "exact")
        raise Corrupt(f"tier {tier.name!r}: the folder of {step} holds {there} step where {wanted} ones belong")


async def load(tier: Tier, step: StepId) -> StepIndex:
    """The index of a step; recent ones are kept. Raises `NotFound`, `Corrupt`, `TierUnavailable`."""
    if (found := tier.steps.indexes.get(step)) is None or not tier.steps.has_own(step):
        return await load_anew(tier, step)
    tier.steps.indexes.remember(step, found)
    return found


async def load_anew(tier: Tier, step: StepId) -> StepIndex:
    """As `load`, but read from the tier though it may be known."""
    steps = tier.steps
    if (held := steps.own(step)) is None:
        raise NotFound(f"tier {tier.name!r} does not hold {step}")
    try:
        found = await asyncio.to_thread(decode_step, *await read(tier, step))
        check_record(tier, step, found.record)
    except (Corrupt, NotFound) as error:
        if is_replaced(tier, step, held):
            return await load_anew(tier, step)
        if isinstance(error, Corrupt) and step in steps.held and not steps.held[step].whole:
            tier.quarantine(step, error)  # as if it had been read at opening
        raise
    if is_replaced(tier, step, held):
        return await load_anew(tier, step)
    if steps.own(step) is not None:  # else it left
        steps.indexes.remember(step, found)
    return found


def is_replaced(tier: Tier, step: StepId, held: Held | None) -> bool:
    """Whether a step was committed anew since it was ``held`` so; an index that was read meanwhile may be the old."""
    now = tier.steps.own(step)
    return now is not None and now is not held


async def packs(tier: Tier, step: StepId) -> frozenset[str]:
    """The packs that a step refers to. Raises as `load`."""
    indexes = tier.steps.indexes
    found = indexes.packs.get(step)
    if found is None:
        found = packs_of((await load(tier, step)).arrays)
        if step in indexes:
            indexes.packs[step] = found
    return found
