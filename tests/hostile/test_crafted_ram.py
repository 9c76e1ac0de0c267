"""A RAM folder that somebody tampered with is refused, or gives up what is not sound; no other file is touched."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from reliability.forging import entries_of, resealed
from support.insight import bytes_of_listed_steps, slab_of, tier_of
from support.scenes import CHUNK, assert_restored, config, ram

from tieredckpt import CheckpointStore
from tieredckpt.errors import Conflict, Corrupt, TieredCkptError
from tieredckpt.format import layout, ocdbt
from tieredckpt.format.ocdbt import Extent

MIB = 1 << 20


@asynccontextmanager
async def in_ram(place: Path) -> AsyncIterator[CheckpointStore]:
    async with CheckpointStore.open(config({"ram": ram(place, on_close="keep")}, name="of-test")) as store:
        yield store


async def with_a_step(place: Path) -> Path:
    """A RAM tier with a step of two chunks, closed."""
    async with in_ram(place) as store:
        await store.save(1, {"x": np.random.default_rng(1).integers(0, 255, 2 * CHUNK, dtype=np.uint8)})
        return Path(tier_of(store, "ram").store.location)


def forge_in_ram(root: Path, where: Callable[[list[Extent]], list[Extent]], *, alike: bool) -> None:
    """Make the only step in RAM claim other extents, for chunks that are said to be alike or not."""
    (manifest,) = root.glob("steps/*/manifest.ocdbt")
    (btree,) = root.glob("steps/*/btree")
    key = btree.relative_to(root).as_posix()
    entries = entries_of(ocdbt.Index([btree.read_bytes()], manifest.read_bytes()), key)
    names = [name for name, value in entries.items() if isinstance(value, Extent)]
    old = [entries[name] for name in names]
    assert all(isinstance(value, Extent) for value in old)
    entries.update(zip(names, where(old), strict=True))
    if alike:
        table = entries[layout.CHUNK_DIGESTS.encode()]
        assert isinstance(table, bytes)
        entries[layout.CHUNK_DIGESTS.encode()] = table[:16] * (len(table) // 16)
    files = resealed(entries, key)
    assert files is not None
    btree.write_bytes(files.btree)
    manifest.write_bytes(files.manifest)


FORGED: dict[str, tuple[Callable[[list[Extent]], list[Extent]], bool]] = {
    "one place for two chunks": (lambda old: [old[0], old[0]], False),
    "places that overlap": (lambda old: [old[0], Extent(old[0].path, old[0].offset + 4096, old[0].length)], False),
    "two places for one chunk": (lambda old: old, True),
    "a place beyond the slab": (lambda old: [old[0], Extent(old[0].path, 1 << 40, old[0].length)], False),
    "a place at the slab's end": (lambda old: [old[0], Extent(old[0].path, 16 * MIB - 4096, old[0].length)], False),
    "another pack": (lambda old: [old[0], Extent(layout.pack_key("ab" * 16), old[0].offset, old[0].length)], False),
}


@pytest.mark.parametrize(("where", "alike"), FORGED.values(), ids=FORGED)
async def test_a_step_that_claims_memory_which_is_not_its_own_leaves_ram(
    shared_memory: Path, where: Callable[[list[Extent]], list[Extent]], alike: bool
) -> None:
    root = await with_a_step(shared_memory)
    forge_in_ram(root, where, alike=alike)
    async with CheckpointStore.open(config({"ram": ram(shared_memory)}, name="of-test"), read_only=True) as reader:
        with pytest.raises(Corrupt, match=r"array 'x' of step 1 .* is lost: no tier has its chunk"):
            await reader.restore()
        with suppress(Corrupt):
            await reader.restore(copy=False)
    async with in_ram(shared_memory) as store:
        assert slab_of(store).used == await bytes_of_listed_steps(store) == 0
        await store.save(3, {"x": np.arange(3 * CHUNK, dtype=np.uint8)})
        assert_restored(await store.restore(), {"x": np.arange(3 * CHUNK, dtype=np.uint8)})


async def test_a_folder_that_others_could_write_to_is_refused(shared_memory: Path) -> None:
    root = await with_a_step(shared_memory)
    for mode in (0o702, 0o720, 0o777):
        root.chmod(mode)
        for read_only in (False, True):
            with pytest.raises(Conflict, match="can be written to by other users"):
                async with CheckpointStore.open(
                    config({"ram": ram(shared_memory)}, name="of-test"), read_only=read_only
                ):
                    pass
        assert root.stat().st_mode & 0o777 == mode
    root.chmod(0o755)
    async with in_ram(shared_memory) as store:
        assert root.stat().st_mode & 0o777 == 0o700
        assert await store.restore() is not None


@pytest.mark.parametrize(
    "note",
    [b"[" * 4000, b'{"slab":' + b"[" * 100_000, bytes(10 * MIB), b'{"slab": "../../etc/passwd", "capacity": 4096}'],
    ids=["deep", "deep and large", "large", "a path"],
)
async def test_a_made_up_note_of_a_slab_is_none(shared_memory: Path, note: bytes) -> None:
    root = await with_a_step(shared_memory)
    (root / "slab.json").write_bytes(note)
    async with in_ram(shared_memory) as store:
        assert await store.restore() is None
        await store.save(5, {"x": np.arange(3)})


async def test_links_and_pipes_among_the_files_of_ram_lead_nowhere(shared_memory: Path, tmp_path: Path) -> None:
    root = await with_a_step(shared_memory)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (root / "slab.tmp").symlink_to(victim)
    async with in_ram(shared_memory) as store:
        assert await store.restore() is not None
    (root / "lock").unlink()
    (root / "lock").symlink_to(victim)
    with pytest.raises(TieredCkptError):
        async with in_ram(shared_memory):
            pass
    (root / "lock").unlink()
    (root / "slab.json").unlink()
    os.mkfifo(root / "slab.json")
    async with asyncio.timeout(20):
        async with CheckpointStore.open(config({"ram": ram(shared_memory)}, name="of-test"), read_only=True) as reader:
            assert await reader.restore() is None
    assert victim.read_text() == "mine"
