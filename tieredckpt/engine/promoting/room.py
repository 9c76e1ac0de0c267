"""Room on a tier for the chunks that a step brings: counted beforehand, and watched while they are written."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import suppress

from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import NoRoom, fits, make_room
from tieredckpt.engine.promoting.pack_writer import Batch, Need
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.layout import aligned
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.ocdbt import Extent
from tieredckpt.units import format_size

__all__ = ["expected", "have_room", "within_capacity"]


async def expected(tier: Tier, needs: Iterable[Need], encoding: Encoding) -> int:
    """Estimate the bytes that chunks take on a tier in ``encoding``.

    Compressed chunks count with the share of their size that their array takes in the newest step there.
    """
    shares: dict[str, float] = {}
    if not encoding.raw and tier.steps.held:
        with suppress(TieredCkptError):  # an index that cannot be read tells nothing
            shares = _shares(await step_index.load(tier, max(tier.steps.held)))
    need = 0
    for each in needs:
        share, most = shares.get(each.key), encoding.stored_size(each.nbytes)
        need += most if share is None else min(most, math.ceil(share * each.nbytes))
    return need


def _shares(index: StepIndex) -> dict[str, float]:
    """Bytes in packs for each byte of an array, by array."""
    found = {}
    for key, array in index.arrays.items():
        taken = [aligned(chunk.where.length) for chunk in array.chunks if isinstance(chunk.where, Extent)]
        if taken:
            found[key] = sum(taken) / (len(taken) * array.grid.cell_nbytes)
    return found


async def have_room(state: State, collector: Collector, step: StepId, tier: Tier, need: int) -> None:
    """Make room on the tier for so many bytes of the step. Raises `NoSpace`."""
    if not await make_room(state, collector, step, tier, need):
        raise NoRoom(
            f"tier {tier.name!r} has {format_size(tier.used)} of {format_size(tier.capacity or 0)} in use, and {step} "
            f"needs {format_size(need)} more: no other step may be evicted there; raise its capacity, or retain fewer "
            f"steps",
            need,
        )


async def within_capacity(
    tier: Tier, batches: AsyncIterator[Batch], needs: Iterable[Need], encoding: Encoding
) -> AsyncGenerator[Batch, None]:
    """Yield the batches, and count the bytes that they really take instead of the estimates.

    Raises `NoRoom` before a batch that the capacity has no room for, with the most bytes that it and the rest take.
    """
    sizes = {need.digest: encoding.stored_size(need.nbytes) for need in needs}
    taken, left = 0, sum(sizes.values())
    async for batch in batches:
        taken += batch.size
        left -= sum(sizes[digest] for digest, _ in batch.places)
        if not encoding.raw and not fits(tier, taken):
            await batch.lent.aclose()
            raise NoRoom(
                f"tier {tier.name!r} has no room for {format_size(taken)}: the step is less compressible than the one "
                f"before; raise its capacity, or retain fewer steps",
                batch.size + left,
            )
        yield batch
