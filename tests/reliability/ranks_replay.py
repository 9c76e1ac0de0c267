"""Crashes a recorded life of several ranks after every one of its changes, and holds what is left to its promises.

After each crash the store is opened by as many ranks as before, by fewer, and by one process alone. Each time it must

- list only steps that all who open it restore bit for bit;
- list each step that was acknowledged on the shared tier, and each that lay in the memory of ranks which all came back
  to it;
- restore the newest of them, accept a new save, bring it to the shared tier, and collect.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from reliability.journal import Crash, Failure
from reliability.life import SLOW, slow_store, slow_stores
from reliability.ranks_life import NODES, RanksLife, opened_together, part, ranks_config, whole
from reliability.replay import Lost, Owed, Replayed, distinct_crashes, rebuild, same
from tieredckpt.engine.inventory import StepInfo
from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.events import Event, StepEvicted
from tieredckpt.store import CheckpointStore

__all__ = ["COMEBACKS", "Death", "replay_ranks"]

Death = Literal["all processes", "one node", "all nodes"]
"""What dies with the training: nothing but it, the memory of the last rank's node, or all memory."""

COMEBACKS: dict[str, tuple[str, ...]] = {"as before": NODES, "fewer": ("a", "b"), "alone": ("a",)}
"""The nodes of the ranks that open the store again; one that is alone knows of no ranks."""


async def replay_ranks(life: RanksLife, death: Death, place: Path, *, every: int = 1, what: str = "") -> Replayed:
    """Survive every crash of a life that leaves ``what`` (a pattern), or of those that differ one in ``every``.

    Raises `Lost`.

    ``place`` is the folder in memory where it was lived, in which the media are rebuilt: RAM notes where they are.
    """
    await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
    found = Replayed()
    failure: Failure = "node" if death == "all nodes" else "process"
    crashes = ((crash, owed) for crash, owed in distinct_crashes(life, failure, found) if re.search(what, crash.what))
    for crash, owed in itertools.islice(crashes, 0, None, every):
        left = _without_a_node(crash) if death == "one node" else crash
        for comeback, nodes in COMEBACKS.items():
            try:
                found.steps += await _survive(life, left, _owed_to(nodes, left, owed), place, comeback)
            except Exception as error:
                where = f"{life.kind}, {death} die after entry {crash.at} of {len(life.entries)}"
                error.add_note(f"{where}: {crash.what}; opened {comeback}")
                raise
            finally:
                await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
            found.states += 1
    return found


def _without_a_node(crash: Crash) -> Crash:
    return replace(crash, files={name: held for name, held in crash.files.items() if name != f"ram-{NODES[-1]}"})


def _owed_to(nodes: Sequence[str], crash: Crash, owed: Owed) -> dict[str, set[int]]:
    """The serials that each tier owes to those who come back: RAM, if all its parts are on nodes that came back."""
    held: dict[str, set[int]] = {}
    for medium, serial in owed.acknowledged:
        held.setdefault(medium, set()).add(serial)
    memories = [f"ram-{node}" for node in dict.fromkeys(NODES)]
    back = len(nodes) > 1 and {f"ram-{node}" for node in nodes} == set(memories) <= crash.files.keys()
    in_ram = set.intersection(*(held.get(name, set()) for name in memories)) if back else set()
    return {"ram": in_ram, SLOW: held.get(SLOW, set())}


async def _survive(life: RanksLife, crash: Crash, owed: dict[str, set[int]], place: Path, comeback: str) -> int:
    objects = rebuild(crash, place, in_memory=life.kind != "posix")
    evicted: set[tuple[str, int]] = set()

    def hear(event: Event) -> None:
        if isinstance(event, StepEvicted):
            evicted.add((event.tier, event.serial))

    with slow_stores(lambda: slow_store(life.kind, objects)):
        async with _opened(life.kind, place, comeback, hear) as stores:
            return await _Comeback(life, stores, owed, evicted).live()


@contextlib.asynccontextmanager
async def _opened(
    kind: str, place: Path, comeback: str, hear: Callable[[Event], None]
) -> AsyncIterator[list[CheckpointStore]]:
    nodes = COMEBACKS[comeback]
    if len(nodes) > 1:
        async with opened_together(kind, place, nodes, hear) as stores:
            yield stores
    else:
        opening = CheckpointStore.open(ranks_config(kind, place, nodes[0]), ranks=None)
        opening.subscribe(hear)
        async with opening as store:
            yield [store]


class _Comeback:
    """The stores of all who came back, held to what is owed to them."""

    def __init__(
        self,
        life: RanksLife,
        stores: Sequence[CheckpointStore],
        owed: dict[str, set[int]],
        evicted: AbstractSet[tuple[str, int]],
    ) -> None:
        self._life, self._stores, self._owed = life, stores, owed
        self._evicted = evicted
        """What the life had no time to evict is evicted now, at any moment from the opening on."""

    async def live(self) -> int:
        """Check everything, and go on; how many steps were listed."""
        listed = {info.serial: info for info in await self._stores[0].steps()}
        for tier, serials in self._owed.items():
            for serial in serials:
                if tier not in self._tiers(listed, serial) and (tier, serial) not in self._evicted:
                    raise Lost(
                        f"serial {serial} was acknowledged on {tier!r}, and is held {self._tiers(listed, serial)}"
                    )
        for info in listed.values():
            await self._check(info)
        newest = await self._newest(listed)
        await self._go_on(newest + 1)
        return len(listed)

    def _tiers(self, listed: dict[int, StepInfo], serial: int) -> tuple[str, ...]:
        return listed[serial].tiers if serial in listed else ()

    async def _check(self, info: StepInfo) -> None:
        """All restore a listed step, unless it is evicted meanwhile or its number is another's by now."""
        if SLOW in info.tiers:
            with contextlib.suppress(NotFound):
                for found in await self._stores[0].verify(info.step, SLOW, serial=info.serial):
                    if found.problem and (SLOW, info.serial) not in self._evicted:
                        raise Lost(f"serial {info.serial} is listed on {SLOW!r}, and {found.problem}")
        if info.off_branch:
            return
        try:
            restored = await asyncio.gather(*(store.restore(info.step, resume=False) for store in self._stores))
        except NotFound as error:
            if not any(serial == info.serial for _, serial in self._evicted):
                raise Lost(f"serial {info.serial} is listed and not found") from error
            return
        self._compare(restored)

    def _compare(self, restored: Sequence[Any]) -> None:
        for rank, each in enumerate(restored):
            if each is None or not same(each.tree, whole(self._life.trees[each.serial], len(NODES))):
                raise Lost(f"serial {each and each.serial} is not what was saved, on rank {rank}")

    async def _newest(self, listed: dict[int, StepInfo]) -> int:
        owed = max(max(serials, default=0) for serials in self._owed.values())
        try:
            restored = await asyncio.gather(*(store.restore() for store in self._stores))
        except Corrupt:
            if listed or owed:
                raise
            return 0  # a commit that is torn is not taken for a store without any
        if restored[0] is None:
            if listed or owed:
                raise Lost(f"nothing is restored, and serial {owed} was acknowledged")
            return 0
        self._compare(restored)
        if restored[0].serial < max(owed, *listed):
            raise Lost(f"serial {restored[0].serial} was restored, and {owed} was acknowledged")
        return restored[0].step

    async def _go_on(self, step: int) -> None:
        size, count = len(self._stores), 100
        saving = (store.save(step, part(count, rank, size)) for rank, store in enumerate(self._stores))
        await asyncio.gather(*(checkpoint.reached(SLOW) for checkpoint in await asyncio.gather(*saving)))
        await asyncio.gather(*(store.flush() for store in self._stores))
        await self._stores[0].collect()
        for each in await asyncio.gather(*(store.restore(step) for store in self._stores)):
            if each is None or not same(each.tree, whole(count, size)):
                raise Lost("what was saved after the crash is not what is restored")
        for found in await self._stores[0].verify(step, SLOW):
            if found.problem:
                raise Lost(f"what was saved after the crash is damaged on {SLOW!r}: {found.problem}")
