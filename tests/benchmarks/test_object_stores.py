"""What our puts and reads of an object store reach, as a ratio to bare obstore with as many in flight, in one run.

``python -m pytest -m benchmark -s tests/benchmarks/test_object_stores.py`` prints the figures.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.null_store import SIZE
from support.object_stores import CREDENTIALS, REAL, Place, null_server

from tieredckpt.blobs.base import Stretch
from tieredckpt.blobs.object.kind import S3
from tieredckpt.config.object_tiers import S3Tier
from tieredckpt.format.digest import copy_and_digest

_PIECE = 16 << 20
_READS = 32
_PACKS = 8
_IN_FLIGHT = 4
_TURNS = 16
"""Of each pair, one behind the other, and each as often first; medians count."""


class Speed(NamedTuple):
    """What calls reached."""

    rate: float
    """MB a second."""
    processor: float
    """Seconds of this process for a GB, all its threads together."""


class Compared(NamedTuple):
    """What ours and bare obstore reached: medians of all turns, and of the turns' ratios, ours to bare."""

    ours: Speed
    bare: Speed
    ratio: Speed


async def speed(one: Callable[[int], Awaitable[object]], count: int, nbytes: int) -> Speed:
    """Of ``count`` calls, some at a time."""
    limit = asyncio.Semaphore(_IN_FLIGHT)

    async def limited(number: int) -> None:
        async with limit:
            await one(number)

    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(limited, range(count)))
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return Speed(count * nbytes / seconds / 1e6, used * 1e9 / (count * nbytes))


async def compared(place: Place, reads: int, packs: int) -> dict[str, Compared]:
    """By what is done."""
    import obstore

    bare = obstore.store.S3Store(
        place.url.split("/")[2],
        prefix=place.prefix,
        endpoint=place.server,
        client_options={"allow_http": True, "timeout": timedelta(days=1)},
        retry_config={"max_retries": 0},
        unsigned_payload=True,
        **CREDENTIALS,
    )
    ours: Any = await S3.open(S3Tier(name="s3", **place.tier(unsigned_payload=True)))
    slab = np.arange(SIZE, dtype=np.uint32).view(np.uint8)[:SIZE]
    parts = [memoryview(slab[at : at + _PIECE]) for at in range(0, SIZE, _PIECE)]
    into = np.ones(reads * _PIECE, np.uint8)

    def room(number: int) -> np.ndarray[Any, Any]:
        return into[number * _PIECE : (number + 1) * _PIECE]

    def start(number: int) -> int:
        return number * _PIECE % SIZE

    async def bare_get(number: int) -> None:
        found = await obstore.get_range_async(bare, "packs/0", start=start(number), length=_PIECE)
        np.copyto(room(number), np.frombuffer(found, np.uint8))

    async def bare_digested(number: int) -> None:
        found = await obstore.get_range_async(bare, "packs/0", start=start(number), length=_PIECE)
        copy_and_digest(np.frombuffer(found, np.uint8), room(number))

    async def bare_stream(number: int) -> None:
        asked = {"range": (start(number), start(number) + _PIECE)}
        target, at = room(number), 0
        async for piece in (await obstore.get_async(bare, "packs/0", options=asked)).stream(min_chunk_size=4 << 20):
            data = np.frombuffer(piece, np.uint8)
            np.copyto(target[at : at + data.size], data)
            at += data.size

    calls: dict[str, tuple[int, int, Any, Any]] = {
        "put": (
            packs,
            SIZE,
            lambda number: ours.put(f"packs/{number}", parts),
            lambda number: obstore.put_async(bare, f"packs/{number}", parts, use_multipart=False),
        ),
        "get": (
            reads,
            _PIECE,
            lambda number: ours.get_into("packs/0", start(number), memoryview(room(number))),
            bare_get,
        ),
        "get, next to bare streams": (
            reads,
            _PIECE,
            lambda number: ours.get_into("packs/0", start(number), memoryview(room(number))),
            bare_stream,
        ),
        "get, digested": (
            reads,
            _PIECE,
            lambda number: ours.get_digested("packs/0", [Stretch(start(number), _PIECE, memoryview(room(number)))]),
            bare_get,
        ),
        "get, both digested": (
            reads,
            _PIECE,
            lambda number: ours.get_digested("packs/0", [Stretch(start(number), _PIECE, memoryview(room(number)))]),
            bare_digested,
        ),
    }
    found: dict[str, Compared] = {}
    for name, (count, nbytes, our, other) in calls.items():
        turns: tuple[list[Speed], list[Speed]] = ([], [])
        for turn in range(_TURNS):
            for which in (0, 1) if turn % 2 else (1, 0):
                turns[which].append(await speed((our, other)[which], count, nbytes))
        ratios = [
            Speed(mine.rate / theirs.rate, mine.processor / theirs.processor)
            for mine, theirs in zip(*turns, strict=True)
        ]
        found[name] = Compared(_median(turns[0]), _median(turns[1]), _median(ratios))
    await ours.close()
    return found


def _median(turns: Sequence[Speed]) -> Speed:
    return Speed(*map(statistics.median, zip(*turns, strict=True)))


def told(server: str, found: dict[str, Compared]) -> None:
    for name, (ours, bare, ratio) in found.items():
        print(  # noqa: T201
            f"{server}, {name}: {ours.rate:.0f} MB/s and {ours.processor:.2f} s/GB of processor, bare obstore "
            f"{bare.rate:.0f} MB/s and {bare.processor:.2f} s/GB, ratio {ratio.rate:.2f}, of processor "
            f"{ratio.processor:.2f}"
        )


@pytest.mark.slow
@pytest.mark.benchmark
def test_puts_and_reads_are_about_as_fast_as_bare_obstore(tmp_path: Path) -> None:
    with null_server(tmp_path) as server:
        found = asyncio.run(compared(Place(server), _READS, _PACKS))
    told("a server that throws away", found)
    both_digested = found.pop("get, both digested")  # there the bare loop digests while nobody else wants to run
    assert both_digested.ratio.rate > 0.8
    assert all(each.ratio.rate > 0.9 for each in found.values())
    assert all(each.ratio.processor < 1.5 for each in (both_digested, *found.values()))


@pytest.mark.slow
@pytest.mark.benchmark
def test_puts_and_reads_of_a_server_of_s3_are_about_as_fast_as_bare_obstore(s3_place: Place) -> None:
    """Of moto, or the server that ``S3_SERVER`` names: the server is the limit, and moody."""
    found = asyncio.run(compared(s3_place, *((_READS, _PACKS) if REAL else (8, 4))))
    told(REAL or "moto", found)
    assert all(each.ratio.rate > 0.6 for each in found.values())
