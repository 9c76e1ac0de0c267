"""What a process that only looks on sees of the RAM of a training's ranks, as far as they are on its machine."""

from __future__ import annotations

import logging
from functools import partial

from tieredckpt.blobs.settle import in_thread
from tieredckpt.engine.neighbours import folders_of_ranks, look_into, near
from tieredckpt.engine.parts import encode_own, merge_parts
from tieredckpt.engine.ram_opening import is_of_a_copy
from tieredckpt.engine.source import ChosenStep
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Held
from tieredckpt.errors import Conflict, Corrupt, NotFound
from tieredckpt.format.manifest import StepId

__all__ = ["look_on"]

_log = logging.getLogger("tieredckpt")


async def look_on(state: State) -> None:
    """Where nothing is written: count steps as held by RAM of which all parts are in folders of ranks here."""
    first = state.tiers[0]
    if not state.read_only or first.config.kind != "ram" or state.marker is None:
        return
    if await is_of_a_copy(state):
        return
    parts: dict[StepId, dict[int, bytes]] = {}
    for folder in await in_thread(folders_of_ranks, state):
        tier = await look_into(state, folder)
        if tier is None:
            continue
        try:
            for step in tuple(tier.held):
                try:
                    index = await tier.load_index(step)
                except (Corrupt, NotFound) as error:
                    _log.info("%s cannot be read in the RAM of a rank: %s", step, error)
                    continue
                if index.record.rank is not None:
                    parts.setdefault(step, {})[index.record.rank] = await in_thread(encode_own, index, pool=state.pool)
        finally:
            await tier.disconnect()
    for step, by_rank in parts.items():
        try:
            merged = await in_thread(merge_parts, by_rank, pool=state.pool)
        except (Conflict, Corrupt) as error:
            _log.info("%s is not whole in the RAM of this machine: %s", step, error)
            continue
        first.held.setdefault(step, Held(merged.record, ""))
        state.looked_on[step] = ChosenStep(step, first, merged, partial(near, state, step))
