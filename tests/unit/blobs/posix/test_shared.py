"""Folders on NFS: a name that a client says is missing is looked for, and so is what a repeated call has done."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.file_systems import kind_on, system_of
from support.posix_files import Calls

from tieredckpt.blobs.base import Stretch
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.posix.system import LUSTRE, NFS, RAMFS, TMPFS
from tieredckpt.errors import Closed, NoSpace, NotFound, TierUnavailable
from tieredckpt.format.digest import digest
from tieredckpt.testing.backdoor import listed, pattern

LARGE = 3 << 20
FUSE = 0x65735546
COHERENT = {"CephFS": 0x00C36400, "GPFS": 0x47504653, "GFS2": 0x01161970, "OCFS2": 0x7461636F}
UNKNOWN = 0x0BADCAFE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(params=["nfs", "posix"])
async def store(request: pytest.FixtureRequest, root: Path) -> AsyncIterator[PosixStore]:
    """By the kind that states it, and by the one that detects it."""
    kind = kind_on(request.param, system_of(NFS))
    store = await kind.open(kind.config(name="shared", path=root))
    assert isinstance(store, PosixStore)
    yield store
    await store.close()


class Client:
    """What an NFS client does with a call: it does it or not, and then says something else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.said: list[str] = []

    def says(self, call: str, number: int, name: str, *, times: int | None = 1, does: bool = False) -> None:
        """Make calls on a path that ends in ``name`` fail, with ``does`` after they have taken effect."""
        real: Callable[..., Any] = getattr(os, call)
        left = times

        def answer(path: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal left
            about = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            if left == 0 or not about.endswith(name):
                return real(path, *arguments, **named)
            left = None if left is None else left - 1
            self.said.append(call)
            if does:
                real(path, *arguments, **named)
            raise OSError(number, os.strerror(number), about)

        self._patch.setattr(os, call, answer)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(monkeypatch)


VERBS = {
    "get": lambda store: store.get("a/key", limit=100),
    "get_into": lambda store: store.get_into("a/key", 0, memoryview(bytearray(1))),
    "stat": lambda store: store.stat("a/key"),
}


class TestNamesThatOthersMade:
    @pytest.mark.parametrize("verb", VERBS)
    async def test_a_name_that_the_client_says_is_missing_is_found_by_its_listing(
        self, store: PosixStore, verb: str, client: Client
    ) -> None:
        await store.put("a/key", [b"x"])
        client.says("open", errno.ENOENT, "a/key")
        await VERBS[verb](store)
        assert client.said == ["open"]

    @pytest.mark.parametrize("verb", VERBS)
    async def test_one_that_is_listed_and_cannot_be_opened_is_not_missing(
        self, store: PosixStore, verb: str, client: Client
    ) -> None:
        await store.put("a/key", [b"x"])
        client.says("open", errno.ENOENT, "a/key", times=None)
        with pytest.raises(TierUnavailable, match="is listed"):
            await VERBS[verb](store)

    @pytest.mark.parametrize("verb", VERBS)
    async def test_what_is_not_listed_is_missing(self, store: PosixStore, root: Path, verb: str) -> None:
        for _ in range(2):
            with pytest.raises(NotFound):
                await VERBS[verb](store)
            await store.put("a/other", [b"x"])
        (root / "a/key").mkdir()
        with pytest.raises(NotFound):
            await VERBS[verb](store)

    async def test_a_size_is_that_of_the_opened_file(self, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
        await store.put("a/key", [b"old"])
        old = os.stat(Path(store.location, "a/key"))
        await store.put("a/key", [b"newer"])
        real = os.stat
        monkeypatch.setattr(os, "stat", lambda path, **how: old if "a/key" in str(path) else real(path, **how))
        assert (await store.stat("a/key")).size == 5

    @pytest.mark.parametrize("verb", VERBS)
    async def test_the_folder_of_a_name_is_listed_before_the_name_is_opened(
        self, store: PosixStore, root: Path, verb: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a name that another node has replaced, a client opens the old file until it has asked for the folder."""
        await store.put("a/key", [b"x"])
        called = []
        for name in ("open", "scandir"):
            real = getattr(os, name)
            noting = lambda path, *rest, _real=real: (called.append(Path(path)), _real(path, *rest))[1]  # noqa: E731
            monkeypatch.setattr(os, name, noting)
        await VERBS[verb](store)
        assert called == [root / "a", root / "a/key"]

    async def test_what_the_client_says_is_missing_is_deleted(
        self, store: PosixStore, root: Path, client: Client
    ) -> None:
        await store.put("a/key", [b"x"])
        client.says("lstat", errno.ENOENT, "a/key")
        await store.delete("a/key")
        assert client.said == ["lstat"]
        assert list(root.iterdir()) == []

    @pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
    async def test_a_listing_is_not_short_of_a_name_that_the_client_doubts(
        self, store: PosixStore, number: int, client: Client
    ) -> None:
        await store.put("a/key", [b"x"])
        client.says("open", number, "a/key")
        assert await listed(store) == {"a/key": 1}
        assert client.said == ["open"]

    @pytest.mark.parametrize("missing", ["/a", "/a/b"])
    async def test_a_listing_is_not_short_of_a_folder_that_the_client_says_is_missing(
        self, store: PosixStore, client: Client, missing: str
    ) -> None:
        await store.put("a/b/key", [b"x"])
        client.says("scandir", errno.ENOENT, missing)
        assert await listed(store, "a/b/") == {"a/b/key": 1}
        client.says("scandir", errno.ENOENT, missing, times=None)
        with pytest.raises(TierUnavailable, match="is listed"):
            await listed(store, missing.strip("/") + "/")

    async def test_a_listing_opens_a_folder_once(self, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in "123":
            await store.put(f"a/{name}", [b"x"])
        scanned, real = [], os.scandir
        monkeypatch.setattr(os, "scandir", lambda path: (scanned.append(Path(path).name), real(path))[1])
        assert len(await listed(store, "a/")) == 3
        assert scanned == ["a"]

    async def test_a_listing_has_the_sizes_and_times_of_opened_files(
        self, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await store.put("leases/other", [b"old"])
        await store.put("leases/strange", [b"x"])
        scandir = os.scandir
        old = os.stat(root / "leases/other")

        class Remembered:
            def __init__(self, path: Any) -> None:
                self._entries = scandir(path)

            def __enter__(self) -> Any:
                return (Entry(entry) for entry in self._entries)

            def __exit__(self, *_: object) -> None:
                self._entries.close()

        class Entry:
            def __init__(self, entry: os.DirEntry[str]) -> None:
                self.name, self.path, self.is_dir, self.is_file = entry.name, entry.path, entry.is_dir, entry.is_file

            def stat(self, **_: Any) -> Any:
                return old

        await store.put("leases/other", [b"newer"])
        os.utime(root / "leases/other", (old.st_mtime + 50,) * 2)
        monkeypatch.setattr(os, "scandir", Remembered)
        Client(monkeypatch).says("open", errno.EACCES, "strange")
        found = {info.key: info async for info in store.list("")}
        assert (found["leases/other"].size, found["leases/other"].modified) == (5, old.st_mtime + 50)
        assert found["leases/strange"].size == 3  # what is remembered of a file that may not be opened


class TestCallsThatWereRepeated:
    """Each has happened, and its answer was lost; the one that the client repeats fails."""

    @pytest.mark.parametrize("nbytes", [10, LARGE], ids=["small", "large"])
    @pytest.mark.parametrize(
        ("call", "number", "name"),
        [
            ("replace", errno.ENOENT, ".tmp~"),
            ("mkdir", errno.EEXIST, "/a"),
            ("open", errno.EEXIST, ".tmp~"),
            ("open", errno.ESTALE, ".tmp~"),
        ],
    )
    async def test_a_put_has_happened(
        self, store: PosixStore, root: Path, client: Client, nbytes: int, call: str, number: int, name: str
    ) -> None:
        data = pattern(nbytes)
        client.says(call, number, name, does=call != "open")
        await store.put("a/key", [data])
        assert client.said == [call]
        assert await store.get("a/key", limit=nbytes) == data
        assert [path.name for path in (root / "a").iterdir()] == ["key"]

    async def test_a_rename_that_has_not_happened_is_an_error(self, store: PosixStore, client: Client) -> None:
        await store.put("a/key", [b"old"])
        client.says("replace", errno.ENOENT, ".tmp~")
        with pytest.raises(TierUnavailable):
            await store.put("a/key", [b"new"])
        assert await store.get("a/key", limit=3) == b"old"

    async def test_a_delete_has_happened(self, store: PosixStore, root: Path, client: Client) -> None:
        await store.put("a/key", [b"x"])
        client.says("unlink", errno.ENOENT, "key", does=True)
        await store.delete("a/key")
        assert client.said == ["unlink"]
        assert await listed(store) == {}


class TestFilesThatWereReplaced:
    @pytest.mark.parametrize("call", ["open", "preadv"])
    async def test_a_stale_file_is_opened_once_more(self, store: PosixStore, client: Client, call: str) -> None:
        data = pattern(LARGE)
        await store.put("a/key", [data])
        client.says(call, errno.ESTALE, "a/key")
        into = bytearray(LARGE)
        assert await store.get_digested("a/key", [Stretch(0, LARGE, memoryview(into))]) == [digest(data)]
        assert into == data
        assert client.said == [call]

    async def test_nothing_stays_of_a_file_that_was_replaced_while_it_was_read(
        self, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nbytes = 2 * LARGE  # more than is read in one go
        old, new = pattern(nbytes, 1), pattern(nbytes, 2)
        await store.put("a/key", [old])
        preadv, reads = os.preadv, 0

        def replaced(fd: int, *arguments: Any) -> int:
            nonlocal reads
            reads += 1
            if reads == 2:
                (root / "new").write_bytes(new)
                os.replace(root / "new", root / "a/key")
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return preadv(fd, *arguments)

        monkeypatch.setattr(os, "preadv", replaced)
        into = bytearray(nbytes)
        assert await store.get_digested("a/key", [Stretch(0, nbytes, memoryview(into))]) == [digest(new)]
        assert into == new

    @pytest.mark.parametrize("verb", VERBS)
    async def test_a_store_that_was_closed_meanwhile_says_so(
        self, store: PosixStore, verb: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await store.put("a/key", [b"x"])
        opening, go_on = threading.Event(), threading.Event()

        def stale(path: Any, *_: Any) -> int:
            opening.set()
            assert go_on.wait(30)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(os, "open", stale)
        reading = asyncio.ensure_future(VERBS[verb](store))
        await asyncio.to_thread(opening.wait, 30)
        await store.close()
        go_on.set()
        with pytest.raises(Closed):
            await reading

    async def test_a_file_that_stays_stale_is_an_error(self, store: PosixStore, client: Client) -> None:
        await store.put("a/key", [b"x"])
        client.says("open", errno.ESTALE, "a/key", times=None)
        for verb in VERBS.values():
            with pytest.raises(TierUnavailable):
                await verb(store)
        assert client.said == ["open"] * 6


class TestNamesOfTheClient:
    async def test_deleted_files_that_are_open_are_not_listed_and_stay(self, store: PosixStore, root: Path) -> None:
        await store.put("a/key", [b"x"])
        name = f".nfs{'0' * 15}1{'0' * 7}2"
        (root / "a" / name).write_bytes(b"x")
        assert await listed(store) == {"a/key": 1}
        await store.delete("a/key")
        assert await listed(store) == {}
        await store.sweep(0)
        assert (root / "a" / name).exists()

    async def test_the_folders_that_they_kept_are_swept(self, store: PosixStore, root: Path) -> None:
        for name in ("old", "young"):
            (root / name / "inner").mkdir(parents=True)
        (root / "a user's").mkdir()
        os.utime(root / "a user's", (time.time() - 1000,) * 2)
        for path in (root / "old/inner", root / "old"):
            os.utime(path, (time.time() - 1000,) * 2)
        await store.sweep(900)
        assert {path.name for path in root.iterdir()} == {"a user's", "old", "young"}  # which has just been changed
        os.utime(root / "old", (time.time() - 1000,) * 2)
        await store.sweep(900)
        assert {path.name for path in root.iterdir()} == {"a user's", "young"}


class TestFileSystemsThatAreDetected:
    @pytest.mark.parametrize("found", [*COHERENT.values(), UNKNOWN], ids=[*COHERENT, "unknown"])
    async def test_a_read_from_what_may_be_on_a_network_ends_at_once_when_it_is_cancelled(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, found: int
    ) -> None:
        kind = kind_on("posix", system_of(found))
        store = await kind.open(kind.config(name="shared", path=root))
        await store.put("key", [b"\x01" * LARGE])
        calls, into = Calls(monkeypatch, "preadv"), memoryview(bytearray(LARGE))
        calls.go_on.clear()
        reading = asyncio.ensure_future(store.get_into("key", 0, into))
        await asyncio.to_thread(calls.entered.wait, 30)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, 30)
        calls.go_on.set()
        await store.close()

    async def test_names_of_an_unknown_file_system_are_looked_for_as_on_nfs(self, root: Path, client: Client) -> None:
        kind = kind_on("posix", system_of(UNKNOWN))
        store = await kind.open(kind.config(name="shared", path=root))
        await store.put("a/key", [b"x"])
        client.says("open", errno.ENOENT, "a/key")
        assert await store.get("a/key", limit=10) == b"x"
        assert store.facts() == {"file system": "type 0xbadcafe"}
        await store.close()

    @pytest.mark.parametrize("found", COHERENT.values(), ids=COHERENT)
    async def test_names_of_a_file_system_that_all_nodes_see_alike_are_looked_at_once(
        self, root: Path, client: Client, found: int
    ) -> None:
        kind = kind_on("posix", system_of(found, options="rw"))
        store = await kind.open(kind.config(name="shared", path=root))
        await store.put("a/key", [b"x"])
        client.says("open", errno.ENOENT, "a/key")
        with pytest.raises(NotFound):
            await store.get("a/key", limit=10)
        assert " (rw)" in store.facts()["file system"]
        await store.close()


class TestRoom:
    """A server, or the fileset of a folder, may tell a quota's soft limit as its size."""

    @pytest.mark.parametrize("found", [NFS, LUSTRE, COHERENT["GPFS"]], ids=["NFS", "Lustre", "GPFS"])
    async def test_a_soft_limit_of_a_server_refuses_no_put(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, found: int
    ) -> None:
        kind = kind_on("posix", system_of(found))
        store = await kind.open(kind.config(name="shared", path=root))
        monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_blocks=1 << 20, f_bavail=0, f_frsize=1))
        await store.put("key", [bytes(LARGE)])
        assert await listed(store) == {"key": LARGE}
        await store.close()

    async def test_a_local_disk_without_room_is_full_before_it_is_filled(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind = kind_on("posix", system_of(0xEF53))
        store = await kind.open(kind.config(name="disk", path=root))
        monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_blocks=1 << 20, f_bavail=0, f_frsize=1))
        monkeypatch.setattr(os, "pwritev", None)
        with pytest.raises(NoSpace):
            await store.put("key", [bytes(LARGE)])
        assert await listed(store) == {}
        await store.close()


class TestRootsThatCannotBeUsed:
    CALLS = ("stat", "mkdir", "open", "unlink", "lstat", "scandir")

    @pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP])
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize(("name", "found"), [("posix", 0xEF53), ("nfs", NFS), ("lustre", LUSTRE)])
    @pytest.mark.parametrize("access", ["private", "group"])
    async def test_no_foreign_error_leaves_an_opening(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: int, call: str, number: int, access: str
    ) -> None:
        kind = kind_on(name, system_of(found))
        Calls(monkeypatch, call).error = number
        try:
            store = await kind.open(kind.config(name="shared", path=root, access=access))
        except TierUnavailable as error:
            assert str(root) in str(error)  # noqa: PT017 an opening may do without the call
            assert isinstance(error.__cause__, OSError)  # noqa: PT017
        else:
            await store.close()

    @pytest.mark.parametrize(
        ("path", "told"),
        [
            ("file", "name another path"),
            ("file/x", "name another path"),
            ("loop/x", "symbolic link"),
            ("a" * 300, "shorter"),
        ],
    )
    async def test_it_is_said_what_to_do(self, tmp_path: Path, path: str, told: str) -> None:
        (tmp_path / "file").write_bytes(b"")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        kind = kind_on("posix", system_of(0xEF53))
        with pytest.raises(TierUnavailable, match=told) as raised:
            await kind.open(kind.config(name="disk", path=tmp_path / path))
        assert str(tmp_path / path) in str(raised.value)


class TestKinds:
    @pytest.mark.parametrize("read_only", [False, True])
    async def test_a_folder_elsewhere_is_not_touched(self, tmp_path: Path, read_only: bool) -> None:
        kind = kind_on("nfs", system_of(0xEF53))
        with pytest.raises(TierUnavailable, match="on ext4, not on NFS; is it mounted"):
            await kind.open(kind.config(name="shared", path=tmp_path / "a/b"), read_only=read_only)
        assert list(tmp_path.iterdir()) == []

    async def test_what_is_found_is_told(self, tmp_path: Path) -> None:
        cases = {
            ("posix", NFS): "NFS (nfs4 rw,hard); kind = 'nfs' says so, and has deadlines for it",
            ("nfs", NFS): "NFS (nfs4 rw,hard)",
            ("posix", FUSE): "FUSE (nfs4 rw,hard)",
        }
        for (name, found), told in cases.items():
            kind = kind_on(name, system_of(found, options="nfs4 rw,hard"))
            store = await kind.open(kind.config(name="shared", path=tmp_path))
            assert store.facts() == {"file system": told}
            await store.close()

    async def test_a_platform_that_does_not_name_file_systems_refuses_none(self, tmp_path: Path) -> None:
        kind = kind_on("nfs", system_of(0))
        await (await kind.open(kind.config(name="shared", path=tmp_path))).close()

    @pytest.mark.parametrize("soft", ["soft", "softerr"])
    async def test_a_mount_that_may_lose_writes_is_warned_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, soft: str
    ) -> None:
        kind = kind_on("nfs", system_of(NFS, options=f"nfs4 rw,{soft},timeo=600"))
        store = await kind.open(kind.config(name="shared", path=tmp_path))
        assert f"mounted `{soft}`" in caplog.text
        assert "mount it `hard`" in store.facts()["file system"]
        await store.close()

    @pytest.mark.parametrize(("found", "name"), [(TMPFS, "tmpfs"), (RAMFS, "ramfs")])
    async def test_a_folder_in_memory_is_warned_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, found: int, name: str
    ) -> None:
        kind = kind_on("posix", system_of(found))
        store = await kind.open(kind.config(name="disk", path=tmp_path))
        assert f"{tmp_path} is on {name}: a reboot loses what is here" in caplog.text
        assert "a reboot loses" in store.facts()["file system"]
        await store.close()

    async def test_a_local_folder_is_looked_at_once(self, tmp_path: Path, client: Client) -> None:
        kind = kind_on("posix", system_of(0xEF53))
        store = await kind.open(kind.config(name="disk", path=tmp_path))
        await store.put("a/key", [b"x"])
        client.says("open", errno.ENOENT, "a/key")
        with pytest.raises(NotFound):
            await store.get("a/key", limit=10)
        assert store.facts() == {}
        await store.close()

    def test_a_store_exists_though_the_client_says_its_marker_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind = kind_on("nfs", system_of(NFS))
        tier = kind.config(name="shared", path=tmp_path / "store")
        assert not kind.exists(tier)
        tier.path.mkdir()
        (tier.path / "tieredckpt.json").write_bytes(b"")
        monkeypatch.setattr(os.path, "lexists", lambda path: False)
        assert kind.exists(tier)
