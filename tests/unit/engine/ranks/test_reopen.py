"""A shared tier that was away comes back on every rank, and not on rank 0 alone."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cohort import Cohort, assert_whole, cohort
from support.limits import limit
from support.scenes import folder, ram

from tieredckpt.blobs.base import BlobStore
from tieredckpt.checkpoint import Checkpoint
from tieredckpt.config import TierConfig
from tieredckpt.engine.state.state import State
from tieredckpt.errors import TierUnavailable
from tieredckpt.events import StepPromoted, TierFailed
from tieredckpt.testing.tiers import Opening, tiers_opened_by


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again soon."""
    limit(monkeypatch, first_retry=0.02)
    limit(monkeypatch, last_retry=0.2)


async def saved(ranks: Cohort, step: int) -> list[Checkpoint]:
    checkpoints = await ranks.save(step)
    await ranks.reached(checkpoints, "ram")
    return checkpoints


async def on_disk(ranks: Cohort, step: int) -> None:
    """The step has come to the shared tier, for all ranks; and is whole there."""
    await asyncio.gather(*(heard.first(StepPromoted, lambda event: event.step == step) for heard in ranks.heard))
    for restored in await ranks.restored(step, resume=False):
        assert_whole(restored, step)


async def test_a_tier_that_was_mounted_anew_is_opened_again_by_every_rank(shared_memory: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    async with cohort(2, shared_memory, disk) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        away = disk.with_name("away")
        disk.rename(away)
        await saved(ranks, 2)
        await asyncio.gather(*(heard.first(TierFailed) for heard in ranks.heard))
        shutil.copytree(away, disk.with_name("anew"))
        disk.with_name("anew").rename(disk)
        await on_disk(ranks, 2)


async def test_a_tier_that_dies_on_one_rank_is_opened_again_there(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk") as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranks.faulty(1).kill(TierUnavailable("evicted by its server"))
        await saved(ranks, 2)
        await on_disk(ranks, 2)


@pytest.mark.parametrize("fits", [True, False], ids=["ram", "past RAM"])
@pytest.mark.parametrize("missing", [{0, 1}, {1}], ids=["all ranks", "one rank"])
async def test_a_tier_that_was_down_when_ranks_opened_comes_back_on_each(
    shared_memory: Path, tmp_path: Path, missing: set[int], fits: bool
) -> None:
    disk = tmp_path / "disk"
    async with cohort(2, shared_memory, disk) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    down, openings = True, 0

    async def opened(tier: TierConfig, opening: Opening) -> BlobStore:
        nonlocal openings
        if tier.name == "disk" and down:
            openings += 1  # rank 0 opens it first
            if min(openings - 1, 1) in missing:
                raise TierUnavailable("nobody answers")
        return await opening()

    with tiers_opened_by(opened):
        sizes: dict[str, Any] = {} if fits else {"capacity": 64 << 10}
        tiers = {"ram": ram(shared_memory / "a", **sizes, on_close="keep"), "disk": folder(disk)}
        async with cohort(2, shared_memory, disk, tiers=tiers, chunk_size=16 << 10) as ranks:
            if fits:
                await saved(ranks, 2)
            down = False
            if not fits:
                await _all_open(ranks)
                await ranks.reached(await ranks.save(2), "disk")
            await on_disk(ranks, 2)


async def _all_open(ranks: Cohort) -> None:
    """Each rank has opened the tier, of which nothing but this tells."""

    async def opened(state: State) -> None:
        tier = state.tier("disk")
        await state.changed.until(lambda: tier.healthy and tier.marker is not None)

    for store in ranks.stores:
        await store._life.loop.call(opened(store._life.engine.state))
