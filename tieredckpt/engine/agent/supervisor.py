"""Starts an agent for a store whenever there is none, and says why there is none when that does not help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tieredckpt.concurrency import being_cancelled, in_thread
from tieredckpt.config import StoreConfig
from tieredckpt.engine import limits
from tieredckpt.engine.agent.process import AgentProcess, lives
from tieredckpt.engine.notify import Notification
from tieredckpt.errors import TieredCkptError, TierUnavailable

__all__ = ["Supervisor"]

_log = logging.getLogger("tieredckpt")

_SPARED = 2
"""How many agents in a row may end soon after they were ready before that counts as a failure: people end some."""


class Supervisor:
    """Keeps an agent process alive: starts it, and starts it again when it dies. Runs on the engine's loop.

    Args:
        config: of the store.
        folder: of its RAM tier, now.
        ready: returns whether an agent is ready.
        changed: notified when an agent comes or goes.
        absent: called with the reason why there is no agent.
    """

    def __init__(
        self,
        config: StoreConfig,
        folder: Callable[[], Path],
        ready: Callable[[], bool],
        changed: Notification,
        absent: Callable[[TieredCkptError], None],
    ) -> None:
        self._config, self._folder, self._ready = config, folder, ready
        self._changed, self._absent = changed, absent
        self._process: AgentProcess | None = None
        self.refused: TieredCkptError | None = None
        """Why the last agent could not work, as it has said."""

    async def run(self) -> None:
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        failures, brief, since = 0, 0, loop.time()
        while not being_cancelled():
            if self._ready():
                began = loop.time()
                await self._changed.until(lambda: not self._ready())
                since = loop.time()
                brief = brief + 1 if since - began < limits.in_force.agent_last_retry else 0
                failures = max(0, brief - _SPARED)
            elif self._runs() or await self._is_there():
                await self._changed.wait(limits.in_force.agent_look)
            else:
                if failures:
                    why = "there is no agent" if self._process is None else self._process.what_happened()
                    self._absent(self.refused or TierUnavailable(why))
                    await asyncio.sleep(
                        limits.backoff(
                            limits.in_force.agent_first_retry, limits.in_force.agent_last_retry, failures - 1
                        )
                    )
                await self._start()
                failures += 1  # until it is ready
            if not self._ready() and loop.time() - since > limits.in_force.agent_silence:
                self._absent(
                    TierUnavailable(f"no agent was ready for {limits.in_force.agent_silence:g} s; see its log")
                )

    async def ended(self, within: float) -> None:
        """Return when the agent that was started here has ended, or after so many seconds."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while self._runs() and loop.time() - begin < within:
            await self._changed.wait(limits.in_force.agent_look)

    def _runs(self) -> bool:
        return self._process is not None and self._process.running

    async def _is_there(self) -> bool:
        with suppress(TierUnavailable, OSError):
            return await in_thread(lives, self._folder())
        return False

    async def _start(self) -> None:
        self.refused = None
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._changed.notify)

        try:
            self._process = await in_thread(AgentProcess, self._config, self._folder(), ended)
        except (OSError, TierUnavailable) as error:
            self._process = None
            self.refused = TierUnavailable(f"no agent can be started: {error}")
        else:
            _log.info("agent %d was started; its log is %s", self._process.number, self._process.log)
