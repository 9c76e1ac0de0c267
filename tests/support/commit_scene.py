"""Two steps in RAM and on a disk, and what is done to the first of them there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.insight import flip_chunk, tier_of
from support.scenes import SOON, Heard, config, folder, ram, tree
from tieredckpt import CheckpointStore
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.engine.repairing.verify import Verified
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.errors import Corrupt
from tieredckpt.events import StepEvicted, StepPromoted
from tieredckpt.format.manifest import ArrayIndex, Chunk
from tieredckpt.testing.faulty import Faulty, Hold

__all__ = ["MANIFEST", "Scene", "opened_scene"]

MANIFEST = "steps/*1-*/manifest.ocdbt"


class Scene:
    """Steps 1 and 2 in RAM and on a disk, and what is done to step 1 on the disk."""

    def __init__(self, store: CheckpointStore, disk: Path) -> None:
        self.store, self.heard, self.disk = store, Heard(store), disk
        self.tier = tier_of(store, "disk")
        self.step = store._life.engine.state.find(1)

    @property
    def manifests(self) -> list[Path]:
        return list(self.disk.glob(MANIFEST))

    async def copied(self, *, again: bool) -> int:
        """Promote the step: once more with ``again``, else only where it is missing or damaged."""
        engine = self.store._life.engine
        copying = copy_step(engine.state, engine.admin._collector, self.step, self.tier, again=again)
        return await self.store._life.loop.call(copying)

    async def held_up(
        self, disk: Faulty, *, damaged: bool = False, after: bool = False
    ) -> tuple[Hold, asyncio.Task[int]]:
        """The step on its way to being committed anew, held before the put of its manifest or ``after`` it."""
        held = disk.hold("put", key=MANIFEST, after=after)
        if damaged:
            await self.quarantine()
        anew = asyncio.create_task(self.copied(again=not damaged))
        await held.reached()
        return held, anew

    async def evicted_while_repaired(self, disk: Faulty, tier: str | None = None) -> asyncio.Task[list[Verified]]:
        """A repair of the step, which has left the disk while its bytes were written there."""
        await flip_chunk(self.store, "disk", 1, "params/w0")
        written = disk.hold("put", key="packs/*")
        verifying = asyncio.create_task(self.store.verify(1, tier, repair=True))
        await written.reached()
        evicting = asyncio.create_task(self.store.evict(1, "disk"))  # ends when the packs may be collected
        await self.heard.first(StepEvicted)
        written.release()
        await evicting
        return verifying

    async def quarantine(self) -> None:
        """As if the commit had been misread just now."""

        async def misread() -> None:
            self.tier.quarantine(self.step, Corrupt("misread"))

        await self.store._life.loop.call(misread())

    async def damage_index(self) -> None:
        """Commit the step with wrong bytes of an array that lies in the index."""

        async def commit() -> None:
            index = await step_index.load(self.tier, self.step)
            half = index.arrays["half"]
            (chunk,) = half.chunks
            assert isinstance(chunk.where, bytes)
            wrong = ArrayIndex(half.grid, half.dtype, [Chunk(chunk.digest, bytes(len(chunk.where)))])
            await commit_file.commit(self.tier, index.record, {**index.arrays, "half": wrong})

        await self.store._life.loop.call(commit())

    async def evicting(self) -> asyncio.Task[None]:
        """The eviction of the step by hand, which has begun."""
        task = asyncio.create_task(self.store.evict(1, "disk"))
        async with asyncio.timeout(SOON):
            while self.step not in self.tier.steps.leaving:
                await asyncio.sleep(0.001)
        return task

    def told(self) -> list[type]:
        """What was told of the step on the disk, since it came there."""
        events = [event for event in self.heard.events if isinstance(event, StepPromoted | StepEvicted)]
        return [type(event) for event in events if (event.step, event.tier) == (1, "disk")]

    async def is_gone(self) -> bool:
        return await self.store.where(1) == ("ram",) and not self.manifests

    async def is_held(self) -> bool:
        verified = await self.store.verify(1)
        return await self.store.where(1) == ("ram", "disk") and all(found.intact for found in verified)


@asynccontextmanager
async def opened_scene(shared_memory: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[Scene]:
    disk = folder(tmp_path / "disk", retain="all", promote="never", deadline=SOON)
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk}, **settings)) as store:
        for step in (1, 2):
            await store.save(step, tree(step))
            await store.promote(step, "disk")
        yield Scene(store, tmp_path / "disk")
