"""The lease of a tier: a renewed file that names the one process that writes there, and refuses a second one.

On the same machine a holder is alive as long as its process is; elsewhere, and where ``/proc`` hides its process, as
long as it renews its lease. The clock of the store, if it has one, tells the age of a lease, for the clocks of two
machines may differ by hours. Where the writing machine stamps files (Lustre, CephFS, GPFS), clocks may differ by two
thirds of ``ttl``. A lease is no fencing token: a holder that was paused beyond it may finish the put that it had begun.
Before the next commit or deletion it renews, and if another writer took over meanwhile, it first reads anew what the
tier holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from tieredckpt._decoders import UNREADABLE, json_decoder
from tieredckpt.blobs.base import BlobInfo, BlobStore, ListAtOnce
from tieredckpt.blobs.boot import boot_id
from tieredckpt.concurrency import whole
from tieredckpt.errors import Conflict, Corrupt, NoSpace, NotFound, TierUnavailable
from tieredckpt.format import layout

__all__ = ["Holder", "Lease", "decode_holder", "everything_at_once", "holder_of", "lives_here"]

_SIZE_MAX = 4096
_CLOCKS_DIFFER = 3600.0
"""Seconds by which the clock of a store and that of this host differ at most, where that cannot be asked."""
_TORN_PAUSES = (0.0, 0.05, 0.2, 0.5)
"""Seconds before each look at a lease that may be being renewed."""


_Epoch = Annotated[float, msgspec.Meta(ge=0.0, le=2.0**37)]
"""Seconds since the epoch, of years that a calendar has names for."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has a lease."""

    host: str
    machine: str
    """Boot id and process namespace: within one, process numbers can be compared."""
    process: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    process_started: str
    taken_at: _Epoch
    renewed_at: _Epoch

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.taken_at))
        return f"process {self.process} on {self.host}, since {since}"


def decode_holder(data: bytes) -> Holder | None:
    """The holder that a lease names; None for what is torn, or no lease at all."""
    try:
        return json_decoder(Holder).decode(data)
    except UNREADABLE:
        return None


def _machine() -> str:
    found = [socket.gethostname(), boot_id()]
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(found)


_UNKNOWN = "unknown"


def _started(process: int) -> str | None:
    """When a process of this machine started, in its kernel's terms; None when there is none (any more).

    `_UNKNOWN` where that is not shown, as of other users' processes below a ``/proc`` mounted with ``hidepid``.
    """
    try:
        # As bytes: the name of a process is cut to 15 of them, also within a character.
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return _UNKNOWN
    state, *fields = stat.rpartition(b")")[2].decode("ascii").split()
    return None if state in "ZX" else fields[18]


async def everything_at_once(store: BlobStore) -> Sequence[BlobInfo] | None:
    """All that a store holds, where requests are counted and one of them tells; else None."""
    return await store.list_at_once("") if store.traits.remote and isinstance(store, ListAtOnce) else None


_of_this_process: set[str] = set()
"""The keys of the leases that this process holds, from before they are written."""


class Lease:
    """The right to write to one tier, from `acquire` to `release`."""

    def __init__(self, store: BlobStore, tier: str, ttl: float) -> None:
        self.store = store
        """Of the tier; another one when that was opened anew."""
        self._tier = tier
        self._ttl = ttl
        self._key = f"{layout.LEASES}{secrets.token_hex(8)}"
        self._taken_at = time.time()
        self._renewed_at = -math.inf
        self.taken_over = False
        """Whether another writer may have been there since what the tier holds was read."""
        self.stale_holders: list[Holder] = []
        """Holders that died with their lease, found here."""
        self._renewing = asyncio.Lock()

    async def acquire(self) -> Sequence[BlobInfo] | None:
        """Take the lease. Raises `Conflict` naming the holder when a live one is there.

        Returns a listing of the whole tier, if one request gave it along with the leases; else None. If a full device
        has no room for the lease, `renew` takes it later.
        """
        _of_this_process.add(self._key)
        try:
            for found in await self._others():
                raise self._conflict(found)
            self._taken_at = time.time()  # a holder that came while others were looked for is first
            await self._write()
            everything = await everything_at_once(self.store)
            await self._give_way(everything)
            return everything
        except NoSpace:
            raise
        except BaseException:
            await whole(self.release())
            raise

    async def renew(self) -> None:
        """Renew the lease. Raises `Conflict` while another writer that took over is at work."""
        async with self._renewing:  # a slow one would set `taken_over` after another has taken the lease
            try:
                await self.store.stat(self._key)
            except NotFound:
                self.taken_over = True
                self._taken_at = time.time()  # taken for dead and removed: a holder that came since is first now
            await self._write()
            try:
                await self._give_way()
            except Conflict:
                self.taken_over = True
                raise

    async def now(self) -> float:
        """The time by the clock of the store, as of the last renewal; by that of this host where the store has none.

        Raises as `confirm` where another writer has removed the lease.
        """
        try:
            return (await self.store.stat(self._key)).modified or time.time()
        except NotFound:
            await self.renew()
            await self.confirm()
            raise

    @property
    def was_taken(self) -> bool:
        """Whether it was ever written: a full device may have had no room for it."""
        return self._renewed_at != -math.inf

    async def confirm(self, *, deleting: bool = False) -> None:
        """Renew the lease if it may have run out; called before anything that could destroy another writer's work.

        Args:
            deleting: a step is deleted next, which makes room for a lease on a full device.

        Raises:
            Conflict: as `renew`.
            TierUnavailable: another writer has been there; what the tier holds is to be read again.
        """
        if _now() - self._renewed_at > self._ttl * 2 / 3:  # it is renewed twice as often
            try:
                await self.renew()
            except NoSpace:
                if not deleting:
                    raise
                await self._give_way(written=False)
        if self.taken_over and (self.was_taken or not deleting):
            raise TierUnavailable(
                f"tier {self._tier!r} at {self.store.location}: this writer had no lease for a while (it was silent "
                f"for longer than `lease_ttl`, {self._ttl:g} s, or the device had no room for one), and another one "
                "has been there, or may have been; what the tier holds is read again"
            )

    async def release(self) -> None:
        """Release the lease; if it cannot be deleted now, the next process that finds it does so."""
        _of_this_process.discard(self._key)
        await self.store.delete(self._key)

    async def _write(self) -> None:
        holder, now = await asyncio.to_thread(_this_process, self._taken_at), _now()
        await self.store.put(self._key, [msgspec.json.encode(holder)])
        self._renewed_at = now

    async def _others(
        self, listed: Iterable[BlobInfo] | None = None, *, written: bool = False
    ) -> list[tuple[Holder, str]]:
        """The other live holders of leases, with the keys of these; removes stale leases.

        ``listed`` is what the tier holds; None to list its leases. Raises `TierUnavailable` for a listing that lacks
        the own lease, which was ``written`` just before.
        """
        found = []
        infos = [info async for info in self.store.list(layout.LEASES)] if listed is None else tuple(listed)
        if written and all(info.key != self._key for info in infos):
            raise TierUnavailable(
                f"tier {self._tier!r} at {self.store.location}: a listing lacks the lease written just before, "
                "so it may lack steps; the server, or a proxy before it, answers with an old listing or with an error"
            )
        for info in infos:
            if info.key == self._key or not info.key.startswith(layout.LEASES):
                continue
            holder = await self._read(info.key)
            if holder is None:
                if info.modified and await self._age(info) >= self._ttl:  # a crash has left it so
                    await self._remove(info.key)
                continue
            if await asyncio.to_thread(_was_given_back, holder, info.key):
                await self._remove(info.key)
            elif await self._is_alive(holder, info):
                found.append((holder, info.key))
            else:
                await self._remove(info.key)
                self.stale_holders.append(holder)
        return found

    async def _remove(self, key: str) -> None:
        """Remove a lease that holds nothing. Credentials that may not delete leave it."""
        with suppress(TierUnavailable):
            await self.store.delete(key)

    async def _is_alive(self, holder: Holder, info: BlobInfo) -> bool:
        lives = await asyncio.to_thread(_process_lives, holder)
        if lives is not None:
            return lives
        age = await self._age(info) if info.modified else time.time() - holder.renewed_at
        return age < self._ttl

    async def _age(self, info: BlobInfo) -> float:
        """Seconds since another lease was written, by the clock of the store; if its clients stamp files, by the clocks
        of two hosts. If a full device has no room for asking, a lower bound.
        """
        try:
            mine = await self.store.stat(self._key)
        except NotFound:
            try:
                await self.store.put(self._key, [b""])  # what is torn holds nothing yet
            except NoSpace:
                return time.time() - info.modified - _CLOCKS_DIFFER
            mine = await self.store.stat(self._key)
        return mine.modified - info.modified

    async def _read(self, key: str) -> Holder | None:
        """The holder; None when it was released just now, or torn by a crash: neither holds anything.

        Where a put is not atomic, what is torn may be being renewed, so it is looked at again.
        """
        for pause in (0.0,) if self.store.traits.atomic_put else _TORN_PAUSES:
            await asyncio.sleep(pause)
            try:
                data = await self.store.get(key, limit=_SIZE_MAX)
            except NotFound:
                return None
            except Corrupt:
                continue
            if (holder := decode_holder(data)) is not None:
                return holder
        return None

    async def _give_way(self, listed: Iterable[BlobInfo] | None = None, *, written: bool = True) -> None:
        """Refuse to hold the lease beside a writer that took it earlier: of several at the same moment one remains."""
        for holder, key in await self._others(listed, written=written):
            if (holder.taken_at, key) < (self._taken_at, self._key):
                raise self._conflict((holder, key))

    def _conflict(self, found: tuple[Holder, str]) -> Conflict:
        holder, _ = found
        return Conflict(
            f"tier {self._tier!r} at {self.store.location} is being written to by {holder}; close that store first, "
            f"or open this one with read_only=True (a holder on another machine that has died is believed for "
            f"{self._ttl:g} s after its last sign of life)"
        )


def _now() -> float:
    """Seconds since the machine started, those of a suspended one too where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def holder_of(process: int, taken_at: float) -> Holder:
    """A process of this machine that lives now, as a holder since then."""
    return Holder(
        host=socket.gethostname(),
        machine=_machine(),
        process=process,
        process_started=_started(process) or "",
        taken_at=taken_at,
        renewed_at=time.time(),
    )


def lives_here(holder: Holder) -> bool:
    """Whether a holder is a process that lives on this machine."""
    return holder.machine == _machine() and _started(holder.process) == holder.process_started


def _this_process(taken_at: float) -> Holder:
    return holder_of(os.getpid(), taken_at)


def _was_given_back(holder: Holder, key: str) -> bool:
    """Whether a store of this very process was closed while the tier did not answer, and its lease stayed there."""
    return holder.process == os.getpid() and lives_here(holder) and key not in _of_this_process


def _process_lives(holder: Holder) -> bool | None:
    """Whether the holder's process does; None on another machine, and where this user is not shown it."""
    started = _started(holder.process) if holder.machine == _machine() else _UNKNOWN
    return None if started == _UNKNOWN else started == holder.process_started
