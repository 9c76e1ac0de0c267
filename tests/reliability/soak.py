"""Lets a store live for long under random faults, and holds it to what it said and to what it may take.

``python -m reliability soak --seconds 3600`` does it for an hour and prints a summary.

A trainer saves, and now and then restores, verifies, collects, moves and rolls back, while the calls of its two
slower tiers fail, hang, lie, lose their answers or find no room, and the tiers come and go (`faulty`). After some
rounds the faults end and it is *calm*: everything must get to where it is due, bytes that were damaged on a medium
meanwhile must be repaired, what was acknowledged must be there and be restored bit for bit, and what the process
takes is measured (`gauges`). Some calms end with the process: the store is closed, or left as by a crash, and
opened again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.insight import flip
from support.scenes import crash

from reliability.doomed import is_state, state
from reliability.gauges import Trend, count_tasks, sample, trends, where_tasks_are
from reliability.tiers import FaultyTiers, faulty_tiers, tried_again_soon
from reliability.trouble import SLOWER, Trouble
from tieredckpt.concurrency import outlast
from tieredckpt.config import StoreConfig, load
from tieredckpt.engine.inventory import StepInfo
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.steps import IndeterminateDelete
from tieredckpt.errors import Closed, Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import ChunkRepaired, Event, StepEvicted, StepPromoted, StepSaved, TierFailed
from tieredckpt.format.ocdbt import Extent
from tieredckpt.store import CheckpointStore
from tieredckpt.testing.faulty import Kind

__all__ = ["Soaked", "soak"]

_ROUNDS = 8
"""From one calm to the next."""
_PATIENCE = 60.0
"""Seconds after which what has not happened counts as never happening."""
_REMEMBERED = 500
"""Saves of which the model knows what was in them; nothing retains as many."""


@dataclass
class Soaked:
    """What a soak came to."""

    seconds: float = 0.0
    saves: int = 0
    skipped: int = 0
    """Saves that found no room in RAM, and said so."""
    promotions: int = 0
    restores: int = 0
    compared: int = 0
    """Copies of steps that were read whole and found intact, or repaired."""
    damaged: int = 0
    """Bits that were inverted where they lie."""
    repaired: int = 0
    """Chunks that were written back, those that a tier only lied about included."""
    healed: int = 0
    """Bytes of these."""
    refused: int = 0
    """Orders that failed with an error of this library while there was trouble."""
    reopened: int = 0
    faults: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    """Calls that met a fault, by its kind and their verb."""
    lost: list[str] = field(default_factory=list)
    """What was promised and did not hold."""
    trends: tuple[Trend, ...] = ()

    @property
    def growing(self) -> list[str]:
        """What the process took more and more of."""
        return [str(trend) for trend in self.trends if trend.grows]


async def soak(
    seconds: float, memory: Path, disk: Path, *, seed: int = 0, every: float = 1.0, rounds: int = 4 * _ROUNDS
) -> Soaked:
    """Run a store under random faults for so long, or longer.

    Args:
        seconds: how long.
        memory: a folder for the RAM tier.
        disk: a folder for the slower tiers.
        seed: of what is done and what fails.
        every: seconds from one save to the next.
        rounds: of a save and an order there are at least, however long they take: some of everything happens.
    """
    found = Soaked()
    with tried_again_soon(), faulty_tiers(remembered=0) as faults:
        soaking = _Soaking(found, faults, random.Random(seed), memory, disk)
        await soaking.live(seconds, every, rounds)
        found.faults = faults.struck
    return found


def _config(memory: Path, disk: Path) -> StoreConfig:
    def folder(name: str, n: int, **promote: object) -> dict[str, Any]:
        retain = {"kind": "last_n", "n": n}
        return {"kind": "posix", "path": disk / name, "retries": 1, "deadline": 0.5, "retain": retain, **promote}

    nearest = {"kind": "ram", "path": memory / "ram", "capacity": "160 KiB", "on_close": "keep"}
    near, far = SLOWER
    even = {"promote": {"kind": "every_n_steps", "n": 2}}
    return load(
        {
            "store": {"chunk_size": 4096, "grace": 1.0, "lease_ttl": 0.5, "when_full": "replace"},
            "tiers": {"ram": nearest, near: folder(near, 3), far: folder(far, 5, **even)},
        }
    )


class _Soaking:
    def __init__(self, found: Soaked, faults: FaultyTiers, chance: random.Random, memory: Path, disk: Path) -> None:
        self._found = found
        self._chance = chance
        self._memory, self._disk = memory, disk
        self._trouble = Trouble(faults, chance)
        self._store: CheckpointStore
        self._step = self._count = 0
        self._ordered = ""
        """What was asked for last, until it has ended."""
        self._saved: dict[int, int] = {}
        """By serial, which save it was: all that its tree depends on."""
        self._acknowledged: dict[str, set[int]] = {"ram": set(), **{name: set() for name in SLOWER}}
        self._failed: set[str] = set()
        """Tiers that have failed since the store was to be opened."""
        self._samples: list[Mapping[str, int]] = []

    async def live(self, seconds: float, every: float, least: int) -> None:
        """Go on until the time is over and so many rounds have been, and end in calm."""
        begin = time.monotonic()
        await self._open()
        rounds = 0
        while (time.monotonic() - begin < seconds or rounds < least) and not self._found.lost:
            due = time.monotonic() + every
            self._trouble.stir()
            await self._within("a save", self._save())
            await self._within("an order", self._order())
            rounds += 1
            if rounds % _ROUNDS == 0:
                await self._within("a calm", self._calm())
                if self._chance.random() < 0.3:
                    await self._within("a restart", self._restart())
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await self._within("the last calm", self._calm())
        await self._within("closing", self._store.close())
        self._found.trends = trends(self._samples)
        self._found.seconds = time.monotonic() - begin

    async def _within(self, what: str, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=_PATIENCE)
            if not task.done():
                order = f" ({self._ordered})" if self._ordered else ""
                self._found.lost.append(f"{what}{order} had not ended after {_PATIENCE:.0f} s")
                with suppress(Closed):  # as while it is opened anew
                    where = await self._store._life.loop.call(where_tasks_are())
                    self._found.lost[-1] += f"; the engine was at\n{where}"
                return
        finally:
            if not task.done():
                task.cancel()
                await outlast(task)
        await task

    # -- the trainer --------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._failed.clear()
        opening = CheckpointStore.open(_config(self._memory, self._disk), ranks=None)
        opening.subscribe(self._hear)
        self._store = await opening

    def _hear(self, event: Event) -> None:
        match event:
            case StepSaved(serial=serial, tier=tier):
                self._acknowledged[tier].add(serial)
            case StepPromoted(serial=serial, tier=tier):
                self._acknowledged[tier].add(serial)
                self._found.promotions += 1
            case StepEvicted(serial=serial, tier=tier):
                self._acknowledged[tier].discard(serial)
            case ChunkRepaired(nbytes=nbytes):
                self._found.repaired += 1
                self._found.healed += nbytes
            case TierFailed(tier=tier) if tier in SLOWER:
                self._failed.add(tier)

    async def _save(self) -> None:
        self._count += 1
        checkpoint = await self._store.save(self._step + 1, state(self._count))
        if checkpoint.skipped:
            self._found.skipped += 1
            return
        self._step += 1
        self._found.saves += 1
        assert checkpoint.saved is not None
        self._saved[checkpoint.saved.step.serial] = self._count
        if len(self._saved) > _REMEMBERED:
            del self._saved[min(self._saved)]

    async def _order(self) -> None:
        """Something that a trainer, or somebody at its side, asks for; it may fail, and may not be wrong."""
        orders: dict[str, Callable[[StepInfo], Awaitable[object]]] = {
            "restore": self._restore_one,
            "verify": self._verify_one,
            "flush": lambda _: self._store.flush(),
            "collect": lambda _: self._store.collect(),
            "promote": lambda info: self._store.promote(info.step, self._chance.choice(SLOWER)),
            "evict": lambda info: self._store.evict(info.step, self._chance.choice(info.tiers)),
            "roll back to": self._roll_back,
        }
        infos = [info for info in await self._store.steps() if info.tiers and not info.off_branch]
        if not infos or self._chance.random() < 0.3:
            return
        name, info = self._chance.choice(list(orders)), self._chance.choice(infos)
        self._ordered = f"{name} {info.step}"
        with self._trouble.passing():
            try:
                await orders[name](info)
            except TieredCkptError:
                self._found.refused += 1
            finally:
                self._ordered = ""

    async def _restore_one(self, info: StepInfo) -> None:
        restored = await self._store.restore(info.step, resume=False)
        assert restored is not None
        self._compare(restored)

    async def _verify_one(self, info: StepInfo) -> None:
        await self._store.verify(info.step, repair=self._chance.random() < 0.5)

    async def _roll_back(self, info: StepInfo) -> None:
        restored = await self._store.restore(info.step, resume=True)
        assert restored is not None
        self._step = restored.step
        self._compare(restored)

    def _compare(self, restored: Any) -> None:
        self._found.restores += 1
        count = self._saved.get(restored.serial)
        if count is None or not is_state(restored.tree, count):
            self._found.lost.append(f"serial {restored.serial} was restored, and is not what was saved")

    # -- when nothing fails -------------------------------------------------------------------------------

    async def _calm(self) -> None:
        self._trouble.end()
        await self._arrived()
        await self._damage()
        await self._scrub()
        await self._look()
        tasks = await self._store._life.loop.call(count_tasks()) + len(asyncio.all_tasks())
        folders = [self._disk / name for name in SLOWER]
        self._samples.append(await asyncio.to_thread(sample, tasks, self._memory, folders))

    async def _arrived(self) -> None:
        """Wait until every tier works again and has what is due there."""
        while True:
            try:
                await self._store.flush()
            except TieredCkptError:
                await asyncio.sleep(0.01)  # of a tier that is tried again soon; patience has an end
                continue
            if all(tier.healthy for tier in self._store._life.engine.state.tiers):
                return
            await asyncio.sleep(0.01)

    async def _damage(self) -> None:
        """Invert a bit of a chunk that another tier has as well, and perhaps meet it first by a restore."""
        infos = [info for info in await self._store.steps() if len(info.tiers) > 1 and not info.off_branch]
        if not infos or self._chance.random() < 0.4:
            return
        info = self._chance.choice(infos)
        tier, key = self._chance.choice(info.tiers), f"w{self._chance.randrange(4)}"
        if await self._store._life.loop.call(self._invert(tier, info, key)):
            self._found.damaged += 1
        if self._chance.random() < 0.5:
            await self._restore_in_calm(info)

    async def _invert(self, name: str, info: StepInfo, key: str) -> bool:
        held = self._store._life.engine.state
        tier = held.tier(name)
        try:
            index = await step_index.load(tier, held.find(info.step, info.serial))
        except NotFound:  # evicted meanwhile
            return False
        places = list(unique_extents({key: index.arrays[key]}).values())
        where: Extent = self._chance.choice(places)
        at = where.offset + self._chance.randrange(4000)
        if tier.ram is not None:
            tier.ram.slab.array[at] ^= 1
        else:
            await asyncio.to_thread(flip, self._disk / name / where.path, at)
        return True

    async def _scrub(self) -> None:
        found = await self._store.scrub(repair=True)
        while any(not each.intact and not each.damaged for each in found):
            await self._arrived()  # it was slower than the tier's deadline, which says nothing of what is there
            found = await self._store.scrub(repair=True)
        for verified in found:
            self._found.compared += 1
            if not verified.intact:
                self._found.lost.append(f"{verified.id} on {verified.tier!r}: {verified.problem}")

    async def _look(self) -> None:
        before = {name: frozenset(held) for name, held in self._acknowledged.items()}
        infos = await self._store.steps()
        newest = max((info.serial for info in infos), default=0)
        owed = max(max(held, default=0) for held in before.values())
        if newest < owed:
            self._found.lost.append(f"serial {owed} was acknowledged, and the newest is {newest}")
        for name, held in before.items():
            if missing := (held & self._acknowledged[name]) - {info.serial for info in infos if name in info.tiers}:
                self._found.lost.append(f"tier {name!r} was heard to hold serials {sorted(missing)}, and does not")
        for info in infos:
            try:
                if not info.off_branch:
                    await self._restore_in_calm(info)
            except (Conflict, NotFound):  # evicted meanwhile
                continue
            except Corrupt as error:
                self._found.lost.append(str(error))

    async def _restore_in_calm(self, info: StepInfo) -> None:
        while True:
            try:
                return await self._restore_one(info)
            except TierUnavailable:
                await self._arrived()  # as when it is scrubbed

    async def _restart(self) -> None:
        """End the process, in order or not, perhaps with its memory or with a tier that is not there at first."""
        tiers = self._store._life.engine.state.tiers
        if self._chance.random() < 0.5:
            await self._store.close()
        else:
            await crash(self._store)
        if self._chance.random() < 0.3:
            await asyncio.to_thread(shutil.rmtree, self._memory / "ram", ignore_errors=True)
            self._acknowledged["ram"].clear()
        for tier in tiers:  # an eviction that was under way is told by nobody
            self._acknowledged[tier.name] -= {
                step.serial for step, error in tier.steps.damaged.items() if isinstance(error, IndeterminateDelete)
            }
        self._found.reopened += 1
        absent = self._chance.choice(SLOWER)
        others = {name: max(held, default=0) for name, held in self._acknowledged.items() if name != absent}
        if not any(others.values()) or self._chance.random() < 0.7:
            others[absent] = max(self._acknowledged[absent], default=0)
        else:
            self._trouble.refuse(absent)
        await self._open()
        # On a machine that stands still for a moment, the deadline of a tier that is there may pass as well.
        owed = max((serial for name, serial in others.items() if name not in self._failed), default=0)
        restored = await self._store.restore()
        if restored is None or restored.serial < owed:
            self._found.lost.append(f"serial {owed} was acknowledged, and {restored and restored.serial} is restored")
        if restored is not None:
            self._compare(restored)
        self._step = restored.step if restored is not None else 0
