"""RAM belongs to the store whose UUID it has: nothing is mixed, nothing lost by opening another store or by looking."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reliability.ranks import World
from support.agents import end_agent, eventually
from support.limits import descriptors_left, limit
from support.object_stores import Place as Bucket
from support.scenes import CHUNK, Heard, assert_restored, assert_same, config, crash, folder, ram, ram_in, tree

from tieredckpt import CheckpointStore, Restored
from tieredckpt.blobs.ram import find
from tieredckpt.blobs.ram.find import find_ram
from tieredckpt.blobs.ram.folder import is_store_folder
from tieredckpt.blobs.ram.owner import Place as PlaceOfTier
from tieredckpt.blobs.ram.owner import read_owner
from tieredckpt.engine.agent import process
from tieredckpt.engine.opening.change_identity import fork
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.events import RamLeftAlone, TierFailed
from tieredckpt.format import layout
from tieredckpt.format.marker import decode_marker


class Place:
    """Stores with RAM in one root, each over a folder of its own."""

    def __init__(self, shared_memory: Path, base: Path) -> None:
        self.shared_memory, self.base = shared_memory, base
        self.root = Path(ram(shared_memory)["path"])

    def at(self, name: str, *, label: str | None = None, **disk: Any) -> Any:
        tiers = {"ram": ram(self.shared_memory, capacity=12 * CHUNK), "disk": folder(self.base / name, **disk)}
        return config(tiers, name=label)

    @asynccontextmanager
    async def opened(self, name: str, **settings: Any) -> AsyncIterator[CheckpointStore]:
        async with CheckpointStore.open(self.at(name, **settings)) as store:
            yield store

    async def killed(self, name: str, *steps: int, promote: Any = "never", label: str | None = None) -> None:
        """A run that dies with its steps in RAM."""
        store = await CheckpointStore.open(self.at(name, promote=promote, label=label))
        for step in steps:
            await store.save(step, state(step))
        if promote == "always":
            await store.flush()
        await crash(store)

    async def newest(self, name: str, **settings: Any) -> int | None:
        async with self.opened(name, **settings) as store:
            restored = await store.restore()
            await crash(store)
        if restored is None:
            return None
        assert_same(restored.tree, state(restored.step))
        return restored.step

    def stores(self) -> dict[str, list[int]]:
        """By UUID, the steps in RAM."""
        return {each.store: [step for _, step in each.steps] for each in find_ram(self.root)}


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(CHUNK // 8, step)}


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path)


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Another file system at a folder meanwhile."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# -- two experiments --------------------------------------------------------------------------------------


async def test_two_configurations_of_one_name_share_nothing(place: Place) -> None:
    await place.killed("a", 1, 2, label="run")
    assert await place.newest("b", label="run") is None
    await place.killed("b", 7, label="run")
    assert await place.newest("a", label="run") == 2
    assert await place.newest("b", label="run") == 7


async def test_the_last_copy_in_ram_outlives_that_another_store_comes_to_its_folder(place: Place) -> None:
    await place.killed("p", 1)
    (place.base / "p").rename(place.base / "p.old")
    async with place.opened("other") as store:
        await store.save(9, state(9))
    (place.base / "other").rename(place.base / "p")
    async with place.opened("p") as store:
        heard = Heard(store)
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 9
        assert not heard.of(TierFailed)
    shutil.rmtree(place.base / "p")
    (place.base / "p.old").rename(place.base / "p")
    assert await place.newest("p") == 1


async def test_ram_of_another_store_is_never_written_renamed_or_removed(place: Place) -> None:
    await place.killed("a", 1)
    folder = ram_in(place.root)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    for step in (1, 2):
        async with place.opened("b") as store:
            await store.save(step, state(5))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


# -- folders that are moved and copied --------------------------------------------------------------------


async def test_a_folder_that_was_moved_finds_its_ram_again(place: Place) -> None:
    await place.killed("p", 1, 2)
    (place.base / "p").rename(place.base / "q")
    assert await place.newest("q") == 2
    (found,) = find_ram(place.root)
    assert found.owner is not None
    assert [noted.location for noted in found.owner.places] == [str(place.base / "q")]


async def test_a_folder_whose_name_is_no_text_finds_its_ram_again(place: Place) -> None:
    """The store could not be opened: what RAM notes of its tiers is JSON."""
    name = os.fsdecode(b"\xff")
    await place.killed(name, 1, 2)
    assert await place.newest(name) == 2


async def test_where_file_names_are_ascii_a_folder_of_another_name_finds_its_ram_again(place: Place) -> None:
    """Batch systems may clear a job's locale; what RAM notes of its tiers then was no name of a file."""
    await place.killed("größe", 1, 2)
    program = """if True:
        import json, os, sys
        from tieredckpt import CheckpointStore

        config = json.loads(sys.argv[1].replace("NAME", sys.argv[2]))
        with CheckpointStore.open_sync(config) as store:
            print(sys.getfilesystemencoding(), store.restore().step)
            sys.stdout.flush(), os._exit(0)  # dies with its step in RAM
    """
    without = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    settings = place.at("NAME", promote="never").model_dump_json()
    command = [sys.executable, "-c", program, settings, "größe"]
    ended = await asyncio.to_thread(subprocess.run, command, env=without, capture_output=True, text=True, check=False)
    assert ended.stdout == "ascii 2\n", ended.stderr
    assert await place.newest("größe") == 2
    (found,) = find_ram(place.root)
    assert found.owner is not None
    assert [noted.location for noted in found.owner.places] == [str(place.base / "größe")]


async def test_a_folder_that_was_moved_to_another_file_system_finds_its_ram_again(place: Place) -> None:
    await place.killed("p", 1)
    (place.base / "q").mkdir()
    with mounted(place.base / "q"):
        shutil.copytree(place.base / "p", place.base / "q" / "p")
        shutil.rmtree(place.base / "p")
        assert await place.newest("q/p") == 1


async def test_a_folder_that_was_moved_is_no_copy_at_a_moment_when_no_file_can_be_opened(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.killed("p", 1, promote="always")
    shutil.copytree(place.base / "p", place.base / "q")
    shutil.rmtree(place.base / "p")
    reads = find.marker_at

    def short_of_descriptors(path: Path) -> Any:
        if path.is_relative_to(place.base / "p"):
            with descriptors_left(0):
                return reads(path)
        return reads(path)

    monkeypatch.setattr(find, "marker_at", short_of_descriptors)
    assert await place.newest("q") == 1


async def test_who_writes_to_a_copied_folder_is_refused_with_both_folders_and_who_reads_goes_on(place: Place) -> None:
    await place.killed("p", 1, promote="always")
    await place.killed("p", 2)
    shutil.copytree(place.base / "p", place.base / "copy")
    with pytest.raises(Conflict) as refused:
        await CheckpointStore.open(place.at("copy"))
    assert str(place.base / "copy") in str(refused.value)
    assert str(place.base / "p") in str(refused.value)
    assert "tieredckpt fork" in str(refused.value)
    async with CheckpointStore.open(place.at("copy"), read_only=True) as reader:
        restored = await reader.restore()
        assert restored is not None
        assert restored.step == 1
        assert set(restored.sources) == {"disk"}
    assert await place.newest("p") == 2


# -- folders that are removed, replaced or not mounted -----------------------------------------------------


async def test_who_removes_a_folder_starts_afresh_and_is_told_what_ram_holds(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    await place.killed("p", 1, 2)
    shutil.rmtree(place.base / "p")
    (before,) = place.stores()
    store = CheckpointStore.open(place.at("p"))
    heard = Heard(store)
    async with store:
        assert await store.restore() is None
        await store.save(1, state(1))  # and no `Conflict`
        await store.flush()
    (told,) = heard.of(RamLeftAlone)
    assert (told.store, told.steps, told.step) == (before, 2, 2)
    assert f"tieredckpt adopt {place.base / 'p'} --ram {before}" in caplog.text
    assert f"tieredckpt forget {before}" in caplog.text
    assert place.stores()[before] == [1, 2]


async def test_a_folder_that_was_emptied_is_a_removed_one(place: Place) -> None:
    await place.killed("p", 1)
    shutil.rmtree(place.base / "p")
    (place.base / "p").mkdir()
    assert await place.newest("p") is None


async def test_while_its_file_system_is_not_mounted_training_goes_on_from_ram_and_nothing_is_written_there(
    place: Place,
) -> None:
    (place.base / "p").mkdir()
    with mounted(place.base / "p"):
        await place.killed("p", 1, promote="always")
    store = CheckpointStore.open(place.at("p", retries=0))
    heard = Heard(store)
    async with store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 1
        ckpt = await store.save(2, state(2))
        await ckpt.reached("ram")
        assert "another file system" in str(heard.of(TierFailed)[0].error)
        assert not list((place.base / "p").iterdir())
        await crash(store)
    assert not list((place.base / "p").iterdir())


async def test_ram_of_a_tier_that_was_never_seen_is_used_when_the_tier_answers(place: Place) -> None:
    (place.base / "file").write_text("no folder")
    store = await CheckpointStore.open(place.at("file/p"))  # the disk cannot be opened
    await store.save(1, state(1))
    await crash(store)
    (place.base / "file").unlink()
    assert await place.newest("file/p") == 1


async def test_a_tier_that_is_silent_at_start_leaves_the_ram_that_notes_it(place: Place) -> None:
    await place.killed("a/p", 1, promote="always")
    await place.killed("a/p", 2)
    (place.base / "a").rename(place.base / "a.away")
    (place.base / "a").write_text("no folder")
    store = await CheckpointStore.open(place.at("a/p"))
    restored = await store.restore()
    assert restored is not None
    assert restored.step == 2
    await store.save(3, state(3))
    await crash(store)
    (place.base / "a").unlink()
    (place.base / "a.away").rename(place.base / "a")
    assert await place.newest("a/p") == 3


@pytest.mark.parametrize("how", ["beside a damaged marker", "by hard links"])
async def test_a_copy_of_a_store_is_another_one_however_it_was_made(place: Place, how: str) -> None:
    await place.killed("p", 1, promote="always")
    await place.killed("p", 2)
    if how == "by hard links":
        shutil.copytree(place.base / "p", place.base / "copy", copy_function=os.link)
    else:
        shutil.copytree(place.base / "p", place.base / "copy")
        (place.base / "p" / "tieredckpt.json").write_text("{")
    with pytest.raises(Conflict, match="is a copy of the store at"):
        await CheckpointStore.open(place.at("copy"))
    assert await place.newest("p") == 2


@pytest.mark.parametrize("promote", ["never", "always"])
async def test_a_fork_that_lost_its_marker_keeps_what_is_in_ram(place: Place, promote: str) -> None:
    await place.killed("p", 1, promote="always")
    before, after = await fork(place.at("p"))
    await place.killed("p", 2, promote=promote)
    await place.killed("p", 3)
    marker = place.base / "p" / layout.MARKER
    known = decode_marker(marker.read_bytes(), "")
    assert (known.store, known.ancestors) == (after, (before,))
    marker.unlink()
    assert await place.newest("p") == 3
    assert decode_marker(marker.read_bytes(), "") == known


# -- who looks --------------------------------------------------------------------------------------------


async def test_who_looks_makes_renames_marks_and_forgets_nothing(place: Place) -> None:
    await place.killed("p", 1)
    folder = ram_in(place.root)
    older = folder.rename(place.root / "an-older-name")

    def there() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in place.shared_memory.rglob("*")}

    before = there()
    async with CheckpointStore.open(place.at("p"), read_only=True) as reader:
        restored = await reader.restore()
        assert restored is not None
        assert set(restored.sources) == {"ram"}
    async with CheckpointStore.open(place.at("q"), read_only=True) as reader:
        assert await reader.restore() is None
    assert there() == before
    assert older.is_dir()


async def test_a_store_of_ram_alone_is_known_by_its_name(place: Place) -> None:
    def alone(name: str) -> Any:
        return config({"ram": ram(place.shared_memory, capacity=12 * CHUNK, on_close="keep")}, name=name)

    for number, name in enumerate(("one", "two")):
        async with CheckpointStore.open(alone(name)) as store:
            await store.save(number, state(number))
    for number, name in enumerate(("one", "two")):
        async with CheckpointStore.open(alone(name)) as store:
            restored = await store.restore()
            assert restored is not None
            assert restored.step == number


@pytest.mark.parametrize("read", ["folders_in", "unfinished_moves", "marker_at", "read_owner", "slab_bytes"])
async def test_a_store_of_ram_alone_is_not_begun_anew_at_a_moment_when_no_file_can_be_opened(
    place: Place, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    alone = config({"ram": ram(place.shared_memory, capacity=12 * CHUNK, on_close="keep")}, name="run")
    async with CheckpointStore.open(alone) as store:
        await store.save(1, state(1))
    reads = getattr(find, read)

    def short_of_descriptors(path: Path) -> Any:
        with descriptors_left(0):
            return reads(path)

    with monkeypatch.context() as patched:
        patched.setattr(find, read, short_of_descriptors)
        with pytest.raises(TierUnavailable, match="Too many open files"):
            async with CheckpointStore.open(alone):
                pass
    assert list(place.stores().values()) == [[1]]
    async with CheckpointStore.open(alone) as store:
        assert_restored(await store.restore(), state(1))


# -- several ranks ----------------------------------------------------------------------------------------


async def test_ranks_of_one_name_and_different_folders_share_nothing(place: Place) -> None:
    async def run(name: str, step: int | None) -> list[int | None]:
        world = World(2, nodes=["a", "a"])
        stores = [
            CheckpointStore.open(place.at(name, promote="never", label="run"), ranks=c) for c in world.communicators()
        ]
        await asyncio.gather(*stores)
        found = await asyncio.gather(*(store.restore() for store in stores))
        if step is not None:
            saved = await asyncio.gather(*(store.save(step, state(step)) for store in stores))
            await asyncio.gather(*(ckpt.reached("ram") for ckpt in saved))
        await asyncio.gather(*map(crash, stores))
        return [None if each is None else each.step for each in found]

    assert await run("a", 1) == [None, None]
    assert await run("b", 5) == [None, None]
    assert await run("a", None) == [1, 1]
    assert await run("b", None) == [5, 5]


async def test_a_uuid_is_made_up_only_if_no_rank_has_ram(place: Place) -> None:
    """The disk is silent, and the first rank's node is a new one: what the other node has in RAM is continued."""

    async def run(nodes: list[str], step: int | None) -> list[int | None]:
        world = World(2, nodes=nodes)
        stores = []
        for node, communicator in zip(nodes, world.communicators(), strict=True):
            near = ram(place.shared_memory, path=place.shared_memory / node, capacity=12 * CHUNK)
            tiers = {"ram": near, "disk": folder(place.base / "file" / "p")}
            stores.append(CheckpointStore.open(config(tiers), ranks=communicator))
        await asyncio.gather(*stores)
        found: list[Restored | None] = [None, None]
        if step is not None:
            saved = await asyncio.gather(*(store.save(step, state(step)) for store in stores))
            await asyncio.gather(*(ckpt.reached("ram") for ckpt in saved))
        else:
            found = await asyncio.gather(*(store.restore() for store in stores))
        await asyncio.gather(*map(crash, stores))
        return [None if each is None else each.step for each in found]

    (place.base / "file").write_text("no folder")
    await run(["a", "a"], 1)
    before = {path.name for path in (place.shared_memory / "a").iterdir() if is_store_folder(path.name)}
    assert await run(["new", "a"], None) == [1, 1]
    assert {path.name for path in (place.shared_memory / "new").iterdir() if is_store_folder(path.name)} == before


# -- the version before -----------------------------------------------------------------------------------


def as_the_version_before(root: Path, name: str) -> Path:
    """The store's RAM, as a version before has left it: in a folder of that name, without a note of whose it is."""
    for path in root.iterdir():
        if path.is_symlink():
            path.unlink()
    old = ram_in(root).rename(root / name)
    for owner in old.rglob("owner.json"):
        owner.unlink()
    return old


async def test_ram_of_the_version_before_is_found_and_moved_by_the_first_writer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIEREDCKPT_SHARED_MEMORY", str(place.root))
    settings = place.at("p", promote="never")
    tiers = [settings.tiers[0].model_copy(update={"path": None}), settings.tiers[1]]
    settings = settings.model_copy(update={"tiers": tuple(tiers)})
    store = await CheckpointStore.open(settings)
    await store.save(1, state(1))
    await crash(store)
    old = as_the_version_before(place.root, settings.identity)
    store = await CheckpointStore.open(settings)
    restored = await store.restore()
    assert restored is not None
    assert restored.step == 1
    assert set(restored.sources) == {"ram"}
    await crash(store)
    assert is_store_folder(ram_in(place.root).name)
    assert read_owner(ram_in(place.root)) is not None
    assert old.is_symlink()
    assert old.readlink() == Path(ram_in(place.root).name)


async def test_ram_of_the_version_before_at_a_path_of_its_own_is_found_and_moved(place: Place) -> None:
    await place.killed("p", 1, 2)
    (place.root / "lock").rmdir()
    old = as_the_version_before(place.root, "taken")
    for path in list(old.iterdir()):
        path.rename(place.root / path.name)
    old.rmdir()
    assert await place.newest("p") == 2
    assert {path.name for path in place.root.iterdir()} == {ram_in(place.root).name, "lock"}


@pytest.mark.parametrize("moved", range(6))
async def test_a_move_that_was_cut_off_is_gone_on_with(
    place: Place, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.killed("p", 1)
    (place.root / "lock").rmdir()
    old = as_the_version_before(place.root, "taken")
    for path in list(old.iterdir()):
        path.rename(place.root / path.name)
    old.rmdir()
    renamed = Path.rename
    left = moved

    def dying(path: Path, target: Path) -> Path:
        nonlocal left
        if path.parent == place.root:
            if not left:
                raise OSError("no more")
            left -= 1
        return renamed(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        store = await CheckpointStore.open(place.at("p", promote="never"))
        await crash(store)
    assert await place.newest("p") == 1


def check_of_the_version_before(folder: Path) -> None:
    """What it did first with a folder that it took for its own."""
    found = folder.lstat()
    if not os.path.isdir(folder) or os.path.islink(folder) or found.st_uid != os.getuid():
        raise Conflict(f"{folder} is not a folder of user {os.getuid()}")
    os.close(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))


async def test_the_version_before_is_refused_where_this_one_has_ram(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.killed("p", 1)
    with pytest.raises(OSError, match="Is a directory"):
        check_of_the_version_before(place.root)
    monkeypatch.setenv("TIEREDCKPT_SHARED_MEMORY", str(place.shared_memory / "user"))
    async with CheckpointStore.open(config({"ram": {"kind": "ram", "capacity": "1 MiB"}}, name="run")):
        with pytest.raises(Conflict, match="is not a folder of user"):
            check_of_the_version_before(place.shared_memory / "user" / "run")
    assert not (place.shared_memory / "user").exists()


async def test_steps_in_ram_are_found_again_though_no_agent_ever_came(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have marked the folder; so an empty one is not one that somebody has emptied."""
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}, promote_in="agent")
    with monkeypatch.context() as patch:
        patch.setattr(process, "sys", SimpleNamespace(executable="/bin/false"))
        limit(patch, agent_silence=0.5)
        store = await CheckpointStore.open(settings)
        await store.save(1, tree(1))
        await crash(store)
    try:
        async with CheckpointStore.open(settings) as store:
            assert_restored(await store.restore(), tree(1))
            await store.flush()
            await asyncio.to_thread(eventually, lambda: noted(store).seen, "the folder is noted once it has a step")
    finally:
        end_agent(shared_memory / "of-test" / "ram")


async def test_ranks_note_that_a_tier_had_the_store_though_rank_0_alone_has_marked_it(
    shared_memory: Path, tmp_path: Path, s3_place: Bucket
) -> None:
    """Or steps in RAM came back by themselves after a person had removed the store from a bucket."""
    bucket = s3_place.tier(promote="never")
    world = World(2, nodes=["a", "a"])
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk"), "far": bucket})
    stores = await asyncio.gather(*(CheckpointStore.open(settings, ranks=each) for each in world.communicators()))
    saved = await asyncio.gather(*(store.save(1, tree(1)) for store in stores))
    await asyncio.gather(*(checkpoint.reached("disk") for checkpoint in saved))
    await asyncio.to_thread(
        eventually,
        lambda: all(each.seen for store in stores for each in places_noted(store)),
        "both are noted as marked",
    )
    await asyncio.gather(*map(crash, stores))
    shutil.rmtree(tmp_path / "disk")
    for key in await s3_place.bucket.list():
        await s3_place.bucket.delete(key)
    world = World(2, nodes=["a", "a"])
    stores = await asyncio.gather(*(CheckpointStore.open(settings, ranks=each) for each in world.communicators()))
    assert await asyncio.gather(*(store.restore() for store in stores)) == [None, None]
    await asyncio.gather(*(store.close() for store in stores))


def places_noted(store: CheckpointStore) -> tuple[PlaceOfTier, ...]:
    owner = read_owner(Path(store._life.engine.state.tiers[0].store.location))
    assert owner is not None
    return owner.places


def noted(store: CheckpointStore) -> PlaceOfTier:
    return places_noted(store)[0]
