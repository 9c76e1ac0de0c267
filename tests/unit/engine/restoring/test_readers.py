"""A store that is only looked at tells what is there when it is asked, beside a trainer that saves and evicts."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.cohort import assert_whole, cohort
from support.insight import flip_chunk, tier_of
from support.scenes import SOON, assert_same, config, crash, folder, ram, ram_in, steps_on, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobInfo
from tieredckpt.config import StoreConfig
from tieredckpt.engine.restoring import restore
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format.layout import STEPS
from tieredckpt.format.manifest import StepId, StepIndex


class Place:
    """RAM and a folder, each of which keeps the last step or two."""

    def __init__(self, shared_memory: Path, disk: Path) -> None:
        self.ram = shared_memory / "of-test" / "ram"
        self.disk = disk
        self._shared_memory = shared_memory

    def settings(self, *, ram_alone: bool = False, **settings: Any) -> StoreConfig:
        tiers = {"ram": ram(self._shared_memory, capacity="640 KiB", retain={"kind": "last_n", "n": 1})}
        if not ram_alone:
            tiers["disk"] = folder(self.disk, retain={"kind": "last_n", "n": 2})
        for name, changed in settings.items():
            tiers[name] |= changed
        return config(tiers, name="of-test" if ram_alone else None)

    @asynccontextmanager
    async def trainer(self, **settings: Any) -> AsyncIterator[CheckpointStore]:
        async with CheckpointStore.open(self.settings(**settings)) as store:
            yield store

    @asynccontextmanager
    async def reader(self, **settings: Any) -> AsyncIterator[CheckpointStore]:
        async with CheckpointStore.open(self.settings(**settings), read_only=True) as store:
            yield store


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path / "disk")


async def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        await store.save(step, tree(step))
    await store.flush()


async def newest(store: CheckpointStore) -> int | None:
    """The step that a restore takes, which is as it was saved."""
    restored = await store.restore()
    if restored is None:
        return None
    assert_same(restored.tree, tree(restored.step))
    return restored.step


async def test_a_reader_tells_what_came_and_what_left_since_it_was_opened(place: Place) -> None:
    async with place.trainer() as trainer:
        await save(trainer, 1)
        async with place.reader() as reader:
            for step in range(2, 8):
                await save(trainer, step)
                assert await reader.steps() == await trainer.steps()
                assert [await reader.where(each.step) for each in await reader.steps()] == [
                    await trainer.where(each.step) for each in await trainer.steps()
                ]
                assert (await reader.describe()).info.step == step
                assert await newest(reader) == step
                used = [(tier.name, tier.steps, tier.used) for tier in await reader.tier_infos()]
                assert used == [(tier.name, tier.steps, tier.used) for tier in await trainer.tier_infos()]
                assert all(found.intact for found in await reader.verify())
            with pytest.raises(NotFound, match=r"no tier holds step 1 \(held: .*6, 7\)"):
                await reader.restore(1)
            with pytest.raises(NotFound):
                await reader.spec(1, "half")


async def test_a_restore_takes_a_newer_step_where_another_call_of_the_reader_finds_that_its_own_has_left(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that no tier holds the step that it had chosen."""
    one = {"retain": {"kind": "last_n", "n": 1}}
    fit, is_held, go_on = restore._fit, threading.Event(), threading.Event()

    def held(*arguments: Any) -> Any:
        is_held.set()
        assert go_on.wait(SOON)
        return fit(*arguments)

    settings = config({"disk": folder(place.disk, **one)})
    async with place.trainer(disk=one) as trainer, CheckpointStore.open(settings, read_only=True) as reader:
        await save(trainer, 1)
        with monkeypatch.context() as patch:
            patch.setattr(restore, "_fit", held)
            restoring = asyncio.create_task(newest(reader))
            assert await asyncio.to_thread(is_held.wait, SOON)
        await save(trainer, 2)
        assert [info.step for info in await reader.steps()] == [2]
        go_on.set()
        assert await restoring == 2


@pytest.mark.parametrize("with_ram", [True, False], ids=["ram-and-disk", "disk-alone"])
async def test_beside_saves_and_evictions_a_reader_finds_the_newest_step_bit_for_bit(
    place: Place, with_ram: bool
) -> None:
    on_disk = {"kind": "last_n", "n": 1}
    reading = place.settings(disk={"retain": on_disk})
    if not with_ram:
        reading = config({"disk": folder(place.disk, retain=on_disk)})
    promoted = 0
    ended = False

    async def train(store: CheckpointStore) -> None:
        nonlocal promoted, ended
        try:
            for step in range(1, 61):
                await store.save(step, tree(step, arrays=2))
                if step % 3:
                    await store.flush()
                    promoted = step
        finally:
            ended = True

    async def look(store: CheckpointStore) -> int:
        looks = 0
        while not ended:
            before = promoted
            restored = await store.restore()
            if restored is not None:
                assert_same(restored.tree, tree(restored.step, arrays=2))
            assert (0 if restored is None else restored.step) >= before
            assert not before or max(info.step for info in await store.steps()) >= before
            if before:
                assert all(found.intact for found in await store.verify())
                await store.describe()
            looks += 1
        return looks

    async with (
        place.trainer(disk={"retain": on_disk}) as trainer,
        CheckpointStore.open(reading, read_only=True) as reader,
        CheckpointStore.open(reading, read_only=True) as another,
    ):
        _, *looks = await asyncio.gather(train(trainer), look(reader), look(reader), look(another))
        assert min(looks) > 3


async def test_a_step_that_several_listings_have_missed_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a trainer whose only step leaves for the next one during each of them."""
    async with place.trainer() as trainer:
        await save(trainer, 1)
        alone = config({"disk": folder(place.disk)})
        async with CheckpointStore.open(alone, read_only=True) as reader:
            assert await newest(reader) == 1
            await save(trainer, 2)
            blobs, missed = tier_of(reader, "disk").store, iter("123")
            whole = blobs.list

            async def list_badly(prefix: str) -> AsyncIterator[BlobInfo]:
                if prefix == STEPS and next(missed, None) is not None:
                    return
                async for info in whole(prefix):
                    yield info

            monkeypatch.setattr(blobs, "list", list_badly)
            assert await newest(reader) == 2
            assert next(missed, None) is None


TRAINER = """
import json, sys
import numpy as np
from tieredckpt import CheckpointStore
with CheckpointStore.open(json.loads(sys.argv[1])).sync() as store:
    for step in range(1, 41):
        values = np.random.default_rng(step).integers(0, 255, 100_000, np.uint8)
        store.save(step, {"w": values, "step": step})
        store.flush()
        print(step, flush=True)
"""


async def test_beside_a_training_process_a_reader_never_fails(place: Place) -> None:
    settings = place.settings(disk={"retain": {"kind": "last_n", "n": 1}})
    lines: list[int] = []
    seen = []
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, settings.model_dump_json()], stdout=subprocess.PIPE, text=True
    ) as process:

        def listen() -> None:
            assert process.stdout is not None
            lines.extend(map(int, process.stdout))

        async with CheckpointStore.open(settings, read_only=True) as reader:
            listening = asyncio.get_running_loop().run_in_executor(None, listen)
            while not listening.done():
                before = lines[-1] if lines else 0
                restored = await reader.restore()
                if restored is None:
                    assert not before
                    continue
                assert restored.step == restored.tree["step"] >= before
                expected = np.random.default_rng(restored.step).integers(0, 255, 100_000, np.uint8)
                assert restored.tree["w"].tobytes() == expected.tobytes()
                seen.append(restored.step)
            await listening
            assert process.wait(SOON) == 0
            assert lines == list(range(1, 41))
            assert seen == sorted(seen)
            assert (await reader.describe()).info.step == 40


async def test_a_step_is_read_from_below_where_its_ram_goes_with_the_training_between_look_and_read(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await CheckpointStore.open(place.settings())
    await save(store, 1)
    await crash(store)
    steps, aside, load = place.disk / "steps", tmp_path / "aside", step_index.load
    steps.rename(aside)  # until the reader has looked, the step is in RAM alone

    async def ends_first(tier: Tier, step: StepId) -> StepIndex:
        if aside.exists():
            aside.rename(steps)
            shutil.rmtree(ram_in(place.ram))
        return await load(tier, step)

    monkeypatch.setattr(step_index, "load", ends_first)
    async with place.reader() as reader:
        assert await newest(reader) == 1
        assert not aside.exists()


async def test_a_reader_that_looked_while_the_store_was_made_finds_its_steps(place: Place) -> None:
    async with place.reader() as reader:
        assert await reader.steps() == ()
        async with place.trainer() as trainer:
            await trainer.save(1, {"w": np.zeros(4)})
            await trainer.flush()
            # As where the first look at a tier found no marker, and the second, a moment later, did.
            tier_of(reader, "disk").marker = tier_of(trainer, "disk").marker
            assert await reader.latest_step() == 1


async def test_a_reader_that_was_there_before_the_trainer_finds_its_steps(place: Place) -> None:
    async with place.reader() as reader:
        assert await reader.steps() == ()
        assert await newest(reader) is None
        with pytest.raises(NotFound):
            await reader.restore(1)
        async with place.trainer() as trainer:
            assert await newest(reader) is None, "of a store that is empty"
            await save(trainer, 1)
            assert await newest(reader) == 1
            assert await reader.where(1) == ("ram", "disk")
        assert await reader.where(1) == ("disk",)
        assert await newest(reader) == 1


async def test_ram_is_attached_when_it_comes_and_let_go_when_it_goes(place: Place) -> None:
    async with place.trainer() as trainer:
        await save(trainer, 1)
    async with place.reader() as reader:
        assert await reader.where(1) == ("disk",)
        for step in (2, 3, 4):
            async with place.trainer() as trainer:
                await save(trainer, step)
                assert await reader.where(step) == ("ram", "disk")
                restored = await reader.restore(copy=False)
                assert restored is not None
                assert restored.sources.keys() == {"ram"}
            assert await reader.where(step) == ("disk",)
            assert_same(restored.tree, tree(step))
            await restored.verified()
            assert await newest(reader) == step


async def test_views_of_a_reader_stay_as_they_were_whatever_becomes_of_ram(place: Place) -> None:
    async with place.trainer(ram_alone=True, ram={"on_close": "keep", "capacity": "2 MiB"}) as trainer:
        await save(trainer, 1)
        async with place.reader(ram_alone=True) as reader:
            viewed = await reader.restore(copy=False)
            assert viewed is not None
            await save(trainer, 2, 3, 4)
            assert await newest(reader) == 4
            assert_same(viewed.tree, tree(1))
            shutil.rmtree(place.ram)
            assert await newest(reader) is None
            await crash(trainer)
            async with place.trainer(ram_alone=True, ram={"on_close": "release"}) as another:
                await save(another, 7, 8)
                assert await newest(reader) == 8
            assert_same(viewed.tree, tree(1))
            await viewed.verified()
    assert_same(viewed.tree, tree(1))


async def test_steps_of_several_ranks_in_ram_are_seen_as_they_come_and_go(shared_memory: Path, tmp_path: Path) -> None:
    retain = {"retain": {"kind": "last_n", "n": 1}, "capacity": "2 MiB"}
    never = {"promote": "never"}
    async with (
        cohort(3, shared_memory, tmp_path / "disk", disk_settings=never, ram_settings=retain) as ranks,
        CheckpointStore.open(ranks[0].config, read_only=True) as reader,
    ):
        assert await reader.restore() is None
        for step in range(1, 5):
            await ranks.reached(await ranks.save(step), "ram")
            found = await reader.restore()
            assert found is not None
            assert found.step == step
            assert_whole(found, step)
            assert {info.tiers for info in await reader.steps()} == {("ram",)}
            assert [info.step for info in await reader.steps()] == await steps_on(ranks[0], "ram")


async def test_a_tier_that_failed_is_tried_again(place: Place, faults: FaultyTiers) -> None:
    async with place.trainer() as trainer:
        await save(trainer, 1)
        faults.refuse("disk", TierUnavailable("the cable was pulled"))
        async with place.reader() as reader:
            assert await reader.where(1) == ("ram",)
            faults.allow("disk")
            await eventually(reader, 1, ("ram", "disk"))
            faults.kill("disk", TierUnavailable("the cable was pulled again"))
            assert await newest(reader) == 1
            faults.revive("disk")
            await save(trainer, 2)
            await eventually(reader, 2, ("ram", "disk"))


async def eventually(store: CheckpointStore, step: int, tiers: tuple[str, ...]) -> None:
    async with asyncio.timeout(SOON):
        while True:
            steps = {info.step: info.tiers for info in await store.steps()}
            if steps.get(step) == tiers:
                return
            await asyncio.sleep(0.05)


async def test_a_folder_in_the_place_of_another_is_the_store_that_is_looked_at(place: Place) -> None:
    async with place.trainer() as trainer:
        await save(trainer, 1, 2)
    async with place.reader() as reader:
        assert await newest(reader) == 2
        place.disk.rename(place.disk.with_name("old"))
        assert await newest(reader) is None
        async with place.trainer() as trainer:
            await save(trainer, 5)
            assert await newest(reader) == 5
            assert [info.step for info in await reader.steps()] == [5]
        place.disk.rename(place.disk.with_name("another"))
        place.disk.with_name("old").rename(place.disk)
        assert await newest(reader) == 2
        assert [info.step for info in await reader.steps()] == [1, 2]


async def test_what_is_damaged_is_said_to_be_and_what_left_is_not(place: Place) -> None:
    async with place.trainer(disk={"retain": "all"}) as trainer:
        await save(trainer, 1, 2)
        await trainer.evict(1, "ram")
        async with place.reader(disk={"retain": "all"}) as reader:
            await flip_chunk(trainer, "disk", 1, "params/w0")
            with pytest.raises(Corrupt, match=r"array 'params/w0' of step 1 .* is lost"):
                await reader.restore(1)
            (found,) = await reader.verify(1)
            assert found.damaged == ("params/w0",)
            assert await newest(reader) == 2
            await trainer.evict(1, "disk")
            with pytest.raises(NotFound, match="no tier holds step 1"):
                await reader.restore(1)


async def test_a_step_that_is_evicted_while_it_is_read_is_looked_for_once_more(
    place: Place, faults: FaultyTiers
) -> None:
    keep = {"disk": {"retain": "all"}}
    async with place.trainer(**keep) as trainer:
        await save(trainer, 1)
        async with CheckpointStore.open(config({"seen": folder(place.disk, retain="all")}), read_only=True) as reader:
            held = faults["seen"].hold("get_into", key="packs/*")
            reading = asyncio.create_task(reader.restore())
            await held.reached()
            await save(trainer, 2)
            await trainer.evict(1, "disk")
            held.release()
            restored = await reading
            assert restored is not None
            assert restored.step == 2
            assert_same(restored.tree, tree(2))
            held = faults["seen"].hold("get_into", key="packs/*")
            reading = asyncio.create_task(reader.restore(2))
            await held.reached()
            await save(trainer, 3)
            await trainer.evict(2, "disk")
            held.release()
            with pytest.raises(NotFound, match=r"no tier holds step 2 \(held: 3\)"):
                await reading


async def test_looking_reads_only_what_is_new(place: Place, faults: FaultyTiers) -> None:
    async with place.trainer(disk={"retain": "all"}) as trainer:
        await save(trainer, *range(1, 21))
        async with CheckpointStore.open(config({"seen": folder(place.disk, retain="all")}), read_only=True) as reader:
            await reader.steps()

            def reads() -> list[str]:
                return [call.key for call in faults["seen"].calls if call.verb.startswith("get")]

            before = len(reads())
            for _ in range(5):
                assert len(await reader.steps()) == 20
                await reader.where()
            assert reads()[before:] == []
            await save(trainer, 21)
            before = len(reads())
            assert len(await reader.steps()) == 21
            assert all("0000000021" in key for key in reads()[before:])
            assert len(reads()) - before <= 2


async def test_a_reader_writes_nothing(place: Place) -> None:
    async with place.reader() as reader:
        await reader.steps()
        assert not place.disk.exists()
        assert not place.ram.exists()
    async with place.trainer() as trainer:
        await save(trainer, 1, 2)
        before = snapshot(place)
        async with place.reader() as reader:
            await newest(reader)
            await reader.restore(copy=False)
            await reader.tier_infos()
            await reader.scrub()
            assert snapshot(place) == before
        assert snapshot(place) == before


def snapshot(place: Place) -> dict[str, tuple[int, int]]:
    found = [*place.disk.rglob("*"), *place.ram.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in found if "leases" not in path.parts}


async def test_a_view_of_ram_that_another_call_finds_gone_is_a_copy(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_index = step_index.load
    loaded, gone = threading.Event(), threading.Event()

    async def wait(tier: Tier, step: StepId) -> StepIndex:
        index = await load_index(tier, step)
        if tier.in_memory and not gone.is_set():
            loaded.set()
            await asyncio.to_thread(gone.wait, SOON)
        return index

    async with place.reader() as reader:
        async with place.trainer(ram={"on_close": "release"}) as trainer:
            await (await trainer.save(1, tree(1))).reached("disk")
            await reader.steps()
            monkeypatch.setattr(step_index, "load", wait)
            restoring = asyncio.create_task(reader.restore(copy=False))
            assert await asyncio.to_thread(loaded.wait, SOON)
        assert [info.tiers for info in await reader.steps()] == [("disk",)]
        gone.set()
        restored = await restoring
        assert restored is not None
        assert_same(restored.tree, tree(1))
