"""Commits: puts, replaces and retracts the manifests that make steps, one at a time for each step."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tieredckpt.blobs.base import Unanswered
from tieredckpt.blobs.wrap import Overdue
from tieredckpt.concurrency import in_thread, whole
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.index_cache import packs_of, unique_extents
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.steps import IndeterminateDelete, Stale
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import ocdbt
from tieredckpt.format.manifest import ArrayIndex, StepId, StepRecord, decode_step, encode_step

__all__ = [
    "Encoded",
    "check_no_deletion",
    "commit",
    "delete_manifest",
    "encode",
    "encode_now",
    "free_btree_key",
    "retract",
    "retract_from_ram",
]


_log = logging.getLogger("tieredckpt")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A commit that has been encoded, but not put."""

    arrays: Mapping[str, ArrayIndex]
    btree_key: str
    index: ocdbt.Index


def free_btree_key(tier: Tier, step: StepId) -> str:
    """A free key for the index nodes of the next commit of a step: no other commit of this step has used it."""
    may_be_used = tier.store.traits.remote or _may_be_there(tier, step)
    return f"{step.first_btree_key}-{secrets.token_hex(4)}" if may_be_used else step.first_btree_key


def _may_be_there(tier: Tier, step: StepId) -> bool:
    """Whether a commit of the step is on the tier, or may be."""
    steps = tier.steps
    return step in steps.held or step in steps.damaged or step in steps.indeterminate


async def encode(
    tier: Tier, record: StepRecord, arrays: Mapping[str, ArrayIndex], btree_key: str, *, at_least: int = 0
) -> Encoded:
    """Encode the commit of a step, whose nodes will lie at ``btree_key``.

    The key is made longer if the manifest, which has it, would be shorter than ``at_least`` bytes.
    """
    while True:
        encoded = await in_thread(encode_now, tier, record, arrays, btree_key)
        if (missing := at_least - len(encoded.index.manifest)) <= 0:
            return encoded
        btree_key += "0" * missing


def encode_now(tier: Tier, record: StepRecord, arrays: Mapping[str, ArrayIndex], btree_key: str) -> Encoded:
    """As `encode`, on this thread."""
    others = None if tier.in_memory else tier.packs.encoding_of_array
    index = encode_step(record, arrays, btree_path=btree_key, encoding=tier.chunks.encoding, others=others)
    return Encoded(arrays, btree_key, index)


async def commit(
    tier: Tier,
    record: StepRecord,
    arrays: Mapping[str, ArrayIndex],
    encoded: Encoded | None = None,
    *,
    only_anew: bool = False,
) -> None:
    """Write the index of a step whose packs are written, its manifest last.

    A step that is committed already is replaced: its new nodes lie beside the old ones until the manifest points to
    them. A first commit to a remote store, which others may reach, replaces nothing, if the store can ensure that.

    Args:
        tier: where to.
        record: of the step, or of a rank's part of it, which counts as such.
        arrays: what it refers to.
        encoded: the same, encoded; it is encoded again if a commit of the step may be there by now.
        only_anew: commit only if the tier still has the step, readable or not.

    Raises:
        NotFound: ``only_anew``, and the step has left the tier.
        Conflict: another writer has committed a step of this name, which stays; or as `check_no_deletion`.
        NoSpace, TierUnavailable: the tier failed. A first commit is undone; of two commits, or where the first was
            misread, the one that is read next counts. Also as `Lease.confirm`.
    """
    step, traits = record.id, tier.store.traits
    async with tier.steps.turn(step):
        check_no_deletion(tier, step)
        before = tier.steps.held.get(step)
        first = before is None and step not in tier.steps.damaged
        if only_anew and first:
            raise NotFound(f"tier {tier.name!r}: {step} was evicted before it could be committed anew")
        replaced = 0
        if before is not None and not traits.atomic_put:
            # One request replaces the manifest, unless it is shorter: a crash could leave neither of the two.
            with suppress(NotFound):
                replaced = (await tier.store.stat(step.manifest_key)).size
        if encoded is None or encoded.arrays is not arrays or _may_be_there(tier, step):
            encoded = await encode(tier, record, arrays, free_btree_key(tier, step), at_least=replaced)
        btree_key, index = encoded.btree_key, encoded.index
        await tier.store.put(btree_key, index.nodes)
        exclusive = first and traits.remote and traits.create_only
        await tier.confirm_lease()
        try:
            await _put_manifest(tier, record, index.manifest, exclusive=exclusive)
        except (TieredCkptError, asyncio.CancelledError) as error:
            if exclusive and isinstance(error, Conflict):
                raise
            # Of a put that was repeated, the first may have happened.
            look = not isinstance(error, asyncio.CancelledError)
            if not await whole(_mark_indeterminate(tier, step, packs_of(arrays), btree_key, look=look)):
                raise
        tier.packs.mark_used(tier.steps.know(record, arrays, btree_key, index.nbytes))
        if first:
            tier.health.took_step()
        if before is not None and step not in tier.steps.indeterminate:
            await _delete_nodes(tier, before.btree_key)


async def _put_manifest(tier: Tier, record: StepRecord, manifest: bytes, *, exclusive: bool) -> None:
    """Put the manifest of a step; ``exclusive`` replaces none but one of the same save. Raises `Conflict`."""
    key = record.id.manifest_key
    try:
        await tier.store.put(key, [manifest], create_only=exclusive)
    except Conflict as error:
        if not exclusive:
            raise
        if not await _is_of(tier, record):
            raise _others(tier, record.id) from error
        await tier.store.put(key, [manifest])  # the other came late: of a put that failed, before a restart perhaps


async def _delete_nodes(tier: Tier, key: str) -> None:
    """Delete the index nodes of a commit that was replaced, if it had any; what fails is left to the collector."""
    if key:
        try:
            await tier.store.delete(key)
        except TieredCkptError as error:
            _log.warning("tier %r: %s could not be deleted, and stays for now: %s", tier.name, key, error)


async def _is_of(tier: Tier, record: StepRecord) -> bool:
    """Whether the commit that is there is of the same save."""
    try:
        found = (await in_thread(partial(decode_step, *await step_index.read(tier, record.id)))).record
    except (Corrupt, NotFound):
        return False
    mark = (found.id, found.store, found.saved_at, found.rank)
    return mark == (record.id, record.store, record.saved_at, record.rank)


def _others(tier: Tier, step: StepId) -> Conflict:
    return Conflict(
        f"tier {tier.name!r}: another writer has committed {step} there, so this one does not; see that "
        f"each training has a prefix of its own, and open the store again to see what it holds"
    )


async def _mark_indeterminate(tier: Tier, step: StepId, packs: frozenset[str], btree_key: str, *, look: bool) -> bool:
    """Resolve a commit that failed and may have happened; returns whether it has.

    A first commit is undone; one in the place of a damaged one, which may only have been misread, is not. If requests
    may come late, it is only looked at (``look``): a deletion could hit a later commit.

    Raises:
        Conflict: the commit that is there is another writer's.
    """
    steps, late = tier.steps, tier.steps.commits_come_late
    steps.mark_indeterminate(step, packs, btree_key)
    misread = step in steps.damaged and not isinstance(steps.damaged[step], Stale)
    if step in steps.held or (not look if late else misread):
        return False
    try:
        if not late:
            await tier.store.delete(step.manifest_key)
            steps.resolve(step)
            return False
        there = await step_index.root_key(tier, step)
    except TieredCkptError:
        return False  # it shows at the next collection
    if there is not None and there not in steps.indeterminate[step].btree_keys and step not in steps.damaged:
        raise _others(tier, step)
    return there == btree_key


def check_no_deletion(tier: Tier, step: StepId) -> None:
    """Raise `Conflict` while a deletion of the step may come late: it would take away a commit that came since."""
    if step in tier.steps.deletions:
        raise Conflict(
            f"tier {tier.name!r}: a deletion of {step} has failed and may still be carried out; promote it when the "
            f"store's `grace` is over"
        )


async def delete_manifest(tier: Tier, step: StepId) -> None:
    """Delete the manifest of a step, and remember a deletion that fails and may come late. Raises as a blob store."""
    remote = tier.store.traits.remote
    try:
        await tier.store.delete(step.manifest_key)
    except (TierUnavailable, asyncio.CancelledError) as error:
        if isinstance(error, Overdue) or (remote and not isinstance(error, Unanswered)):
            tier.steps.deletions[step] = time.monotonic()
        raise


async def retract(tier: Tier, step: StepId, check: Callable[[], None] | None = None) -> None:
    """Take a step's commit back, the manifest first. Its packs are left to the collector.

    ``check`` is called once nothing more is waited for; the step stays if that raises.

    Raises:
        TierUnavailable: it may be there or not, which shows when the tier works again; a server that refused has left
            it there. Also as `Lease.confirm`.
    """
    async with tier.steps.turn(step):
        await tier.confirm_lease(deleting=True)
        if check is not None:
            check()
        try:
            await delete_manifest(tier, step)
        except (TierUnavailable, asyncio.CancelledError):
            refused = tier.store.traits.remote and step not in tier.steps.deletions
            if not refused and (held := tier.steps.held.get(step)) is not None:
                why = IndeterminateDelete(f"tier {tier.name!r}: {step} was being deleted when that failed", held)
                tier.quarantine(step, why)
            raise
        btree_key = tier.steps.drop(step)
        if btree_key is not None:
            await tier.store.delete(btree_key)


async def retract_from_ram(tier: Tier, ram: Ram, step: StepId) -> None:
    """Take a step, or a rank's part of it, out of RAM; its chunks are free once nobody reads it. Raises as `load`."""
    await whole(_retract_from_ram(tier, ram, step))  # half done, it would lose the extents


async def _retract_from_ram(tier: Tier, ram: Ram, step: StepId) -> None:
    arrays = (await step_index.load(tier, step)).arrays if tier.steps.has_own(step) else {}
    async with tier.steps.turn(step):
        own = tier.steps.own(step)
        index_key = own.btree_key if own is not None else ""
        unread = await in_thread(ram.store.retire, step.manifest_key, index_key)
        tier.steps.drop(step)
    ram.retracted.append((unread, list(unique_extents(arrays))))
    await ram.reclaim()
    if index_key:
        await tier.store.delete(index_key)
