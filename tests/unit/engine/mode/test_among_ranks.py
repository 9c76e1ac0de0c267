"""One rank of several: a save of it is a part, and rank 0 alone manages shared tiers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.cohort import assert_whole, cohort
from support.insight import tier_of
from support.scenes import SOON

from tieredckpt import Invalid


async def test_every_rank_can_ask_for_a_promotion_that_rank_0_begins(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk", disk_settings={"promote": "never"}) as ranks:
        await ranks.save(1)
        await ranks[1].flush()
        assert await ranks[0].where(1) == ("ram",)
        life = ranks[1]._life
        (step,) = life.engine.state.records()
        await life.loop.call(life.engine.promote_at_once(step, tier_of(ranks[1], "disk")))
        async with asyncio.timeout(SOON):
            await life.loop.call(life.engine.state.changed.until(lambda: step in tier_of(ranks[1], "disk").steps.held))
        assert await ranks[0].where(1) == ("ram", "disk")


async def test_a_save_that_streams_waits_for_no_commit_of_another_step(shared_memory: Path, tmp_path: Path) -> None:
    """A commit holds the packs while it waits for a silent rank."""
    async with cohort(2, shared_memory, tmp_path / "disk", ram_settings={"capacity": "64 KiB"}) as ranks:
        for store in ranks.stores:
            await store._life.loop.call(tier_of(store, "disk").packs.guard.acquire())
        async with asyncio.timeout(SOON):
            saved = await ranks.save(1)
        assert all(each.saved is not None and each.saved.tier == "disk" for each in saved)
        assert [bool(tier_of(store, "disk").packs.sizes) for store in ranks.stores] == [
            True,
            False,
        ]  # rank 0 alone counts
        for store in ranks.stores:
            store._life.loop.soon(tier_of(store, "disk").packs.guard.release)
        await ranks.reached(saved, "disk")
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_what_rank_0_does_for_all_is_refused_to_others(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk") as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        for work in (ranks[1].promote(1, "disk"), ranks[1].evict(1, "disk"), ranks[1].delete(1)):
            with pytest.raises(Invalid, match="rank 0 does that for all ranks"):
                await work
        with pytest.raises(Invalid, match="repair tier 'disk' on rank 1"):
            await ranks[1].verify(1, "disk", repair=True)
