"""A cancelled call of the posix store, or one whose thread hangs: what it leaves alone, and what goes on beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.posix_files import LARGE, SMALL, Calls, files

from tieredckpt.blobs.base import BlobStore, Stretch, Unanswered
from tieredckpt.blobs.posix import target, threads
from tieredckpt.blobs.posix.paths import Folders
from tieredckpt.blobs.posix.shared import SharedFolders
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.testing.backdoor import aligned, listed

pytestmark = pytest.mark.usefixtures("never_blocked_loop")


class TestCancellation:
    async def hang(self, store: BlobStore, calls: Calls, call: Awaitable[None]) -> asyncio.Task[None]:
        calls.go_on.clear()
        task = asyncio.ensure_future(call)
        await asyncio.to_thread(calls.entered.wait, 30)
        return task

    async def settled(self, task: asyncio.Task[None]) -> bool:
        for _ in range(50):
            await asyncio.sleep(0)
        return task.done()

    @pytest.mark.parametrize(("nbytes", "name"), [(SMALL, "fsync"), (LARGE, "fsync"), (LARGE, "pwritev")])
    async def test_a_put_ends_when_its_thread_has_let_go(
        self, root: Path, store: PosixStore, nbytes: int, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = Calls(monkeypatch, name)
        task = await self.hang(store, calls, store.put("key", [aligned(bytes(nbytes))]))
        for _ in range(3):
            task.cancel()
            assert not await self.settled(task)
        assert store.hanging == 1
        calls.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert files(root) == set()
        await store.put("key", [b"x"])
        assert files(root) == {"key"}

    async def test_a_put_that_is_given_up_while_its_rename_waits_for_a_thread_has_not_happened(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a commit that counts as failed would appear behind the deletion that undid it."""
        store = await asyncio.to_thread(PosixStore, root, threads=1)
        await store.put("key", [b"old"])
        info, hangs, turns = Folders.info, threading.Semaphore(0), [threading.Event(), threading.Event()]
        waiting = iter(turns)

        def hang(folders: Folders, path: Path) -> Any:
            turn = next(waiting)
            hangs.release()
            assert turn.wait(30)
            return info(folders, path)

        monkeypatch.setattr(Folders, "info", hang)
        calls = Calls(monkeypatch, "fsync")
        putting = await self.hang(store, calls, store.put("key", [b"late"]))
        looking = []
        for before in (calls.go_on, turns[0]):  # the file is closed, and then renamed, behind another call
            looking.append(asyncio.ensure_future(store.stat("key")))
            await self.settled(looking[-1])
            before.set()
            await asyncio.to_thread(hangs.acquire)
            await self.settled(putting)
        putting.cancel()
        await self.settled(putting)
        turns[1].set()
        await asyncio.gather(*looking)
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert await store.get("key", limit=10) == b"old"
        assert files(root) == {"key"}
        await store.close()

    @pytest.fixture
    async def network_store(self, root: Path) -> AsyncIterator[PosixStore]:
        store = await asyncio.to_thread(PosixStore, root, folders=SharedFolders)
        yield store
        await store.close()

    async def test_a_read_in_place_ends_when_its_thread_has_let_go(
        self, store: PosixStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await store.put("key", [bytes(LARGE)])
        calls, into = Calls(monkeypatch, "preadv"), aligned(bytes(LARGE))
        task = await self.hang(store, calls, store.get_into("key", 0, into))
        task.cancel()
        assert not await self.settled(task)
        calls.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    @pytest.mark.parametrize(("network", "digested"), [(False, True), (True, True), (True, False)])
    async def test_a_read_ends_at_once_and_leaves_the_memory_alone(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, network: bool, digested: bool
    ) -> None:
        store = await asyncio.to_thread(PosixStore, root, folders=SharedFolders if network else Folders)
        await store.put("key", [b"\x01" * LARGE])
        calls, room = Calls(monkeypatch, "preadv"), bytearray(LARGE)
        into = memoryview(room)
        read = store.get_digested("key", [Stretch(0, LARGE, into)]) if digested else store.get_into("key", 0, into)
        task = await self.hang(store, calls, read)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.hanging == 1
        del task, read
        into.release()
        room.clear()  # nothing refers to it
        room.extend(bytes(LARGE))
        calls.go_on.set()
        await self.until_none_hangs(store)
        assert not any(room)
        await store.close()

    async def until_none_hangs(self, store: PosixStore) -> None:
        async with asyncio.timeout(30):
            while store.hanging:
                await asyncio.sleep(0.001)

    async def test_a_read_that_is_copying_ends_when_the_copy_has(
        self, network_store: PosixStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = network_store
        await store.put("key", [bytes(LARGE)])
        copying, go_on = threading.Event(), threading.Event()
        real = target.np.copyto

        def copy(to: Any, data: Any) -> None:
            copying.set()
            assert go_on.wait(30)
            real(to, data)

        monkeypatch.setattr(target.np, "copyto", copy)
        task = asyncio.ensure_future(store.get_into("key", 0, aligned(bytes(LARGE))))
        await asyncio.to_thread(copying.wait, 30)
        for _ in range(3):
            for each in asyncio.all_tasks() - {asyncio.current_task()}:  # as the end of a loop does
                each.cancel()
            assert not await self.settled(task)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_a_read_whose_coroutine_is_closed_lets_the_copy_end_first(
        self, network_store: PosixStore, monkeypatch: pytest.MonkeyPatch, never_blocked_loop: Any
    ) -> None:
        never_blocked_loop.deactivate()  # nothing may be awaited any more
        store = network_store
        await store.put("key", [bytes(LARGE)])
        copying, go_on, copied = threading.Event(), threading.Event(), threading.Event()
        real = target.np.copyto

        def copy(to: Any, data: Any) -> None:
            copying.set()
            assert go_on.wait(30)
            real(to, data)
            copied.set()

        def let_it_end() -> None:
            end = time.monotonic() + 30
            while not store.hanging and time.monotonic() < end:  # till the read was given up
                time.sleep(0.001)
            go_on.set()

        monkeypatch.setattr(target.np, "copyto", copy)
        running: Any = store.get_into("key", 0, aligned(bytes(LARGE)))
        running.send(None)
        await asyncio.to_thread(copying.wait, 30)
        ending = threading.Thread(target=let_it_end, daemon=True)
        ending.start()
        running.close()
        assert copied.is_set()
        ending.join()
        await self.until_none_hangs(store)

    @pytest.mark.parametrize(
        ("name", "verb"),
        [
            ("open", lambda store: store.get("key", limit=10)),
            ("stat", lambda store: store.stat("key")),
            ("scandir", listed),
        ],
        ids=["get", "stat", "list"],
    )
    async def test_other_reading_verbs_end_at_once_too(
        self,
        store: PosixStore,
        name: str,
        verb: Callable[[PosixStore], Awaitable[Any]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await store.put("key", [b"x"])
        calls = Calls(monkeypatch, name)
        task = await self.hang(store, calls, verb(store))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.hanging == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}
        calls.go_on.set()
        await self.until_none_hangs(store)
        assert await store.get("key", limit=10) == b"x"

    @pytest.mark.parametrize(
        ("name", "network", "verb"),
        [
            ("preadv", True, lambda store, into: store.get_into("key", 0, into)),
            ("preadv", False, lambda store, into: store.get_into("key", 0, into)),
            ("preadv", False, lambda store, into: store.get_digested("key", [Stretch(0, LARGE, into)])),
            ("open", False, lambda store, _: store.get("key", limit=LARGE)),
            ("fsync", False, lambda store, _: store.put("other", [b"x"])),
        ],
        ids=["read", "read in place", "digested", "get", "put"],
    )
    async def test_a_verb_whose_coroutine_is_closed_stops_its_thread(
        self, root: Path, name: str, network: bool, verb: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = await asyncio.to_thread(PosixStore, root, folders=SharedFolders if network else Folders)
        await store.put("key", [b"\x01" * LARGE])
        calls, into = Calls(monkeypatch, name), aligned(bytes(LARGE))
        calls.go_on.clear()
        running = verb(store, into)
        running.send(None)
        await asyncio.to_thread(calls.entered.wait, 30)
        running.close()
        assert store.hanging == 1
        calls.go_on.set()
        await self.until_none_hangs(store)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        assert (name == "preadv" and not network) or not any(into)
        await store.close()
        assert files(root) == {"key"}

    async def test_small_puts_that_hang_are_bounded(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threads, "_HANGS_AFTER", 0.0)
        store = await asyncio.to_thread(PosixStore, root, threads=2)
        calls = Calls(monkeypatch, "fsync")
        tasks = []
        for name in ("one", "two"):
            calls.entered.clear()
            tasks.append(await self.hang(store, calls, store.put(name, [b"x"])))
            tasks[-1].cancel()
            assert not await self.settled(tasks[-1])
        with pytest.raises(Unanswered, match="all 2 threads hang"):
            await store.put("key", [b"x"])
        calls.go_on.set()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError)
        assert files(root) == set()
        await store.put("key", [b"x"])
        await store.close()

    async def test_while_all_threads_hang_a_verb_is_refused_and_no_more_hang(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(threads, "_HANGS_AFTER", 0.0)
        store = await asyncio.to_thread(PosixStore, root, threads=2, folders=SharedFolders)
        await store.put("key", [bytes(LARGE)])
        calls = Calls(monkeypatch, "preadv")
        for _ in range(2):
            calls.entered.clear()
            task = await self.hang(store, calls, store.get_into("key", 0, memoryview(bytearray(LARGE))))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(Unanswered, match="all 2 threads hang"):
            await store.get_into("key", 0, memoryview(bytearray(LARGE)))
        calls.go_on.set()
        await self.until_none_hangs(store)
        await store.get_into("key", 0, memoryview(bytearray(LARGE)))
        await store.close()

    async def test_a_verb_that_waits_for_a_thread_ends_at_once(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = await asyncio.to_thread(PosixStore, root, threads=1)
        await store.put("key", [bytes(LARGE)])
        calls = Calls(monkeypatch, "preadv")
        hanging = await self.hang(store, calls, store.get_into("key", 0, aligned(bytes(LARGE))))
        waiting = asyncio.ensure_future(store.get_into("key", 0, aligned(bytes(LARGE))))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await self.settled(waiting)
        calls.go_on.set()
        await hanging
        await store.close()

    async def test_reads_of_chunks_hold_up_nothing_else(
        self, store: PosixStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await store.put("key", [bytes(LARGE)])
        calls = Calls(monkeypatch, "preadv")
        calls.go_on.clear()
        stretch = Stretch(0, LARGE, memoryview(bytearray()))
        reads = [asyncio.ensure_future(store.get_digested("key", [stretch])) for _ in range(40)]
        await asyncio.to_thread(calls.entered.wait, 30)
        await store.put("small", [b"x"])
        assert await store.get("small", limit=1) == b"x"
        assert not any(read.done() for read in reads)
        calls.go_on.set()
        await asyncio.gather(*reads)

    async def test_a_store_that_hangs_holds_up_no_other(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hung, other = [await asyncio.to_thread(PosixStore, tmp_path / name) for name in ("hung", "other")]
        await hung.put("key", [bytes(LARGE)])
        calls = Calls(monkeypatch, "preadv")
        calls.go_on.clear()
        reads = [asyncio.ensure_future(hung.get_into("key", 0, aligned(bytes(LARGE)))) for _ in range(40)]
        await asyncio.to_thread(calls.entered.wait, 30)
        await other.put("key", [b"x"])
        assert await other.get("key", limit=1) == b"x"
        assert await listed(other) == {"key": 1}
        assert not any(read.done() for read in reads)
        await hung.close()  # does not wait either
        calls.go_on.set()
        await asyncio.gather(*reads)
        await other.close()

    def test_the_end_of_the_loop_leaves_no_temporary_file(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = Calls(monkeypatch, "fsync")
        stores = []

        async def abandon() -> None:
            store = await asyncio.to_thread(PosixStore, root)
            stores.append(store)
            calls.go_on.clear()
            calls.entered.clear()
            putting = asyncio.ensure_future(store.put("key", [bytes(LARGE)]))
            await asyncio.to_thread(calls.entered.wait, 30)
            assert not putting.done()
            threading.Timer(0.05, calls.go_on.set).start()

        asyncio.run(abandon())
        stores[0]._calls.pool.shutdown(wait=True)
        assert files(root) == set()
