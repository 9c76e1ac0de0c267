"""Lazy saves: copy while the trainer goes on, and find arrays that changed too early.

The trainer confirms such a save before it changes the arrays, at a moment when nothing changes them: by
`Checkpoint.captured`, by the step of a torch optimizer, or by its next call of the store. Only then are the arrays
compared with what they were, and the save is committed: a framework may count a change when it has ended, so that its
counter tells nothing during the change.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.loop import EngineLoop, Latch
from tieredckpt.engine.saving.capture import Capture
from tieredckpt.engine.saving.snapshot import Digests, Located, Snapshot
from tieredckpt.errors import Invalid, TieredCkptError
from tieredckpt.tree.arrays import device_view, host_view
from tieredckpt.tree.changes import before_each_step, stamp, version
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["DigestGuard", "LazyCapture"]

_SAMPLE = 512
"""Bytes at either end of an array on the host that are compared."""
_SAMPLED_FROM = 4096
"""Bytes from which on an array is sampled; smaller ones are compared as a whole."""


class DigestGuard:
    """Digests of the arrays before the copy, to be compared with those of the copy (``lazy_guard = "digests"``)."""

    def __init__(self, leaves: Sequence[ArrayLeaf], digest: Callable[[Sequence[ArrayLeaf]], Digests]) -> None:
        """Blocks, as ``digest`` does, which gives the digests of leaves as they are when it is called."""
        self._leaves = {leaf.key: leaf for leaf in leaves}
        self._digest = digest
        self._before = digest(leaves)

    async def changed(self, copied: Digests) -> list[str]:
        """The arrays whose copied bytes are not those from before."""
        # Of arrays that ranks divide, this rank copied a share, in other cells: compare what these arrays are now.
        divided = dict.fromkeys(key for key, _, _ in self._before.keys() - copied.keys())
        now = copied | await in_thread(self._digest, [self._leaves[key] for key in divided])
        return [self._leaves[place[0]].array for place, digest in self._before.items() if now[place] != digest]


class LazyCapture(Capture):
    """The capture of a lazy save: copying, then *copied*, then *confirmed* by the trainer, who may change the arrays.

    Made on the trainer's thread. `copied` and `ended` are the engine's; the rest may be called from any thread.
    """

    def __init__(self, loop: EngineLoop, step: int, leaves: Sequence[ArrayLeaf], guard: DigestGuard | None) -> None:
        """Take fingerprints of the arrays as they are now; ``loop`` is the engine's, and ``step`` for messages."""
        # Not the store's own `EngineLoop`: a store that nobody else refers to is to be closed.
        self._loop, self._step, self._guard = EngineLoop(loop.thread), step, guard
        self._before = [(leaf, _fingerprint(leaf)) for leaf in leaves]
        self._copied = Latch()
        self._past_ram = False
        self._confirmed = Latch()
        self._error: Exception | None = None
        self._guards_outcome = threading.Lock()
        self._forget_steps = before_each_step(leaves, self._before_step)

    @property
    def arrays_may_change(self) -> bool:
        return self._confirmed.is_open

    # -- of the engine ------------------------------------------------------------------------------------

    async def copied(self, snapshot: Snapshot, located: Located, *, past_ram: bool) -> None:
        """Wait, after the copy, until the trainer has confirmed it. Raises `Invalid`, naming arrays that changed."""
        self._past_ram = past_ram
        guard = self._guard  # which `ended` forgets, on another thread
        if guard is not None and not self._confirmed.is_open:
            self._fail(await guard.changed(snapshot.digests_copied(located)))
        self._copied.open()
        await _opened(self._confirmed)
        if self._error is not None:
            raise self._error

    def ended(self, error: Exception | None) -> None:
        """The save has ended, with that error if any: nobody needs to wait for its copy any more."""
        with self._guards_outcome:
            if self._error is None:
                self._error = error
        self._forget_steps()
        self._copied.open()
        self._confirmed.open()
        self._before, self._guard = [], None  # whoever keeps the checkpoint keeps no arrays

    # -- of the trainer -----------------------------------------------------------------------------------

    async def captured(self, *, only_past_ram: bool = False) -> None:
        """Return when the arrays may change; called while nothing changes them.

        ``only_past_ram``: confirm the save only if it was copied to a slower tier, and so keeps other steps waiting.

        Raises:
            Invalid: an array, which is named, changed before.
            TieredCkptError: what else the save failed with until now.
        """
        begin = time.monotonic()
        self._loop.thread.check_process()
        await _opened(self._copied)  # and no call of the loop, which a store that is closing refuses
        if self._past_ram or not only_past_ram:
            self._confirm(time.monotonic() - begin)

    def captured_blocking(self) -> None:
        """`captured` without an event loop."""
        begin = time.monotonic()
        self._loop.check_thread()
        self._loop.thread.check_process()
        self._loop.thread.wait_for(self._copied)
        self._confirm(time.monotonic() - begin)

    def _before_step(self) -> None:
        with suppress(TieredCkptError):  # a save that failed has told so, and training goes on
            self.captured_blocking()

    def _confirm(self, waited: float) -> None:
        """Confirm the save, which is then committed, or fails. Raises its error."""
        with self._guards_outcome:
            if not self._confirmed.is_open:
                self.stall = (self.stall or 0.0) + waited
        if not self._confirmed.is_open:
            self._fail([leaf.array for leaf, before in self._before if not _is_unchanged(leaf, before)])
            self._confirmed.open()
            self._forget_steps()  # only now: a step meanwhile confirms it as well, before it changes what is compared
        if self._error is not None:
            raise self._error

    def _fail(self, changed: Sequence[str]) -> None:
        keys = list(dict.fromkeys(changed))
        with self._guards_outcome:
            if keys and self._error is None and not self._confirmed.is_open:
                self._error = Invalid(
                    f"step {self._step}: {', '.join(map(repr, keys[:5]))} ({len(keys)} in all) changed before the copy "
                    f"of capture='lazy' had ended, so nothing was saved; call captured() before anything changes the "
                    f"state, or use capture='copy'"
                )


_Fingerprint = tuple[object, bytes | None]


def _is_unchanged(leaf: ArrayLeaf, before: _Fingerprint) -> bool:
    try:
        return _fingerprint(leaf) == before
    except Exception:  # of its framework: its memory is gone, or its device
        return False


def _fingerprint(leaf: ArrayLeaf) -> _Fingerprint:
    """What shows a change of an array: its version, if its framework counts; some bytes, on the host; its address, on a
    device, for giving memory back, as by ``untyped_storage().resize_(0)``, counts as no change.

    Fused optimizers and distributed tensors of torch change arrays without counting, and NumPy counts nothing. But
    training changes all of an array, or most of it.
    """
    if device_view(leaf) is not None:
        return stamp(leaf) or version(leaf), None
    if leaf.kind not in ("numpy", "torch") or not getattr(leaf.source, "is_cpu", True):
        return version(leaf), None
    view = host_view(leaf)
    if view.nbytes <= _SAMPLED_FROM:
        return version(leaf), view.tobytes()
    items = max(1, _SAMPLE // view.itemsize)  # through `flat`, which copies no more of an array that is not contiguous
    return version(leaf), view.flat[:items].tobytes() + view.flat[-items:].tobytes()


async def _opened(latch: Latch) -> None:
    """Await a latch, on any loop."""
    loop, opened = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop was closed while it waited
            loop.call_soon_threadsafe(opened.set)

    latch.then(wake)
    await opened.wait()
