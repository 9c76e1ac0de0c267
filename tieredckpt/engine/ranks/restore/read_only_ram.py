"""Read-only access to the RAM tiers of local ranks."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.opening.ram import is_of_a_copy
from tieredckpt.engine.ranks.commit.parts import encode_own, merge_parts
from tieredckpt.engine.ranks.node_ram import folders_of_ranks, look_into, near
from tieredckpt.engine.state.state import MergedRam, State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.steps import Held
from tieredckpt.errors import Conflict, Corrupt, NotFound
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId

__all__ = ["open_read_only_ram", "seen_in_ram"]

_log = logging.getLogger("tieredckpt")


async def open_read_only_ram(state: State) -> None:
    """In a read-only store, count a step as held by RAM if all its parts are in RAM folders of this machine.

    A step counts no more once one of its parts is gone.
    """
    first = state.tiers[0]
    if not state.read_only or state.config.ram is None or state.identity.marker is None:
        return
    if await is_of_a_copy(state):
        return
    parts: dict[StepId, dict[int, bytes]] = {}
    for folder in await in_thread(_folders, state):
        tier = await look_into(state, folder)
        if tier is None:
            continue
        try:
            for step in tuple(tier.steps.held):
                try:
                    index = await step_index.load(tier, step)
                except (Corrupt, NotFound) as error:
                    _log.info("%s cannot be read in the RAM of a rank: %s", step, error)
                    continue
                if index.record.rank is not None:
                    parts.setdefault(step, {})[index.record.rank] = await in_thread(encode_own, index, pool=state.pool)
        finally:
            await tier.disconnect()
    whole: dict[StepId, MergedRam] = {}
    for step, by_rank in parts.items():
        try:
            merged = await in_thread(merge_parts, by_rank, pool=state.pool)
        except (Conflict, Corrupt) as error:
            _log.info("%s is not whole in the RAM of this machine: %s", step, error)
            continue
        whole[step] = MergedRam(step, first, merged, partial(near, state, step))
    for step in state.reader.ram_steps:
        if step not in whole and not first.steps.has_own(step):
            first.steps.drop(step)
    state.reader.ram_steps = whole
    for step, found in whole.items():
        first.steps.held.setdefault(step, Held(found.index.record, ""))


def seen_in_ram(state: State) -> Hashable:
    """A token that changes when `open_read_only_ram` would find something else. Blocks; reads no step."""
    if state.config.ram is None or state.identity.marker is None:
        return None
    found: list[Hashable] = [state.identity.marker.store]
    for folder in _folders(state):
        for manifest in sorted(folder.glob(f"{layout.STEPS}*/{layout.MANIFEST}")):
            with suppress(OSError):  # it has just been evicted
                seen = manifest.stat()
                found.append((str(manifest), seen.st_ino, seen.st_mtime_ns))
    return tuple(found)


def _folders(state: State) -> list[Path]:
    """The RAM folders of ranks, without the one that is open here, which has no part of a step."""
    ram = state.tiers[0].ram
    return [folder for folder in folders_of_ranks(state) if ram is None or str(folder) != ram.store.location]
