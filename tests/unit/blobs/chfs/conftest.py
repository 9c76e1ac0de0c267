"""A look-alike of CHFS with three servers, its faults, and stores over it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.lookalike import LookalikeBackDoor, hangs, library, missing
from support.scenes import SOON

from tieredckpt.blobs.chfs.store import ChfsStore

MIB = 1 << 20
SERVERS = 3


class Lookalike:
    """The directory of a look-alike."""

    root = "/job/checkpoints"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.back_door = LookalikeBackDoor(directory, self.root, SERVERS)

    def switch(self, *switches: str) -> None:
        """Put these faults, and no others, in force."""
        draft = self.directory / "switches.draft"
        draft.write_text("\n".join((f"servers = {SERVERS}", *switches)) + "\n")
        (self.directory / "hanging").unlink(missing_ok=True)
        os.replace(draft, self.directory / "switches")

    async def hangs(self, verb: str) -> None:
        """Return when a call of a verb hangs, as the switches in force have it."""
        await hangs(self.directory, verb)


@pytest.fixture
def chfs(tmp_path: Path) -> Lookalike:
    if why := missing():
        pytest.skip(why)
    directory = tmp_path / "chfs"
    directory.mkdir()
    chfs = Lookalike(directory)
    chfs.switch()
    return chfs


@pytest.fixture
async def stores(chfs: Lookalike) -> AsyncIterator[Callable[..., ChfsStore]]:
    """Makes stores over the look-alike, not connected yet, that end with the test."""
    made: list[ChfsStore] = []

    def make(**settings: object) -> ChfsStore:
        defaults = {
            "server": f"directory:{chfs.directory}",
            "library": str(library()),
            "chunk_size": MIB,
            "arena": 8 * MIB,
            "rpc_timeout": 0.3,
            "grace": 0.2,
        }
        store = ChfsStore(chfs.root, **(defaults | settings))
        store._connection.within = SOON  # the worker's process may start slowly
        made.append(store)
        return store

    yield make
    chfs.switch()  # what hangs goes on, so that closing does not wait for it
    for store in made:
        await store.close()


@pytest.fixture
def store(stores: Callable[..., ChfsStore]) -> ChfsStore:
    return stores()
