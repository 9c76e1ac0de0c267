"""A life of a store that does everything that changes its tiers, recorded change by change.

It saves, promotes, evicts, shares packs, dies with work undone, goes on in a new process, is damaged and repaired,
is rolled back, rewrites sparse packs and collects: by a script, or in an order drawn from a seed. The nearest tier
is RAM; the slower one is of a chosen kind.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.scenes import crash

from reliability.journal import Acknowledged, Damaged, Entry, Journal, Medium, Synced, Written
from reliability.memory import MemoryBlobs, Objects
from reliability.recorder import FileRecorder, recording
from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.config import StoreConfig, TierConfig, load
from tieredckpt.engine.saving import cells
from tieredckpt.engine.tier import lease, step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, NotFound
from tieredckpt.events import Event, StepPromoted, StepSaved
from tieredckpt.format import digest
from tieredckpt.format.manifest import StepId
from tieredckpt.format.ocdbt import Extent
from tieredckpt.store import CheckpointStore
from tieredckpt.testing.tiers import Opening, tiers_opened_by

__all__ = [
    "CHUNK",
    "CODEC_CHANGED",
    "KINDS",
    "LOSSY",
    "SLOW",
    "SMALL",
    "Life",
    "Tree",
    "config_of",
    "dead_when_it_is_read",
    "files_in",
    "live",
    "slow_store",
    "slow_stores",
]

Tree = dict[str, Any]

SLOW = "slow"
"""Name of the slower tier."""

CHUNK = 4096
_ARRAY = 2 * 4000  # two chunks, each of which takes a page with its checksum
_ARRAYS = 4
_PIECE = 8192

KINDS: Mapping[str, Medium] = {"posix": Medium.FILES, "chfs": Medium.SERVERS, "object": Medium.SERVERS}
"""Kinds of the slower tier: a directory, servers without rename, an object store."""


CODEC_CHANGED = "object, then small"
"""The kind of an object store whose chunks are compressed from the second process on; not one of `KINDS`."""

LOSSY = ("posix, and lossy", "object, and lossy")
"""The kinds of a slower tier at whose place is another one, with lossy copies; not among `KINDS`."""

SMALL = "small"
"""Name of the tier with lossy copies."""


@dataclass(frozen=True)
class Life:
    """What was done and what came of it."""

    kind: str
    entries: tuple[Entry, ...]
    trees: Mapping[int, Tree]
    """Every tree that was saved, by serial."""
    left: Mapping[str, Mapping[str, bytes]]
    """The files of each tier at its end, read from where they lie."""

    @property
    def media(self) -> Mapping[str, Medium]:
        return {"ram": Medium.SHARED_MEMORY, SLOW: KINDS[self.kind.partition(",")[0]]}


def config_of(kind: str, place: Path, *, codec: str | None = None) -> StoreConfig:
    """A store below ``place``; the slower tier of another kind than ``posix`` is given by `slow_stores`."""
    codec = codec or ("small" if kind == CODEC_CHANGED else "none")
    kind, both = kind.partition(",")[0], kind in LOSSY
    policy: dict[str, Any] = {"name": SLOW, "retain": {"kind": "last_n", "n": 3}, "retries": 0, "codec": codec}
    survives = {"survives": "node"}  # the servers are on other nodes
    slow: dict[str, dict[str, Any]] = {
        "posix": {"kind": "posix", "path": place / SLOW, "direct": False},
        "chfs": {"kind": "kvstore", "spec": "memory://", **survives},
        "object": {"kind": "kvstore", "spec": "memory://", **survives},
    }
    lossy = {
        "name": SMALL,
        "codec": "small",
        "lossy": [{"keys": [f"w{i}" for i in range(_ARRAYS)], "max_error": 0.004}],
    }
    derived = [slow[kind] | policy | lossy] if both else []
    nearest = {"name": "ram", "kind": "ram", "path": place / "ram", "capacity": 24 * 4096, "on_close": "keep"}
    store = {"chunk_size": CHUNK, "threads": 1, "repack_below": 0.8}
    return load({"store": store, "tiers": [nearest, slow[kind] | policy, *derived]})


def slow_store(kind: str, objects: Objects, journal: Journal | None = None) -> MemoryBlobs:
    """The store in memory that is a slower tier of this kind."""
    pieces = _PIECE if kind == "chfs" else None
    return MemoryBlobs(objects, pieces=pieces, survives=Survives.NODE, journal=journal, tier=SLOW)


@contextlib.contextmanager
def slow_stores(make: Callable[[], BlobStore]) -> Iterator[None]:
    """Replace every slower tier that is opened in the block, except directories, by what ``make`` returns."""

    async def opened(tier: TierConfig, opening: Opening) -> BlobStore:
        return await opening() if tier.kind == "posix" else make()

    with tiers_opened_by(opened):
        yield


async def live(kind: str, place: Path, *, seed: int | None = None) -> Life:
    """Live below ``place``, a folder in memory; by the script, or as the seed has it."""
    journal = Journal()
    objects = Objects()
    in_files = kind.partition(",")[0] == "posix"
    folders = {"ram": place / "ram"} | ({SLOW: place / SLOW} if in_files else {})
    with (
        recording(journal, folders) as recorder,
        slow_stores(lambda: slow_store(kind, objects, journal)),
        dead_when_it_is_read(recorder),
    ):
        life = _Living(config_of(kind, place, codec="none"), config_of(kind, place), journal, objects, kind in LOSSY)
        await (life.follow_the_script() if seed is None else life.wander(random.Random(seed)))
        recorder.look()
        left = {tier: files_in(folder) for tier, folder in folders.items()}
    if not in_files:
        left[SLOW] = {key: bytes(data) for key, data in objects.data.items()}
    return Life(kind, journal.entries, life.trees, left)


@contextlib.contextmanager
def dead_when_it_is_read(recorder: FileRecorder) -> Iterator[None]:
    """Give leases to a process that has ended, and report every copied chunk to the journal."""
    this_process, copy_and_digest = lease._this_process, digest.copy_and_digest

    def ended(taken_at: float) -> lease.Holder:
        return msgspec.structs.replace(this_process(taken_at), process_started="in a life that has ended")

    def seen(source: Any, target: Any) -> bytes:
        found = copy_and_digest(source, target)
        recorder.look()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "_this_process", ended)
        patch.setattr(cells, "copy_and_digest", seen)
        yield


class _Living:
    def __init__(
        self, first: StoreConfig, config: StoreConfig, journal: Journal, objects: Objects, rounds: bool
    ) -> None:
        """``first`` is the configuration of the first process; arrays are such as can be rounded if it ``rounds``."""
        self._rounds = rounds
        self._first: StoreConfig | None = first
        self._config = config
        self._journal = journal
        self._objects = objects
        self._state: Tree = {f"w{i}": self._array(i) for i in range(_ARRAYS)}
        self._state["small"] = np.zeros(5, np.float16)
        self.trees: dict[int, Tree] = {}

    def _array(self, value: int) -> np.ndarray[Any, Any]:
        if self._rounds:
            return np.full(_ARRAY // 4, (value + 1) / 3, np.float32)
        return np.full(_ARRAY, value, np.uint8)

    async def follow_the_script(self) -> None:
        """Everything once, in an order in which each has something to do."""
        async with self._opened() as store:
            await self._save(store, 1)
            await store.flush()
            await self._save(store, 2, 0)
            await store.flush()
            await self._save(store, 3, 0, 1)
            await self._save(store, 4, 1)  # beside the promotion of the one before
            await store.flush()
            await store.evict(2, SLOW)
        async with self._opened(dies=True) as store:
            await store.restore()
            await self._save(store, 5, 2, 3)
            await store.flush()
            await self._damage(store, 5, "w3")
            await store.restore(4)
            await self._save(store, 5, 0)  # on a branch of its own
            await store.flush()
            await store.collect()
            await self._save(store, 6, 0, 1, 2, 3)
            await self._save(store, 7, 2)
        async with self._opened() as store:
            await store.restore()
            await self._save(store, 8, 1)
            await store.flush()
            await store.collect()

    async def wander(self, chance: random.Random) -> None:
        """A few processes, each of which does some of everything."""
        for _ in range(chance.randrange(2, 5)):
            async with self._opened(dies=chance.random() < 0.5) as store:
                await self._go_on_from(store, None)
                for _ in range(chance.randrange(4, 10)):
                    await self._do_something(store, chance)

    async def _do_something(self, store: CheckpointStore, chance: random.Random) -> None:
        infos = await store.steps()
        info = chance.choice(infos) if infos else None
        what = chance.choice(["save"] * 5 + ["flush"] * 3 + ["evict", "promote", "damage", "roll back", "collect"])
        if what == "save" or info is None:
            changed = chance.sample(range(_ARRAYS), chance.randrange(_ARRAYS))
            await self._save(store, int(self._state.get("step", 0)) + 1, *changed)
        elif what == "flush":
            await store.flush()
        elif what == "collect":
            await store.flush()
            await store.collect()
        else:
            with contextlib.suppress(Conflict, NotFound):  # it has left, or is the last of its kind
                if what == "evict":
                    await store.evict(info.step, chance.choice(["ram", SLOW]))
                elif what == "promote":
                    await store.promote(info.step, SLOW)
                elif what == "roll back":
                    await self._go_on_from(store, info.step)
                else:
                    await store.flush()
                    if await store.where(info.step) == ("ram", SLOW):
                        await self._damage(store, info.step, f"w{chance.randrange(_ARRAYS)}")

    async def _go_on_from(self, store: CheckpointStore, step: int | None) -> None:
        restored = await store.restore(step, resume=True)
        if restored is not None:
            self._state = dict(restored.tree)

    @contextlib.asynccontextmanager
    async def _opened(self, *, dies: bool = False) -> AsyncIterator[CheckpointStore]:
        """A store that is closed in the end, or left with everything undone, as its process ends."""
        config, self._first = self._first or self._config, None
        opening = CheckpointStore.open(config)
        opening.subscribe(self._hear)
        store = await opening
        yield store
        await (crash(store) if dies else store.close())

    def _hear(self, event: Event) -> None:
        if (isinstance(event, StepSaved) and event.tier is not None) or isinstance(event, StepPromoted):
            self._journal.add(Acknowledged(event.tier, event.serial))

    async def _save(self, store: CheckpointStore, step: int, *changed: int) -> None:
        for i in changed:
            self._state[f"w{i}"] = self._array((7 * len(self.trees) + i) % 256)
        self._state |= {"step": step, "small": self._state["small"] + np.float16(1)}
        # It is known before it can be found, as a save that is under way at the crash may be.
        serial = store._life.engine.state.branch.last_serial + 1
        self.trees[serial] = dict(self._state)
        checkpoint = await store.save(step, self._state)
        assert checkpoint.saved is not None
        assert checkpoint.saved.step.serial == serial

    async def _damage(self, store: CheckpointStore, step: int, key: str) -> None:
        """Spoil an array on the slower tier, and repair every step there that uses it, that one first."""

        async def damage() -> list[StepId]:
            state = store._life.engine.state
            tier, found = state.tier(SLOW), state.find(step)
            (chunk, *_) = (await step_index.load(tier, found)).arrays[key].chunks
            assert isinstance(chunk.where, Extent)
            spoilt = [
                other
                for other in tier.steps.held
                if chunk.digest in unique_extents((await step_index.load(tier, other)).arrays)
            ]
            for other in spoilt:
                self._journal.add(Damaged(SLOW, other.serial))
            self._flip(tier, chunk.where)
            return sorted(spoilt, key=lambda other: other != found)

        for spoilt in await store._life.loop.call(damage()):
            (repaired,) = await store.verify(spoilt.step, SLOW, serial=spoilt.serial, repair=True)
            assert repaired.intact
            self._journal.add(Acknowledged(SLOW, spoilt.serial))

    def _flip(self, tier: Tier, where: Extent) -> None:
        """Invert a bit of a chunk where it lies; noted, since a crash after it finds it."""
        if tier.config.kind == "posix":
            fd = os.open(Path(tier.store.location, where.path), os.O_RDWR)
            os.pwrite(fd, bytes([os.pread(fd, 1, where.offset)[0] ^ 1]), where.offset)
            os.fsync(fd)
            os.close(fd)
            return
        data, file = self._objects.data[where.path], self._objects.files[where.path]
        data[where.offset] ^= 1
        changed = bytes(data[where.offset : where.offset + 1])
        self._journal.add(Written(SLOW, file, where.offset, changed, len(data)))
        self._journal.add(Synced(SLOW, file))


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its name there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
