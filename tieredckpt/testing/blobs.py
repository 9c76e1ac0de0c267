"""Conformance suite of blob stores: subclass `BlobStoreTests` to test a store of your own.

::

    class TestMyStore(BlobStoreTests):
        @pytest.fixture
        async def store(self, tmp_path):
            store = MyStore(tmp_path)
            yield store
            await store.close()

        @pytest.fixture
        def back_door(self, tmp_path):
            return FolderBackDoor(tmp_path)    # of tieredckpt.testing.backdoor

The *back door* reaches the same data by other means, so that a store cannot agree with itself wrongly. Tests
of a trait that the store does not claim are skipped. They need pytest-asyncio in ``auto`` mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import ClassVar

import pytest

from tieredckpt.blobs.base import ALIGNMENT, BlobStore, Buffer, ListAtOnce, Traits
from tieredckpt.errors import Closed, Conflict, Corrupt, Invalid, NotFound, ShortRead, TieredCkptError, TierUnavailable
from tieredckpt.testing.backdoor import BackDoor, aligned, assert_cancelled_reads_let_go, listed, lister, pattern, verbs
from tieredckpt.testing.digesting import GetDigestedTests

__all__ = ["BlobStoreTests"]

MIB = 1 << 20
ENOUGH = 64 * MIB

NOT_KEYS = ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "./a", "a b", "a\n", "ä", "a\\b", "a~", "a\0"]
NOT_PREFIXES = ["a", "/", "../", "a/../", "a//", "a b/"]


class BlobStoreTests(GetDigestedTests):
    """The contract of `tieredckpt.blobs.base`. Subclasses give the fixtures ``store`` and ``back_door``."""

    closed: ClassVar[type[TieredCkptError]] = Closed
    """The error of verbs of a closed store; behind `Retrying` it is `TierUnavailable`."""

    @pytest.fixture
    def store(self) -> BlobStore:
        """An empty store."""
        raise NotImplementedError("a subclass of BlobStoreTests gives the fixture `store`")

    @pytest.fixture
    def back_door(self) -> BackDoor:
        """The data of ``store``, past it."""
        raise NotImplementedError("a subclass of BlobStoreTests gives the fixture `back_door`")

    async def test_it_tells_its_traits_and_place(self, store: BlobStore) -> None:
        assert isinstance(store, BlobStore)
        assert isinstance(store.traits, Traits)
        assert store.traits.object_size > 0
        assert store.location

    async def test_what_is_put_is_there_for_others(self, store: BlobStore, back_door: BackDoor) -> None:
        await store.put("packs/ab/0001.pack", [b"some ", b"bytes"])
        assert await back_door.get("packs/ab/0001.pack") == b"some bytes"
        assert await back_door.list() == {"packs/ab/0001.pack"}

    async def test_what_others_wrote_is_read(self, store: BlobStore, back_door: BackDoor) -> None:
        data = pattern(100_000)
        await back_door.put("x/y", data)
        assert await store.get("x/y", limit=len(data)) == data
        into = bytearray(len(data))
        await store.get_into("x/y", 0, memoryview(into))
        assert into == data

    @pytest.mark.parametrize("parts", [[], [b""], [b"", b"", b""]], ids=["none", "empty", "empties"])
    async def test_an_object_may_be_empty(self, store: BlobStore, back_door: BackDoor, parts: list[Buffer]) -> None:
        await store.put("empty", parts)
        assert await back_door.get("empty") == b""
        assert await store.get("empty", limit=0) == b""
        assert (await store.stat("empty")).size == 0
        assert await listed(store) == {"empty": 0}
        await store.get_into("empty", 0, memoryview(bytearray()))

    @pytest.mark.parametrize("seed", range(5))
    async def test_an_object_is_the_concatenation_of_its_parts(
        self, store: BlobStore, back_door: BackDoor, seed: int
    ) -> None:
        rng = random.Random(seed)
        sizes = [0, 1, 7, 100, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT, 300_000, MIB]
        parts: list[Buffer] = []
        for number in range(rng.randrange(1, 40)):
            data = pattern(rng.choice(sizes), number)
            shift = rng.choice([0, 0, 1, 512])
            forms: list[Buffer] = [data, bytearray(data), aligned(data, shift=shift)]
            parts.append(rng.choice(forms))
        await store.put("parts", parts)
        assert await back_door.get("parts") == b"".join(parts)

    async def test_an_object_may_have_thousands_of_parts(self, store: BlobStore, back_door: BackDoor) -> None:
        data = aligned(pattern(2 * MIB))
        parts = [data[at : at + 700] for at in range(0, len(data), 700)]
        await store.put("many", parts)
        assert await back_door.get("many") == bytes(data)

    @pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "unaligned"])
    @pytest.mark.parametrize("nbytes", [4 * MIB, 5 * MIB + 123, MIB + ALIGNMENT - 1])
    async def test_a_large_object_is_kept_bit_for_bit(
        self, store: BlobStore, back_door: BackDoor, nbytes: int, shift: int
    ) -> None:
        data = pattern(nbytes)
        await store.put("large", [aligned(data, shift=shift)])
        assert await back_door.get("large") == data
        into = aligned(bytes(nbytes), shift=shift)
        await store.get_into("large", 0, into)
        assert into == data
        assert await store.get("large", limit=nbytes) == data

    @pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "unaligned"])
    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            (0, 1),
            (4095, 2),
            (100_000, 300_000),
            (4096, MIB),
            (4096, MIB + 5),
            (4097, MIB),
            (2 * MIB + 17, 0),
            (MIB, MIB + 17),
            (MIB + 1, MIB + 16),
        ],
    )
    async def test_a_range_fills_its_memory_and_no_more(
        self, store: BlobStore, back_door: BackDoor, offset: int, nbytes: int, shift: int
    ) -> None:
        data = pattern(2 * MIB + 17)
        await back_door.put("object", data)
        room = aligned(b"\xa5" * (nbytes + 8192), shift=shift)
        await store.get_into("object", offset, room[4096 : 4096 + nbytes])
        assert room[4096 : 4096 + nbytes] == data[offset : offset + nbytes]
        assert bytes(room[:4096]) == bytes(room[4096 + nbytes :]) == b"\xa5" * 4096

    @pytest.mark.parametrize(
        ("size", "offset", "nbytes"),
        [
            (0, 0, 1),
            (10, 0, 11),
            (10, 10, 1),
            (10, 11, 0),
            (10, 1 << 40, 5),
            (2 * MIB, MIB, MIB + 1),
            (2 * MIB + 9, 0, 2 * MIB + 10),
            (2 * MIB + 9, 1, 3 * MIB),
        ],
    )
    async def test_a_range_beyond_the_end_is_a_short_read(
        self, store: BlobStore, back_door: BackDoor, size: int, offset: int, nbytes: int
    ) -> None:
        await back_door.put("object", bytes(size))
        with pytest.raises(ShortRead):
            await store.get_into("object", offset, aligned(bytes(nbytes)))

    @pytest.mark.parametrize("nbytes", [1, 5000, 2 * MIB])
    async def test_an_object_over_the_limit_is_corrupt(
        self, store: BlobStore, back_door: BackDoor, nbytes: int
    ) -> None:
        await back_door.put("object", bytes(nbytes))
        assert len(await store.get("object", limit=nbytes)) == nbytes
        with pytest.raises(Corrupt) as raised:
            await store.get("object", limit=nbytes - 1)
        assert not isinstance(raised.value, ShortRead)

    async def test_what_is_not_there_is_not_found(self, store: BlobStore, back_door: BackDoor) -> None:
        await back_door.put("folder/object", b"x")
        for key in ("missing", "folder/missing", "no/folder/missing", "folder"):
            for call in (
                store.get(key, limit=10),
                store.get_into(key, 0, memoryview(bytearray(1))),
                store.stat(key),
            ):
                with pytest.raises(NotFound):
                    await call

    async def test_stat_tells_size_and_time(self, store: BlobStore, back_door: BackDoor) -> None:
        await store.put("a/b", [bytes(12_345)])
        info = await store.stat("a/b")
        assert (info.key, info.size) == ("a/b", 12_345)
        assert info.modified == 0.0 or abs(info.modified - time.time()) < 3600

    async def test_a_put_replaces_what_was_there(self, store: BlobStore, back_door: BackDoor) -> None:
        for data in (pattern(2 * MIB), b"short", b"", pattern(MIB + 1, 1)):
            await store.put("key", [data])
            assert await back_door.get("key") == data
            assert await store.get("key", limit=ENOUGH) == data

    @pytest.mark.parametrize("nbytes", [10, 2 * MIB])
    async def test_create_only_leaves_what_was_there(self, store: BlobStore, back_door: BackDoor, nbytes: int) -> None:
        if not store.traits.create_only:
            with pytest.raises(Invalid):
                await store.put("new", [pattern(nbytes)], create_only=True)
            assert await back_door.list() == set()
            return
        await store.put("new", [pattern(nbytes)], create_only=True)
        assert await back_door.get("new") == pattern(nbytes)
        await back_door.put("old", b"first")
        with pytest.raises(Conflict):
            await store.put("old", [pattern(nbytes)], create_only=True)
        assert await back_door.get("old") == b"first"
        assert await back_door.list() == {"new", "old"}

    @pytest.mark.parametrize("nbytes", [10, MIB + 10])
    async def test_create_only_has_one_winner(self, store: BlobStore, back_door: BackDoor, nbytes: int) -> None:
        if not store.traits.create_only:
            pytest.skip("the store does not claim it")
        for number in range(3):
            key = f"locks/{number}"
            contents = [pattern(nbytes, seed) for seed in range(6)]
            results = await asyncio.gather(
                *(store.put(key, [data], create_only=True) for data in contents), return_exceptions=True
            )
            winners = [data for data, result in zip(contents, results, strict=True) if result is None]
            assert [type(result) for result in results if result is not None] == [Conflict] * 5
            assert [await back_door.get(key)] == winners

    @pytest.mark.parametrize("nbytes", [20_000, MIB])
    async def test_a_reader_never_sees_part_of_an_object(self, store: BlobStore, nbytes: int) -> None:
        if not store.traits.atomic_put:
            pytest.skip("the store does not claim it")
        versions = [bytes([number]) * (nbytes + number) for number in range(12)]
        await store.put("object", [versions[0]])
        seen = 0

        async def read() -> None:
            nonlocal seen
            while not writing.done():
                with contextlib.suppress(TierUnavailable):  # moto fails sometimes beside a put; a tier tries again
                    assert await store.get("object", limit=ENOUGH) in versions
                    sizes = await listed(store)
                    assert sizes["object"] in map(len, versions)
                    seen += 1

        async def write() -> None:
            for version in versions:
                await store.put("object", [version])

        writing = asyncio.ensure_future(write())
        await asyncio.gather(read(), read(), writing)
        assert seen, (
            "nothing was read beside the puts: no verb lets the event loop go on. What waits for a device belongs on a "
            "thread (tieredckpt.concurrency.in_thread); a store in memory may `await asyncio.sleep(0)` in put"
        )

    async def test_list_is_complete_and_recursive(self, store: BlobStore, back_door: BackDoor) -> None:
        keys = {"top", "a/1", "a/b/2", "a/b/c/d/e/3", "ab/4", "a-/5", "b/a/6", ".hidden/.7"}
        keys |= {f"many/{number:04}" for number in range(100)}
        for number, key in enumerate(sorted(keys)):
            await (store.put(key, [bytes(number)]) if number % 2 else back_door.put(key, bytes(number)))
        expected = {key: number for number, key in enumerate(sorted(keys))}
        assert await listed(store) == expected
        for prefix in ("a/", "a/b/", "ab/", "many/", ".hidden/", "a/b/c/d/e/"):
            assert await listed(store, prefix) == {
                key: size for key, size in expected.items() if key.startswith(prefix)
            }
            if isinstance(store, ListAtOnce) and (found := await store.list_at_once(prefix)) is not None:
                assert {info.key: info.size for info in found} == await listed(store, prefix)

    async def test_a_folder_that_is_not_there_is_empty(self, store: BlobStore) -> None:
        await store.put("a/b", [b"x"])
        for prefix in ("none/", "a/none/", "none/none/", "a/b/"):
            assert await listed(store, prefix) == {}

    async def test_list_forgets_what_was_deleted(self, store: BlobStore, back_door: BackDoor) -> None:
        for key in ("f/a", "f/b", "g/c"):
            await store.put(key, [b"x"])
        await store.delete("f/a")
        await back_door.delete("g/c")
        assert await listed(store) == {"f/b": 1}

    async def test_list_lets_its_caller_use_the_store(self, store: BlobStore) -> None:
        for number in range(10):
            await store.put(f"f/{number}", [b"x"])
        async for info in store.list("f/"):
            await store.delete(info.key)
        assert await listed(store) == {}

    async def test_delete_is_idempotent(self, store: BlobStore, back_door: BackDoor) -> None:
        await store.put("a/b/c", [b"x"])
        await store.delete("a/b/none")
        await store.delete("none/none")
        assert await back_door.list() == {"a/b/c"}
        await store.delete("a/b/c")
        await store.delete("a/b/c")
        assert await back_door.list() == set()
        await store.put("a/b/c", [b"y"])
        assert await back_door.get("a/b/c") == b"y"

    async def test_a_name_outside_the_alphabet_is_invalid(self, store: BlobStore, back_door: BackDoor) -> None:
        for key in NOT_KEYS:
            for call in verbs(store, key):
                with pytest.raises(Invalid):
                    await call()
        assert await back_door.list() == set()

    async def test_a_prefix_that_is_no_folder_is_invalid(self, store: BlobStore) -> None:
        at_once = await lister(store)
        for prefix in NOT_PREFIXES:
            with pytest.raises(Invalid):
                await listed(store, prefix)
            if at_once is not None:
                with pytest.raises(Invalid):
                    await at_once.list_at_once(prefix)

    async def test_memory_that_cannot_be_filled_is_invalid(self, store: BlobStore, back_door: BackDoor) -> None:
        await back_door.put("a", b"abc")
        for offset, into in ((0, memoryview(b"xyz")), (-1, memoryview(bytearray(1)))):
            with pytest.raises(Invalid):
                await store.get_into("a", offset, into)

    async def test_a_closed_store_says_so(self, store: BlobStore, back_door: BackDoor) -> None:
        await store.put("a", [b"x"])
        at_once = await lister(store)
        await store.close()
        await store.close()
        for call in verbs(store, "a"):
            with pytest.raises(self.closed):
                await call()
        with pytest.raises(self.closed):
            await listed(store)
        if at_once is not None:
            with pytest.raises(self.closed):
                await at_once.list_at_once("")
        assert await back_door.get("a") == b"x"

    async def test_a_put_under_way_survives_close(self, store: BlobStore, back_door: BackDoor) -> None:
        putting = asyncio.ensure_future(store.put("a", [pattern(3 * MIB)]))
        await asyncio.sleep(0)
        await store.close()
        try:
            await putting
        except self.closed:
            assert await back_door.list() == set()
        else:
            assert await back_door.get("a") == pattern(3 * MIB)

    @pytest.mark.parametrize("nbytes", [50_000, 6 * MIB])
    async def test_a_cancelled_put_has_happened_wholly_or_not_at_all(
        self, store: BlobStore, back_door: BackDoor, nbytes: int
    ) -> None:
        old, new = pattern(nbytes, 1), pattern(nbytes, 2)
        await store.put("key", [old])
        for turns in (*range(8), 20, 50, 100):
            parts = [aligned(new), memoryview(bytearray(b"tail"))]
            putting = asyncio.ensure_future(store.put("key", parts))
            for _ in range(turns):
                await asyncio.sleep(0)
            putting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await putting
            for part in parts:
                part[:] = bytes(len(part))  # the memory is the caller's again
            if not store.traits.atomic_put:
                continue
            assert await back_door.get("key") in (old, new + b"tail")
            assert await back_door.list() == {"key"}
        await store.put("key", [old])
        assert await store.get("key", limit=nbytes) == old

    async def test_a_cancelled_read_lets_go_of_the_memory(self, store: BlobStore, back_door: BackDoor) -> None:
        await back_door.put("key", b"\xff" * (8 * MIB))
        await assert_cancelled_reads_let_go(store, "key", lambda into: store.get_into("key", 0, into))

    @pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
    async def test_parts_may_change_once_put_has_returned(
        self, store: BlobStore, back_door: BackDoor, nbytes: int
    ) -> None:
        part = aligned(pattern(nbytes))
        await store.put("key", [part, part[:100]])
        part[:] = bytes(nbytes)
        assert await back_door.get("key") == pattern(nbytes) + pattern(nbytes)[:100]

    async def test_verbs_may_be_used_side_by_side(self, store: BlobStore, back_door: BackDoor) -> None:
        async def use(number: int) -> None:
            key, data = f"side/{number % 3}/{number}", pattern(number * 90_000, number)
            await store.put(key, [aligned(data, shift=number)])
            assert (await store.stat(key)).size == len(data)
            into = bytearray(len(data) // 2)
            await store.get_into(key, len(data) - len(into), memoryview(into))
            assert into == data[len(data) - len(into) :]
            assert key in await listed(store, f"side/{number % 3}/")
            assert await store.get(key, limit=ENOUGH) == data
            await store.delete(key)

        await asyncio.gather(*map(use, range(24)))
        assert await back_door.list() == set()
