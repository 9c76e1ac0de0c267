"""What is opened for a tier is closed with it, whatever error ends the opening."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from reliability.tiers import FaultyTiers
from support.insight import tier_of
from support.scenes import Heard, assert_restored, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward
from tieredckpt.config import TierConfig
from tieredckpt.config.tiers import PosixTier
from tieredckpt.engine.keeping import collector
from tieredckpt.engine.opening import ram as opening_ram
from tieredckpt.engine.opening.connect import connect_late, move_to_earlier_place, reopen
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict
from tieredckpt.events import TierFailed
from tieredckpt.testing.tiers import Opening, tiers_opened_by


class Counted(Forward):
    """Raises what a test says, and tells whether it was closed."""

    closed = False
    on_get: BaseException | None = None
    on_close: BaseException | None = None

    async def get(self, key: str, *, limit: int) -> bytes:
        if self.on_get is not None:
            raise self.on_get
        return await super().get(key, limit=limit)

    async def close(self) -> None:
        await super().close()
        self.closed = True
        if self.on_close is not None:
            raise self.on_close


@pytest.fixture
def opened() -> Iterator[list[Counted]]:
    """The blob stores of slower tiers, as they are opened."""
    stores: list[Counted] = []

    async def count(tier: TierConfig, opening: Opening) -> BlobStore:
        stores.append(Counted(await opening()))
        return stores[-1]

    with tiers_opened_by(count):
        yield stores


async def test_a_tier_that_is_opened_again_in_vain_leaves_nothing_open(
    shared_memory: Path, tmp_path: Path, opened: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(both) as store:
        await (await store.save(1, tree(1))).reached("disk")
        with monkeypatch.context() as patch:
            patch.setattr(Counted, "on_get", MemoryError())
            with pytest.raises(MemoryError):
                await store._life.loop.call(reopen(store._life.engine.state, tier_of(store, "disk")))
        assert [each.closed for each in opened] == [False, True]
    assert [each.closed for each in opened] == [True, True]


async def test_a_tier_that_moves_to_its_earlier_place_leaves_nothing_open(
    shared_memory: Path, tmp_path: Path, opened: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "before")})) as store:
        await store.save(1, tree(1))
        marker = tier_of(store, "disk").marker
    assert marker is not None
    opened.clear()
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(tmp_path / "now")})) as store:
        with monkeypatch.context() as patch:
            patch.setattr(PosixTier, "earlier", lambda tier: tier.model_copy(update={"path": tmp_path / "before"}))
            patch.setattr(opened[0], "on_close", MemoryError())
            move = move_to_earlier_place(store._life.engine.state, tier_of(store, "disk"), {marker.store})
            with pytest.raises(MemoryError):
                await store._life.loop.call(move)
    assert [each.closed for each in opened] == [True, True]


async def test_a_tier_that_is_scanned_again_while_a_collection_is_under_way_loses_no_pack(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection would find packs that were listed again, and no step that was read again yet."""
    both = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")})
    async with CheckpointStore.open(both) as store:
        for step in (1, 2):
            await (await store.save(step, tree(step))).reached("disk")
        await store.flush()
        engine, tier = store._life.engine, tier_of(store, "disk")
        asked, scans = asyncio.Event(), list[asyncio.Task[None]]()
        reads = faults["disk"].hold("get", key="steps/*/manifest.ocdbt", times=None)

        class Guard(asyncio.Lock):
            async def acquire(self) -> Literal[True]:
                asked.set()
                return await super().acquire()

        async def scanned_meanwhile(tier: Tier, used: object) -> None:
            asked.clear()
            scans.append(asyncio.create_task(connect_late(engine.state, tier)))
            until = [asyncio.ensure_future(each) for each in (asked.wait(), reads.reached())]
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
            until[1].cancel()

        async def collect() -> None:
            tier.packs.guard = Guard()
            await engine.collector.collect(tier)
            reads.release()
            await asyncio.gather(*scans)

        with monkeypatch.context() as patch:
            patch.setattr(collector, "note_impaired", scanned_meanwhile)
            await store._life.loop.call(collect())
        for step in (1, 2):
            assert all(found.intact for found in await store.verify(step, "disk"))


@pytest.mark.parametrize("known", ["by an empty folder", "by a step of its own"])
async def test_a_tier_of_another_store_that_comes_late_is_refused_and_left_as_it_is(
    tmp_path: Path, faults: FaultyTiers, known: str
) -> None:
    """An identity that was made up for want of any is given up for that of a late tier; one that is in use is not."""
    near, far = folder(tmp_path / "near"), folder(tmp_path / "far")
    async with CheckpointStore.open(config({"far": far})) as store:
        await store.save(7, tree(7))
        (other, marker) = marker_of(store, "far")
    if known == "by an empty folder":
        async with CheckpointStore.open(config({"near": near})):
            pass
    faults.refuse("far")
    async with CheckpointStore.open(config({"near": near, "far": {**far, "promote": "never"}})) as store:
        heard = Heard(store)
        if known == "by a step of its own":
            await store.save(1, tree(1))
        (ours, _) = marker_of(store, "near")
        faults.allow("far")
        failed = await heard.first(TierFailed, lambda event: isinstance(event.error, Conflict))
        told = f"tier 'far' at {tmp_path / 'far'} belongs to another store ({other}, this one is {ours})"
        assert told in str(failed.error)
        assert marker_of(store, "near")[0] == ours
    assert (tmp_path / "far/tieredckpt.json").read_bytes() == marker
    async with CheckpointStore.open(config({"far": far}), read_only=True) as store:
        assert_restored(await store.restore(), tree(7))


def marker_of(store: CheckpointStore, name: str) -> tuple[str, bytes]:
    """The store that a folder belongs to, and its marker."""
    marker = Path(tier_of(store, name).config.location, "tieredckpt.json").read_bytes()
    return json.loads(marker)["store"], marker


async def test_ram_is_used_though_an_error_that_nobody_expected_keeps_no_earlier_version_out(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*what: object) -> None:
        raise MemoryError

    monkeypatch.setattr(opening_ram, "keep_earlier_versions_out", broken)
    for step in (1, 2):  # its lock was held till the end of the process
        async with CheckpointStore.open(config({"ram": ram(shared_memory, on_close="keep")}, name="run")) as store:
            await store.save(step, tree(step))
