"""Bytes in shared memory are read and written where they lie; only others are copied."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.blobs.chfs.transfer import chunk_size_for, cut, piece_size, ranges
from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.testing.backdoor import pattern

MIB = 1 << 20
CAPACITY = 24 * MIB


@pytest.fixture
def slab() -> Iterator[Slab]:
    fd = os.memfd_create("tieredckpt-test")
    os.ftruncate(fd, CAPACITY)
    slab = Slab(fd, CAPACITY, CAPACITY)
    yield slab
    slab.close()


async def test_extents_of_a_slab_are_not_copied(store: ChfsStore, slab: Slab) -> None:
    data = pattern(9 * MIB + 5)
    memory = memoryview(slab.array)
    memory[ALIGNMENT : ALIGNMENT + len(data)] = data
    await store.put("key", [memory[ALIGNMENT : 5 * MIB], memory[5 * MIB : ALIGNMENT + len(data)]])
    into = memory[12 * MIB : 12 * MIB + len(data)]
    await store.get_into("key", 0, into)
    assert into == data
    assert store.copied == 0


async def test_only_what_lies_elsewhere_is_copied(store: ChfsStore, slab: Slab) -> None:
    slab.array[: 8 * MIB] = memoryview(pattern(8 * MIB))
    memory = memoryview(slab.array)
    parts = [memory[: 3 * MIB], b"checksum", bytes(100), memory[3 * MIB : 3 * MIB + 10], memory[4 * MIB : 8 * MIB]]
    await store.put("key", parts)
    assert store.copied == 118
    assert await store.get("key", limit=8 * MIB) == b"".join(parts)


@pytest.mark.parametrize("seed", range(4))
async def test_any_mixture_of_memory_is_one_object(store: ChfsStore, slab: Slab, seed: int) -> None:
    slab.array[:] = memoryview(pattern(CAPACITY))
    rng = random.Random(seed)
    parts: list[memoryview] = []
    for _ in range(rng.randrange(1, 60)):
        start = rng.randrange(CAPACITY)
        view = memoryview(slab.array)[start : start + rng.choice([1, 100, 70_000, 2 * MIB])]
        parts.append(view if rng.random() < 0.6 else memoryview(bytes(view)))
    await store.put("key", parts)
    whole = b"".join(parts)
    assert await store.get("key", limit=len(whole)) == whole


async def test_a_slab_that_was_closed_is_let_go_of(store: ChfsStore) -> None:
    assert store.link is None
    for number in range(3):
        fd = os.memfd_create("tieredckpt-test")
        os.ftruncate(fd, MIB)
        slab = Slab(fd, MIB, MIB)
        slab.array[:] = number
        await store.put("key", [memoryview(slab.array)])
        slab.close()
    assert store.link is not None
    maps = Path(f"/proc/{store.link.process.number}/maps").read_text()
    assert maps.count("memfd:tieredckpt-test") == 1  # the last: the next new region sends it away


@pytest.mark.parametrize("chunk", [4096, MIB, 3 * MIB, 64 * MIB])
def test_pieces_are_multiples_of_a_chunk(chunk: int) -> None:
    assert piece_size(chunk) % chunk == 0
    assert piece_size(chunk) >= 4 * MIB


def test_a_small_object_is_one_chunk_of_its_size() -> None:
    assert [chunk_size_for(n, MIB) for n in (0, 1, 4095, 4096, MIB, 5 * MIB)] == [4096, 4096, 4096, 8192, MIB, MIB]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_parts_without_a_hole(seed: int) -> None:
    rng = random.Random(seed)
    parts = [rng.randbytes(rng.choice([0, 1, 10, 100])) for _ in range(rng.randrange(30))]
    pieces = [(start, b"".join(memory)) for start, memory in cut(parts, 64)]
    assert b"".join(data for _, data in pieces) == b"".join(parts)
    assert [start for start, _ in pieces] == [64 * n for n in range(len(pieces))]
    assert all(len(data) == 64 for _, data in pieces[:-1])
    offset, nbytes = rng.randrange(200), rng.randrange(300)
    spans = list(ranges(offset, nbytes, 64))
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
    assert all(start % 64 == 0 for start, _ in spans[1:])
    assert not spans or (spans[0][0], spans[-1][1]) == (offset, offset + nbytes)
