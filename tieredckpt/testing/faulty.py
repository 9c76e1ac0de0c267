"""A blob store that fails by script, around one that works.

::

    store = Faulty(PosixStore(tmp_path))
    store.fail("put", NoSpace("full"), key="packs/*", nth=2)    # the second put of a pack
    store.fail("put", TierUnavailable("no answer"), after=True) # done, but the answer is lost
    held = store.hold("get_into")                               # hangs there ...
    await held.reached()
    held.release()                                              # ... until now
    store.cut("get_into", 100)                                  # fills 100 bytes, raises ShortRead
    store.flip("get", bit=7)                                    # returns wrong bytes, and no error
    store.delay("put", 0.5, times=None)                         # every put takes so much longer
    store.full_after(1 << 20)                                   # puts find the device full after so much
    store.come_and_go(up=5, down=3)                             # of eight calls, the last three fail
    store.kill(); store.revive()                                # the tier is dead, and comes back
    store.struck["wrong bytes", "get"]                          # how many calls met that

A script may be written from any thread, before or while the store is in use. ``verb`` is a verb's name or
``"*"``, ``key`` a pattern of `fnmatch`. ``nth`` counts the matching calls from 1 on; ``times`` says how many
in a row are affected, None all that follow. Listing counts once for each object, and once for its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, get_args

import numpy as np

from tieredckpt.blobs.base import BlobStore, Stretch, span
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.concurrency import outlast, shielded
from tieredckpt.errors import NoSpace, ShortRead, TierUnavailable
from tieredckpt.format.digest import copy_start_and_digest

__all__ = ["KINDS", "Faulty", "Hold", "Kind"]

T = TypeVar("T")

Kind = Literal["error", "no space", "answer lost", "hang", "delay", "short read", "wrong bytes", "gone"]
"""Kinds of faults: a dead or absent tier is gone; each other kind is a line of a script."""

KINDS: tuple[Kind, ...] = get_args(Kind)


class Hold:
    """A place where calls wait; made by `Faulty.hold`. Safe to use from any thread."""

    def __init__(self, *, stubborn: bool) -> None:
        self._stubborn = stubborn
        self._reached: Future[None] = Future()
        self._released: Future[None] = Future()
        self._guards_futures = threading.Lock()

    async def reached(self) -> None:
        """Wait until a call waits here."""
        await shielded(asyncio.wrap_future(self._reached))

    def wait(self, timeout: float) -> None:
        """As `reached`, from a thread without an event loop; raises `TimeoutError` after ``timeout`` seconds."""
        self._reached.result(timeout)

    def release(self) -> None:
        """Release the calls that wait; later calls pass."""
        self._resolve(self._released)

    @property
    def is_released(self) -> bool:
        """Whether calls pass without waiting."""
        return self._released.done()

    def _resolve(self, future: Future[None]) -> None:
        with self._guards_futures:
            if not future.done():
                future.set_result(None)

    async def stop_here(self) -> None:
        """Wait at this place until it is released."""
        self._resolve(self._reached)
        released = asyncio.wrap_future(self._released)
        await (outlast(released) if self._stubborn else shielded(released))


@dataclass(frozen=True, slots=True)
class _Error:
    error: Exception


@dataclass(frozen=True, slots=True)
class _Cut:
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Flip:
    bit: int


@dataclass(frozen=True, slots=True)
class _Delay:
    seconds: float


_Effect = _Error | _Cut | _Flip | _Delay | Hold


@dataclass(slots=True)
class _Fault:
    """One line of the script; ``skip`` and ``left`` count down."""

    verb: str
    key: str
    when: Literal["before", "data", "after"]
    skip: int
    left: int | None
    effect: _Effect

    def strikes(self, operation: Operation, when: str) -> bool:
        if self.when != when or self.left == 0:
            return False
        if self.verb not in ("*", operation.verb) or not fnmatchcase(operation.key, self.key):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.left is not None:
            self.left -= 1
        return True


class Faulty(Forward):
    """A store with a script of faults; without a script it behaves as the inner store.

    Args:
        inner: the store that does the work.
        remembered: how many calls `calls` goes back; None for all of them, which takes memory.
    """

    _listed_at_once = 1

    def __init__(self, inner: BlobStore, *, remembered: int | None = None) -> None:
        super().__init__(inner)
        self._guards_script = threading.Lock()
        self._script: list[_Fault] = []
        self._calls: deque[Operation] = deque(maxlen=remembered)
        self._made = 0
        self._struck: Counter[tuple[Kind, str]] = Counter()
        self._dead: Exception | None = None
        self._room: int | None = None
        self._rhythm: tuple[int, int, int] | None = None
        """Calls that pass, calls that fail, and how many calls there were before."""

    @property
    def calls(self) -> tuple[Operation, ...]:
        """Every call so far, including failed ones, or the last ones that are remembered."""
        with self._guards_script:
            return tuple(self._calls)

    @property
    def struck(self) -> Counter[tuple[Kind, str]]:
        """How many calls met a fault so far, by its kind and their verb."""
        with self._guards_script:
            return Counter(self._struck)

    def fail(
        self,
        verb: str,
        error: Exception,
        *,
        key: str = "*",
        nth: int = 1,
        times: int | None = 1,
        after: bool = False,
    ) -> None:
        """Raise ``error`` instead of the work, or ``after`` it is done."""
        self._add(verb, key, nth, times, "after" if after else "before", _Error(error))

    def hold(
        self,
        verb: str,
        *,
        key: str = "*",
        nth: int = 1,
        times: int | None = 1,
        after: bool = False,
        stubborn: bool = False,
    ) -> Hold:
        """Make calls wait before their work, or ``after`` it; ``stubborn`` ones even when cancelled."""
        hold = Hold(stubborn=stubborn)
        self._add(verb, key, nth, times, "after" if after else "before", hold)
        return hold

    def cut(self, verb: str, nbytes: int, *, key: str = "*", nth: int = 1, times: int | None = 1) -> None:
        """Read at most ``nbytes``: `get` returns so many, `get_into` fills so many and raises `ShortRead`."""
        self._add(verb, key, nth, times, "data", _Cut(nbytes))

    def flip(self, verb: str, bit: int, *, key: str = "*", nth: int = 1, times: int | None = 1) -> None:
        """Invert a bit of the data that `get` or `get_into` reads; the bit's number counts modulo the length."""
        self._add(verb, key, nth, times, "data", _Flip(bit))

    def delay(self, verb: str, seconds: float, *, key: str = "*", nth: int = 1, times: int | None = 1) -> None:
        """Make calls wait for so long before their work, unless they are cancelled."""
        self._add(verb, key, nth, times, "before", _Delay(seconds))

    def come_and_go(self, *, up: int, down: int) -> None:
        """Pass the next ``up`` calls, fail the ``down`` calls after them as `kill` does, and repeat until `clear`."""
        with self._guards_script:
            self._rhythm = (up, down, self._made)

    def full_after(self, nbytes: int | None) -> None:
        """Store ``nbytes`` more, and raise `NoSpace` for a put that does not fit; None: no bound."""
        with self._guards_script:
            self._room = nbytes

    def kill(self, error: Exception | None = None) -> None:
        """Make every verb raise ``error``, a `TierUnavailable` by default, until `revive`."""
        with self._guards_script:
            self._dead = error or TierUnavailable(f"the store at {self.location} is dead by script")

    def revive(self) -> None:
        """Undo `kill`; the rest of the script stays."""
        with self._guards_script:
            self._dead = None

    def clear(self) -> None:
        """Forget the script; calls that are held stay so until they are released."""
        with self._guards_script:
            self._script.clear()
            self._dead = self._room = self._rhythm = None

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        with self._guards_script:
            gone = self._is_gone(self._made)
            self._made += 1
            self._calls.append(operation)
        await self._meet(operation, "before")
        with self._guards_script:
            if self._dead is not None:
                self._struck["gone", operation.verb] += 1
                raise self._dead
            if gone:
                self._struck["gone", operation.verb] += 1
                raise TierUnavailable(f"the store at {self.location} is gone for a while, by script")
            if operation.verb == "put" and self._room is not None:
                if operation.nbytes > self._room:
                    self._struck["no space", "put"] += 1
                    raise NoSpace(f"{operation.key} does not fit into {self.location}: {self._room} bytes left")
                self._room -= operation.nbytes
        result = await call()
        await self._meet(operation, "after")
        return result

    def _is_gone(self, call: int) -> bool:
        if self._rhythm is None:
            return False
        up, down, begin = self._rhythm
        return (call - begin) % (up + down) >= up

    async def get(self, key: str, *, limit: int) -> bytes:
        data = await super().get(key, limit=limit)
        for effect in self._due(Operation("get", key, limit), "data"):
            match effect:
                case _Cut(nbytes) if nbytes < len(data):
                    self._count("short read", "get")
                    data = data[:nbytes]
                case _Flip(bit) if data:
                    self._count("wrong bytes", "get")
                    changed = bytearray(data)
                    _invert(changed, bit)
                    data = bytes(changed)
        return data

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        await self._get_into(key, offset, into, self._due(Operation("get_into", key, into.nbytes), "data"))

    async def _get_into(self, key: str, offset: int, into: memoryview, effects: Sequence[_Effect]) -> None:
        keep = min([len(into), *(effect.nbytes for effect in effects if isinstance(effect, _Cut))])
        await super().get_into(key, offset, into[:keep])
        for effect in effects:
            if isinstance(effect, _Flip) and keep:
                self._count("wrong bytes", "get_into")
                _invert(into[:keep], effect.bit)
        if keep < len(into):
            self._count("short read", "get_into")
            raise ShortRead(f"{key} ended after {keep} of {len(into)} bytes, by script")

    async def get_digested(self, key: str, stretches: Sequence[Stretch]) -> Sequence[bytes]:
        """Read and digest; the script counts it as one `get_into` from the first stretch to the last."""
        effects = self._due(Operation("get_into", key, span(stretches)), "data")
        if self.traits.digested_reads and not effects:
            return await super().get_digested(key, stretches)
        first, memory = stretches[0].offset, np.zeros(span(stretches), dtype=np.uint8)
        await self._get_into(key, first, memoryview(memory), effects)
        return [
            copy_start_and_digest(memory[at : at + nbytes], np.frombuffer(into, dtype=np.uint8))
            for at, nbytes, into in ((offset - first, nbytes, into) for offset, nbytes, into in stretches)
        ]

    def _add(
        self,
        verb: str,
        key: str,
        nth: int,
        times: int | None,
        when: Literal["before", "data", "after"],
        effect: _Effect,
    ) -> None:
        with self._guards_script:
            self._script.append(_Fault(verb, key, when, nth - 1, times, effect))

    def _due(self, operation: Operation, when: str) -> list[_Effect]:
        with self._guards_script:
            return [fault.effect for fault in self._script if fault.strikes(operation, when)]

    async def _meet(self, operation: Operation, when: str) -> None:
        effects = self._due(operation, when)
        for effect in effects:
            if isinstance(effect, Hold):
                if not effect.is_released:
                    self._count("hang", operation.verb)
                await effect.stop_here()
            elif isinstance(effect, _Delay):
                self._count("delay", operation.verb)
                await asyncio.sleep(effect.seconds)
        for effect in effects:
            if isinstance(effect, _Error):
                full = isinstance(effect.error, NoSpace)
                self._count("answer lost" if when == "after" else "no space" if full else "error", operation.verb)
                raise effect.error

    def _count(self, kind: Kind, verb: str) -> None:
        with self._guards_script:
            self._struck[kind, verb] += 1


def _invert(data: bytearray | memoryview, bit: int) -> None:
    at = bit % (8 * len(data))
    data[at // 8] ^= 1 << (at % 8)
