"""A step lies in the RAM of several nodes, behind the training, and a lost node comes back from there."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.ranks import World
from support.cohort import DEADLINE, RanksPlace, cohort, part, stores_of
from support.insight import mapped_below, opened_below
from support.scenes import SOON, config, crash, folder, ram, ram_in

from tieredckpt import CheckpointStore
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.engine.ranks.replicas import replication
from tieredckpt.engine.ranks.restore.transfer import PEERS
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Invalid, TierUnavailable
from tieredckpt.events import ReplicationFailed, StepEvicted, StepReplicated
from tieredckpt.format.manifest import StepId

TWO_NODES = "aabb"
REPLICAS = {"ram_settings": {"replicas": 2}, "disk_settings": {"promote": "never"}}


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> RanksPlace:
    return RanksPlace(shared_memory, tmp_path / "disk", 4, {"nodes": TWO_NODES, "crashing": True} | REPLICAS)


def copies_on(place: RanksPlace, node: str) -> list[Path]:
    """The folders of the copies of parts in the RAM of a node."""
    return list(ram_in(place.shared_memory / node / "of-test" / "ram").glob("rank-*.replica"))


async def test_a_lost_node_comes_back_from_the_ram_of_the_others(place: RanksPlace) -> None:
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.save(2)
        for event in await ranks.replicated(2):
            assert event.copies == 2
    for lost in ("b", "a"):
        place.lose_ram(lost)
        async with place.open() as ranks:
            for rank, came in enumerate(await ranks.restore_into(2)):
                assert came.keys() <= {"ram", PEERS}  # or its part was given back to its RAM before
                assert came.keys() == {"ram"} or ranks.world.nodes[rank] == lost
                assert ranks.read(rank) == 0
            # What the lost node had is made anew, or the other one could not be lost next.
            await ranks.copied(2)


async def test_training_goes_on_after_a_lost_node(place: RanksPlace) -> None:
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
    place.lose_ram("a")
    async with place.open(crashing=False) as ranks:
        await ranks.restore_into(1)
        await ranks.save(2)
        await ranks.replicated(2)
        assert set(await ranks[0].where(2)) == {"ram"}
        await asyncio.gather(*(store.promote(2, "disk") for store in ranks.stores[:1]))


async def test_what_is_damaged_in_a_rank_s_own_ram_comes_from_its_copy(place: RanksPlace) -> None:
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
        for store in ranks.stores[:2]:  # both of one node
            tier = store._life.engine.state.tiers[0]
            assert tier.ram is not None
            (step,) = tier.steps.held
            for extent in [*unique_extents((await step_index.load(tier, step)).arrays).values()][::2]:
                tier.ram.slab.array[extent.offset] ^= 1
        for rank, came in enumerate(await ranks.restore_into(1)):
            assert (PEERS in came) == (rank < 2)


async def test_a_part_that_came_back_is_promoted_from_where_it_is_now(place: RanksPlace) -> None:
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
    place.lose_ram("b")
    async with place.open() as ranks:
        await ranks.restore_into(1)
        await ranks.copied(1)
        await ranks.save(2)
        await ranks.replicated(2)  # the copies of step 1 have gone
        await ranks[0].promote(1, "disk")
        assert await ranks[0].where(1) == ("ram", "disk")


async def test_a_part_that_comes_back_after_its_step_was_evicted_brings_the_step_to_no_rank(
    place: RanksPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the rank that it came to, the step counted as held in RAM, though no other rank had its part of it."""
    receive_part, may_come, came = replication.receive_part, threading.Event(), threading.Event()
    may_come.set()

    async def late(*arguments: Any) -> StepId:
        assert await asyncio.to_thread(may_come.wait, SOON)
        step = await receive_part(*arguments)
        came.set()
        return step

    async def nothing_lies_apart(store: CheckpointStore) -> None:
        state = store._life.engine.state
        await state.changed.until(lambda: not state.tiers[0].steps.parts)

    monkeypatch.setattr(replication, "receive_part", late)
    disk = {"disk_settings": {"promote": "always"}}
    async with place.open(**disk) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        await ranks.replicated(1)
    place.lose_ram("a")
    may_come.clear()
    came.clear()
    async with place.open(**disk) as ranks:
        await ranks.reached(await ranks.save(2), "disk")
        for heard in ranks.heard:
            await heard.first(StepEvicted, lambda event: (event.step, event.tier) == (1, "ram"))
        may_come.set()
        assert await asyncio.to_thread(came.wait, SOON)
        await ranks.copied(2)
        async with asyncio.timeout(SOON):
            await ranks.all(lambda store, rank: store._life.loop.call(nothing_lies_apart(store)))
        assert [await store.where(1) for store in ranks.stores] == [("disk",)] * 4


@pytest.mark.parametrize("deleted", ["before", "meanwhile"])
async def test_a_copy_that_comes_after_its_step_was_deleted_does_not_stay(
    place: RanksPlace, monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    """The next opening could have brought the step back, and the copies of the step before had gone for it."""
    receive_part, may_come, waits = replication.receive_part, threading.Event(), threading.Event()
    retract, may_go = commit_file.retract_from_ram, threading.Event()
    replicate, ended = replication.Replication._replicate_on_all, threading.Event()

    async def late(state: Any, transfer: Any, tier: Any, source: int, make_room: Any) -> StepId:
        if source == 3:
            waits.set()
            assert await asyncio.to_thread(may_come.wait, SOON)
        return await receive_part(state, transfer, tier, source, make_room)

    async def slow(tier: Tier, ram: Ram, step: StepId) -> None:
        if tier is ranks[0]._life.engine.state.tiers[0] and step.step == 2:
            assert await asyncio.to_thread(may_go.wait, SOON)
        await retract(tier, ram, step)

    async def to_the_end(self: replication.Replication, request: Any) -> None:
        await replicate(self, request)
        ended.set()

    async def leaves(store: CheckpointStore) -> None:
        while not store._life.engine.state.tiers[0].steps.leaving:
            await asyncio.sleep(0.01)

    def copies() -> list[set[int]]:
        kept = (store._life.engine.mode.ranked.replicas.kept.values() for store in ranks.stores)
        return [{step.step for tier in tiers for step in tier.steps.parts} for tiers in kept]

    async def unread(store: CheckpointStore) -> None:
        while store._life.engine.state.tiers[0].steps.readers:
            await asyncio.sleep(0.01)

    async def copied(store: CheckpointStore) -> None:
        while any("copies of step" in task.get_name() for task in store._life.engine.mode.ranked.group._tasks):
            await asyncio.sleep(0.01)

    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
        monkeypatch.setattr(replication, "receive_part", late)
        monkeypatch.setattr(replication.Replication, "_replicate_on_all", to_the_end)
        await ranks.save(2)
        assert await asyncio.to_thread(waits.wait, SOON)
        await ranks[0]._life.loop.call(unread(ranks[0]))
        if deleted == "before":
            may_go.set()
        monkeypatch.setattr(commit_file, "retract_from_ram", slow)
        deleting = asyncio.create_task(ranks[0].delete(2, force=True))
        if deleted == "meanwhile":
            await ranks[0]._life.loop.call(leaves(ranks[0]))
            may_come.set()
            assert await asyncio.to_thread(ended.wait, SOON)
            may_go.set()
        await deleting
        for heard in ranks.heard:
            await heard.first(StepEvicted, lambda event: (event.step, event.tier) == (2, "ram"))
        may_come.set()
        await ranks.all(lambda store, rank: store._life.loop.call(copied(store)))
        assert copies() == [{1}] * 4
        await ranks.save(3)
        await ranks.replicated(3)
        assert copies() == [{3}] * 4
        for heard in ranks.heard:
            assert [event.step for event in heard.of(StepReplicated)] == [1, 3]


async def test_ranks_that_change_their_nodes_find_their_parts_and_copy_them_anew(
    shared_memory: Path, tmp_path: Path
) -> None:
    place = RanksPlace(shared_memory, tmp_path / "disk", 3, {"crashing": True} | REPLICAS)
    async with place.open(nodes="abc") as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
    async with place.open(nodes="cab") as ranks:
        await ranks.restore_into(1)
        await ranks.copied(1)
    place.lose_ram("a")
    async with place.open(nodes="cab") as ranks:
        for rank, came in enumerate(await ranks.restore_into(1)):
            assert came.keys() <= {"ram", PEERS}
            assert ranks.read(rank) == 0


async def test_no_node_keeps_a_copy_of_its_own_parts(place: RanksPlace) -> None:
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
        kept = {node: {path.name for path in copies_on(place, node)} for node in "ab"}
    assert kept == {"a": {"rank-2.replica", "rank-3.replica"}, "b": {"rank-0.replica", "rank-1.replica"}}


async def test_only_what_changed_is_sent(place: RanksPlace) -> None:
    async with place.open() as ranks:
        await ranks.save(1)
        (first, *_) = await ranks.replicated(1)
        nbytes = sum(part(1, rank, 4)["w"].array.nbytes + part(1, rank, 4)["common"].nbytes for rank in range(4))
        assert nbytes <= first.sent <= 1.1 * nbytes
        await ranks.save(2, seed=1)
        (second, *_) = await ranks.replicated(2)
        assert second.sent <= 0.1 * nbytes


async def test_policies_see_on_how_many_nodes_a_step_lies(place: RanksPlace) -> None:
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
        for store in ranks.stores:
            (step,) = store._life.engine.state.view().steps
            assert step.replicas == 2


async def test_older_copies_go_when_a_newer_step_is_whole(place: RanksPlace) -> None:
    async with place.open() as ranks:
        for step in range(1, 5):
            await ranks.save(step)
            await ranks.replicated(step)
        for kept in copies_on(place, "a") + copies_on(place, "b"):
            assert [path.name for path in (kept / "steps").iterdir() if any(path.iterdir())] == ["0000000004-000004"]


async def test_a_copy_that_fails_stops_no_training(place: RanksPlace) -> None:
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
        (kept,) = (path for path in copies_on(place, "b") if path.name == "rank-0.replica")
        shutil.rmtree(kept / "steps")
        (kept / "steps").touch()  # nothing can be committed there
        await ranks.save(2)
        for one in ranks.heard:
            failed = await one.first(ReplicationFailed)
            assert (failed.step, failed.ranks) == (2, (ranks.world.nodes.index("b"),))
        (kept / "steps").unlink()
        await ranks.save(3)
        await ranks.replicated(3)


async def test_memory_that_is_not_there_for_replicas_is_refused_with_the_numbers(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "memory_limit", lambda: (100 << 20, "the machine's memory"))
    settings = {"replicas": 2, "capacity": "32 MiB"}
    stores = stores_of(World(4, nodes=TWO_NODES), shared_memory, tmp_path / "disk", ram_settings=settings)
    for end in await asyncio.gather(*stores, return_exceptions=True):
        assert isinstance(end, Invalid)
        assert "128 MiB" in str(end)
        assert "100 MiB" in str(end)


async def test_racks_that_are_named_are_never_shared(shared_memory: Path, tmp_path: Path) -> None:
    racks = {"a": "east", "b": "east", "c": "west", "d": "west"}
    settings = {"nodes": tuple(racks), "racks": racks, "ram_settings": {"replicas": 2}}
    async with cohort(4, shared_memory, tmp_path / "disk", crashing=True, **settings) as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
        for rank, node in enumerate(racks):
            (keeper,) = list(shared_memory.rglob(f"rank-{rank}.replica"))
            assert racks[keeper.parents[3].name] != racks[node]


@pytest.mark.parametrize(
    ("verb", "topic"),
    [
        ("send", "replica/*/offer"),
        ("recv", "replica/*/offer"),
        ("send", "replica/*/lacks"),
        ("recv", "replica/*/lacks"),
        ("send_bulk", "*"),
        ("recv_bulk", "*"),
        ("send", "replica/*/kept"),
        ("recv", "replica/*/kept"),
        ("send", "replicas/done/*"),
    ],
)
async def test_a_rank_that_dies_while_copying_stops_no_other(verb: str, topic: str, place: RanksPlace) -> None:
    async with place.open(disk_settings={"min_bandwidth": "1 GB/s"}) as ranks:
        ranks.let_wait(DEADLINE)
        ranks.world.kill(3, verb, topic=topic)
        await ranks.save(1)
        await ranks.world.died(3)
        for one in ranks.heard[:3]:
            failed = await one.first(ReplicationFailed)
            assert failed.step == 1
            assert 3 in failed.ranks
        for store in ranks.stores[:3]:
            assert "ram" in await store.where(1)
            assert store._life.engine.state.view().steps[0].replicas == 1


async def test_an_automatic_slab_leaves_as_much_room_for_replicas_as_for_parts(place: RanksPlace) -> None:
    async with place.open(ram_settings={"replicas": 2, "capacity": "auto"}) as ranks:
        for store in ranks.stores:
            ranked = store._life.engine.mode.ranked
            assert ranked is not None
            assert ranked.replicas is not None
            (kept,) = ranked.replicas.kept.values()
            assert kept.capacity == store._life.engine.state.tiers[0].capacity


@pytest.mark.parametrize("name", ["rank-3", "rank-1.replica"])
async def test_ram_that_cannot_be_opened_costs_the_replicas_and_no_training(
    name: str, place: RanksPlace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = RamStore.open

    def open_but_one(folder: Path, *arguments: Any, **settings: Any) -> RamStore:
        if folder.name == name and "b" in folder.parts:
            raise TierUnavailable("no such memory, by script")
        return really(folder, *arguments, **settings)

    monkeypatch.setattr(RamStore, "open", open_but_one)
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.flush()
        assert [info.step for info in await ranks[0].steps()] == [1]
    assert "parts are not replicated until the store is opened again" in caplog.text


async def test_replicas_are_let_go_when_own_ram_cannot_be_opened_any_more(
    place: RanksPlace, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.open() as ranks:
        engine = ranks[0]._life.engine
        own = engine.state.tiers[0]

        def refuse(*_: object, **__: object) -> RamStore:
            raise TierUnavailable("no such memory, by script")

        async def lose() -> None:
            with pytest.raises(TierUnavailable):
                await engine._reconnect(own)

        with monkeypatch.context() as patch:
            patch.setattr(RamStore, "open", refuse)
            await ranks[0]._life.loop.call(lose())
            assert mapped_below(shared_memory)
            await asyncio.gather(*map(crash, ranks.stores))
    assert not mapped_below(shared_memory)
    assert not opened_below(shared_memory)


async def test_one_node_alone_has_nowhere_to_copy_to_and_works(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk", ram_settings={"replicas": 2}) as ranks:
        await ranks.save(1)
        await ranks.flush()
    assert "kept on 1 nodes and not on 2" in caplog.text


async def test_a_process_that_is_alone_is_told_that_it_keeps_no_replicas(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = {"ram": ram(shared_memory, replicas=2), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers), ranks=None) as store:
        await store.save(1, {"x": np.arange(9)})
    assert "tier 'ram' keeps no replicas" in caplog.text
