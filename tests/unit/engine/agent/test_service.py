"""The agent's end of a connection serves a trainer for as long as it trains, and keeps nothing of what is over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.scenes import SOON, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.agent.service import Service
from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.wire import Parted, accept, connect, listen
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.errors import Conflict


async def test_a_request_that_is_cancelled_before_it_has_begun_leaves_nothing_behind(
    shared_memory: Path, tmp_path: Path
) -> None:
    """A trainer may cancel thousands: both messages come at once where the agent was busy."""

    async def serve() -> int:
        sock = listen(tmp_path)
        accepting = asyncio.create_task(accept(sock))
        trainer = await connect(tmp_path)
        assert trainer is not None
        wire = await accepting
        service = Service(store._life.engine, wire)
        for number in range(10):
            trainer.send(messages.Request(number, messages.Flush()))
            trainer.send(messages.Cancel(number))
        trainer.send(messages.Request(10, messages.Flush()))
        running = asyncio.create_task(service.run(()))
        answer: Any = None
        while not isinstance(answer, messages.Response):
            answer = await trainer.read(messages.FromAgent)
        assert answer.number == 10
        left = len(service._work.keys() - {10})
        trainer.send(messages.Goodbye(False))
        await running
        await wire.close()
        await trainer.close()
        sock.close()
        return left

    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers)) as store, asyncio.timeout(SOON):
        assert await store._life.loop.call(serve()) == 0


async def test_a_commit_that_is_cancelled_keeps_its_packs_until_it_has_ended(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    """Till then its manifest may be on the tier, and readers would miss the packs."""

    async def serve() -> None:
        engine = store._life.engine
        disk, step = engine.state.tier("disk"), engine.state.find(1)
        manifest, btree, key = await step_index.read(disk, step)
        disk.steps.tombstones.add(step)  # it is not promoted once more
        await commit_file.retract(disk, step)
        sock = listen(tmp_path)
        accepting = asyncio.create_task(accept(sock))
        trainer = await connect(tmp_path)
        assert trainer is not None
        wire = await accepting
        service = Service(engine, wire)
        running = asyncio.create_task(service.run(()))
        trainer.send(messages.Request(1, messages.Lend("disk")))
        trainer.send(messages.Request(2, messages.Commit("disk", manifest, btree, key, {})))  # all chunks were there
        await hold.reached()
        trainer.send(messages.Cancel(2))
        trainer.send(messages.Request(3, messages.GiveBack("disk")))
        trainer.send(messages.Request(4, messages.Collect()))
        while 4 not in service._work:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # in which they would go
        kept = [*(tmp_path / "disk").glob("packs/*/*.pack")]
        hold.release()
        answer: object
        while not isinstance(answer := await trainer.read(messages.FromAgent), messages.Response) or answer.number != 4:
            pass
        trainer.send(messages.Goodbye(False))
        await running
        for each in (wire, trainer):
            await each.close()
        sock.close()
        assert kept
        assert not [*(tmp_path / "disk").glob("packs/*/*.pack")]

    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers)) as store, asyncio.timeout(SOON):
        await (await store.save(1, tree(1))).reached("disk")
        await store.flush()
        hold = faults["disk"].hold("put", key="steps/*/manifest.ocdbt", stubborn=True)
        await store._life.loop.call(serve())


async def test_what_a_trainer_that_ends_without_a_goodbye_has_taken_is_free_again(
    shared_memory: Path, tmp_path: Path
) -> None:
    """Else its steps would never leave, and nothing would be promoted any more."""

    async def serve() -> None:
        engine = store._life.engine
        disk, step = engine.state.tier("disk"), engine.state.find(1)
        sock = listen(tmp_path)
        accepting = asyncio.create_task(accept(sock))
        trainer = await connect(tmp_path)
        assert trainer is not None
        wire = await accepting
        running = asyncio.create_task(Service(engine, wire).run(()))
        trainer.send(messages.Request(1, messages.Commit("disk", b"", b"", "", {})))
        trainer.send(messages.Request(2, messages.BeginRead(step, "disk")))
        trainer.send(messages.Request(3, messages.Lend("disk")))
        failures: dict[int, object] = {}
        answer: object
        while failures.keys() != {1, 2, 3}:
            if isinstance(answer := await trainer.read(messages.FromAgent), messages.Response):
                failures[answer.number] = answer.failure and answer.failure.error()
        assert isinstance(failures.pop(1), Conflict), "it was not lent"
        assert failures == {2: None, 3: None}
        assert disk.steps.readers == {step: 1}
        assert disk.packs.guard.locked()
        await trainer.close()
        with pytest.raises(Parted):
            await running
        assert not disk.steps.readers
        assert not disk.packs.guard.locked()
        await wire.close()
        sock.close()

    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers)) as store, asyncio.timeout(SOON):
        await (await store.save(1, tree(1))).reached("disk")
        await store._life.loop.call(serve())
