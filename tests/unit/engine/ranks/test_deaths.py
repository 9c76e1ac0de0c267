"""A rank may die at any of its calls, or lack memory: nobody waits for ever, and a restart has a whole step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.cohort import assert_whole, cohort
from support.limits import limit
from support.scenes import SOON

from tieredckpt.engine.ranks.commit import commit, coordinator, vote
from tieredckpt.errors import RanksUnavailable, TieredCkptError, TierUnavailable

SIZE = 3


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("nth", [1, 2, 4, 7])
async def test_a_death_at_any_call_blocks_no_rank_and_loses_no_step(
    victim: int, nth: int, shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, last_words=0.2)
    limit(monkeypatch, wait_longer=0.2)
    disk = tmp_path / "disk"
    async with cohort(SIZE, shared_memory, disk, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranks.let_wait(0.5)
        ranks.world.kill(victim, nth=nth)
        others = [rank for rank in range(SIZE) if rank != victim]
        async with asyncio.timeout(SOON):
            for step in (2, 3):
                await ranks.save(step)  # on the victim too: a save needs nobody
            ended = await asyncio.gather(*(ranks[rank].flush() for rank in others), return_exceptions=True)
            assert all(each is None or isinstance(each, TieredCkptError) for each in ended)
            await asyncio.gather(*(ranks[rank].close() for rank in others))
    async with cohort(SIZE, shared_memory, disk) as again:
        restored = await again.restored()
        found = {each.step for each in restored if each is not None}
        assert len(found) == 1
        assert found <= {1, 2, 3}
        for each in restored:
            assert_whole(each, found.copy().pop())
        await again.reached(await again.save(9), "disk")


@pytest.mark.parametrize(
    ("module", "name", "capacity"),
    [(vote, "encode_own", "64 MiB"), (coordinator, "merge_parts", "64 MiB"), (commit, "holders", "64 KiB")],
    ids=["for a part", "for the vote", "for the commit of what was streamed"],
)
async def test_a_save_without_memory_behind_the_training_is_told_and_the_next_one_works(
    module: Any, name: str, capacity: str, shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promises 3 and 5."""

    def fail(*arguments: Any) -> Any:
        raise MemoryError

    async with cohort(SIZE, shared_memory, tmp_path / "disk", ram_settings={"capacity": capacity}) as ranks:
        async with asyncio.timeout(SOON):
            with monkeypatch.context() as without_memory:
                without_memory.setattr(module, name, fail)
                checkpoints = await ranks.save(1)
                for checkpoint in checkpoints:
                    with pytest.raises((RanksUnavailable, TierUnavailable), match="MemoryError"):
                        await checkpoint.reached("disk")
            await ranks.flush()
            await ranks.reached(await ranks.save(2), "disk")
        for restored in await ranks.restored():
            assert_whole(restored, 2)
