"""A restore begins once all ranks call it; who comes alone, gives up or comes late spoils none that all make later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.cohort import DEADLINE, Cohort, assert_whole, cohort
from support.limits import limit
from support.scenes import SOON, crash

from tieredckpt.checkpoint import Restored
from tieredckpt.engine.ranks.messages import Chosen
from tieredckpt.engine.ranks.restore import restore
from tieredckpt.errors import Closed, Corrupt, RanksUnavailable
from tieredckpt.events import StepCommitted


@pytest.fixture(autouse=True)
def soon_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for rank 0 waits little longer than rank 0 does."""
    limit(monkeypatch, wait_longer=0.2)


async def asked(ranks: Cohort, rank: int, times: int = 1) -> None:
    """Wait until a rank has told rank 0 so often that it wants to restore, or wants to no more, besides its votes."""
    times += len(ranks.heard[rank].of(StepCommitted))
    async with asyncio.timeout(SOON):
        while len([1 for call in ranks.world.calls if call[:2] == (rank, "send") and "log/" in call[2]]) < times:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("alone", [[0], [1], [0, 2], [1, 2]])
async def test_a_restore_that_some_call_alone_spoils_none_that_all_call(
    alone: list[int], shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(3, shared_memory, tmp_path / "disk") as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranks.let_wait(DEADLINE)
        for _ in range(2):
            outcomes = await asyncio.gather(*(ranks[rank].restore() for rank in alone), return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, RanksUnavailable)
                assert "call of all ranks" in str(outcome)
        ranks.let_wait(SOON)
        for restored in await ranks.restored():
            assert_whole(restored, 1)
        await ranks.reached(await ranks.save(2), "disk")


async def test_who_asks_after_the_others_gave_up_is_told_in_time_or_joins_the_next(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(3, shared_memory, tmp_path / "disk") as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranks.let_wait(DEADLINE)
        outcomes = await asyncio.gather(ranks[0].restore(), ranks[1].restore(), return_exceptions=True)
        assert all(isinstance(outcome, RanksUnavailable) for outcome in outcomes)
        with pytest.raises(RanksUnavailable, match="rank 0 did not call restore"):
            async with asyncio.timeout(SOON):
                await ranks[2].restore()
        ranks.let_wait(SOON)
        late = asyncio.create_task(ranks[2].restore())
        await asked(ranks, 2, 3)  # asked, withdrawn, asked
        for restored in [*await asyncio.gather(ranks[0].restore(), ranks[1].restore()), await late]:
            assert_whole(restored, 1)


async def given_up_by(ranks: Cohort, victim: int, held: Any, *, within: float = SOON) -> list[Any]:
    """What becomes of a restore on each rank which one gives up while it is held."""
    restoring = [asyncio.create_task(store.restore()) for store in ranks.stores]
    await held.reached()
    restoring[victim].cancel()
    await asyncio.wait([restoring[victim]])
    held.release()
    async with asyncio.timeout(within):  # and not after the deadline
        return await asyncio.gather(*restoring, return_exceptions=True)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("verb", ["send", "recv"])
@pytest.mark.parametrize("topic", ["restore/*", "reading/*", "restored/*"])
async def test_a_restore_that_is_cancelled_on_one_rank_fails_at_once_on_all(
    victim: int, verb: str, topic: str, shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(3, shared_memory, tmp_path / "disk", rank_deadline=4 * SOON) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        outcomes = await given_up_by(ranks, victim, ranks.world.hold(victim, verb, topic=topic))
        assert isinstance(outcomes.pop(victim), asyncio.CancelledError)
        if victim == 0 or (verb, topic) != ("recv", "restored/*"):  # what rank 0 has counted as done is done
            for outcome in outcomes:
                assert isinstance(outcome, RanksUnavailable)
                assert f"rank {victim} has given up" in str(outcome)
        for restored in await ranks.restored():
            assert_whole(restored, 1)
        await ranks.reached(await ranks.save(2), "disk")


async def test_a_restore_that_is_cancelled_while_rank_0_sends_the_index_fails_at_once_on_all(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_PIECE", 500)
    async with cohort(3, shared_memory, tmp_path / "disk", rank_deadline=4 * SOON) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        sending = ranks.world.hold(0, "send", topic="restore/*/index/2")
        _, *outcomes = await given_up_by(ranks, 0, sending, within=SOON / 2)
        for outcome in outcomes:
            assert isinstance(outcome, RanksUnavailable)
            assert "rank 0 has given up" in str(outcome)
        for restored in await ranks.restored():
            assert_whole(restored, 1)


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_rank_that_cannot_take_up_what_was_chosen_fails_the_restore_at_once(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    async with cohort(3, shared_memory, tmp_path / "disk", rank_deadline=3 * SOON) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranked = ranks[rank]._life.engine.mode.ranked
        assert ranked is not None
        pass_index = ranked.restores._pass_index

        async def cut(topic: str, chosen: Chosen) -> tuple[bytes, bytes]:
            manifest, nodes = await pass_index(topic, chosen)
            return manifest, nodes[:-1]

        with monkeypatch.context() as patch:
            patch.setattr(ranked.restores, "_pass_index", cut)
            async with asyncio.timeout(SOON):
                outcomes = await asyncio.gather(*(store.restore() for store in ranks.stores), return_exceptions=True)
        assert all(isinstance(outcome, Corrupt) for outcome in outcomes), outcomes
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_an_ask_that_was_cancelled_is_not_counted(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk") as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        asking = asyncio.create_task(ranks[1].restore())
        await asked(ranks, 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asked(ranks, 1, 2)
        ranks.let_wait(DEADLINE)
        with pytest.raises(RanksUnavailable, match="rank 1 did not call restore"):
            await ranks[0].restore()
        ranks.let_wait(SOON)
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_a_rank_that_gave_up_as_the_restore_began_holds_up_none(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(3, shared_memory, tmp_path / "disk", rank_deadline=4 * SOON) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        begins = ranks.world.hold(0, "send", topic="log/*", nth=2)  # after the roll call
        for outcome in (await given_up_by(ranks, 2, begins))[:2]:
            assert isinstance(outcome, RanksUnavailable)
        for restored in await ranks.restored():
            assert_whole(restored, 1)


@pytest.mark.parametrize("waits_for", ["log/*", "restore/*", "restored/*"])
async def test_a_store_that_is_closed_ends_the_restore_that_it_is_in(
    waits_for: str, shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk", rank_deadline=4 * SOON, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        held = ranks.world.hold(0, "send", topic=waits_for)
        restoring = [asyncio.create_task(store.restore()) for store in ranks.stores]
        await held.reached()
        async with asyncio.timeout(SOON):
            await asyncio.gather(*map(crash, ranks.stores))
            for outcome in await asyncio.gather(*restoring, return_exceptions=True):
                assert isinstance(outcome, Closed)


async def test_a_restore_that_fails_leaves_the_line_as_it_was_on_every_rank(
    shared_memory: Path, tmp_path: Path
) -> None:
    """A rank that had its arrays already goes on with the line that all go on with."""
    async with cohort(2, shared_memory, tmp_path / "disk") as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
        held = ranks.world.hold(1, "send", topic="restored/*")
        restoring = [asyncio.create_task(store.restore(1)) for store in ranks.stores]
        await held.reached()
        restoring[1].cancel()
        await asyncio.wait([restoring[1]])
        held.release()  # so that it can tell
        outcomes = await asyncio.gather(*restoring, return_exceptions=True)
        assert not any(isinstance(outcome, Restored) for outcome in outcomes)
        await ranks.reached(await ranks.save(3), "disk")
        assert [[info.step for info in await store.steps() if not info.off_branch] for store in ranks.stores] == [
            [1, 2, 3]
        ] * 2


async def test_two_restores_of_one_rank_at_a_time_come_one_after_the_other(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk") as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        for restored in await asyncio.gather(*(store.restore() for store in ranks.stores * 2)):
            assert_whole(restored, 1)
