"""Parts of ranks: converts between the engine's indexes and the files of the format."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Executor

import msgspec

from tieredckpt.concurrency import in_thread
from tieredckpt.errors import Conflict, Corrupt
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord
from tieredckpt.format.merging import merge
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.part import Part, PartArray, decode_extents, decode_part, encode_part

__all__ = [
    "check_found",
    "encode_own",
    "encode_written",
    "extents_of",
    "holders",
    "merge_parts",
    "share_out",
    "whole_steps",
]

_log = logging.getLogger("tieredckpt")

Extents = Mapping[bytes, Extent]


def encode_own(index: StepIndex) -> bytes:
    """The part of a rank as it lies in its RAM, or was streamed."""
    arrays = {key: PartArray(array.grid, array.dtype, array.chunks) for key, array in index.arrays.items()}
    return encode_part(Part(_as_part(index.record), arrays))


def _as_part(record: StepRecord) -> StepRecord:
    """The record of a part; a step that a single rank saved is its one part."""
    return record if record.rank is not None else msgspec.structs.replace(record, rank=0, ranks=1)


def encode_written(index: StepIndex, written: Extents) -> bytes:
    """The part of a rank for others: the chunks that it has ``written`` have their places, small ones their bytes, and
    the rest neither."""
    arrays = {
        key: PartArray(
            array.grid,
            array.dtype,
            [(digest, where if isinstance(where, bytes) else written.get(digest)) for digest, where in array.chunks],
        )
        for key, array in index.arrays.items()
    }
    return encode_part(Part(_as_part(index.record), arrays))


def merge_parts(parts: Mapping[int, bytes]) -> StepIndex:
    """The step that the encoded parts of all ranks make. Raises `Conflict` when they do not fit, and `Corrupt`."""
    return merge(decode_part(data, f"the part of rank {rank}") for rank, data in parts.items())


async def whole_steps(
    found: Mapping[StepId, Mapping[str, Mapping[int, bytes]]], pool: Executor, *, level: int = logging.WARNING
) -> AsyncIterator[StepIndex]:
    """The steps, by age, of which the encoded parts of all ranks are there; of several runs that of the newest save.

    Args:
        found: by step, run and rank.
        pool: threads that merge.
        level: at which it is logged that a run has not left all parts.
    """
    for step, runs in sorted(found.items()):
        newest: StepIndex | None = None
        for parts in runs.values():
            try:
                merged = await in_thread(merge_parts, parts, pool=pool)
            except (Conflict, Corrupt) as error:
                _log.log(level, "%s is not whole in RAM: %s", step, error)
                continue
            if newest is None or merged.record.saved_at > newest.record.saved_at:
                newest = merged
        if newest is not None:
            yield newest


def extents_of(parts: Mapping[int, bytes]) -> dict[bytes, Extent]:
    """The places of the chunks that the ranks have written, by digest. Raises `Corrupt`."""
    found: dict[bytes, Extent] = {}
    for rank, data in parts.items():
        found.update(decode_extents(data, f"the part of rank {rank}"))
    return found


def holders(
    parts: Mapping[int, bytes], there: Callable[[bytes, int], bool]
) -> tuple[dict[bytes, list[int]], dict[bytes, int]]:
    """By digest, the ranks that have each chunk, and its bytes as it lies in RAM.

    Leaves out chunks that are ``there`` already, and those that lie in the index.
    """
    ranks: dict[bytes, list[int]] = {}
    sizes: dict[bytes, int] = {}
    for rank, data in parts.items():
        for digest, extent in decode_extents(data, f"the part of rank {rank}"):
            if not there(digest, extent.length):
                having = ranks.setdefault(digest, [])
                if not having or having[-1] != rank:
                    having.append(rank)
                sizes[digest] = extent.length
    return ranks, sizes


def share_out(ranks: Mapping[bytes, list[int]], sizes: Mapping[bytes, int]) -> dict[int, list[bytes]]:
    """Assign each chunk to one of the ranks that have it, so that all write about the same number of bytes."""
    load: dict[int, int] = {}
    shares: dict[int, list[bytes]] = {}
    # First the chunks that only one rank has, then the largest; the small ones at the end even the loads out.
    for digest in sorted(ranks, key=lambda digest: (len(ranks[digest]) > 1, -sizes[digest])):
        rank = min(ranks[digest], key=lambda rank: load.get(rank, 0))
        load[rank] = load.get(rank, 0) + sizes[digest]
        shares.setdefault(rank, []).append(digest)
    return shares


def check_found(index: StepIndex, packs: Collection[str]) -> None:
    """Raise `Conflict` for a chunk in a pack that is not on the tier."""
    gone = {
        where.path
        for array in index.arrays.values()
        for _, where in array.chunks
        if isinstance(where, Extent) and where.path not in packs
    }
    if gone:
        raise Conflict(f"{index.record.id}: {len(gone)} packs that it refers to are gone from the tier; save again")
