"""The posix store: what it leaves behind, how it syncs, and what it says when the file system fails."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.insight import opened_below
from support.posix_files import LARGE, SMALL, Calls, files, sizes

from tieredckpt.blobs.base import Free, Stretch, Survives
from tieredckpt.blobs.posix import transfer
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.wrap import Metered
from tieredckpt.errors import Closed, Corrupt, Invalid, NoSpace, NotFound, ShortRead, TieredCkptError, TierUnavailable
from tieredckpt.testing.backdoor import aligned, listed, pattern, verbs

pytestmark = pytest.mark.usefixtures("never_blocked_loop")


def refuse_folders(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Fail each sync of a folder with this ``errno``."""
    real = os.fsync

    def only_files(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", only_files)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestPermissions:
    async def test_what_it_makes_is_the_owners_alone(self, root: Path, store: PosixStore) -> None:
        await store.put("a/b/small", [b"x"])
        await store.put("a/b/large", [bytes(LARGE)])
        for path in (root, root / "a", root / "a/b"):
            assert mode(path) == 0o700
        for name in ("small", "large"):
            assert mode(root / "a/b" / name) == 0o600

    async def test_other_permissions_are_the_users_choice(self, tmp_path: Path) -> None:
        mask = os.umask(0o007)
        try:
            store = await asyncio.to_thread(PosixStore, tmp_path / "r", folder_mode=0o770, file_mode=0o640)
            await store.put("a/b", [b"x"])
            await store.close()
        finally:
            os.umask(mask)
        assert [mode(tmp_path / path) for path in ("r", "r/a", "r/a/b")] == [0o770, 0o770, 0o640]

    async def test_a_root_that_was_there_stays_as_it_is(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o750)
        store = await asyncio.to_thread(PosixStore, tmp_path)
        await store.close()
        assert mode(tmp_path) == 0o750
        assert files(tmp_path) == set()


def needs_direct_io(store: PosixStore) -> None:
    if not store.traits.direct_io:
        pytest.skip("the file system refuses direct I/O")


class TestDirectIO:
    def descriptors(self, monkeypatch: pytest.MonkeyPatch, name: str) -> list[bool]:
        real, direct = getattr(os, name), []

        def noting(fd: int, *args: Any) -> Any:
            direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & transfer.O_DIRECT))
            return real(fd, *args)

        monkeypatch.setattr(os, name, noting)
        return direct

    @pytest.mark.parametrize("shift", [0, 7], ids=["aligned", "unaligned"])
    async def test_large_transfers_use_it(self, store: PosixStore, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
        needs_direct_io(store)
        written = self.descriptors(monkeypatch, "pwritev")
        read = self.descriptors(monkeypatch, "preadv")
        data = aligned(pattern(LARGE + 100), shift=shift)
        await store.put("key", [data])
        into = aligned(bytes(len(data)), shift=shift)
        await store.get_into("key", 0, into)
        assert into == data
        assert set(written) == set(read) == {True}

    async def test_aligned_memory_goes_without_a_copy(self, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
        needs_direct_io(store)
        copied: list[int] = []
        real = transfer.np.copyto
        monkeypatch.setattr(transfer.np, "copyto", lambda to, data: (copied.append(len(data)), real(to, data)))
        data = aligned(pattern(LARGE + 100))
        await store.put("key", [data])
        await store.get_into("key", 0, aligned(bytes(len(data))))
        assert copied == [100, 100]

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    async def test_a_full_file_system_is_not_taken_for_one_that_refuses_it(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        needs_direct_io(await asyncio.to_thread(PosixStore, root))

        def full(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pwritev", full)
        for direct in (None, True):
            assert (await asyncio.to_thread(PosixStore, root, direct=direct)).traits.direct_io

    async def test_it_is_off_when_the_user_says_so(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = await asyncio.to_thread(PosixStore, root, direct=False)
        assert not store.traits.direct_io
        written, read = self.descriptors(monkeypatch, "pwritev"), self.descriptors(monkeypatch, "preadv")
        await store.put("key", [aligned(bytes(LARGE))])
        await store.get_into("key", 0, aligned(bytes(LARGE)))
        await store.close()
        assert set(written) == set(read) == {False}

    async def test_a_file_system_that_refuses_it_is_used_buffered(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.open

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & transfer.O_DIRECT:
                raise OSError(errno.EINVAL, "refused")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        store = await asyncio.to_thread(PosixStore, root)
        assert not store.traits.direct_io
        with pytest.raises(Invalid, match="direct"):
            await asyncio.to_thread(PosixStore, root, direct=True)
        store._direct = True  # as found out on a root that could not be written to
        (root / "key").write_bytes(pattern(LARGE))
        into = aligned(bytes(LARGE))
        await store.get_into("key", 0, into)
        await store.close()
        assert into == pattern(LARGE)


class TestDurability:
    def synced(self, monkeypatch: pytest.MonkeyPatch, *, nbytes: int | None = None) -> list[str]:
        """The paths of what is synced, in order; a file has ``nbytes`` by then."""
        real, synced = os.fsync, []

        def noting(fd: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
            found = os.fstat(fd)
            assert nbytes in (None, found.st_size) or stat.S_ISDIR(found.st_mode)
            real(fd)

        monkeypatch.setattr(os, "fsync", noting)
        return synced

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
    @pytest.mark.parametrize("nbytes", [1, SMALL, LARGE])  # the first one fits in a buffer of Python's
    async def test_a_put_syncs_the_file_then_its_name_then_new_folders(
        self, root: Path, store: PosixStore, nbytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced = self.synced(monkeypatch, nbytes=nbytes)
        await store.put("a/b/key", [bytes(nbytes)])
        assert synced[0].startswith(f"{root}/a/b/.")
        assert synced[1] == f"{root}/a/b"
        assert set(synced[2:]) == {str(root), f"{root}/a"}
        synced.clear()
        await store.put("a/b/other", [bytes(nbytes)])
        assert synced[1:] == [f"{root}/a/b"]
        synced.clear()
        await store.delete("a/b/other")
        assert synced == [f"{root}/a/b"]

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
    async def test_the_names_of_a_new_root_and_of_the_folders_above_it_are_synced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced = self.synced(monkeypatch)
        store = await asyncio.to_thread(PosixStore, tmp_path / "new/newer/root")
        await store.close()
        assert {str(tmp_path), f"{tmp_path}/new", f"{tmp_path}/new/newer"} <= set(synced)

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
    @pytest.mark.parametrize("broken", range(1, 5))
    async def test_the_names_above_a_root_whose_making_broke_off_are_synced_by_the_next_opening(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
    ) -> None:
        real, synced, calls = os.fsync, set[str](), 0

        def breaking(fd: int) -> None:
            nonlocal calls
            calls += 1
            if calls == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            synced.add(os.readlink(f"/proc/self/fd/{fd}"))
            real(fd)

        monkeypatch.setattr(os, "fsync", breaking)
        path = tmp_path / "new/newer/root"
        with suppress(TierUnavailable):
            await (await asyncio.to_thread(PosixStore, path)).close()
        assert calls >= broken
        store = await asyncio.to_thread(PosixStore, path)
        await store.put("key", [b"x"])
        await store.close()
        assert {str(tmp_path), f"{tmp_path}/new", f"{tmp_path}/new/newer", str(path)} <= synced

    @pytest.mark.parametrize("writable", [True, False])
    async def test_a_folder_above_the_root_that_may_not_be_read_is_no_obstacle(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, writable: bool
    ) -> None:
        """Only the names in one that may be written to are new, so only of those a warning tells."""
        real = os.open

        def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
            if Path(path) == tmp_path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(os, "access", lambda path, mode: writable)
        store = await asyncio.to_thread(PosixStore, tmp_path / "new/root")
        await store.put("key", [b"x"])
        await store.close()
        told = f"{tmp_path}/new/root: {tmp_path} may not be read, so not be synced"
        assert [record.message[: len(told)] for record in caplog.records] == [told] * writable

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
    async def test_a_folder_that_was_pruned_is_synced_anew(
        self, root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await store.put("a/b/key", [b"x"])
        synced = self.synced(monkeypatch)
        await store.delete("a/b/key")
        assert synced == [str(root)]
        assert list(root.iterdir()) == []
        synced.clear()
        await store.put("a/b/key", [b"x"])
        assert set(synced[2:]) == {str(root), f"{root}/a"}
        await store.delete("a/b/key")
        synced.clear()
        (root / "a/b").mkdir(parents=True)  # by another process, which may not have synced it
        await store.put("a/b/key", [b"x"])
        assert set(synced[2:]) == {str(root), f"{root}/a"}
        shutil.rmtree(root / "a")  # by another process
        synced.clear()
        await store.put("a/b/key", [b"x"])
        assert set(synced[2:]) == {str(root), f"{root}/a"}

    async def test_a_store_that_need_not_be_durable_syncs_nothing(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = Calls(monkeypatch, "fsync")
        store = await asyncio.to_thread(PosixStore, root, fsync=False, survives=Survives.PROCESS)
        await store.put("a/small", [b"x"])
        await store.put("a/large", [bytes(LARGE)])
        await store.delete("a/small")
        await store.close()
        assert calls.seen == []
        assert (store.traits.durable, store.traits.survives) == (False, Survives.PROCESS)

    @sizes
    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
    async def test_a_file_system_that_cannot_sync_folders_is_used_and_told_of_once(
        self, root: Path, nbytes: int, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        refuse_folders(monkeypatch, number)
        root.mkdir()
        store = await asyncio.to_thread(PosixStore, root)
        assert "a power cut may lose new files" in store.facts()["names"]
        await store.put("a/key", [bytes(nbytes)])
        await store.delete("a/key")
        await store.close()
        assert len(caplog.records) == 1

    @sizes
    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
    async def test_a_name_that_was_not_synced_is_an_error(
        self, store: PosixStore, nbytes: int, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refuse_folders(monkeypatch, number)
        with pytest.raises(TierUnavailable, match="not synced"):
            await store.put("key", [bytes(nbytes)])


FAILURES = [
    ("open", errno.EACCES, TierUnavailable),
    ("open", errno.ENOENT, TierUnavailable),
    ("fsync", errno.EIO, TierUnavailable),
    ("fsync", errno.ENOSPC, NoSpace),
    ("fsync", errno.EDQUOT, NoSpace),
    ("replace", errno.EIO, TierUnavailable),
    ("replace", errno.ENOENT, TierUnavailable),
    ("mkdir", errno.EROFS, TierUnavailable),
]


class TestFailures:
    @sizes
    @pytest.mark.parametrize(("call", "number", "error"), FAILURES)
    async def test_a_failed_put_leaves_nothing(
        self,
        root: Path,
        store: PosixStore,
        nbytes: int,
        call: str,
        number: int,
        error: type[TieredCkptError],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await store.put("there", [b"old"])
        with monkeypatch.context() as patch:
            Calls(patch, call).error = number
            with pytest.raises(error) as raised:
                await store.put("a/key", [bytes(nbytes)])
            assert type(raised.value) is error
            assert str(root) in str(raised.value)
            assert isinstance(raised.value.__cause__, OSError)
        assert files(root) == {"there"}
        await store.put("a/key", [b"works again"])
        assert await store.get("a/key", limit=100) == b"works again"

    async def test_a_limit_on_the_size_of_files_is_named(
        self, store: PosixStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Calls(monkeypatch, "pwritev").error = errno.EFBIG
        with pytest.raises(TierUnavailable, match="ulimit -f"):
            await store.put("key", [bytes(LARGE)])

    @pytest.mark.parametrize("call", ["pwritev", "ftruncate", "close"])
    async def test_a_device_that_fills_up_leaves_nothing(
        self, root: Path, store: PosixStore, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = Calls(monkeypatch, call)
        calls.error = errno.ENOSPC
        with pytest.raises(NoSpace, match="key"):
            await store.put("key", [bytes(LARGE)])
        assert calls.seen
        assert files(root) == set()

    async def test_a_file_where_a_folder_belongs_is_no_missing_object(self, store: PosixStore) -> None:
        await store.put("a", [b"x"])
        for nbytes in (SMALL, LARGE):
            with pytest.raises(TierUnavailable):
                await store.put("a/b", [bytes(nbytes)])
        with pytest.raises(NotFound):
            await store.get("a/b", limit=10)
        assert await listed(store) == {"a": 1}

    async def test_a_folder_where_an_object_belongs_stays(self, root: Path, store: PosixStore) -> None:
        await store.put("a/b", [b"x"])
        for nbytes in (SMALL, LARGE):
            with pytest.raises(TierUnavailable):
                await store.put("a", [bytes(nbytes)])
        await store.delete("a")
        assert files(root) == {"a/b"}

    @pytest.mark.parametrize(
        ("call", "verb"),
        [
            ("open", lambda store: store.get("key", limit=1)),
            ("open", lambda store: store.get_into("key", 0, memoryview(bytearray(1)))),
            ("open", lambda store: store.sweep(0)),
            ("stat", lambda store: store.stat("key")),
            ("unlink", lambda store: store.delete("key")),
            ("statvfs", lambda store: store.free()),
        ],
        ids=["get", "get_into", "sweep", "stat", "delete", "free"],
    )
    async def test_a_verb_that_the_file_system_fails_names_where(
        self,
        root: Path,
        store: PosixStore,
        call: str,
        verb: Callable[[PosixStore], Awaitable[object]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await store.put("key", [b"x"])
        Calls(monkeypatch, call).error = errno.EIO
        with pytest.raises(TierUnavailable, match=str(root)):
            await verb(store)

    @sizes
    @pytest.mark.parametrize(
        "read",
        [
            lambda store, nbytes: store.get("key", limit=nbytes),
            lambda store, nbytes: store.get_into("key", 0, aligned(bytes(nbytes))),
            lambda store, nbytes: store.get_digested("key", [Stretch(0, nbytes, aligned(bytes(nbytes)))]),
        ],
        ids=["get", "get_into", "get_digested"],
    )
    async def test_a_file_that_is_cut_while_it_is_read_is_short(
        self,
        root: Path,
        store: PosixStore,
        read: Callable[[PosixStore, int], Awaitable[object]],
        nbytes: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await store.put("key", [pattern(nbytes)])
        real, looks = os.fstat, 0

        def cutting(fd: int) -> os.stat_result:
            nonlocal looks
            found = real(fd)
            looks += found.st_size == nbytes
            if looks == 2:  # the first one asks what kind of file it is, the second how large
                os.truncate(root / "key", nbytes // 2)
            return found

        monkeypatch.setattr(os, "fstat", cutting)
        with pytest.raises(ShortRead, match=f"ended.* {nbytes // 2} "):
            await read(store, nbytes)

    @pytest.mark.parametrize("call", ["scandir", "stat"])
    async def test_a_listing_that_fails_is_an_error(
        self, store: PosixStore, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await store.put("a/b", [b"x"])
        Calls(monkeypatch, call).error = errno.EIO
        with pytest.raises(TierUnavailable):
            await listed(store)

    async def test_a_root_that_cannot_be_made_is_unavailable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        for path in (tmp_path / "file", tmp_path / "file/root"):
            with pytest.raises(TierUnavailable, match="file"):
                await asyncio.to_thread(PosixStore, path)

    async def test_a_name_that_is_too_long_is_invalid(self, store: PosixStore) -> None:
        for nbytes in (SMALL, LARGE):
            with pytest.raises(Invalid):
                await store.put("a" * 300, [bytes(nbytes)])


class TestVanishedRoot:
    """A file system that is unmounted leaves no folder, or another one."""

    @pytest.fixture(params=["gone", "another", "file"])
    async def vanished(self, request: pytest.FixtureRequest, root: Path, store: PosixStore) -> PosixStore:
        await store.put("a", [b"x"])
        root.rename(root.with_name("elsewhere"))
        if request.param == "another":
            root.mkdir()
        if request.param == "file":
            root.write_bytes(b"")
        return store

    async def test_nothing_is_missing_and_nothing_is_made(self, root: Path, vanished: PosixStore) -> None:
        before = root.exists()
        calls: list[Callable[[], Awaitable[object]]] = [
            *verbs(vanished, "a"),
            *verbs(vanished, "b/c"),
            lambda: listed(vanished),
            lambda: listed(vanished, "a/"),
            lambda: vanished.sweep(0),
        ]
        for call in calls:
            with pytest.raises(TierUnavailable, match="mounted"):
                await call()
        assert root.exists() == before
        assert not root.is_dir() or list(root.iterdir()) == []

    async def test_it_works_again_when_the_root_is_back(self, root: Path, store: PosixStore) -> None:
        await store.put("a", [b"x"])
        root.rename(root.with_name("elsewhere"))
        with pytest.raises(TierUnavailable):
            await store.get("b", limit=1)
        root.with_name("elsewhere").rename(root)
        assert await store.get("a", limit=1) == b"x"
        with pytest.raises(NotFound):
            await store.get("b", limit=1)


class TestForeignFiles:
    async def test_symbolic_links_are_refused(self, root: Path, tmp_path: Path, store: PosixStore) -> None:
        (tmp_path / "secret").write_bytes(b"secret")
        (root / "key").symlink_to(tmp_path / "secret")
        for call in (
            store.get("key", limit=100),
            store.get_into("key", 0, memoryview(bytearray(6))),
            store.stat("key"),
        ):
            with pytest.raises(Corrupt, match="symbolic link"):
                await call
        assert await listed(store) == {}
        await store.put("key", [b"mine"])
        assert (tmp_path / "secret").read_bytes() == b"secret"
        assert await store.get("key", limit=100) == b"mine"

    async def test_symbolic_links_are_followed_when_asked_for(self, root: Path, tmp_path: Path) -> None:
        store = await asyncio.to_thread(PosixStore, root, follow_symlinks=True)
        (tmp_path / "slab").write_bytes(b"packed")
        (root / "key").symlink_to(tmp_path / "slab")
        assert await store.get("key", limit=100) == b"packed"
        assert (await store.stat("key")).size == 6
        assert await listed(store) == {"key": 6}
        await store.delete("key")
        assert (tmp_path / "slab").exists()
        await store.close()

    async def test_no_verb_leaves_a_file_or_folder_open(self, tmp_path: Path, root: Path, store: PosixStore) -> None:
        os.mkfifo(root / "pipe")
        for key, size in (("a/small", SMALL), ("a/large", LARGE)):
            await store.put(key, [pattern(size)])
            assert await store.get(key, limit=size) == pattern(size)
            await store.get_into(key, 0, memoryview(bytearray(size)))
            await store.get_into(key, 1, memoryview(bytearray(size - 1)))
            with pytest.raises(ShortRead):
                await store.get_into(key, 1, memoryview(bytearray(size)))
            with pytest.raises(Corrupt):
                await store.get(key, limit=size - 1)
        for missing in ("pipe", "a"):
            with pytest.raises((Corrupt, NotFound)):
                await store.get(missing, limit=100)
        assert await store.sweep(0) == 0
        await listed(store)
        await store.delete("a/large")
        assert not opened_below(tmp_path)

    async def test_a_pipe_is_refused_and_hangs_nobody(self, root: Path, store: PosixStore) -> None:
        os.mkfifo(root / "key")
        for call in (
            store.get("key", limit=100),
            store.get_into("key", 0, memoryview(bytearray(6))),
            store.stat("key"),
        ):
            with pytest.raises(Corrupt, match="regular"):
                await call
        assert await listed(store) == {}

    async def test_names_that_are_no_keys_are_not_listed(self, root: Path, store: PosixStore) -> None:
        for name in ("a b", "ä", f".{'0' * 32}.tmp~"):
            (root / name).write_bytes(b"x")
        (root / "no key").mkdir()
        (root / "no key/key").write_bytes(b"x")
        await store.put("key", [b"x"])
        assert await listed(store) == {"key": 1}


class TestFoldersComeAndGo:
    async def test_deletes_remove_the_folders_that_they_empty(self, root: Path, store: PosixStore) -> None:
        await store.put("steps/1/parts/0", [b"x"])
        await store.put("steps/2/parts/0", [b"x"])
        await store.delete("steps/1/parts/0")
        assert not (root / "steps/1").exists()
        assert (root / "steps/2/parts/0").exists()
        await store.delete("steps/2/parts/0")
        assert list(root.iterdir()) == []

    async def test_puts_and_deletes_side_by_side_lose_nothing(self, root: Path, store: PosixStore) -> None:
        async def use(number: int) -> None:
            for turn in range(20):
                key = f"shared/folder/{number}"
                await store.put(key, [bytes([turn])])
                assert await store.get(key, limit=1) == bytes([turn])
                await store.delete(key)

        await asyncio.gather(*map(use, range(4)))
        assert list(root.iterdir()) == []


async def test_it_tells_how_much_room_there_is(store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(os.statvfs(root))
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(found))
    assert isinstance(store, Free)
    assert await Metered(store).free() == found[1] * found[4]
    found[2] = 0  # a file system without blocks
    assert await store.free() is None


async def test_a_closed_store_tells_no_room_and_sweeps_nothing(store: PosixStore) -> None:
    await store.close()
    with pytest.raises(Closed):
        await store.free()
    with pytest.raises(Closed):
        await store.sweep(0)


class TestSweep:
    async def test_it_removes_old_temporary_files_and_nothing_else(self, root: Path, store: PosixStore) -> None:
        names = {f".{number:032x}.tmp~" for number in (1, 2)}
        old, young = sorted(names)
        kept = {"key", ".hidden.tmp", "folder/key", f"folder/{young}"}
        (root / "folder").mkdir()
        for name in (*kept, f"folder/{old}", old):
            (root / name).write_bytes(b"x")
            if young not in name:
                os.utime(root / name, (time.time() - 1000,) * 2)
        assert await store.sweep(2000) == 0
        assert await store.sweep(900) == 2
        assert files(root) == kept
        assert await store.sweep(0) == 1

    async def test_a_put_under_way_is_not_swept(
        self, root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = Calls(monkeypatch, "fsync")
        calls.go_on.clear()
        putting = asyncio.ensure_future(store.put("key", [bytes(LARGE)]))
        await asyncio.to_thread(calls.entered.wait, 30)
        assert await store.sweep(600) == 0
        calls.go_on.set()
        await putting
        assert files(root) == {"key"}
