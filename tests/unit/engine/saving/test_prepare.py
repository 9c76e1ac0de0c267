"""Memory comes behind the training: opening waits for none, and the first save stalls like the second."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.cohort import cohort
from support.insight import slab_of
from support.scenes import SOON, assert_restored, config, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.blobs import mapping
from tieredckpt.blobs.ram import slab as slabs
from tieredckpt.blobs.ram import store as ram_store
from tieredckpt.config import StoreConfig
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.errors import Invalid

MIB = 1 << 20
CHUNKS = 12
STATE = CHUNKS * slab_size(MIB // 2)
"""Bytes of the slab that one state takes."""


def state(seed: int = 0) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).integers(0, 255, CHUNKS * MIB // 2, dtype=np.uint8), "step": seed}


class Memory:
    """Counts what slabs ask the system for, and runs something before each stride."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object] = lambda _: None) -> None:
        self.asked = 0
        self._before, self._reserve = before, mapping.reserve
        monkeypatch.setattr(mapping, "reserve", self)

    def __call__(self, fd: int, mapped: npt.NDArray[np.uint8], offset: int, nbytes: int) -> None:
        self.asked += 1
        self._before(self.asked)
        self._reserve(fd, mapped, offset, nbytes)


async def reserved(store: CheckpointStore, nbytes: int) -> None:
    """Return when the slab has so much memory."""
    async with asyncio.timeout(SOON):
        while slab_of(store).reserved < nbytes:
            await asyncio.sleep(0.01)


def store_in(tmp_path: Path, shared_memory: Path, **settings: Any) -> StoreConfig:
    tiers = {"ram": ram(shared_memory, **settings), "disk": folder(tmp_path / "disk")}
    return config(tiers, chunk_size="512 KiB")


async def test_opening_waits_for_no_memory(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    Memory(monkeypatch, lambda _: opened.wait(SOON))
    async with CheckpointStore.open(store_in(tmp_path, shared_memory, capacity="16 MiB")) as store:
        assert slab_of(store).reserved == 0
        opened.set()
        await reserved(store, 16 * MIB)


async def test_a_save_copies_while_its_memory_comes(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "_RESERVED_AT_ONCE", 2 * MIB)
    copied: list[int] = []
    copying = threading.Event()

    def before(stride: int) -> None:
        if stride == 2:
            assert copying.wait(SOON), "the copy waits for all of its memory"

    memory = Memory(monkeypatch, before)
    async with CheckpointStore.open(store_in(tmp_path, shared_memory, capacity="auto")) as store:
        slab, real = slab_of(store), slab_of(store).allocate

        def allocate(nbytes: int) -> int | None:
            offset = real(nbytes)
            copied.append(nbytes)
            copying.set()
            return offset

        monkeypatch.setattr(slab, "allocate", allocate)
        await store.save(1, state())
        assert memory.asked > 2
        assert len(copied) == CHUNKS
        assert_restored(await store.restore(), state())


async def test_after_the_first_save_the_second_finds_its_memory(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch)
    async with CheckpointStore.open(store_in(tmp_path, shared_memory, capacity="auto")) as store:
        await store.save(1, state(1))
        await reserved(store, 2 * STATE)
        before = memory.asked
        await store.save(2, state(2))
        assert memory.asked == before


@pytest.mark.parametrize("told", ["prepare", "like", "into"])
async def test_the_first_save_finds_its_memory_where_the_shapes_were_told(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    memory = Memory(monkeypatch)
    async with CheckpointStore.open(store_in(tmp_path, shared_memory, capacity="auto")) as store:
        match told:
            case "prepare":
                await store.prepare(state())
            case "like":
                assert await store.restore(like=state()) is None
            case _:
                assert await store.restore(into=state()) is None
        await reserved(store, 2 * STATE)
        before = memory.asked
        await store.save(1, state())
        assert memory.asked == before
        assert slab_of(store).reserved < 3 * STATE


async def test_after_a_restart_the_first_save_finds_memory_by_the_newest_step(
    tmp_path: Path, shared_memory: Path
) -> None:
    async with CheckpointStore.open(store_in(tmp_path, shared_memory, capacity="auto")) as store:
        await store.save(1, state())
    async with CheckpointStore.open(store_in(tmp_path, shared_memory, capacity="auto")) as store:
        assert slab_of(store).used == 0, "its RAM was given back when all was on the disk"
        assert await store.restore(resume=False) is not None
        assert slab_of(store).reserved == 0, "who only looks needs none"
        assert await store.restore() is not None
        await reserved(store, 2 * CHUNKS * MIB // 2)


async def test_a_tree_that_cannot_be_stored_is_refused_when_memory_is_asked_for(
    tmp_path: Path, shared_memory: Path
) -> None:
    async with CheckpointStore.open(store_in(tmp_path, shared_memory)) as store:
        with pytest.raises(Invalid, match="'what'"):
            await store.prepare({"what": object()})
        assert await store.restore(like={"what": object()}) is None


async def test_of_what_ranks_have_alike_each_takes_memory_for_its_share(tmp_path: Path, shared_memory: Path) -> None:
    automatic = {"capacity": "auto"}
    async with cohort(
        4, shared_memory, tmp_path, ram_settings=automatic, replicated=["x"], chunk_size="512 KiB"
    ) as ranks:
        await ranks.all(lambda store, _: store.prepare(state()))
        for rank in range(ranks.size):
            await reserved(ranks[rank], 2 * STATE // 4)
            slab_of(ranks[rank]).prepare(share=1)
            assert slab_of(ranks[rank]).reserved < STATE


async def test_a_save_goes_past_ram_whose_quota_it_does_not_fit(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another store has taken half of what automatic slabs may have."""
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (6 * STATE, "the test"))
    stores = []
    for name in ("one", "two"):
        tiers = {"ram": ram(shared_memory, capacity="auto"), "disk": folder(tmp_path / name)}
        stores.append(await CheckpointStore.open(config(tiers, chunk_size="512 KiB")))
        saved = await stores[-1].save(1, state())
        assert not saved.skipped
        assert "disk" in await stores[-1].where(1) or name == "one"
    assert await stores[1].where(1) == ("disk",)
    for store in stores:
        await store.close()


async def test_a_reader_takes_no_memory(tmp_path: Path, shared_memory: Path) -> None:
    async with CheckpointStore.open(store_in(tmp_path, shared_memory)) as store:
        await store.save(1, state())
        async with CheckpointStore.open(store_in(tmp_path, shared_memory), read_only=True) as reader:
            with pytest.raises(Invalid, match="read_only"):
                await reader.prepare(state())
