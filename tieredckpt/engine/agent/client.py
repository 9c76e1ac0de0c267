"""The trainer's connection to its agent: listens for one, starts one if there is none, sends it deltas and requests.

The deltas are in `deltas`; nothing here decides anything about steps.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tieredckpt.concurrency import being_cancelled, in_thread, outlast, shielded
from tieredckpt.engine import limits
from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.deltas import VERSION, adopt_tier, event_of, ram_deltas, settings_of
from tieredckpt.engine.agent.supervisor import Supervisor
from tieredckpt.engine.agent.wire import Parted, Silent, Wire, accept, listen
from tieredckpt.engine.notify import Notification
from tieredckpt.engine.opening.ram import mark_ram
from tieredckpt.engine.restoring.source import Damage
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.lease import Holder
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, decode
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import StepPromoted, TierFailed, TierRecovered
from tieredckpt.format.manifest import StepId

__all__ = ["AgentClient"]

M = TypeVar("M")

_log = logging.getLogger("tieredckpt")

_CALL_AGAIN = 0.1
"""Seconds after which a call that failed is waited for again."""


@dataclass
class _Asked:
    answer: asyncio.Future[bytes]
    progress: Callable[[int], None] | None


class AgentClient:
    """The trainer's end of the connection. Lives on the engine's loop, while the RAM tier is open."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._socket: socket.socket | None = None
        self._wire: Wire | None = None
        self._deltas = ram_deltas(state)
        self._asked: dict[int, _Asked] = {}
        self._number = 0
        self._absent: TieredCkptError | None = None
        """The reason why there is no agent although there should be one."""
        self._changed = Notification()
        """Notified when an agent comes or goes."""
        self._starter = Supervisor(
            state.config, lambda: self._folder, lambda: self._wire is not None, self._changed, self._tell_absence
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._meeting: asyncio.Task[None] | None = None
        self._talk: asyncio.Task[None] | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._connecting: set[str] = set()
        """Tiers that this process opens at present: they work for the agent, and could not be opened here before."""
        self.dead: tuple[Holder, ...] = ()
        """Dead writers that the agent found when it connected first."""

    # -- life ---------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return Path(self._state.tiers[0].store.location)

    async def open(self) -> None:
        """Connect to an agent, or start one. Raises `Conflict` or `Invalid` if the agent cannot be this store's."""
        for tier in self._slower():
            tier.remote.being_read = partial(self._being_read, tier)
        ram = self._state.tiers[0]
        if ram.blobs is not None:
            await self._listen()
        else:  # it is tried again, and listened in then
            why = f"no agent can be met while tier {ram.name!r} fails: {ram.health.error}"
            self._tell_absence(TierUnavailable(why))
        self._tasks = [
            asyncio.create_task(self._starter.run(), name="tieredckpt agent of this store"),
            asyncio.create_task(self._keep_sending(), name="tieredckpt state deltas"),
        ]
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while (
            self._wire is None
            and self._absent is None
            and (left := begin + limits.in_force.agent_silence - loop.time()) > 0
        ):
            await self._changed.wait(left)
        if isinstance(self._absent, Conflict | Invalid):
            raise self._absent

    async def listen_anew(self) -> None:
        """Register again in RAM's folder after it was made again."""
        await self._hang_up()
        await self._end_talk()
        await self._listen()

    async def close(self, *, done: bool) -> None:
        """Leave the agent: ``done`` when everything that was due is done, so that it may end."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._wire is not None and self._talk is not None:
            self._send_delta()
            self._wire.send(messages.Goodbye(done))
            await asyncio.wait([self._talk], timeout=limits.in_force.agent_ends)
            if done:
                await self._starter.ended(limits.in_force.agent_ends)
        await self._hang_up()
        await self._end_talk()
        for opening in self._opening:
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _slower(self) -> Sequence[Tier]:
        return [tier for tier in self._state.every_tier if not self._state.manages(tier)]

    async def _listen(self) -> None:
        try:
            self._socket = await in_thread(listen, self._folder)
        except OSError as error:
            raise TierUnavailable(f"no agent can be met in {self._folder}: {error.strerror}") from error
        self._meeting = asyncio.create_task(self._meet(self._socket), name="tieredckpt agents calling")

    async def _hang_up(self) -> None:
        if self._meeting is not None:
            self._meeting.cancel()
            await outlast(self._meeting)  # before the number of its descriptor is another's
        if self._socket is not None:
            self._socket.close()
        self._meeting = self._socket = None

    async def _end_talk(self) -> None:
        if self._talk is not None:
            self._talk.cancel()
            await outlast(self._talk)
            self._talk = None

    # -- meeting agents -----------------------------------------------------------------------------------

    async def _meet(self, sock: socket.socket) -> None:
        while not being_cancelled():
            try:
                wire = await accept(sock)
            except Conflict as error:
                _log.error("%s", error)
                continue
            except OSError as error:
                _log.warning("an agent that called was not heard: %s", error)
                await asyncio.sleep(_CALL_AGAIN)
                continue
            try:
                await self._end_talk()  # of several, the last has the folder's lock
            except asyncio.CancelledError:
                await wire.close()
                raise
            self._talk = asyncio.create_task(self._talk_to(wire), name="tieredckpt agent's words")

    def _tell_absence(self, problem: TieredCkptError) -> None:
        if self._absent is None:
            _log.error("nothing is promoted: %s", problem)
        self._absent = problem
        for tier in self._slower():
            if tier.health.error is None:
                delay = tier.health.fail(problem)
                self._state.events.emit(TierFailed(tier.name, problem, delay))
        self._changed.notify()
        self._state.changed.notify()

    async def _talk_to(self, wire: Wire) -> None:
        """Apply the messages of an agent until it has gone."""
        state, ram = self._state, self._state.tiers[0].ram
        try:
            if state.identity.marker is None or ram is None:
                return
            wire.send(
                messages.Hello(
                    VERSION,
                    settings_of(state.config),
                    state.identity.marker.store,
                    state.identity.made_up,
                    ram.store.slab_key,
                    ram.slab.capacity,
                )
            )
            self._deltas = ram_deltas(state)
            wire.send(self._deltas.take())
            while True:
                self._apply(await wire.read(messages.FromAgent, limits.in_force.agent_silence), wire)
        except Silent as error:
            self._tell_absence(TierUnavailable(f"the agent, process {wire.peer}, does not answer: {error}"))
        except Parted as error:
            if wire is self._wire:
                _log.info("agent %d has gone: %s", wire.peer, error)
        except Corrupt as error:
            _log.error("agent %d is not understood: %s", wire.peer, error)
        except Exception:
            _log.exception("unexpected failure in the connection to agent %d", wire.peer)
        finally:
            if wire is self._wire:
                self._wire = None
            for asked in self._asked.values():
                if not asked.answer.done():
                    asked.answer.set_exception(Parted())
            self._changed.notify()
            await wire.close()

    def _apply(self, message: messages.FromAgent, wire: Wire) -> None:
        state = self._state
        match message:
            case messages.OnTier():
                self._adopt(message)
            case messages.Happened():
                event = event_of(message)
                if isinstance(event, StepPromoted) and event.lag:
                    step = StepId(event.serial, event.step)
                    if step in (held := state.any_tier(event.tier).steps.held):
                        state.observation.observe_promotion(held[step].record, state.any_tier(event.tier))
                        state.observation.promotions_ended += 1
                state.events.emit(event)
                state.changed.notify()
            case messages.Ready():
                recovered = [tier for tier in self._slower() if self._absent is not None and tier.health.error is None]
                self._wire, self._absent, self._starter.refused = wire, None, None
                self.dead = self.dead or message.dead
                for tier in recovered:
                    state.events.emit(TierRecovered(tier.name))
                self._changed.notify()
                state.changed.notify()
            case messages.Refused():
                self._starter.refused = message.failure.error()
                self._tell_absence(self._starter.refused)
            case messages.Response():
                if (asked := self._asked.get(message.number)) is not None and not asked.answer.done():
                    if message.failure is not None:
                        asked.answer.set_exception(message.failure.error())
                    else:
                        asked.answer.set_result(message.value)
            case messages.Progress():
                asked = self._asked.get(message.number)
                if asked is not None and asked.progress is not None and not asked.answer.done():
                    try:
                        asked.progress(message.nbytes)
                    except Exception as error:  # of the caller, who is told: the agent has done nothing wrong
                        wire.send(messages.Cancel(message.number))
                        asked.answer.set_exception(error)
            case messages.Heartbeat():
                pass

    def _adopt(self, delta: messages.OnTier) -> None:
        state = self._state
        try:
            state.any_tier(delta.tier)
        except NotFound as error:
            raise Corrupt(str(error)) from error
        if state.identity.made_up and delta.marker is not None and delta.marker != state.identity.marker:
            # A tier that was silent at start had an identity, for which one was made up here.
            state.identity.marker, state.identity.made_up = delta.marker, False
            self._behind(mark_ram(state))
        tier = adopt_tier(state, delta)
        if tier.blobs is None and delta.known and tier.name not in self._connecting:
            self._connecting.add(tier.name)
            self._behind(self._open(tier))

    def _behind(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="tieredckpt work that an agent's message starts")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, tier: Tier) -> None:
        failures = 0
        try:
            while tier.blobs is None:
                try:
                    await tier.open()
                except TieredCkptError as error:
                    level = logging.INFO if failures else logging.WARNING
                    _log.log(level, "tier %r works for the agent, and cannot be read here: %s", tier.name, error)
                    retry = limits.backoff(limits.in_force.first_retry, limits.in_force.last_retry, failures)
                    failures += 1
                    await asyncio.sleep(retry)
        finally:
            self._connecting.discard(tier.name)

    # -- deltas and requests ------------------------------------------------------------------------------

    async def _keep_sending(self) -> None:
        while not being_cancelled():
            self._send_delta()
            await self._state.changed.wait()

    def _send_delta(self) -> None:
        if self._wire is not None and (delta := self._deltas.take()) is not None:
            self._wire.send(delta)

    async def _agent(self) -> Wire:
        """The agent, as soon as there is one. Raises why there is none."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while self._wire is None:
            if not self._tasks:
                raise TierUnavailable("the store is closing")
            if self._absent is not None:
                raise self._absent
            if (left := begin + limits.in_force.agent_silence - loop.time()) <= 0:
                raise TierUnavailable(
                    f"no agent was there for {limits.in_force.agent_silence:g} s; see its log in {self._folder}"
                )
            await self._changed.wait(left)
        return self._wire

    async def ask(
        self,
        operation: messages.Operation,
        kind: type[M] | object = None,
        *,
        progress: Callable[[int], None] | None = None,
        again: bool = True,
    ) -> M:
        """Send a request to the agent and return its response, of type ``kind``; if the agent dies, ask the next one.

        Raises the agent's errors; `TierUnavailable` if there is no agent, if it died and ``again`` is False, or if
        several died, one after the other: the request may be what ends them.
        """
        agents = limits.in_force.agents_asked if again else 1
        for _ in range(agents):
            wire = await self._agent()
            with suppress(Parted):
                answer: M = decode(await self._ask(wire, operation, progress), kind)
                return answer
        who = "the agent" if agents == 1 else f"{agents} agents, one after the other,"
        raise TierUnavailable(
            f"{who} ended while asked to {type(operation).__name__.lower()}, and may have done it; see the log in "
            f"{self._folder}, and ask again"
        )

    async def _ask(self, wire: Wire, operation: messages.Operation, progress: Callable[[int], None] | None) -> bytes:
        self._send_delta()  # the request may be about a step that was saved just now
        self._number += 1
        number = self._number
        asked = self._asked[number] = _Asked(asyncio.get_running_loop().create_future(), progress)
        wire.send(messages.Request(number, operation))
        try:
            return await asked.answer
        except asyncio.CancelledError:
            wire.send(messages.Cancel(number))
            raise
        finally:
            del self._asked[number]

    async def repair(
        self, step: StepId, damage: Sequence[Damage], unreadable: Sequence[tuple[Tier, TieredCkptError]]
    ) -> None:
        """Ask the agent to repair damage on slower tiers."""
        bad = [messages.BadChunk(each.tier.name, each.digest, each.key, Failure.of(each.error)) for each in damage]
        silent = [(tier.name, Failure.of(error)) for tier, error in unreadable]
        await self.ask(messages.Repair(step, tuple(bad), tuple(silent)))

    @asynccontextmanager
    async def _being_read(self, tier: Tier, step: StepId) -> AsyncIterator[None]:
        """Keep the agent from evicting a step that is read here; without an agent, no step is evicted."""
        wire = self._wire
        if wire is None:
            yield
            return

        async def begin() -> None:
            if wire is self._wire:  # and no other agent, which nobody would tell to let the step go
                await self._ask(wire, messages.BeginRead(step, tier.name), None)

        def end(begun: asyncio.Future[None]) -> None:
            if not begun.cancelled() and begun.exception() is None and wire is self._wire:
                self._number += 1
                wire.send(messages.Request(self._number, messages.EndRead(step, tier.name)))

        beginning = asyncio.ensure_future(begin())
        try:
            with suppress(TierUnavailable, Parted):
                await shielded(beginning)
            yield
        finally:
            beginning.add_done_callback(end)  # also where a cancelled reader has not waited for the answer
