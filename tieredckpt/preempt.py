"""Spot machines and job time limits: on SIGTERM, the newest step is made durable before the time runs out.

::

    with CheckpointStore.open("ckpt.toml").sync() as store, preemption(store, seconds=100) as notice:
        for step in ...:
            state = train(state)
            if store.due(step) or notice.raised:
                store.save(step, state)
            if notice.raised:
                break

The warning raises the signal ``"preempt"`` for the policies, and the newest step is promoted at once, behind the
training, to the tier that survives most; an older step that is on its way there gives way. A block that was warned
ends with `SystemExit` once that tier has the newest step: with the status 143, that of a process which SIGTERM ended.
If the time runs out first, the exit's message says so, and what was kept where. An exception that ends the block goes
on, and the outcome is in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from tieredckpt.errors import Closed, Invalid, TieredCkptError
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncStore

if TYPE_CHECKING:
    from tieredckpt.blobs.base import Survives
    from tieredckpt.engine.tier.tier import Tier
    from tieredckpt.format.manifest import StepId

__all__ = ["EXIT_STATUS", "Preemption", "preemption"]

EXIT_STATUS = 128 + signal.SIGTERM
"""Of a process that made its newest step durable in time: what a shell shows for one that SIGTERM ended."""

_TRY_AGAIN = 1.0
"""Seconds after which a promotion that failed is tried again, if nothing has changed before."""


_log = logging.getLogger("tieredckpt")


def preemption(
    store: CheckpointStore | SyncStore,
    *,
    seconds: float = 100.0,
    tier: str | None = None,
    name: str = "preempt",
    on: signal.Signals = signal.SIGTERM,
) -> Preemption:
    """Train inside this context: when a signal warns of the end, the newest step is made durable.

    Args:
        store: an open store; close it after this context.
        seconds: time limit from the warning on; less than the machine gives, for the process must end too.
        tier: the tier to promote to; None for the nearest of those that survive most.
        name: of the signal that is raised for policies.
        on: the signal of the operating system that warns.

    Raises:
        Invalid: no positive time or no name; entered twice, or not in the main thread, which gets the signals.
        NotFound: there is no such tier.
    """
    return Preemption(store._store if isinstance(store, SyncStore) else store, seconds, tier, name, on)


class Preemption:
    """Context of a training that may be warned; made by `preemption`."""

    def __init__(self, store: CheckpointStore, seconds: float, tier: str | None, name: str, on: signal.Signals) -> None:
        if not seconds > 0:
            raise Invalid(f"a warning leaves a positive number of seconds, not {seconds!r}")
        if not name:
            raise Invalid("a signal needs a name")
        self.raised = False
        """Whether the warning has come: the training should save and stop."""
        self._engine = store._life.open_engine
        self._state = self._engine.state
        self._store = store
        self._seconds = seconds
        self._tier = self._state.tier(tier) if tier is not None else self._safest()
        self._name = name
        self._on = on
        self._process = os.getpid()
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._warned_at = 0.0
        self._warnings: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a signal handler may call its put
        self._promoting = threading.Thread(target=self._promote_when_warned, name="tieredckpt preemption", daemon=True)
        self._why = ""

    def _safest(self) -> Tier:
        from tieredckpt.blobs.base import Survives

        def safety(tier: Tier) -> Survives:
            return tier.survives if tier.config.survives is None else Survives.named(tier.config.survives)

        return max(self._state.tiers, key=safety)

    def __enter__(self) -> Self:
        if self._promoting.ident is not None:
            raise Invalid("this was entered before: make a new one with preemption() for each block")
        try:
            self._before = signal.signal(self._on, self._warn) or signal.SIG_DFL  # None for one that Python did not set
        except ValueError as error:
            raise Invalid(f"{self._on.name} reaches the main thread alone: enter preemption() there") from error
        self._promoting.start()
        return self

    def _warn(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker, which the warning ends as if this had never been entered
            signal.signal(self._on, self._before)
            signal.raise_signal(self._on)
            return
        if self.raised:
            return
        self._warned_at = time.monotonic()
        self.raised = True
        self._store.signal(self._name)
        self._warnings.put(True)

    def _promote_when_warned(self) -> None:
        if self._warnings.get():
            self._promote_newest(self._engine.pending.drained_beside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            signal.signal(self._on, self._before)
            return
        try:
            self._warnings.put(False)  # unless it was warned before
            self._promoting.join()
            if warned := self.raised:
                self._finish(error)
        finally:
            signal.signal(self._on, self._before)
        if self.raised and not warned:  # raised in between: for those who listen now
            signal.raise_signal(self._on)

    def _finish(self, error: BaseException | None) -> None:
        kept = self._promote_newest(self._engine.pending.drained)  # which may have been saved since the warning
        if not kept:
            _log.error("%s", self._what_was_kept())
        if error is None:
            raise SystemExit(EXIT_STATUS if kept else self._what_was_kept())

    def _promote_newest(self, saved: Callable[[], Awaitable[None]]) -> bool:
        """Promote the newest step; whether the tier has it in time. ``saved`` waits for saves under way."""
        newest = self._state.newest()
        saving = self._engine.pending.background or self._state.membership.undecided
        kept = not saving and (newest is None or newest in self._tier.steps.held)
        left = self._warned_at + self._seconds - time.monotonic()
        work = self._store._life.loop.submit(self._keep(saved))
        try:
            step = work.result(max(0.0, left))
        except TimeoutError:
            work.cancel()
            return kept
        except Closed:  # inside the block, by the training itself
            return kept
        except TieredCkptError as failure:
            self._why = str(failure)
            return False
        if step is not None:
            _log.info("preempted: %s is on tier %r after %.1f s", step, self._tier.name, self._passed())
        return True

    async def _keep(self, saved: Callable[[], Awaitable[None]]) -> StepId | None:
        """Promote the newest step, and keep trying; None where nothing was saved."""
        await saved()
        undecided = self._state.membership.undecided
        while True:
            # The ranks vote on a save at once; where one is silent, the step before is better than none.
            with suppress(TimeoutError):
                async with asyncio.timeout(_TRY_AGAIN):
                    await self._state.changed.until(lambda: not undecided)
            step = self._state.newest()
            if step is None or step in self._tier.steps.held:
                if not undecided:
                    break
                self._why = f"the ranks have not decided on {min(undecided)}"
                continue
            try:
                await self._promote(step)
            except Exception as error:  # the code of a tier may raise anything, and time is not out yet
                self._why = str(error)
                await self._state.changed.wait(_TRY_AGAIN)
        await self._engine.mode.told()  # the other ranks wait for that as well, and this process ends
        return step

    async def _promote(self, step: StepId) -> None:
        await self._engine.promote_at_once(step, self._tier)

    def _passed(self) -> float:
        return time.monotonic() - self._warned_at

    def _what_was_kept(self) -> str:
        newest = self._state.newest()
        there = [step for step in tuple(self._tier.steps.held) if self._state.on_line(step.serial)]
        holders = ", ".join(repr(tier.name) for tier in self._state.tiers if newest in tier.steps.held)
        text = f"preempted, and time ran out after {self._passed():.1f} s: {newest} is on {holders} alone; "
        text += f"tier {self._tier.name!r} has {max(there)}" if there else f"tier {self._tier.name!r} has no step"
        return f"{text} ({self._why})" if self._why else text
