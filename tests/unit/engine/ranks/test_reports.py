"""What any rank finds or is told, rank 0 acts on for all: damage on shared tiers, signals, and machines taken away."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.cohort import Cohort, assert_whole, cohort
from support.insight import flip_chunk
from support.scenes import SOON, files_under, folder, ram

from tieredckpt.engine.ranks.messages import Damaged
from tieredckpt.engine.tier import step_index
from tieredckpt.events import ChunkRepaired, StepPromoted
from tieredckpt.preempt import EXIT_STATUS, preemption


def tiers(shared_memory: Path, tmp_path: Path) -> dict[str, Any]:
    """RAM, and two shared tiers."""
    return {
        "ram": ram(shared_memory, on_close="keep"),
        "disk": folder(tmp_path / "disk"),
        "far": folder(tmp_path / "far"),
    }


async def saved_and_lost_in_ram(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(3, shared_memory, tmp_path, tiers=tiers(shared_memory, tmp_path)) as ranks:
        saves = await ranks.save(1)
        await ranks.reached(saves, "disk")
        await ranks.reached(saves, "far")
    shutil.rmtree(shared_memory / "of-test")


async def intact(ranks: Cohort) -> bool:
    return all(found.intact for found in await ranks[0].verify(1, "disk"))


@pytest.mark.parametrize("finders", [[1], [1, 2]])
async def test_damage_that_only_other_ranks_read_is_repaired_by_rank_0(
    finders: list[int], shared_memory: Path, tmp_path: Path
) -> None:
    await saved_and_lost_in_ram(shared_memory, tmp_path)
    async with cohort(3, shared_memory, tmp_path, tiers=tiers(shared_memory, tmp_path), restore_group=1) as ranks:
        await flip_chunk(ranks[0], "disk", 1, "w")
        assert not await intact(ranks)
        keys = [["w"] if rank in finders else ["common"] for rank in range(3)]
        for restored in await ranks.all(lambda store, rank: store.restore(keys=keys[rank])):
            assert restored is not None
        repaired = await ranks.heard[0].first(ChunkRepaired)
        assert (repaired.key, repaired.tier, repaired.source) == ("w", "disk", "far")
        await ranks.flush()
        assert await intact(ranks)
        assert len(ranks.heard[0].of(ChunkRepaired)) == 1
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_a_rank_that_sees_damage_where_there_is_none_has_nothing_written(
    shared_memory: Path, tmp_path: Path
) -> None:
    await saved_and_lost_in_ram(shared_memory, tmp_path)
    async with cohort(3, shared_memory, tmp_path, tiers=tiers(shared_memory, tmp_path)) as ranks:
        before = files_under(tmp_path / "disk")
        reports = ranks[0]._life.engine.mode.ranked.reports
        state = ranks[0]._life.engine.state
        step = state.newest()
        assert step is not None
        index = await ranks[0]._life.loop.call(step_index.load(state.tier("disk"), step))
        digests = tuple(chunk.digest for array in index.arrays.values() for chunk in array.chunks)
        for digests_said in (digests, ()):
            said = Damaged(step.step, step.serial, "disk", digests_said)
            await ranks[0]._life.loop.call(reports._repair(2, said))
        assert not ranks.heard[0].of(ChunkRepaired)
        assert files_under(tmp_path / "disk") == before


async def test_a_signal_that_another_rank_raises_is_seen_by_the_policies_of_rank_0(
    shared_memory: Path, tmp_path: Path
) -> None:
    on_signal = {"promote": {"kind": "on_signal"}}
    async with cohort(3, shared_memory, tmp_path / "disk", disk_settings=on_signal) as ranks:
        saves = await ranks.save(1)
        await ranks.reached(saves, "ram")
        ranks[2].signal("preempt")
        await asyncio.gather(*(heard.first(StepPromoted) for heard in ranks.heard))
        ranks[2].signal("preempt", on=False)
        state = ranks[0]._life.engine.state
        async with asyncio.timeout(SOON):
            await ranks[0]._life.loop.call(state.changed.until(lambda: not state.observation.signals))


async def test_a_rank_that_alone_is_warned_ends_with_the_newest_step_durable(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(3, shared_memory, tmp_path / "disk", disk_settings={"promote": "never"}, crashing=True) as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "ram")
        with pytest.raises(SystemExit) as ended, preemption(ranks[1], seconds=SOON):
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == EXIT_STATUS
        await asyncio.gather(*(heard.first(StepPromoted) for heard in ranks.heard))  # of which one rank alone has heard
        assert [await store.where(2) for store in ranks.stores] == [("ram", "disk")] * 3
        assert await ranks[0].where(1) == ("ram",)


async def save_on_a_warning(ranks: Cohort, rank: int, step: int, *, seconds: float) -> None:
    """All ranks save; one of them was warned, and its block ends."""
    with preemption(ranks[rank], seconds=seconds):
        signal.raise_signal(signal.SIGTERM)
        await ranks.save(step)


@pytest.mark.parametrize("warned", [0, 1])
async def test_what_a_warned_rank_saves_last_is_durable_when_it_ends(
    warned: int, shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk", crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranks.world.delay(1, 0.3, "send", topic="log/*")  # so the block ends before the vote does
        with pytest.raises(SystemExit) as ended:
            await save_on_a_warning(ranks, warned, 2, seconds=SOON)
        assert ended.value.code == EXIT_STATUS
        assert await ranks[warned].where(2) == ("ram", "disk")


async def test_a_warned_rank_whose_last_save_is_not_decided_on_says_so(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk", crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranks.world.kill(1, "send", topic="log/*")
        with pytest.raises(SystemExit, match="not decided on step 2"):
            await save_on_a_warning(ranks, 0, 2, seconds=2.0)


async def test_a_step_that_is_on_its_way_when_a_rank_is_warned_is_written_once(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk", crashing=True) as ranks:
        held = ranks.faulty(0).hold("put", key="steps/*/manifest.ocdbt")
        await ranks.save(1)
        await held.reached()
        wanted = asyncio.create_task(ranks[0].promote(1, "disk"))
        done, _ = await asyncio.wait([wanted], timeout=0.2)
        assert not done
        held.release()
        assert await wanted == 0
        await asyncio.gather(*(heard.first(StepPromoted) for heard in ranks.heard))
        orders = [topic for rank, verb, topic in ranks.world.calls if (rank, verb) == (0, "send") and "todo/" in topic]
        assert len(orders) == 1
        assert len(ranks.heard[0].of(StepPromoted)) == 1


async def test_when_rank_0_does_nothing_for_a_warned_rank_its_exit_says_so(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk", disk_settings={"promote": "never"}, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        ranks.world.kill_now(0)
        with pytest.raises(SystemExit, match="time ran out"), preemption(ranks[1], seconds=0.3):
            signal.raise_signal(signal.SIGTERM)
