"""Crashes a recorded life after every one of its changes, and holds what is left to what was promised.

``python -m reliability replay`` prints how many crashes there were and what they cost.

For each crash the media are rebuilt as it left them, and a store is opened over them. It must

- list only steps that restore bit for bit, on each tier that lists them;
- list, on every tier that outlived the crash, each step that was acknowledged there;
- restore the newest of them, accept a new save, promote it, and collect everything that no step needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from reliability.journal import Acknowledged, Crash, Damaged, Entry, Failure, Medium, Removed, crashes
from reliability.life import SLOW, SMALL, Life, config_of, slow_store, slow_stores
from reliability.memory import Objects
from tieredckpt.engine.inventory import StepInfo
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError
from tieredckpt.events import Event, StepEvicted
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId
from tieredckpt.format.rounding import Bound, round_values
from tieredckpt.store import CheckpointStore

__all__ = ["Lost", "Owed", "Recorded", "Replayed", "distinct_crashes", "rebuild", "replay", "same", "survive"]

_DAY = 86400.0


class Lost(AssertionError):
    """A crash cost what was promised."""


@dataclass
class Replayed:
    """What a replay came to."""

    crashes: int = 0
    """How many were told apart by what was pending, torn and lost."""
    states: int = 0
    """How many of them left something that no other had left, and were survived."""
    steps: int = 0
    """How many steps were compared bit for bit, over all of them."""


Copy = tuple[str, int]
"""A tier, and the serial of a step there."""


@dataclass(frozen=True)
class Owed:
    """What a store owes after a crash."""

    acknowledged: frozenset[Copy]
    damaged: frozenset[Copy]
    """Of which nothing is owed but the truth."""


@dataclass
class _Ledger:
    """What is owed, entry by entry."""

    acknowledged: set[Copy] = field(default_factory=set)
    damaged: set[Copy] = field(default_factory=set)

    def post(self, entry: Entry) -> None:
        match entry:
            case Acknowledged(tier=tier, serial=serial):
                self.acknowledged.add((tier, serial))
                self.damaged.discard((tier, serial))
            case Damaged(tier=tier, serial=serial):
                self.acknowledged.discard((tier, serial))
                self.damaged.add((tier, serial))
            case Removed(tier=tier, path=path):
                if path.startswith(layout.DERIVED):
                    tier = SMALL
                folder, _, name = path[path.find(layout.STEPS) :].rpartition("/")  # in RAM, in a folder of the store
                if name == layout.MANIFEST and (step := layout.parse_step_folder(f"{folder}/")) is not None:
                    self.acknowledged.discard((tier, step[1]))  # it was evicted

    def owed(self, crash: Crash) -> Owed:
        return Owed(
            frozenset((tier, serial) for tier, serial in self.acknowledged if _place(tier) in crash.files),
            frozenset(self.damaged),
        )


def _place(tier: str) -> str:
    """The medium of a tier."""
    return SLOW if tier == SMALL else tier


class Recorded(Protocol):
    """A life that was recorded."""

    @property
    def entries(self) -> tuple[Entry, ...]: ...

    @property
    def media(self) -> Mapping[str, Medium]: ...


def distinct_crashes(life: Recorded, failure: Failure, counted: Replayed | None = None) -> Iterator[tuple[Crash, Owed]]:
    """Every crash of a life that leaves something new to see or owes something new, with what it owes."""
    ledger = _Ledger()
    posted = 0
    seen: set[int] = set()
    for crash in crashes(life.entries, life.media, failure):
        for entry in life.entries[posted : crash.at]:
            ledger.post(entry)
        posted = crash.at
        if counted is not None:
            counted.crashes += 1
        owed = ledger.owed(crash)
        key = hash((_visible(crash.files), owed))
        if key not in seen:
            seen.add(key)
            yield crash, owed


def _visible(files: Mapping[str, Mapping[str, bytes]]) -> frozenset[tuple[str, str, bytes]]:
    """What a store can see: neither the temporary names that no key may have, nor whose lease it was."""
    return frozenset(
        (tier, path, data)
        for tier, held in files.items()
        for path, data in held.items()
        if "~" not in path and not path.startswith(layout.LEASES)
    )


async def replay(life: Life, failure: Failure, place: Path, *, every: int = 1) -> Replayed:
    """Survive every crash of a life, or of those that differ one in ``every``; raises `Lost`.

    ``place`` is the folder in memory where it was lived, in which the media are rebuilt: RAM notes where they are.
    """
    shutil.rmtree(place, ignore_errors=True)
    found = Replayed()
    for number, (crash, owed) in enumerate(distinct_crashes(life, failure, found)):
        if number % every:
            continue
        try:
            found.steps += await survive(life, crash, owed, place)
        except Exception as error:
            error.add_note(f"{life.kind}, {failure} dies after entry {crash.at} of {len(life.entries)}: {crash.what}")
            raise
        finally:
            shutil.rmtree(place, ignore_errors=True)
        found.states += 1
    return found


async def survive(life: Life, crash: Crash, owed: Owed, place: Path) -> int:
    """Open a store over what a crash left, below ``place``, and hold it to the promises; how many steps it listed."""
    objects = rebuild(crash, place, in_memory=not life.kind.startswith("posix"))
    with slow_stores(lambda: slow_store(life.kind, objects)):
        opening = CheckpointStore.open(config_of(life.kind, place))
        # What the life had no time to evict is evicted now, at any moment of what follows.
        evicted: set[Copy] = set()

        def hear(event: Event) -> None:
            if isinstance(event, StepEvicted):
                evicted.add((event.tier, event.serial))

        opening.subscribe(hear)
        async with opening as store:
            listed = {info.serial: info for info in await store.steps()}
            _check_listed(listed, owed, evicted)
            for info in listed.values():
                await _check_restores(store, info, life, owed, evicted)
            newest = await _check_newest(store, listed, life, owed)
            await _check_goes_on(store, newest, owed)
            return len(listed)


def rebuild(crash: Crash, place: Path, *, in_memory: bool) -> Objects:
    """Write the files of every tier below ``place``, or return those of the slower one where it is ``in_memory``.

    All are of a day ago, so that nothing is spared for being new.
    """
    then = 0.0
    for tier, files in crash.files.items():
        if tier == SLOW and in_memory:
            continue
        for path, data in files.items():
            file = place / tier / path
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.write_bytes(data)
            then = then or file.stat().st_mtime - _DAY
            os.utime(file, (then, then))
    return Objects.of(crash.files.get(SLOW, {}) if in_memory else {}, modified=1.0)


def _check_listed(listed: Mapping[int, StepInfo], owed: Owed, evicted: AbstractSet[Copy]) -> None:
    for tier, serial in sorted(owed.acknowledged - evicted):
        if serial not in listed or tier not in _tiers(listed[serial]):
            held = _tiers(listed[serial]) if serial in listed else "nowhere"
            raise Lost(f"serial {serial} was acknowledged on tier {tier!r}, and is held {held}")


def _tiers(info: StepInfo) -> tuple[str, ...]:
    return (*info.tiers, *info.lossy)


async def _check_restores(
    store: CheckpointStore, info: StepInfo, life: Life, owed: Owed, evicted: AbstractSet[Copy]
) -> None:
    step = StepId(info.serial, info.step)
    copies = {(tier, info.serial) for tier in info.tiers or info.lossy}  # of which a restore takes one
    try:
        for found in await store.verify(info.step, serial=info.serial):
            copy = (found.tier, info.serial)
            if found.problem and found.tier in _tiers(info) and copy not in owed.damaged:
                with suppress(TieredCkptError):
                    await store.flush()  # an eviction that is under way is told when it has ended
                if copy not in evicted:
                    raise Lost(f"{step} is listed on {found.tier!r}, and {found.problem}")
        if info.off_branch:
            return  # its number may be another step's by now
        restored = await store.restore(info.step, resume=False, lossy=not info.tiers)
    except NotFound as error:
        with suppress(TieredCkptError):
            await store.flush()  # as above
        if not copies & evicted:
            raise Lost(f"{step} is listed and not found") from error
        again = [now for now in await store.steps() if now.serial == info.serial]
        if again:  # on another tier
            await _check_restores(store, again[0], life, owed, evicted)
        elif not copies <= evicted:
            raise Lost(f"{step} was listed and is gone") from error
        return
    except Corrupt as error:
        if not copies <= owed.damaged | evicted:
            raise Lost(f"{step} is listed and does not restore") from error
        return
    assert restored is not None
    saved = life.trees[info.serial]
    if restored.serial != info.serial or not (close if restored.lossy else same)(restored.tree, saved):
        raise Lost(f"{step} is not what was saved")


async def _check_newest(store: CheckpointStore, listed: Mapping[int, StepInfo], life: Life, owed: Owed) -> int:
    """The number of the newest step, which a restore takes; 0 where there is none."""
    owed_newest = max((serial for tier, serial in owed.acknowledged if tier != SMALL), default=0)
    lossy, listed = listed, {serial: info for serial, info in listed.items() if info.tiers}
    if not listed and lossy:
        restored = await store.restore(lossy=True)
        assert restored is not None
        if not restored.lossy or restored.serial != max(lossy):
            raise Lost(f"serial {restored.serial} was restored, and a lossy copy of {max(lossy)} is listed")
        return restored.step
    try:
        restored = await store.restore()
    except Corrupt:
        if not listed:
            return 0  # a commit that is torn is not taken for a store without any
        newest = listed[max(listed)]
        if any((tier, newest.serial) not in owed.damaged for tier in newest.tiers):
            raise
        return newest.step
    if restored is None:
        if listed:
            raise Lost("a store that lists steps restores nothing")
        return 0
    if restored.serial < owed_newest or restored.serial < max(listed):
        raise Lost(f"serial {restored.serial} was restored, and {owed_newest} was acknowledged")
    if not same(restored.tree, life.trees[restored.serial]):
        raise Lost(f"serial {restored.serial} is not what was saved")
    return restored.step


async def _check_goes_on(store: CheckpointStore, newest: int, owed: Owed) -> None:
    step, tree = newest + 1, {"w": np.arange(9000, dtype=np.uint16), "n": newest}
    await (await store.save(step, tree)).reached(SLOW)
    with suppress(*([Corrupt] if owed.damaged else [])):  # of what is damaged everywhere
        await store.flush()
        await store.collect()
    restored = await store.restore(step)
    if restored is None or not same(restored.tree, tree):
        raise Lost("what was saved after the crash is not what is restored")
    for found in await store.verify(step):
        if found.problem:
            raise Lost(f"what was saved after the crash is damaged on {found.tier!r}: {found.problem}")
    if not owed.damaged:
        await store._life.loop.call(_check_litter(store))


async def _check_litter(store: CheckpointStore) -> None:
    """Nothing is left on the slower tiers that no step needs."""
    for tier in (store._life.engine.state.tier(SLOW), *store._life.engine.state.derived):
        await _check_litter_of(tier)


async def _check_litter_of(tier: Tier) -> None:
    needed = {layout.MARKER}
    for step, held in tier.steps.held.items():
        needed |= {step.manifest_key, held.btree_key, *await step_index.packs(tier, step)}
    torn = tuple(step.folder for step in tier.steps.damaged)
    perhaps = tier.steps.damaged.any_packs(float("inf"))
    left = {
        info.key
        async for info in tier.store.list("")
        if not info.key.startswith((layout.LEASES, layout.CATALOGS, layout.DERIVED, *torn))
    }
    if not needed <= left or not left <= needed | perhaps:
        too_much = sorted(left - needed - perhaps)
        raise Lost(f"after a collection there is {too_much} too much, {sorted(needed - left)} missing")


def close(found: Any, expected: Mapping[str, Any]) -> bool:
    """As `same`, for a lossy copy: floats of four bytes are rounded to 7 bits."""
    return same(found, {key: _rounded(value) for key, value in expected.items()})


def _rounded(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        return value
    memory = value.copy().view(np.uint8)
    assert round_values(memory, value.dtype, Bound(0.004)) is not None
    return memory.view(np.float32)


def same(found: Any, expected: Mapping[str, Any]) -> bool:
    """Whether two flat trees have the same keys, and bit for bit the same values."""
    return found.keys() == expected.keys() and all(
        np.array_equal(found[key], value) and np.asarray(found[key]).dtype == np.asarray(value).dtype
        for key, value in expected.items()
    )
