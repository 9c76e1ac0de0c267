"""The RAM of ranks on this machine, for a process that works alone: it counts the steps that are whole in it.

A process that writes gives the memory back once newer steps are as safe, for no save can use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tieredckpt.blobs.ram.folder import RANK_FOLDER, folders_in, locked, remove
from tieredckpt.blobs.ram.reader_locks import Retired
from tieredckpt.concurrency import being_cancelled, in_thread
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.evictor import Evictor
from tieredckpt.engine.keeping.policies import waits_for_promotion
from tieredckpt.engine.keeping.safety import why_kept
from tieredckpt.engine.opening.ram import is_of_a_copy
from tieredckpt.engine.opening.stale import stale_steps
from tieredckpt.engine.ranks.commit.parts import encode_own, whole_steps
from tieredckpt.engine.ranks.node_ram import folders_of_ranks, look_into, near
from tieredckpt.engine.state.membership import Role
from tieredckpt.engine.state.state import Near, RamOfRanksStep, State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["RamOfRanks"]

_log = logging.getLogger("tieredckpt")

_Commits = tuple[tuple[str, int, int], ...]
"""The commits in a folder: path, inode and time of change of each manifest."""


@dataclass(slots=True)
class _Folder:
    """The RAM of one rank, as it was read."""

    commits: _Commits
    keys: dict[StepId, str]
    """Of the index nodes of each step of which it has a part; empty where that cannot be read."""


class RamOfRanks:
    """The RAM of ranks on this machine, as a process that works alone sees it. Lives on the engine's loop."""

    def __init__(self, state: State, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor
        self._guards_folders = asyncio.Lock()
        self._folders: dict[Path, _Folder] = {}
        self._whole: dict[StepId, RamOfRanksStep] = {}
        """The steps that are whole in them, stale ones included."""
        self._last = 0
        """The highest serial of a step in them, whole or not."""
        self._not_before: dict[StepId | Path, float] = {}
        """When steps and folders are tried again that could not be taken out or freed (monotonic seconds)."""
        self._seen: Mapping[Path, _Commits] = {}
        """The commits in every folder when these were read last."""

    # -- which steps there are ----------------------------------------------------------------------------

    async def look(self) -> None:
        """Count a step as held by RAM if all its parts are in RAM folders of this machine, and no more if one has gone.

        A stale one does not count: the training has gone on from an older step, elsewhere or in one process.

        Raises `TierUnavailable` if no file can be opened now; what is known stays.
        """
        state, membership = self._state, self._state.membership
        if state.config.ram is None or state.identity.marker is None:
            return
        if membership.size > 1 or membership.role is Role.AGENT:
            return  # the ranks do it together, and an agent reads its trainer's RAM alone
        async with self._guards_folders:
            try:
                seen = await in_thread(self._look)
                if membership.role is Role.TRAINER:
                    _warn_beside_agent([folder for folder, commits in seen.items() if commits])
                elif seen != self._seen:
                    all_read = await self._read(seen if seen and not await is_of_a_copy(state) else {})
                    self._seen = seen if all_read else {}  # the rest may be read the next time
            finally:
                self.count()

    def _look(self) -> dict[Path, _Commits]:
        """The commits in every folder of a rank. Blocks."""
        folders = folders_of_ranks(self._state)  # perhaps with that of this process, which has no part of a step
        return {each: _commits(each) for each in folders if each.name.startswith(RANK_FOLDER)}

    async def _read(self, seen: Mapping[Path, _Commits]) -> bool:
        """Find out which steps are whole; returns whether all parts could be read, or are damaged."""
        state, folders, all_read = self._state, dict[Path, _Folder](), True
        parts: dict[StepId, dict[str, dict[int, bytes]]] = {}
        for folder, commits in seen.items():
            found = folders[folder] = _Folder(commits, dict.fromkeys(_steps(folder, commits), ""))
            if (tier := await look_into(state, folder)) is None:
                if commits:
                    _log.log(await _level(folder), "the RAM of a rank at %s cannot be read", folder)
                all_read = all_read and not commits
                continue
            try:
                for step, held in tuple(tier.steps.held.items()):
                    found.keys[step] = held.btree_key
                    try:
                        record, part = await _part(state, tier, step)
                    except TieredCkptError as error:
                        level = await _level(folder, error)
                        _log.log(level, "%s cannot be read in the RAM of a rank: %s", step, error)
                        all_read = all_read and isinstance(error, Corrupt | NotFound)
                        continue
                    parts.setdefault(step, {}).setdefault(record.run, {})[record.rank or 0] = part
            finally:
                await tier.disconnect()
        whole: dict[StepId, RamOfRanksStep] = {}
        async for index in whole_steps(parts, state.pool, level=logging.INFO if state.read_only else logging.WARNING):
            step = index.record.id
            reads, takes_out = partial(self._near, step), partial(self._take_out_step, step)
            whole[step] = RamOfRanksStep(step, state.tiers[0], index, reads, takes_out)
        self._folders, self._whole = folders, whole
        self._last = max((step.serial for found in folders.values() for step in found.keys), default=0)
        self._not_before.clear()
        return all_read

    def count(self) -> None:
        """Count the steps that are whole and not stale as held, and no others."""
        state, steps = self._state, self._state.tiers[0].steps
        # No save takes the serial of a step that is there, whole or not.
        state.branch.last_serial = max(state.branch.last_serial, self._last)
        if not self._whole and not state.ram_of_ranks:
            return
        stale = stale_steps([found.index.record for found in self._whole.values()], state.tiers)
        counted = {step: found for step, found in self._whole.items() if step not in stale and not steps.has_own(step)}
        for step in state.ram_of_ranks.keys() - counted.keys():
            if not steps.has_own(step):
                steps.drop(step)
        state.ram_of_ranks.clear()
        state.ram_of_ranks.update(counted)
        for step, found in counted.items():
            steps.held.setdefault(step, Held(found.index.record, ""))

    @asynccontextmanager
    async def _near(self, step: StepId) -> AsyncIterator[Near]:
        """See `MergedRam.near`; this process does not evict the step meanwhile."""
        steps = self._state.tiers[0].steps
        steps.begin_read(step)
        try:
            async with near(self._state, step) as found:
                yield found
        finally:
            steps.end_read(step)
            self._state.changed.notify()

    # -- giving it back -----------------------------------------------------------------------------------

    async def give_back(self) -> None:
        """Give memory back when nothing needs it any more, until cancelled."""
        while not self._state.read_only and not being_cancelled():
            await self._state.changed.until(lambda: bool(self._to_evict() or self._unused()))
            for step in self._to_evict():
                try:
                    await self._evictor.evict(step, self._state.tiers[0])
                except TieredCkptError as error:
                    _log.info("%s stays in the RAM of ranks: %s", step, error)
                    self._put_off(step)
            for folder in self._unused():
                await self._free(folder)

    def _to_evict(self) -> list[StepId]:
        """The steps that may leave RAM. Till this process has saved a newer one, a restore takes them from there."""
        state, first = self._state, self._state.tiers[0]
        return [
            step
            for step in state.ram_of_ranks
            if self._may_go(step)
            and first.steps.keeps(step)
            and not (waits_for_promotion(state, step, first) or why_kept(state, step, first))
        ]

    def _unused(self) -> list[Path]:
        """The folders without a step that counts, or that is as safe as the newest elsewhere."""
        state, first = self._state, self._state.tiers[0]
        return [
            folder
            for folder, found in self._folders.items()
            if self._may_go(folder)
            and not any(step in state.ram_of_ranks or why_kept(state, step, first) for step in found.keys)
        ]

    def _may_go(self, what: StepId | Path) -> bool:
        """Whether a newer save than all that is there is committed, and nothing has kept ``what`` a moment ago."""
        newest = self._state.branch.newest
        is_overtaken = newest is not None and newest.serial > self._last
        return is_overtaken and time.monotonic() >= self._not_before.get(what, 0.0)

    def _put_off(self, what: StepId | Path) -> None:
        self._not_before[what] = time.monotonic() + limits.in_force.last_retry

    async def _free(self, folder: Path) -> None:
        async with self._guards_folders:
            if folder not in self._unused():
                return  # a look has found more there meanwhile, or what was as safe is no more
            try:
                await in_thread(_free, folder, self._folders[folder].commits)
            except (OSError, TieredCkptError) as error:
                _log.info("the RAM of a rank at %s stays: %s", folder, error)
                self._put_off(folder)
            else:
                del self._folders[folder]

    async def _take_out_step(self, step: StepId) -> None:
        """Take a step out of all folders, or of none where another process uses one: `Conflict`, `TierUnavailable`."""
        async with self._guards_folders:
            having = {folder: found for folder, found in self._folders.items() if step in found.keys}
            try:
                left = await in_thread(_take_out, having, step)
            except OSError as error:
                raise TierUnavailable(f"{step} cannot be taken out of the RAM of ranks: {error.strerror}") from error
            for folder, found in having.items():
                found.commits = left[folder]
                del found.keys[step]
            self._whole.pop(step, None)


async def _part(state: State, tier: Tier, step: StepId) -> tuple[StepRecord, bytes]:
    index = await step_index.load(tier, step)
    return index.record, await in_thread(encode_own, index, pool=state.pool)


async def _level(folder: Path, error: TieredCkptError | None = None) -> int:
    """How to log that something cannot be read: a rank that runs evicts steps, and one that ends gives its RAM back."""
    gone = isinstance(error, NotFound) or not await in_thread(folder.is_dir)
    return logging.DEBUG if gone else logging.WARNING


def _warn_beside_agent(folders: Collection[Path]) -> None:
    if folders:
        _log.warning(
            "the RAM that ranks left at %s is not read beside an agent, which could not promote what is there: open "
            "the store once without `promote_in = 'agent'` to go on from it",
            ", ".join(map(str, folders)),
        )


def _commits(folder: Path) -> _Commits:
    found = []
    for each in sorted(folders_in(folder / layout.STEPS)):
        manifest = each / layout.MANIFEST
        with suppress(OSError):  # there is none, or it has just been evicted
            seen = manifest.stat()
            found.append((str(manifest), seen.st_ino, seen.st_mtime_ns))
    return tuple(found)


def _steps(folder: Path, commits: _Commits) -> list[StepId]:
    found = (layout.parse_step_folder(f"{Path(path).parent.relative_to(folder)}/") for path, *_ in commits)
    return [StepId(serial, step) for step, serial in filter(None, found)]


@contextmanager
def _unchanged(folders: Mapping[Path, _Commits]) -> Iterator[None]:
    """Hold the locks of folders meanwhile. Raises `Conflict` where a process writes, or has written, `OSError`."""
    there = [folder for folder in folders if folder.is_dir()]  # to lock one that has gone would make it
    with locked(there):
        for folder in there:
            if _commits(folder) != folders[folder]:
                raise Conflict(f"another process has written to the RAM at {folder} meanwhile")
        yield


def _free(folder: Path, commits: _Commits) -> None:
    """Free the RAM of a rank; who reads there goes on, for memory that is mapped stays. Blocks; raises as `_unchanged`.

    ``commits`` are those that were there.
    """
    with _unchanged({folder: commits}):
        if folder.is_dir():
            remove(folder)


def _take_out(folders: Mapping[Path, _Folder], step: StepId) -> dict[Path, _Commits]:
    """Take a step out of the RAM of ranks; returns the commits that are left. Blocks; raises as `_unchanged`."""
    with _unchanged({folder: found.commits for folder, found in folders.items()}):
        for folder, found in folders.items():
            retired = Retired(folder)
            retired.take_away(step.manifest_key, found.keys[step])
            retired.close()
            if found.keys[step]:
                (folder / found.keys[step]).unlink(missing_ok=True)
        return {folder: _commits(folder) for folder in folders}
