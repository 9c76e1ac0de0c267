"""An agent's life: it waits for a RAM tier, promotes what is in it, serves the trainers that come, and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tieredckpt.agent.service import Service
from tieredckpt.blobs.locks import let_go
from tieredckpt.blobs.ram.find import find_ram
from tieredckpt.blobs.ram.folder import ram_root
from tieredckpt.blobs.ram.owner import Place
from tieredckpt.blobs.ram.places import places_of
from tieredckpt.blobs.ram.slab_meta import read_note
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.concurrency import in_thread, outlast, whole
from tieredckpt.config import StoreConfig
from tieredckpt.engine import limits
from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.deltas import VERSION, adopt_ram, settings_of
from tieredckpt.engine.agent.process import claim
from tieredckpt.engine.agent.wire import Parted, Wire, connect
from tieredckpt.engine.clock import RunningTimeLoop
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.opening.connect import connect as connect_tier
from tieredckpt.engine.opening.ram import judged_within
from tieredckpt.engine.opening.ram_choice import may_return, notes
from tieredckpt.engine.opening.scan import scan_tier
from tieredckpt.engine.state.adoption import adopt_newest
from tieredckpt.engine.state.membership import Role
from tieredckpt.engine.tier.lease import Holder, lives_here
from tieredckpt.engine.wire_types import Failure
from tieredckpt.errors import Conflict, Invalid, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import Events
from tieredckpt.format.layout import MARKER

__all__ = ["Agent", "Ending", "Life", "run_agent"]

_log = logging.getLogger("tieredckpt")

Life = Literal["stays", "with trainer", "once"]
"""When an agent ends: when told to; without a trainer and work; or as soon as it has no work."""

_LOOK_AGAIN = 0.1
"""Seconds between looks for a trainer, or for the folder that it makes."""
_LOOK_AT_PLACES = 10.0
"""Seconds for a file system to say whether a store is still there."""
_CLAIM_TRIES = 5
"""Tries to claim the folder; a process that only checks for an agent holds the lock for a moment."""
_HELLO = 10.0
"""Seconds for a trainer to send its first message."""
_TRY_AGAIN = 1.0


class _Unfit(Exception):
    """This agent cannot serve that trainer."""


class _Outdated(Exception):
    """An agent of the trainer's version and configuration should replace this one."""


class Agent:
    """Promotes from the RAM tier of a store. Everything runs on one event loop.

    Args:
        config: of the store, whose nearest tier is RAM.
        events: told what happens.
        life: how long it works.
        ram: the folder of RAM; None to find the one whose owner note has a tier of the configuration.
        begins: called after the first look for RAM, with whether there is some.
    """

    def __init__(
        self,
        config: StoreConfig,
        events: Events,
        life: Life,
        ram: Path | None = None,
        begins: Callable[[bool], None] = lambda _: None,
    ) -> None:
        if config.ram is None or not config.slower:
            raise Invalid("an agent promotes from RAM to slower tiers; the configuration needs a ram tier and another")
        self._root = ram_root(config.ram.path)
        self._given = ram
        self._folder = ram or self._root
        """The RAM folder, once it is found."""
        self._places: list[Place] = []
        self._config = config
        self._life = life
        self._events = events
        self._begins = begins
        self._opened = False
        self._claim = -1
        self._identity: tuple[int, int] | None = None
        """Identity of the claimed folder."""
        self._wire: Wire | None = None
        self._dead: tuple[Holder, ...] = ()
        self._finishing: asyncio.Task[None] | None = None

    @property
    def opened(self) -> bool:
        """Whether there was RAM to promote from."""
        return self._opened

    async def run(self) -> None:
        """Work until there is nothing to do, or until cancelled; then finish the write under way, or abandon it.

        Raises:
            Conflict: another agent, or a store that promotes by itself, is at work there.
            TieredCkptError: the tiers cannot be opened.
        """
        try:
            await self._live()
        finally:
            await whole(self._end())

    async def _end(self) -> None:
        await self._stop_finishing()
        if self._opened:
            await self._engine.close(flush=False, keep_ram=True)
        if self._wire is not None:
            await self._wire.close()
        self._unclaim()

    async def _live(self) -> None:
        since = time.monotonic()
        self._begins(await self._attach())
        while True:
            if not await in_thread(self._is_claimed) and not await self._attach():
                if self._life == "once" or (
                    self._life != "stays" and (self._opened or time.monotonic() - since > _HELLO)
                ):
                    return  # nothing is left to promote, and no trainer makes more
            elif self._life != "once" and (wire := await self._call()) is not None:
                await self._stop_finishing()
                if await self._meet(wire):
                    return
            elif not self._opened:
                await self._open()
            elif self._life != "stays" and self._is_finished() and not await self._finds_more():
                return
            await asyncio.sleep(_LOOK_AGAIN)

    async def _call(self) -> Wire | None:
        """A connection to the trainer; None where the trainer has ended, though a fork of it may hold its socket."""
        wire = await connect(self._folder)
        if wire is None or await in_thread(wire.peer_lives):
            return wire
        await wire.close()
        return None

    async def _meet(self, wire: Wire) -> bool:
        """Serve a trainer; True when it closed in order and this agent ends with it."""
        self._wire = wire
        goodbye = messages.Goodbye(done=False)
        try:
            goodbye = await self._serve(wire)
        except Parted as error:
            _log.info("the trainer (process %d) has gone: %s", wire.peer, error)
            self._dead = (*self._dead, wire.holder)  # the next trainer counts it as a failure
        except _Unfit as error:
            _log.error("%s", error)
            await asyncio.sleep(_TRY_AGAIN)  # it closes its store, or is repaired
        except _Outdated as error:
            _log.info("%s", error)
            return True
        if goodbye.done and self._life == "with trainer":
            return True  # it waits for the end of the connection, which comes when the leases are released
        self._wire = None
        await wire.close()
        await self._look_into_ram()
        return False

    # -- the folder ---------------------------------------------------------------------------------------

    def _is_claimed(self) -> bool:
        """Whether this agent has claimed the folder that is there now."""
        if self._identity is None:
            return False
        with suppress(OSError):
            found = self._folder.stat()
            return (found.st_dev, found.st_ino) == self._identity
        return False

    async def _attach(self) -> bool:
        """Become the agent of the folder and read its content; False while there is none."""
        self._unclaim()
        if self._opened:
            await self._engine.state.tiers[0].disconnect()
        if not await in_thread(self._is_there) and not await self._find():
            return False
        for attempt in range(_CLAIM_TRIES):
            try:
                self._claim = await in_thread(claim, self._folder)
                found = await in_thread(self._folder.stat)
            except FileNotFoundError:
                return False
            except Conflict:
                if attempt == _CLAIM_TRIES - 1:
                    raise
                await asyncio.sleep(_LOOK_AGAIN)
            else:
                break
        self._identity = found.st_dev, found.st_ino
        if self._opened:
            await self._look_into_ram()
        return True

    async def _find(self) -> bool:
        """Find the RAM whose owner note has a tier of the configuration: that of a trainer, else the last used one."""
        if self._given is not None:
            return False
        if not self._places:
            self._places = list((await places_of(self._config)).values())
        try:
            ram = await in_thread(find_ram, self._root)
        except TierUnavailable as error:  # no file can be opened now
            _log.info("RAM cannot be looked for: %s", error)
            return False
        found = [each for each in ram if each.rank is None and not each.lost]
        near = [await judged_within(_LOOK_AT_PLACES, each) for each in found if notes([each], self._places)]
        # RAM of a store that a person removed is promoted only while a trainer uses it: the trainer knows better.
        mine = [each for each in near if each.user or each.holding or may_return([each], self._places)]
        if not mine:
            return False
        folder = Path(max(mine, key=lambda each: (bool(each.user), each.used_at)).folder)
        if self._opened and folder != self._folder:
            self._opened = False
            await self._engine.close(flush=False, keep_ram=True)
        self._folder = folder
        return await in_thread(self._is_there)

    def _is_there(self) -> bool:
        """Whether the folder is a RAM tier whose writer has named its owner. Raises `Conflict` for another user's."""
        try:
            RamStore.attach(self._folder).slab.close()
        except NotFound:
            return False
        return (self._folder / MARKER).is_file()

    def _unclaim(self) -> None:
        if self._claim >= 0:
            let_go(self._claim)
        self._claim, self._identity = -1, None

    async def _look_into_ram(self) -> None:
        """Scan RAM again: a trainer that died may have sent less than it had saved."""
        if not self._opened:
            return
        state, ram = self._engine.state, self._engine.state.tiers[0]
        try:
            note = await in_thread(read_note, self._folder)
            if ram.ram is not None and note is not None and ram.ram.store.is_of(note):
                await scan_tier(ram)  # the slab of an ended process is still mapped here
            else:
                while ram.steps.readers:  # steps that are read stay where they are
                    await state.changed.wait(_LOOK_AGAIN)
                await ram.disconnect()
                await connect_tier(state, ram)
        except TieredCkptError as error:
            ram.health.error = error
            _log.info("RAM cannot be seen: %s", error)
        else:
            ram.health.error = None
            adopt_newest(state)
            self._engine.prepare_memory()
        state.changed.notify()

    # -- trainers -----------------------------------------------------------------------------------------

    async def _serve(self, wire: Wire) -> messages.Goodbye:
        """Receive from a trainer until it sends `Goodbye`. Raises `Parted` if it ends without."""
        hello: messages.FromTrainer = await wire.read(messages.FromTrainer, _HELLO)
        if not isinstance(hello, messages.Hello):
            raise Parted("it does not begin with its name")
        if (hello.version, hello.settings) != (VERSION, settings_of(self._config)):
            self._give_up(wire, hello)  # later messages may have a form that this version cannot read
        in_ram: messages.FromTrainer = await wire.read(messages.FromTrainer, _HELLO)
        if not isinstance(in_ram, messages.InRam):
            raise Parted("it does not go on with what it has")
        try:
            if self._opened:
                await self._see(hello)
            else:
                await self._open(made_up=hello.made_up)
        except (Conflict, Invalid) as error:
            wire.send(messages.Refused(Failure.of(error)))
            await wire.close()
            raise
        adopt_ram(self._engine.state, in_ram)
        dead = tuple([holder for holder in self._dead if not await in_thread(lives_here, holder)])
        self._dead = ()
        return await Service(self._engine, wire).run(dead)

    def _give_up(self, wire: Wire, hello: messages.Hello) -> None:
        """Leave a trainer to an agent that fits it."""
        if self._life == "with trainer":
            raise _Outdated("the trainer has another configuration or version now, and starts an agent of its own")
        differs = "configuration" if hello.version == VERSION else f"version ({hello.version}, not {VERSION})"
        refusal = Conflict(
            f"the agent, process {os.getpid()}, has another {differs} than the trainer; end it, or start it with "
            f"the trainer's"
        )
        wire.send(messages.Refused(Failure.of(refusal)))
        raise _Unfit(str(refusal))

    async def _see(self, hello: messages.Hello) -> None:
        """Attach to RAM again if it is not the RAM that this agent reads."""
        state, ram = self._engine.state, self._engine.state.tiers[0].ram
        state.identity.made_up = state.identity.made_up or hello.made_up
        if ram is None or (ram.store.slab_key, ram.slab.capacity) != (hello.slab, hello.capacity):
            await self._look_into_ram()

    async def _open(self, *, made_up: bool = False) -> None:
        self._engine = Engine(self._config, self._events, read_only=False, role=Role.AGENT, ram=self._folder)
        await self._engine.start()
        self._opened = True
        state = self._engine.state
        state.identity.made_up = made_up
        leases = [tier.lease for tier in state.every_tier if tier.lease is not None]
        self._dead = (*self._dead, *(holder for lease in leases for holder in lease.stale_holders))

    # -- the end ------------------------------------------------------------------------------------------

    def _is_finished(self) -> bool:
        """Whether everything due is promoted, now that there is no trainer; starts the last promotions if needed."""
        if self._finishing is None:
            self._finishing = asyncio.create_task(self._finish(), name="tieredckpt last promotions")
        return self._finishing.done()

    async def _finds_more(self) -> bool:
        """Whether RAM has steps that came after its trainer had hung up, as one does that was stopped for a while."""
        held = self._engine.state.tiers[0].steps.held
        known = set(held)
        await self._look_into_ram()
        if known.issuperset(held):
            return False
        self._finishing = None
        return True

    async def _finish(self) -> None:
        loop, told = asyncio.get_running_loop(), ""
        begin = loop.time()
        while loop.time() - begin < limits.in_force.agent_gives_up:
            try:
                await self._engine.flush()
            except TieredCkptError as error:
                if str(error) != told:
                    _log.warning("not everything is promoted: %s", error)
                told = str(error)
                await asyncio.sleep(_TRY_AGAIN)
            else:
                return
        _log.error(
            "gave up what is not promoted after %g s without a trainer: %s", limits.in_force.agent_gives_up, told
        )

    async def _stop_finishing(self) -> None:
        if self._finishing is not None:
            self._finishing.cancel()
            await outlast(self._finishing)
            self._finishing = None


Ending = Literal["signal", "done", "nothing to do"]


def run_agent(
    config: StoreConfig,
    events: Events,
    life: Life,
    ram: Path | None = None,
    begins: Callable[[bool], None] = lambda _: None,
) -> Ending:
    """Run until the agent ends, and return why. Raises as `Agent.run`. For the main thread."""
    agent = Agent(config, events, life, ram, begins)
    try:
        with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
            runner.run(_run(agent))
    except asyncio.CancelledError:
        return "signal"
    return "done" if agent.opened else "nothing to do"


async def _run(agent: Agent) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as behind nohup
            loop.add_signal_handler(number, task.cancel)
    await agent.run()
