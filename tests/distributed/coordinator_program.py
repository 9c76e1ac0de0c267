"""What every rank does in `test_coordinators`: speaks with the others, while it trains."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed.launch import Rank, rank_of_this_process

from tieredckpt import RanksUnavailable, StoreConfig
from tieredckpt.engine.coordinators.auto import coordinator_of
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.ranks import Coordinator, barrier, broadcast, exchange, gather

DEADLINE = 30.0


def config_of(me: Rank) -> StoreConfig:
    """A store whose folder all ranks share."""
    return StoreConfig(name="speaking", tiers=({"kind": "posix", "name": "disk", "path": me.arguments["disk"]},))


async def speak(me: Rank, coordinator: Coordinator) -> dict[str, Any]:
    """Messages of many kinds and sizes, and bulk where there is any."""
    rank, size = me.rank, me.size
    count = me.arguments.get("messages", 200)
    begin = time.monotonic()
    for number in range(count):
        said = await exchange(coordinator, f"exchange/{number}", f"{rank}:{number}".encode(), timeout=DEADLINE)
        assert said == [f"{other}:{number}".encode() for other in range(size)]
    seconds = time.monotonic() - begin
    large = os.urandom(1) * (2 << 20) if rank == 0 else None
    got = await broadcast(coordinator, "large", large, timeout=DEADLINE)
    assert len(got) == 2 << 20
    came = await gather(coordinator, "pieces", got[:rank], timeout=DEADLINE)
    assert came == ({other: got[:other] for other in range(size)} if rank == 0 else {})
    await coordinator.post([(rank + 1) % size], "ring", bytes([rank]))
    assert await coordinator.take((rank - 1) % size, "ring", timeout=DEADLINE) == bytes([(rank - 1) % size])
    nbytes = 0
    if coordinator.bulk:
        nbytes = await pass_round(rank, size, coordinator)
    await barrier(coordinator, "end", timeout=DEADLINE)
    return {"bulk": coordinator.bulk, "nbytes": nbytes, "exchanges_a_second": count / seconds}


async def pass_round(rank: int, size: int, coordinator: Coordinator) -> int:
    """Each rank sends the next one several parcels at once, the larger ones first."""
    sizes = [20_000_000, 5_000_001, 1, 0]
    mine = [bytes([rank + 10 * index]) * n for index, n in enumerate(sizes)]
    theirs = [bytearray(n) for n in sizes]
    following, before = (rank + 1) % size, (rank - 1) % size
    async with asyncio.TaskGroup() as group:
        for index in range(len(sizes)):
            tag = 7 if index < 2 else index  # two with one tag come in the order in which they were sent
            group.create_task(coordinator.send(following, memoryview(mine[index]), tag=tag, timeout=DEADLINE))
            group.create_task(coordinator.receive(before, memoryview(theirs[index]), tag=tag, timeout=DEADLINE))
    for index, n in enumerate(sizes):
        assert theirs[index] == bytes([before + 10 * index]) * n, f"parcel {index}"
    return sum(sizes)


def training(me: Rank) -> Callable[[], Any]:
    """One collective of the engine's own, as a step of training makes them."""
    if me.engine == "torch":
        import torch
        import torch.distributed as dist

        def step() -> float:
            total = torch.ones(1000) * me.rank
            dist.all_reduce(total)
            return float(total[0])
    elif me.engine == "mpi":
        from mpi4py import MPI

        def step() -> float:
            return float(MPI.COMM_WORLD.allreduce(me.rank))
    else:

        def step() -> float:
            time.sleep(0.001)
            return float(sum(range(me.size)))

    return step


def train_until(done: threading.Event, me: Rank) -> int:
    """Collectives in a loop until every rank's engine has done what it had to do."""
    step, agree = training(me), agreement(me)
    steps = 0
    while True:
        for _ in range(20):
            assert step() == sum(range(me.size))
            steps += 1
        if agree(done.is_set()):
            return steps


def agreement(me: Rank) -> Callable[[bool], bool]:
    """Whether all ranks say so, by a collective."""
    if me.engine == "torch":
        import torch
        import torch.distributed as dist

        def agree(mine: bool) -> bool:
            all_of_them = torch.tensor(int(mine))
            dist.all_reduce(all_of_them, dist.ReduceOp.MIN)
            return bool(all_of_them)
    elif me.engine == "mpi":
        from mpi4py import MPI

        def agree(mine: bool) -> bool:
            return bool(MPI.COMM_WORLD.allreduce(int(mine), op=MPI.MIN))
    else:

        def agree(mine: bool) -> bool:
            return mine

    return agree


async def opened(me: Rank) -> Coordinator:
    coordinator = coordinator_of("auto", config_of(me))
    assert (coordinator.rank, coordinator.size) == (me.rank, me.size)
    await coordinator.open(timeout=DEADLINE)
    return coordinator


def speak_beside_training(me: Rank) -> None:
    """The engine's loop is in a thread of its own, and the trainer runs collectives meanwhile."""
    loop = EngineLoop("tieredckpt engine")

    async def work() -> dict[str, Any]:
        told: dict[str, Any] = {}
        for _ in range(me.arguments.get("sessions", 1)):
            coordinator = await opened(me)
            told = await speak(me, coordinator) | {"kind": type(coordinator).__name__}
            await coordinator.close()
        return told

    done = threading.Event()
    outcome = loop.submit(work()).outcome
    outcome.add_done_callback(lambda _: done.set())
    steps = train_until(done, me)
    told = outcome.result()
    loop.stop()
    me.tell(told | {"steps": steps, "left": left_behind(me)})


def left_behind(me: Rank) -> list[str]:
    """What messages have left in the engine's store once every rank has closed."""
    if me.engine == "torch":
        import torch.distributed as dist

        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        keys = store.list_keys() if hasattr(store, "list_keys") else []
        dist.barrier()
        return [key for key in keys if "tieredckpt" in key and "gloo" not in key]
    if me.engine == "jax":
        from jax._src import distributed

        client = distributed.global_state.client
        client.wait_at_barrier("spoken", 30_000)
        keys = [key for key, _ in client.key_value_dir_get_bytes("tieredckpt/")]
        client.wait_at_barrier("looked", 30_000)
        return keys
    return []


async def outlive(me: Rank) -> None:
    """The last rank dies or hangs; the others are told within the deadline, and go on."""
    coordinator = await opened(me)
    await barrier(coordinator, "begin", timeout=DEADLINE)
    me.mark("open")
    if me.rank == me.size - 1:
        await asyncio.sleep(3600)
    deadline = me.arguments["deadline"]
    while not Path(me.arguments["disk"], "gone").exists():  # noqa: ASYNC110  # another process makes it
        await asyncio.sleep(0.01)
    begin = time.monotonic()
    try:
        await exchange(coordinator, "without", b"", timeout=deadline)
    except RanksUnavailable as error:
        told: dict[str, Any] = {"missing": list(error.ranks), "seconds": time.monotonic() - begin}
    else:
        told = {"missing": []}
    await coordinator.post([me.size - 1], "into the void", bytes(1 << 20))  # does not wait for the dead
    others = [rank for rank in range(me.size - 1) if rank != me.rank]
    await coordinator.post(others, "still", bytes([me.rank]))
    told["still"] = [list(await coordinator.take(other, "still", timeout=DEADLINE)) for other in others]
    if me.arguments["bulk"]:
        told["bulk"] = await bulk_without(me, coordinator)
    me.tell(told)
    me.mark("outlived")
    await coordinator.close()


async def bulk_without(me: Rank, coordinator: Coordinator) -> list[float]:
    """Seconds until transfers with the dead were given up; those with the living go on."""
    deadline, dead = me.arguments["deadline"], me.size - 1
    seconds = []
    for transfer in (coordinator.send, coordinator.receive):
        begin = time.monotonic()
        try:
            await transfer(dead, memoryview(bytearray(64 << 20)), tag=1, timeout=deadline)
        except RanksUnavailable:
            seconds.append(time.monotonic() - begin)
    into = bytearray(1000)
    async with asyncio.TaskGroup() as group:
        sent = memoryview(bytes([me.rank]) * 1000)
        group.create_task(coordinator.send((me.rank + 1) % dead, sent, tag=2, timeout=DEADLINE))
        group.create_task(coordinator.receive((me.rank - 1) % dead, memoryview(into), tag=2, timeout=DEADLINE))
    assert into == bytes([(me.rank - 1) % dead]) * 1000
    return seconds


async def meet_again(me: Rank) -> None:
    """The first attempt leaves messages that nobody takes, and is killed; the second must not see them."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    coordinator = await opened(me)
    everybody = range(me.size)
    if attempt == 0:
        for number in range(20):
            await coordinator.post(everybody, f"word/{number}", b"first")
        await barrier(coordinator, "posted", timeout=DEADLINE)
        if me.rank == me.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(3600)
    await coordinator.post(everybody, "word/0", b"second")
    words = [await coordinator.take(other, "word/0", timeout=DEADLINE) for other in everybody]
    stale = []
    for other in everybody:
        with suppress(RanksUnavailable):
            stale.append(str(await coordinator.take(other, "word/1", timeout=0.2)))
    await barrier(coordinator, "end", timeout=DEADLINE)
    await coordinator.close()
    me.tell({"words": [word.decode() for word in words], "stale": stale})


def main() -> None:
    with rank_of_this_process() as me:
        match me.arguments["task"]:
            case "speak":
                speak_beside_training(me)
            case "meet again":
                asyncio.run(meet_again(me))
            case "outlive":
                asyncio.run(outlive(me))
                os._exit(0)  # without a farewell to the engine, which would wait for the dead


if __name__ == "__main__":
    main()
