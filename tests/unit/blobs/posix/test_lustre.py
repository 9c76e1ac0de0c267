"""Folders on Lustre, with the answers that its extended attributes and errors are documented to give."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.file_systems import Attributes, kind_on, system_of

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.posix.lustre import Layout, LustreFolders, decode_layout, encode_layout
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.posix.system import LUSTRE, System
from tieredckpt.config.kinds import replaced
from tieredckpt.errors import Corrupt, NoSpace, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.testing.backdoor import aligned, pattern

MIB = 1 << 20
WIDE = Layout(4, 4 * MIB)


def lustre(attributes: Attributes) -> System:
    return system_of(LUSTRE, options="lustre rw,flock", attributes=attributes)


async def opened(root: Path, attributes: Attributes, *, read_only: bool = False, **settings: object) -> PosixStore:
    kind = kind_on("lustre", lustre(attributes))
    store = await kind.open(kind.config(name="lustre", path=root, **settings), read_only=read_only)
    assert isinstance(store, PosixStore)
    return store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def attributes() -> Attributes:
    return Attributes()


class TestLayouts:
    @pytest.mark.parametrize("layout", [WIDE, Layout(-1, 65536), Layout(0, 0), Layout(8, 16 * MIB, "flash")])
    def test_a_layout_is_read_as_it_was_written(self, layout: Layout) -> None:
        assert decode_layout(encode_layout(layout)) == (layout,)

    def test_the_bytes_are_those_of_lustre_user_h(self) -> None:
        plain = struct.pack("=IIQQIHH", 0x0BD10BD0, 0, 0, 0, 16 * MIB, 4, 0xFFFF)
        assert encode_layout(Layout(4, 16 * MIB)) == plain
        pooled = struct.pack("=IIQQIHH16s", 0x0BD30BD0, 0, 0, 0, 16 * MIB, 4, 0xFFFF, b"flash")
        assert encode_layout(Layout(4, 16 * MIB, "flash")) == pooled

    def test_a_progressive_layout_has_several_parts(self) -> None:
        parts = [encode_layout(Layout(1, MIB)), encode_layout(Layout(8, 4 * MIB, "flash"))]
        header = struct.pack("=IIIHHHHHHQ", 0x0BD60BD0, 0, 1, 0, 2, 0, 0, 0, 0, 0)
        at = [len(header) + 2 * 48, len(header) + 2 * 48 + len(parts[0])]
        starts, ends = [0, 256 * MIB], [256 * MIB, 2**64 - 1]
        entries = [
            struct.pack("=IIQQIIIQI", i + 1, 0, starts[i], ends[i], at[i], len(parts[i]), 0, 0, 0) for i in range(2)
        ]
        whole = b"".join([header, *entries, *parts])
        assert decode_layout(whole) == (Layout(1, MIB), Layout(8, 4 * MIB, "flash", 256 * MIB))
        for cut in (0, 3, 31, 40, len(whole) - len(parts[1])):
            with pytest.raises(Corrupt):
                decode_layout(whole[:cut])

    def test_what_is_no_layout_is_corrupt(self) -> None:
        for other in (b"", b"abc", b"\0" * 32, struct.pack("=I", 0x0BD30BD0) + b"\xff" * 60):
            with pytest.raises(Corrupt):
                decode_layout(other)


STRIPING = {"count": 4, "size": "4 MiB"}


class TestStriping:
    async def test_it_is_set_once_on_the_folder_of_packs(self, root: Path, attributes: Attributes) -> None:
        for _ in range(2):
            store = await opened(root, attributes, striping=STRIPING)
            await store.put("packs/ab/1", [b"x"])
            await store.close()
        assert attributes.set == [(root / "packs", encode_layout(WIDE))]

    async def test_it_is_set_on_the_folder_of_packs_of_lossy_copies(self, root: Path, attributes: Attributes) -> None:
        for _ in range(2):
            store = await opened(root, attributes, striping=STRIPING)
            await store.put("derived/packs/ab/1", [b"x"])
            await store.close()
        assert attributes.set == [(root / each, encode_layout(WIDE)) for each in ("packs", "derived/packs")]

    async def test_it_is_set_again_when_the_folder_is_made_again(self, root: Path, attributes: Attributes) -> None:
        store = await opened(root, attributes, striping=STRIPING)
        await store.put("packs/ab/1", [b"x"])
        await store.delete("packs/ab/1")
        assert not (root / "packs").exists()
        await store.put("packs/ab/2", [b"x"])
        await store.close()
        assert [path for path, _ in attributes.set] == [root / "packs"] * 2

    async def test_it_is_set_though_the_client_repeated_the_call_that_made_the_folder(
        self, root: Path, attributes: Attributes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.mkdir

        def repeated(path: Path, mode: int) -> None:
            real(path, mode)
            if path.name == "packs":
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

        monkeypatch.setattr(os, "mkdir", repeated)
        await (await opened(root, attributes, striping=STRIPING)).close()
        assert attributes.set == [(root / "packs", encode_layout(WIDE))]

    async def test_a_folder_of_packs_that_cannot_be_made_is_an_error_of_the_tier(
        self, root: Path, attributes: Attributes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.mkdir

        def full(path: Path, mode: int) -> None:
            if path.name == "packs":
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            real(path, mode)

        monkeypatch.setattr(os, "mkdir", full)
        with pytest.raises(NoSpace, match=r"packs was not made: .*lfs quota"):
            await opened(root, attributes, striping=STRIPING)

    async def test_a_layout_that_was_there_is_replaced_by_the_one_that_is_asked_for(
        self, root: Path, attributes: Attributes
    ) -> None:
        (root / "packs").mkdir(parents=True)
        attributes.set.append((root / "packs", encode_layout(Layout(1, MIB))))
        await (await opened(root, attributes, striping=STRIPING)).close()
        assert attributes.set[-1] == (root / "packs", encode_layout(WIDE))

    async def test_folders_in_it_that_were_there_get_it_before_a_pack_is_put_there(
        self, root: Path, attributes: Attributes
    ) -> None:
        older = [root / place for place in ("packs/ab", "packs/cd", "derived/packs/ab")]
        for path in older:
            path.mkdir(parents=True)
            attributes.set.append((path, encode_layout(Layout(1, MIB))))
        store = await opened(root, attributes, striping=STRIPING)
        for key in ("packs/ab/1", "packs/ab/2", "packs/ef/1", "derived/packs/ab/1", "steps/ab/1"):
            await store.put(key, [b"x"])
        await store.close()
        asked = [path for path, value in attributes.set if value == encode_layout(WIDE)]
        assert asked == [root / each for each in ("packs", "packs/ab", "derived/packs", "derived/packs/ab")]

    async def test_a_folder_of_another_user_keeps_its_layout_and_others_get_it(
        self, root: Path, attributes: Attributes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def owned(path: Path, name: str, value: bytes) -> None:
            if path.name in ("ab", "cd"):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            Attributes.put(attributes, path, name, value)

        def refuse(arguments: Sequence[str]) -> None:
            raise subprocess.CalledProcessError(1, ["lfs"], stderr="not yours\n")

        monkeypatch.setattr(attributes, "put", owned)
        monkeypatch.setattr(attributes, "lfs", refuse)
        for name in ("ab", "cd", "ef"):
            (root / "packs" / name).mkdir(parents=True)
            attributes.set.append((root / "packs" / name, encode_layout(Layout(1, MIB))))
        store = await opened(root, attributes, striping=STRIPING)
        for name in ("ab", "cd", "ef"):
            await store.put(f"packs/{name}/1", [b"x"])
        await store.close()
        assert attributes.set[-1] == (root / "packs/ef", encode_layout(WIDE))
        assert caplog.text.count("was not striped") == 1
        assert "not yours" in caplog.text

    @pytest.mark.parametrize("read_only", [False, True])
    async def test_nothing_is_set_where_nobody_asked_or_who_only_looks(
        self, root: Path, attributes: Attributes, read_only: bool
    ) -> None:
        (root / "packs").mkdir(parents=True)
        asked = {"striping": STRIPING} if read_only else {}
        store = await opened(root, attributes, read_only=read_only, **asked)
        if not read_only:
            await store.put("packs/ab/1", [b"x"])
        await store.close()
        assert attributes.set == []

    async def test_where_the_attribute_is_refused_lfs_is_run(self, root: Path, attributes: Attributes) -> None:
        attributes.refuse = errno.EOPNOTSUPP
        await (await opened(root, attributes, striping=STRIPING | {"pool": "flash"})).close()
        assert attributes.run == [
            ["setstripe", "-c", "4", "-S", str(4 * MIB), "-p", "flash", str(root / "packs")],
        ]

    async def test_a_layout_that_cannot_be_set_is_told_and_packs_are_written(
        self, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(arguments: Sequence[str]) -> None:
            raise subprocess.CalledProcessError(1, ["lfs"], stderr="no such pool\n")

        attributes = Attributes(refuse=errno.EPERM)
        attributes.lfs = refuse
        store = await opened(root, attributes, striping=STRIPING)
        assert "was not striped" in caplog.text
        assert "no such pool" in caplog.text
        await store.put("packs/ab/1", [b"x"])
        await store.close()

    async def test_what_is_in_force_is_told_and_what_would_be_better(self, root: Path, attributes: Attributes) -> None:
        told = {}
        for name, layout in {"none": None, "one": Layout(1, MIB), "four": WIDE}.items():
            if layout is not None:
                attributes.set.append((root, encode_layout(layout)))
            store = await opened(root, attributes)
            assert store.facts()["file system"] == "Lustre (lustre rw,flock)"
            told[name] = store.facts()["layout of packs"]
            await store.close()
        assert told["four"] == "4 stripes of 4 MiB"
        assert told["one"].startswith("1 stripe of 1 MiB; ")
        assert told["none"].startswith("that of the file system; ")
        assert "count = 4, size = '16 MiB'" in told["one"]
        assert "count = 4, size = '16 MiB'" in told["none"]

    async def test_stripes_that_no_direct_write_can_end_with_are_not_heeded(
        self, root: Path, attributes: Attributes
    ) -> None:
        root.mkdir()
        attributes.set.append((root, encode_layout(Layout(1, MIB + 1))))
        store = await opened(root, attributes)
        assert store._folders.block % ALIGNMENT == 0
        await store.close()

    @pytest.mark.parametrize(("size", "block"), [(3 * MIB, 15 * MIB), (4 * MIB, 16 * MIB), (20 * MIB, 20 * MIB)])
    async def test_calls_of_a_large_write_end_with_stripes(
        self, root: Path, attributes: Attributes, size: int, block: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = await opened(root, attributes, striping={"count": 2, "size": size})
        ends: list[int] = []
        real = os.pwritev

        def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            ends.append(offset + real(fd, buffers, offset))
            return ends[-1] - offset

        monkeypatch.setattr(os, "pwritev", write)
        data = pattern(45 * MIB)
        parts = [aligned(data[at : at + MIB + 100]) for at in range(0, len(data), MIB + 100)]
        await store.put("packs/ab/1", parts)
        await store.close()
        assert (root / "packs/ab/1").read_bytes() == data
        crossed = {end - end % block for end in ends}
        assert crossed >= set(range(block, len(data), block)) <= {*ends}


class TestErrors:
    @pytest.mark.parametrize(
        ("number", "free", "kind", "said"),
        [
            (errno.EDQUOT, 1 << 40, NoSpace, "lfs quota"),
            (errno.ENOSPC, 1 << 40, NoSpace, "an OST is full, see `lfs df"),
            (errno.ENOSPC, 0, NoSpace, "evict steps, or give the tier more room"),
            (errno.EIO, 1 << 40, TierUnavailable, "may have evicted this client"),
            (errno.ESHUTDOWN, 1 << 40, TierUnavailable, "may have evicted this client"),
            (errno.ENODEV, 1 << 40, TierUnavailable, "may have evicted this client"),
            (errno.ENOTCONN, 1 << 40, TierUnavailable, "may have evicted this client"),
            (errno.EACCES, 1 << 40, TierUnavailable, "mounted and healthy"),
            (errno.EACCES, 1 << 40, TierUnavailable, "let this user read, write and enter"),
            (errno.ENOENT, 1 << 40, NotFound, "does not exist"),
        ],
    )
    def test_they_are_told_apart(
        self,
        root: Path,
        number: int,
        free: int,
        kind: type[TieredCkptError],
        said: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folders = LustreFolders(root, 0o700, False, True, system=lustre(Attributes()))
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
        found = folders.error(OSError(number, os.strerror(number)), root / "packs/ab/1", "written")
        assert type(found) is kind
        assert said in str(found)

    async def test_the_health_of_the_tier_says_which_it_is(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.pwritev

        def full(fd: int, *arguments: object) -> int:
            if "/packs/" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return real(fd, *arguments)

        monkeypatch.setattr(os, "pwritev", full)
        tiers = {"lustre": {"kind": "lustre", "path": root, "retries": 0}}
        with replaced(kind_on("lustre", lustre(Attributes()))):
            async with CheckpointStore.open({"tiers": tiers}) as store:
                with pytest.raises(NoSpace, match="lfs quota"):
                    await store.save(1, {"w": np.zeros(2 * MIB, np.uint8)})
                (info,) = await store.tier_infos()
                assert "lfs quota" in info.problem


async def test_a_folder_elsewhere_is_not_touched(tmp_path: Path) -> None:
    kind = kind_on("lustre", system_of(0xEF53))
    with pytest.raises(TierUnavailable, match="on ext4, not on Lustre"):
        await kind.open(kind.config(name="lustre", path=tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


async def test_the_kind_posix_knows_lustre_too(root: Path, attributes: Attributes) -> None:
    kind = kind_on("posix", lustre(attributes))
    store = await kind.open(kind.config(name="disk", path=root))
    assert store.facts()["file system"].endswith("kind = 'lustre' says so, and has deadlines for it")
    assert await asyncio.to_thread(lambda: isinstance(store._folders, LustreFolders))
    await store.close()
