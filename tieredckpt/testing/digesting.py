"""Conformance suite of stores that digest what they read (`tieredckpt.blobs.base.GetDigested`)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tieredckpt.blobs.base import ALIGNMENT, BlobStore, GetDigested, Stretch
from tieredckpt.errors import Invalid, NotFound, ShortRead
from tieredckpt.format.digest import digest
from tieredckpt.testing.backdoor import BackDoor, aligned, assert_cancelled_reads_let_go, pattern

__all__ = ["GetDigestedTests"]

MIB = 1 << 20

Asked = tuple[int, int, int]
"""Offset and bytes of a stretch, and the bytes of its memory."""


def digesting(store: BlobStore) -> GetDigested:
    """The store as one that has the ability; the test is skipped otherwise."""
    if not store.traits.digested_reads:
        pytest.skip("the store does not claim it")
    assert isinstance(store, GetDigested)
    return store


class GetDigestedTests:
    """Part of `tieredckpt.testing.blobs.BlobStoreTests`, which gives the fixtures."""

    @pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "unaligned"])
    @pytest.mark.parametrize(
        "asked",
        [
            [(0, 1, 1)],
            [(0, 3 * MIB + 17, 3 * MIB + 17)],
            [(ALIGNMENT, 2 * MIB, MIB + 5)],
            [(77, 2 * MIB, 2 * MIB)],
            [(0, 2 * MIB, 0)],
            [(0, MIB, MIB), (MIB, MIB, MIB), (2 * MIB, MIB + 17, 1)],
            [(5, 10, 10), (15, 1, 0), (ALIGNMENT, 100, 100), (MIB + 3, MIB, 9)],
            [(number * ALIGNMENT, 300, 300) for number in range(50)],
        ],
    )
    async def test_stretches_are_filled_and_digested(
        self, store: BlobStore, back_door: BackDoor, asked: Sequence[Asked], shift: int
    ) -> None:
        reader, data = digesting(store), pattern(3 * MIB + 17)
        await back_door.put("object", data)
        rooms = [aligned(b"\xa5" * (kept + 100), shift=shift) for _, _, kept in asked]
        digests = await reader.get_digested(
            "object", [Stretch(offset, n, room[:kept]) for (offset, n, kept), room in zip(asked, rooms, strict=True)]
        )
        for (offset, nbytes, kept), room, found in zip(asked, rooms, digests, strict=True):
            assert found == digest(data[offset : offset + nbytes])
            assert room == data[offset : offset + kept] + b"\xa5" * 100

    async def test_a_digest_tells_what_was_read(self, store: BlobStore, back_door: BackDoor) -> None:
        reader, data = digesting(store), bytearray(pattern(2 * MIB))
        stretch = Stretch(0, len(data), aligned(bytes(len(data))))
        await back_door.put("object", bytes(data))
        (before,) = await reader.get_digested("object", [stretch])
        data[MIB] ^= 1
        await back_door.put("object", bytes(data))
        (after,) = await reader.get_digested("object", [stretch])
        assert before != after == digest(data)
        assert stretch.into == data

    async def test_a_stretch_beyond_the_end_is_a_short_read(self, store: BlobStore, back_door: BackDoor) -> None:
        reader = digesting(store)
        await back_door.put("object", pattern(MIB))
        for offset, nbytes in ((0, MIB + 1), (MIB, 1), (1 << 40, 5)):
            with pytest.raises(ShortRead):
                await reader.get_digested("object", [Stretch(offset, nbytes, memoryview(bytearray()))])
        with pytest.raises(NotFound):
            await reader.get_digested("missing", [Stretch(0, 1, memoryview(bytearray(1)))])

    async def test_stretches_that_cannot_be_are_invalid(self, store: BlobStore, back_door: BackDoor) -> None:
        reader = digesting(store)
        await back_door.put("object", pattern(100))
        nothing = memoryview(bytearray())
        for stretches in (
            [],
            [Stretch(-1, 2, nothing)],
            [Stretch(0, 0, nothing)],
            [Stretch(0, 1, memoryview(bytearray(2)))],
            [Stretch(0, 4, memoryview(b"1234"))],
            [Stretch(0, 10, nothing), Stretch(9, 1, nothing)],
            [Stretch(10, 10, nothing), Stretch(0, 1, nothing)],
        ):
            with pytest.raises(Invalid):
                await reader.get_digested("object", stretches)

    async def test_when_it_is_cancelled_it_lets_go_of_the_memory(self, store: BlobStore, back_door: BackDoor) -> None:
        reader = digesting(store)
        await back_door.put("object", b"\xff" * (8 * MIB))
        await assert_cancelled_reads_let_go(
            store, "object", lambda into: reader.get_digested("object", [Stretch(0, 8 * MIB, into)])
        )
