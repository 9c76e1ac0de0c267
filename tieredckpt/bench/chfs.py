"""The speed of a `chfs` tier, next to a bare loop over libchfs and to directories.

In each round the same bytes go, in objects of one size, through the tier's worker, through a loop over libchfs with the
same chunk size and threads, and to directories; and a whole checkpoint is promoted and restored. The medians of the
rounds are compared, since a machine's speed varies more from minute to minute than between these.
"""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.bare import BareLoop
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.concurrency import in_thread
from tieredckpt.config import ChfsTier, PosixTier, RamTier, StoreConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.store import CheckpointStore

__all__ = ["ChfsFigures", "measure_chfs"]

_ARRAYS = 64
_OBJECT = 128 << 20

Seconds = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class ChfsFigures:
    """Medians of the rounds."""

    library: str
    servers: int
    chunk_size: int
    threads: int
    nbytes: int
    """Bytes of the objects of a round, and nearly those of the checkpoint."""
    seconds: dict[str, float]
    """Seconds of each contender for ``nbytes``."""
    ratios: dict[str, float]
    """Ratios of speeds; above 1, the first is faster."""


async def measure_chfs(
    tier: ChfsTier, nbytes: int, rounds: int, *, directory: Path | None = None, shared: Path | None = None
) -> ChfsFigures:
    """Measure ``tier`` in a folder of its own beside the store's, which is removed afterwards.

    Args:
        tier: reached through its worker.
        nbytes: of a round, rounded to whole objects.
        rounds: how often everything is done, after once to warm up.
        directory: on the medium that CHFS uses, to measure it without CHFS.
        shared: on the file system that checkpoints would be written to without CHFS.

    Raises:
        Invalid: the tier does not go through a worker.
        TierUnavailable: CHFS cannot be reached, or fails.
    """
    tier = tier.model_copy(update={"path": f"{tier.folder}-bench-{secrets.token_hex(4)}", "capacity": None})
    seconds: Seconds = {}
    async with AsyncExitStack() as stack:
        store = await kind_of(tier).open(tier)
        stack.push_async_callback(store.close)
        if not isinstance(store, ChfsStore):
            raise Invalid(f"tier {tier.name!r} goes through TensorStore's driver; `via = 'worker'` can be measured")
        await store.connect()
        link = store.link
        assert link is not None
        stack.push_async_callback(_tidy, store, tier.folder)
        await link.ask(frames.MakeFolder(tier.folder))  # else the objects of the bare loop may not be listed
        objects = _Objects(nbytes)
        stack.push_async_callback(in_thread, objects.slab.close)
        stores: dict[str, BlobStore] = {"worker": store}
        folders: dict[str, Path] = {}
        for name, parent in (("directory", directory), ("shared", shared)):
            if parent is not None:
                folders[name] = Path(await in_thread(tempfile.mkdtemp, None, "tieredckpt-bench-", parent))
                stack.push_async_callback(in_thread, shutil.rmtree, folders[name])
                # CHFS never syncs either; the shared file system must be as durable as for a checkpoint.
                fsync, direct = (True, None) if name == "shared" else (False, False)
                opened = partial(PosixStore, folders[name] / "objects", fsync=fsync, direct=direct)
                stores[name] = await in_thread(opened)
                stack.push_async_callback(stores[name].close)
        bare = BareLoop(
            link.library,
            tier.server or os.environ["CHFS_SERVER"],
            chunk_size=tier.chunk_size,
            threads=tier.threads,
            nbytes=objects.size,
        )
        stack.enter_context(bare)
        contenders = ["bare", *stores]
        for turn in range(rounds + 1):
            first = turn % len(contenders)  # each contender starts first in turn, to spread effects of the order
            for name in contenders[first:] + contenders[:first]:
                if name == "bare":
                    await in_thread(_bare_round, bare, f"{tier.folder}/bare", objects.count, seconds)
                else:
                    await objects.round(name, stores[name], seconds)
        await _checkpoints("tier", tier, objects.nbytes, rounds, seconds)
        if "shared" in folders:
            posix = PosixTier(name="shared", path=folders["shared"] / "store", survives="site")
            await _checkpoints("shared", posix, objects.nbytes, rounds, seconds)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return ChfsFigures(
        f"{link.version}, {link.library}",
        link.servers,
        tier.chunk_size,
        tier.threads,
        objects.nbytes,
        medians,
        _ratios(medians),
    )


_COMPARED = (
    ("worker_write_over_bare", "write bare", "write worker"),
    ("worker_read_over_bare", "read bare", "read worker"),
    ("promote_over_bare", "write bare", "promote tier"),
    ("restore_over_bare", "read bare", "restore tier"),
    ("worker_write_over_directory", "write directory", "write worker"),
    ("worker_read_over_directory", "read directory", "read worker"),
    ("worker_write_over_shared", "write shared", "write worker"),
    ("promote_over_shared", "promote shared", "promote tier"),
)


def _ratios(medians: dict[str, float]) -> dict[str, float]:
    return {
        name: medians[other] / medians[mine] for name, other, mine in _COMPARED if other in medians and mine in medians
    }


class _Objects:
    """Objects of one size, written from shared memory and read into it, as with the RAM tier."""

    def __init__(self, nbytes: int) -> None:
        self.size = min(_OBJECT, nbytes)
        self.count = max(1, nbytes // self.size)
        self.nbytes = self.size * self.count
        fd = os.memfd_create("tieredckpt-bench", os.MFD_CLOEXEC)
        os.ftruncate(fd, 2 * self.size)
        self.slab = Slab(fd, 2 * self.size)
        self.slab.reserve(2 * self.size)
        self.slab.prepare(share=1)
        self._content, self._into = self.slab.array[: self.size], self.slab.array[self.size :]
        self._content[:] = np.random.default_rng().integers(0, 256, self.size, dtype=np.uint8)

    async def round(self, name: str, store: BlobStore, seconds: Seconds) -> None:
        """Write all objects and read them back; they are deleted after that."""
        self._into[:] = 0
        begin = time.perf_counter()
        for number in range(self.count):
            await store.put(f"object-{number}", [memoryview(self._content)])
        written = time.perf_counter()
        for number in range(self.count):
            await store.get_into(f"object-{number}", 0, memoryview(self._into))
        read = time.perf_counter()
        if not np.array_equal(self._content, self._into):
            raise Corrupt(f"{store.location}: other bytes came back than were written")
        for number in range(self.count):
            await store.delete(f"object-{number}")
        _note(seconds, f"write {name}", written - begin)
        _note(seconds, f"read {name}", read - written)


async def _tidy(store: ChfsStore, path: str) -> None:
    await store.connect()  # again, if the failure has ended the worker
    assert store.link is not None
    with suppress(NotFound):  # nothing was written yet
        await _erase(store.link, path)


async def _erase(link: Link, path: str) -> None:
    """Remove ``path`` and everything below it; no other process may write there."""
    for name, kind, *_ in await link.ask(frames.ListFolder(path)):
        below = f"{path}/{name}"
        if kind == "folder":
            await _erase(link, below)
        else:
            await link.ask(frames.Remove(below))
    await link.ask(frames.RemoveFolder(path))


def _bare_round(bare: BareLoop, path: str, count: int, seconds: Seconds) -> None:
    paths = [f"{path}-{number}" for number in range(count)]
    _note(seconds, "write bare", sum(map(bare.write, paths)))
    _note(seconds, "read bare", sum(map(bare.read, paths)))
    for each in paths:
        bare.remove(each)


async def _checkpoints(name: str, tier: ChfsTier | PosixTier, nbytes: int, rounds: int, seconds: Seconds) -> None:
    """Save a checkpoint, promote it from RAM to ``tier``, and restore it from there into existing arrays."""
    state = await in_thread(_state, nbytes)
    into = {key: np.zeros_like(array) for key, array in state.items()}
    ram = RamTier(name="ram", capacity=nbytes * 9 // 4 + (64 << 20), on_close="release")
    config = StoreConfig(name=f"bench-{secrets.token_hex(4)}", tiers=(ram, tier))
    async with CheckpointStore.open(config) as store:
        for step in range(rounds + 1):
            for key in state:
                state[key] += np.float32(1)
            checkpoint = await store.save(step, state)
            begin = time.perf_counter()
            await checkpoint.reached(tier.name)
            _note(seconds, f"promote {name}", time.perf_counter() - begin)
            await store.evict(step, "ram")
            begin = time.perf_counter()
            restored = await store.restore(into=into, resume=False)
            _note(seconds, f"restore {name}", time.perf_counter() - begin)
            _compare(state, into, None if restored is None else restored.sources, tier.name)


def _compare(
    state: dict[str, npt.NDArray[np.float32]],
    into: dict[str, npt.NDArray[np.float32]],
    sources: object,
    tier: str,
) -> None:
    for key, array in state.items():
        if not np.array_equal(array, into[key]):
            raise Corrupt(f"tier {tier!r}: {key} was not restored as it was saved (from {sources})")


def _state(nbytes: int) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng()
    rows = max(1, nbytes // _ARRAYS // 4096)
    return {f"layer{number}": rng.random((rows, 1024), dtype=np.float32) for number in range(_ARRAYS)}


def _note(seconds: Seconds, name: str, value: float) -> None:
    seconds.setdefault(name, []).append(value)
