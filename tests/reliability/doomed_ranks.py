"""What every rank does in `rank_kills`: it goes on from what there is, and saves until it is killed or has its steps.

Each rank appends to a journal what it restored and what was acknowledged to it, one line of JSON at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed.launch import SOON, Rank, rank_of_this_process

from tieredckpt import Checkpoint, CheckpointStore, Shard
from tieredckpt.errors import TieredCkptError
from tieredckpt.events import Event, StepReplicated

_ROWS, _COLUMNS = 96, 64
_KEPT = 3
"""So many steps follow each other with the same array beside the one that always changes."""


def _values(*seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((_ROWS, _COLUMNS)).astype(np.float32)


def config_of(me: Rank) -> dict[str, Any]:
    """RAM of this rank's node, and a folder that all share."""
    node = me.arguments["nodes"][me.rank]
    place = Path(me.arguments["memory"], node, "ram")
    nearest: dict[str, Any] = {"kind": "ram", "path": str(place), "capacity": "512 KiB"}
    if me.arguments["replicas"]:
        nearest["replicas"] = 2
    often = {"lease_ttl": 0.5, "grace": 1.0}  # what nobody refers to is collected all the time
    return {
        "store": {"name": "doomed", "chunk_size": 4096, "rank_deadline": SOON, **often},
        "tiers": {"ram": nearest, "disk": {"kind": "posix", "path": me.arguments["disk"], **me.arguments["policies"]}},
    }


class Training:
    """One rank of a training whose state tells by which save it came about."""

    def __init__(self, me: Rank) -> None:
        self._me = me
        self._life = me.arguments["life"]
        self._rows = slice(_ROWS * me.rank // me.size, _ROWS * (me.rank + 1) // me.size)

    def state(self, life: int, step: int) -> dict[str, Any]:
        """This rank's rows of what the save of ``step`` in ``life`` has."""
        arrays = {"new": _values(life, step), "kept": _values(step // _KEPT)}
        return {"life": life, "step": step} | {name: self._shard(whole) for name, whole in arrays.items()}

    def _shard(self, whole: npt.NDArray[np.float32]) -> Shard:
        return Shard(whole[self._rows].copy(), shape=(_ROWS, _COLUMNS), offset=(self._rows.start, 0))

    async def run(self, store: CheckpointStore) -> None:
        """Restore, compare, and save on."""
        into = self.state(0, 0)
        restored = await store.restore(into=into)
        begin = 0
        if restored is not None:
            begin, life = restored.step, restored.tree["life"]
            expected = self.state(life, begin)
            right = restored.tree["step"] == begin and all(
                into[name].array.tobytes() == expected[name].array.tobytes() for name in ("new", "kept")
            )
            self._note("restored", origin=(life, begin), right=right, sources=list(restored.sources))
        else:
            self._note("restored", origin=None, right=True, sources=[])
        self._me.mark("restored")
        if self._me.size > 1:  # from here on one may be missed
            engine: Any = store._life.engine
            engine.mode.ranked.group.deadline = self._me.arguments["deadline"]
        store.subscribe(self._hear)
        chance = random.Random(self._life)  # the same for all ranks
        async with asyncio.TaskGroup() as waiting:
            for step in range(begin + 1, begin + 1 + self._me.arguments["steps"]):
                try:
                    saved = await store.save(step, self.state(self._life, step))
                except TieredCkptError:  # as where the ranks were told that one of them is gone
                    continue
                for tier in ("ram", "disk"):
                    waiting.create_task(self._wait(saved, tier))
                await asyncio.sleep(chance.choice([0, 0.002, 0.02, 0.1]))

    async def _wait(self, saved: Checkpoint, tier: str) -> None:
        try:
            await saved.reached(tier)
        except TieredCkptError:  # it will not come there
            return
        self._note("acknowledged", step=saved.step, tier=tier)

    def _hear(self, event: Event) -> None:
        if isinstance(event, StepReplicated):
            self._note("acknowledged", step=event.step, tier="replicas")

    def _note(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "rank": self._me.rank, **more})
        journal = os.open(self._me.arguments["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(journal, f"{line}\n".encode())  # at once and in one piece
        os.close(journal)


async def train(me: Rank) -> None:
    """Open the store, and train."""
    async with CheckpointStore.open(config_of(me)) as store:
        await Training(me).run(store)


def main() -> None:
    """Run one rank."""
    with rank_of_this_process() as me:
        os.environ["TIEREDCKPT_NODE"] = me.arguments["nodes"][me.rank]
        asyncio.run(train(me))


if __name__ == "__main__":
    main()
