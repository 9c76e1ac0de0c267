"""What ranks left in the RAM of a machine is held for a process that works alone there: promises 3, 4 and 6."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import faulty_tiers
from support.agents import end_agent
from support.cohort import RanksPlace, assert_whole, common, whole
from support.scenes import SOON, Heard, config, folder, polled, ram

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import Survives
from tieredckpt.blobs.locks import let_go
from tieredckpt.blobs.ram.folder import locked
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.engine import engine
from tieredckpt.engine.ranks import ram_of_ranks
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, NoSpace, NotFound, TierUnavailable
from tieredckpt.events import StepEvicted
from tieredckpt.format.manifest import StepId


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> RanksPlace:
    return RanksPlace(shared_memory, tmp_path / "disk", 2)


def tiers(place: RanksPlace, node: str = "a", **disk: Any) -> dict[str, Any]:
    """RAM of a node, and a shared folder to which nothing is promoted unless ``disk`` says so."""
    return {
        "ram": ram(place.shared_memory / node, on_close="keep", retain={"kind": "last_n", "n": 9}),
        "disk": folder(place.disk, **({"promote": "never"} | disk)),
    }


def alone(place: RanksPlace, node: str = "a", *, read_only: bool = False, **disk: Any) -> CheckpointStore:
    chosen = config(tiers(place, node, **disk), name="test")
    return CheckpointStore.open(chosen, ranks=None, read_only=read_only)


def tree(seed: int) -> dict[str, Any]:
    """What `part` gives all ranks together."""
    own = {f"rank{rank}": np.arange(5) + rank for rank in range(2)}
    return {"w": whole(seed), "common": common(seed), "own": own, "epoch": seed}


async def saved_by_ranks(place: RanksPlace, *steps: int, **settings: Any) -> None:
    """Two ranks save steps and die."""
    async with place.open(tiers=tiers(place), crashing=True, **settings) as ranks:
        for step in steps:
            await ranks.reached(await ranks.save(step), "ram")


def folders(place: RanksPlace) -> list[str]:
    return sorted(path.name for path in place.shared_memory.glob("a/of-test/ram/*/rank-*"))


async def steps_of(store: CheckpointStore) -> list[tuple[int, tuple[str, ...]]]:
    return [(info.step, info.tiers) for info in await store.steps()]


async def test_steps_that_ranks_left_in_ram_are_restored_promoted_and_continued(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1, 2)
    async with alone(place) as store:
        assert await steps_of(store) == [(1, ("ram",)), (2, ("ram",))]
        restored = await store.restore()
        assert_whole(restored, 2)
        assert restored is not None
        assert dict(restored.sources).keys() == {"ram"}
        target = {"w": np.zeros_like(whole(1)), "common": np.zeros_like(common(1))}
        await store.restore(1, into=target, resume=False)
        np.testing.assert_array_equal(target["w"], whole(1))
        await store.promote(2, "disk")
        assert await steps_of(store) == [(1, ("ram",)), (2, ("ram", "disk"))]  # none may save the read from a device
        await store.save(3, tree(3))
        await polled(lambda: not folders(place))
        assert await steps_of(store) == [(2, ("disk",)), (3, ("ram",))]
        assert [info.off_branch for info in await store.steps()] == [False, False]
        assert_whole(await store.restore(2, resume=False), 2)
    shutil.rmtree(place.shared_memory / "a")
    async with alone(place) as store:
        assert_whole(await store.restore(), 2)


async def test_a_process_that_only_looks_leaves_the_ram_of_ranks_and_none_of_its_own(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1)
    chosen = tiers(place) | {"ram": ram(place.shared_memory / "a", on_close="release")}
    async with CheckpointStore.open(config(chosen, name="test"), ranks=None) as store:
        assert_whole(await store.restore(resume=False), 1)
    (top,) = place.shared_memory.glob("a/of-test/ram/*-*-*")
    assert sorted(path.name for path in top.iterdir()) == ["rank-0", "rank-1"]


async def test_what_is_due_is_promoted_before_it_leaves_ram(
    place: RanksPlace, caplog: pytest.LogCaptureFixture
) -> None:
    await saved_by_ranks(place, 1, 2)
    caplog.clear()
    async with alone(place, promote={"kind": "every_n_steps", "n": 2}) as store:
        await store.save(3, tree(3))
        await store.flush()
        await polled(lambda: not folders(place))
        assert await steps_of(store) == [(2, ("disk",)), (3, ("ram",))]
        assert "the RAM of a rank" not in caplog.text
    async with alone(place, read_only=True) as store:
        assert_whole(await store.restore(2), 2)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "not whole"])
async def test_ram_of_ranks_stays_while_newer_steps_lie_in_a_memfd(
    place: RanksPlace, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """Promise 6: a memfd ends with the process, and the RAM of the ranks does not."""
    await saved_by_ranks(place, 1)
    if not is_whole:
        shutil.rmtree(next(place.shared_memory.glob("a/of-test/ram/*/rank-1")))
    left = folders(place)
    async with alone(place) as store:
        survives = Tier.survives.fget
        assert survives is not None
        in_memfd = property(lambda tier: Survives.NOTHING if tier.in_memory else survives(tier))
        monkeypatch.setattr(Tier, "survives", in_memfd)
        await store.save(2, tree(2))
        await store.save(3, tree(3))
        await store.flush()
        assert ((1, ("ram",)) in await steps_of(store)) is is_whole
        assert folders(place) == left
        await store.promote(2, "disk")
        await polled(lambda: not folders(place))
        assert await steps_of(store) == [(2, ("ram", "disk")), (3, ("ram",))]


@pytest.mark.parametrize("saves", [False, True], ids=["looks", "trains"])
async def test_a_step_that_is_not_whole_here_stays_until_a_newer_one_is_as_safe(place: RanksPlace, saves: bool) -> None:
    """The ranks of other machines may have the rest, and all of them come back."""
    await saved_by_ranks(place, 1)
    (lost,) = place.shared_memory.glob("a/of-test/ram/*/rank-1")
    lost.rename(lost.with_name("elsewhere"))
    async with alone(place) as store:
        assert await store.restore() is None
        if saves:
            await store.save(1, tree(7))
            await polled(lambda: not folders(place))
            (info,) = await store.steps()
            assert info.serial == 2  # not that of the step which is not whole
    if not saves:
        lost.with_name("elsewhere").rename(lost)
        async with place.open(tiers=tiers(place)) as ranks:
            for restored in await ranks.restored():
                assert_whole(restored, 1)


async def overtaken_elsewhere(place: RanksPlace) -> None:
    """Ranks leave steps 2 and 3 in RAM; on another machine another step 2 with that serial is made, and promoted."""
    async with alone(place, "c") as store:
        await store.save(1, tree(1))
        await store.promote(1, "disk")
    async with place.open(tiers=tiers(place), crashing=True) as ranks:
        await ranks.restored()
        for step in (2, 3):
            await ranks.reached(await ranks.save(step, seed=10 * step), "ram")
    async with alone(place, "b") as store:
        await store.restore()
        await store.save(2, tree(2))
        await store.promote(2, "disk")


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_step_that_the_training_overtook_elsewhere_is_not_restored(place: RanksPlace, read_only: bool) -> None:
    """Promise 4: number and serial are the same, and the bytes are not."""
    await overtaken_elsewhere(place)
    async with alone(place, read_only=read_only) as store:
        assert await steps_of(store) == [(1, ("disk",)), (2, ("disk",))]
        assert_whole(await store.restore(), 2)
        if not read_only:
            await store.save(3, tree(3))
            await polled(lambda: not folders(place))
    assert bool(folders(place)) is read_only


async def test_what_a_person_deletes_does_not_come_back(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1, 2)
    async with alone(place) as store:
        heard = Heard(store)
        await store.delete(1, force=True)
        assert [event.step for event in heard.of(StepEvicted)] == [1]
        with pytest.raises(NotFound):
            await store.restore(1)
        assert not list(place.shared_memory.glob("a/of-test/ram/*/rank-*/steps/*-000001/*"))
    async with alone(place) as store:
        assert await steps_of(store) == [(2, ("ram",))]
        assert_whole(await store.restore(), 2)


@pytest.mark.parametrize("full", [False, True], ids=["with room", "full"])
async def test_a_tier_that_comes_late_tells_which_steps_are_stale(
    place: RanksPlace, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    await overtaken_elsewhere(place)
    connect_late = engine.connect_late

    async def connect_and_find_it_full(state: State, tier: Tier) -> None:
        await connect_late(state, tier)
        raise NoSpace("no space left on device")

    if full:
        monkeypatch.setattr(engine, "connect_late", connect_and_find_it_full)
    with faulty_tiers() as faults:
        faults.refuse("disk")
        async with alone(place) as store:
            assert await steps_of(store) == [(2, ("ram",)), (3, ("ram",))]
            faults.allow("disk")
            state = store._life.engine.state
            await polled(lambda: bool(state.tiers[1].steps.held) and not state.ram_of_ranks)
            assert await steps_of(store) == [(1, ("disk",)), (2, ("disk",))]
            assert_whole(await store.restore(2), 2)


async def test_a_step_that_this_process_overtook_by_itself_is_stale(place: RanksPlace) -> None:
    """As by a version that did not look into the RAM of ranks."""
    await saved_by_ranks(place, 1)
    (top,) = place.shared_memory.glob("a/of-test/ram/*-*-*")
    for rank in (0, 1):
        (top / f"rank-{rank}").rename(place.shared_memory / f"aside-{rank}")
    async with alone(place) as store:
        await store.save(2, tree(7))
    for rank in (0, 1):
        (place.shared_memory / f"aside-{rank}").rename(top / f"rank-{rank}")
    async with alone(place) as store:
        assert await steps_of(store) == [(2, ("ram",))]
        assert_whole(await store.restore(), 7)


@pytest.mark.parametrize("when_full", ["wait", "replace"])
async def test_a_full_slab_drives_no_step_of_ranks_out(place: RanksPlace, when_full: str) -> None:
    """Its memory is another: they would go for nothing, before they are promoted."""
    await saved_by_ranks(place, 1, 2)
    sizes = {"capacity": "1500 KiB", "retain": {"kind": "last_n", "n": 9}}
    chosen = {"ram": ram(place.shared_memory / "a", on_close="keep", **sizes), "disk": folder(place.disk)}
    with faulty_tiers() as faults:
        faults.refuse("disk")
        async with CheckpointStore.open(config(chosen, name="test", when_full=when_full), ranks=None) as store:
            for step in (3, 4, 5):
                await store.save(step, tree(step))
            assert [step for step, _ in await steps_of(store)][:2] == [1, 2]
            faults.allow("disk")
            await polled(lambda: not folders(place))
            assert [step for step, tiers in await steps_of(store) if "disk" in tiers][:2] == [1, 2]


@pytest.mark.parametrize("left", ["nothing", "a damaged part"])
async def test_memory_without_a_step_that_can_be_read_is_given_back(place: RanksPlace, left: str) -> None:
    await saved_by_ranks(place, *([] if left == "nothing" else [1]))
    for manifest in place.shared_memory.glob("a/of-test/ram/*/rank-1/steps/*/manifest*"):
        manifest.write_bytes(bytes(manifest.stat().st_size))
    async with alone(place) as store:
        assert await store.restore() is None
        await store.save(1, tree(1))
        await polled(lambda: not folders(place))


@pytest.mark.parametrize("what", ["_part", "look_into"], ids=["a part", "a folder"])
async def test_what_cannot_be_read_for_now_stays(place: RanksPlace, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    async with place.open(tiers=tiers(place), crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        await ranks[0].promote(1, "disk")
        await ranks.reached(await ranks.save(2), "ram")

    async def fail(*arguments: Any) -> None:
        if what == "_part":
            raise TierUnavailable("no file can be opened now")

    with monkeypatch.context() as patched:
        patched.setattr(ram_of_ranks, what, fail)
        async with alone(place) as store:
            assert_whole(await store.restore(resume=False), 1)
            await store.flush()
    assert folders(place) == ["rank-0", "rank-1"]
    async with alone(place, read_only=True) as reader:
        with monkeypatch.context() as patched:
            patched.setattr(ram_of_ranks, what, fail)
            (manifest,) = place.shared_memory.glob("a/of-test/ram/*/rank-0/steps/*-000002/manifest*")
            manifest.touch()  # it reads anew what has changed
            assert_whole(await reader.restore(), 1)
        if what == "look_into":
            manifest.touch()
        assert_whole(await reader.restore(), 2)


async def test_ram_that_another_process_uses_is_left_alone(place: RanksPlace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await saved_by_ranks(place, 1)
    (rank_0,) = place.shared_memory.glob("a/of-test/ram/*/rank-0")
    with locked([rank_0]):
        async with alone(place) as store:
            for step in (2, 3, 4):
                await store.save(step, tree(step))
            said = [record for record in caplog.records if "stays in the RAM of ranks" in record.getMessage()]
            assert len(said) == 1  # it is not tried at each change
            assert_whole(await store.restore(1, resume=False), 1)
    assert folders(place) == ["rank-0", "rank-1"]


@pytest.mark.parametrize("gone", ["all", "steps"])
async def test_ranks_that_give_their_ram_back_under_a_look_are_no_trouble(
    place: RanksPlace, gone: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await saved_by_ranks(place, 1, 2)
    part = ram_of_ranks._part

    async def part_late(state: State, tier: Tier, step: StepId) -> Any:
        shutil.rmtree(Path(tier.store.location, "" if gone == "all" else "steps"), ignore_errors=True)
        return await part(state, tier, step)

    monkeypatch.setattr(ram_of_ranks, "_part", part_late)
    async with alone(place, read_only=True) as store:
        assert not await store.steps()
    assert "the RAM of a rank" not in caplog.text


async def test_a_step_of_ranks_that_is_read_is_not_taken_out(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1)
    async with alone(place) as store:
        state = store._life.engine.state
        go_on = asyncio.Event()

        async def read() -> None:
            async with StepSource.open(state, StepId(1, 1)):
                await go_on.wait()

        async def end() -> None:
            go_on.set()

        reading = asyncio.ensure_future(store._life.loop.call(read()))
        await polled(lambda: bool(state.tiers[0].steps.readers))
        await store.save(2, tree(2))
        with pytest.raises(Conflict, match="is being read"):
            await store.evict(1, "ram")
        assert folders(place) == ["rank-0", "rank-1"]
        await store._life.loop.call(end())
        await reading
        await polled(lambda: not folders(place))


async def test_what_is_read_elsewhere_keeps_its_memory(place: RanksPlace) -> None:
    """A reader of another process holds its lock: ranks that come back use none of that memory meanwhile."""
    await saved_by_ranks(place, 1, 2)
    (manifest,) = place.shared_memory.glob("a/of-test/ram/*/rank-1/steps/*-000001/manifest*")
    store = RamStore.attach(manifest.parents[2])
    reader = store.share(str(manifest.relative_to(manifest.parents[2])))
    async with alone(place) as alone_here:
        await alone_here.delete(1, force=True)
    assert len(store.still_read()) == 1
    let_go(reader)
    await store.close()


async def test_other_tiers_than_ram_show_a_step_of_ranks_to_tensorstore(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1)
    async with alone(place) as store:
        with pytest.raises(NotFound, match="promote it"):
            await store.spec(1, "w")
        await store.promote(1, "disk")
        assert str(place.disk) in str(await store.spec(1, "w"))


async def test_a_step_is_taken_out_of_all_folders_or_of_none(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1, 2)
    (rank_1,) = place.shared_memory.glob("a/of-test/ram/*/rank-1")
    async with alone(place) as store:
        with locked([rank_1]), pytest.raises(Conflict, match="in use"):
            await store.delete(2, force=True)
        assert_whole(await store.restore(), 2)


async def test_steps_of_ranks_that_stay_keep_none_of_this_process(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1)
    (rank_0,) = place.shared_memory.glob("a/of-test/ram/*/rank-0")
    chosen = tiers(place) | {"ram": ram(place.shared_memory / "a", capacity="auto", retain={"kind": "last_n", "n": 1})}
    with locked([rank_0]):
        async with CheckpointStore.open(config(chosen, name="test"), ranks=None) as store:
            for step in range(2, 12):
                await store.save(step, tree(step))
            steps = [step for step, _ in await steps_of(store)]
            assert steps[0] == 1
            assert len(steps) < 6  # a save that needs memory lets the older ones go


async def test_a_look_that_fails_is_made_again(place: RanksPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved_by_ranks(place, 1)
    async with alone(place, read_only=True) as reader:
        assert await steps_of(reader) == [(1, ("ram",))]
        async with place.open(tiers=tiers(place), crashing=True) as ranks:
            await ranks.reached(await ranks.save(2), "ram")

        async def fail(state: State) -> bool:
            raise TierUnavailable("no file can be opened now")

        with monkeypatch.context() as patched:
            patched.setattr(ram_of_ranks, "is_of_a_copy", fail)
            assert await steps_of(reader) == [(1, ("ram",))]
        assert await steps_of(reader) == [(1, ("ram",)), (2, ("ram",))]


async def test_what_a_look_finds_meanwhile_is_not_freed(place: RanksPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was suspended begins to free memory in which ranks have saved newer steps since."""
    only_ram = {"ram": tiers(place)["ram"]}
    async with place.open(tiers=only_ram, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
    (rank_1,) = place.shared_memory.glob("a/of-test/ram/*/rank-1")
    rank_1.rename(aside := rank_1.with_name("elsewhere"))
    async with CheckpointStore.open(config(only_ram, name="test"), ranks=None) as store:
        aside.rename(rank_1)
        async with place.open(tiers=only_ram, crashing=True) as ranks:
            for step in (2, 3):
                await ranks.reached(await ranks.save(step), "ram")
        begun, go_on, look_into = threading.Event(), threading.Event(), ram_of_ranks.look_into

        async def slowly(*arguments: Any) -> Tier | None:
            begun.set()
            await asyncio.to_thread(go_on.wait, SOON)
            return await look_into(*arguments)

        monkeypatch.setattr(ram_of_ranks, "look_into", slowly)
        mine = store._life.engine.mode.ram_of_ranks
        looking = asyncio.ensure_future(store._life.loop.call(mine.look()))
        await polled(begun.is_set)
        await store.save(9, tree(9))
        await polled(lambda: bool(mine._guards_folders._waiters))
        go_on.set()
        await looking
        await store.flush()
    async with place.open(tiers=only_ram) as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 3)


async def test_a_copy_that_other_ranks_use_is_not_said_to_be_deleted(place: RanksPlace) -> None:
    only_ram = {"ram": tiers(place)["ram"]}
    async with place.open(tiers=only_ram, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        await ranks.reached(await ranks.save(2), "ram")
        async with CheckpointStore.open(config(only_ram, name="test"), ranks=None) as store:
            with pytest.raises(Conflict, match="in use"):
                await store.delete(1, force=True)
            assert [step for step, _ in await steps_of(store)] == [1, 2]


async def test_ram_in_which_other_ranks_have_written_meanwhile_stays(place: RanksPlace) -> None:
    """A process that was suspended must not take newer steps for those that it knew."""
    only_ram = {"ram": tiers(place)["ram"]}
    async with place.open(tiers=only_ram, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
    async with CheckpointStore.open(config(only_ram, name="test"), ranks=None) as store:
        assert await steps_of(store) == [(1, ("ram",))]
        async with place.open(tiers=only_ram, crashing=True) as ranks:
            await ranks.reached(await ranks.save(2), "ram")
        await store.save(3, tree(3))
    assert folders(place) == ["rank-0", "rank-1"]


async def test_a_check_finds_no_damage_in_what_ranks_hold(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1)
    for read_only in (True, False):
        async with alone(place, read_only=read_only) as store:
            assert not list(await store.scrub())
            with pytest.raises(NotFound, match="only in the RAM of ranks"):
                await store.verify(1)


async def test_a_chunk_that_is_damaged_in_the_ram_of_a_rank_is_read_from_the_next_tier(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1)
    async with alone(place) as store:
        await store.promote(1, "disk")
    for slab in place.shared_memory.glob("a/of-test/ram/*/rank-*/packs/*/*"):
        with slab.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(64 << 10))
    async with alone(place) as store:
        restored = await store.restore()
        assert_whole(restored, 1)
        assert restored is not None
        assert dict(restored.sources).keys() == {"ram", "disk"}
        await store.flush()
        await store.save(2, tree(2))
        await polled(lambda: not folders(place))


async def test_a_process_beside_an_agent_says_that_it_leaves_what_ranks_have(
    place: RanksPlace, caplog: pytest.LogCaptureFixture
) -> None:
    await saved_by_ranks(place, 1)
    chosen = config(tiers(place), name="test", promote_in="agent")
    async with CheckpointStore.open(chosen, ranks=None) as store:
        assert await store.restore() is None
        assert "is not read beside an agent" in caplog.text
    assert folders(place) == ["rank-0", "rank-1"]
    end_agent(place.shared_memory / "a" / "of-test" / "ram")


async def test_ram_of_ranks_counts_again_after_the_process_has_lost_its_own(place: RanksPlace) -> None:
    await saved_by_ranks(place, 1)
    async with alone(place) as store:
        (top,) = place.shared_memory.glob("a/of-test/ram/*-*-*")
        for path in top.iterdir():
            if not path.name.startswith("rank-"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        state = store._life.engine.state

        async def fail() -> None:
            state.report(state.tiers[0], TierUnavailable("its folder has gone"))

        await store._life.loop.call(fail())
        await polled(lambda: state.tiers[0].health.error is None)
        await polled(lambda: len(state.tiers[0].steps.held) == 1)
        assert_whole(await store.restore(), 1)
