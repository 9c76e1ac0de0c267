"""What every rank does in `test_communicators`: speaks with the others, while it trains."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed.launch import Rank, rank_of_this_process

from tieredckpt import RanksUnavailable, StoreConfig
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.ranks.communicator import Communicator, barrier, broadcast, exchange, gather
from tieredckpt.engine.transport.auto import communicator_of

DEADLINE = 60.0
WAITING: list[asyncio.Task[None]] = []
LARGE = 9 << 20
"""Bytes of a message; more than the store of torch.distributed takes at once."""


def config_of(me: Rank) -> StoreConfig:
    """A store whose folder all ranks share."""
    return StoreConfig(name="speaking", tiers=({"kind": "posix", "name": "disk", "path": me.arguments["disk"]},))


async def speak(me: Rank, communicator: Communicator) -> dict[str, Any]:
    """Messages of many kinds and sizes, and bulk where there is any."""
    rank, size = me.rank, me.size
    count = me.arguments.get("messages", 200)
    begin = time.monotonic()
    for number in range(count):
        said = await exchange(communicator, f"exchange/{number}", f"{rank}:{number}".encode(), timeout=DEADLINE)
        assert said == [f"{other}:{number}".encode() for other in range(size)]
    seconds = time.monotonic() - begin
    large = os.urandom(1) * LARGE if rank == 0 else None
    got = await broadcast(communicator, "large", large, timeout=DEADLINE)
    assert len(got) == LARGE
    came = await gather(communicator, "pieces", got[:rank], timeout=DEADLINE)
    assert came == ({other: got[:other] for other in range(size)} if rank == 0 else {})
    await communicator.send([(rank + 1) % size], "ring", bytes([rank]))
    assert await communicator.recv((rank - 1) % size, "ring", timeout=DEADLINE) == bytes([(rank - 1) % size])
    nbytes = 0
    if communicator.bulk:
        nbytes = await pass_round(rank, size, communicator)
    await barrier(communicator, "end", timeout=DEADLINE)
    return {"bulk": communicator.bulk, "nbytes": nbytes, "exchanges_a_second": count / seconds}


async def pass_round(rank: int, size: int, communicator: Communicator) -> int:
    """Each rank sends the next one several parcels at once, the larger ones first."""
    sizes = [20_000_000, 5_000_001, 1, 0]
    mine = [bytes([rank + 10 * index]) * n for index, n in enumerate(sizes)]
    theirs = [bytearray(n) for n in sizes]
    following, before = (rank + 1) % size, (rank - 1) % size
    async with asyncio.TaskGroup() as group:
        for index in range(len(sizes)):
            tag = 7 if index < 2 else index  # two with one tag come in the order in which they were sent
            group.create_task(communicator.send_bulk(following, memoryview(mine[index]), tag=tag, timeout=DEADLINE))
            group.create_task(communicator.recv_bulk(before, memoryview(theirs[index]), tag=tag, timeout=DEADLINE))
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
    step, agree = training(me), votes(me)
    steps = 0
    while True:
        for _ in range(20):
            assert step() == sum(range(me.size))
            steps += 1
        if agree(done.is_set()):
            return steps


def votes(me: Rank) -> Callable[[bool], bool]:
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


async def opened(me: Rank) -> Communicator:
    communicator = communicator_of("auto", config_of(me))
    assert communicator is not None
    assert (communicator.rank, communicator.size) == (me.rank, me.size)
    await communicator.open(timeout=DEADLINE)
    return communicator


def speak_beside_training(me: Rank) -> None:
    """The engine's loop is in a thread of its own, and the trainer runs collectives meanwhile."""
    loop = EngineLoop("tieredckpt engine")

    async def work() -> dict[str, Any]:
        told: dict[str, Any] = {}
        for _ in range(me.arguments.get("sessions", 1)):
            communicator = await opened(me)
            told = await speak(me, communicator) | {"kind": type(communicator).__name__}
            await communicator.close()
        return told

    done = threading.Event()
    working = loop.submit(work())
    working.ended.then(done.set)
    steps = train_until(done, me)
    told = working.result()
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
    communicator = await opened(me)
    if me.arguments["bulk"]:
        await pass_round(me.rank, me.size, communicator)
    await barrier(communicator, "begin", timeout=DEADLINE)
    me.mark("open")
    if me.rank == me.size - 1:
        await asyncio.sleep(3600)
    deadline = me.arguments["deadline"]
    await let_go(me, "gone")
    begin = time.monotonic()
    try:
        await exchange(communicator, "without", b"", timeout=deadline)
    except RanksUnavailable as error:
        told: dict[str, Any] = {"missing": list(error.ranks), "seconds": time.monotonic() - begin}
    else:
        told = {"missing": []}
    await communicator.send([me.size - 1], "into the void", bytes(1 << 20))  # does not wait for the dead
    others = [rank for rank in range(me.size - 1) if rank != me.rank]
    await communicator.send(others, "still", bytes([me.rank]))
    told["still"] = [list(await communicator.recv(other, "still", timeout=DEADLINE)) for other in others]
    if me.arguments["bulk"]:
        told["bulk"] = await bulk_without(me, communicator)
        told["cancelled"] = await cancelled_bulk(me, communicator)
    begin = time.monotonic()
    await communicator.close()
    me.tell(told | {"closing": time.monotonic() - begin})
    me.mark("outlived")
    await let_go(me, "over")  # mpiexec ends the others when one has ended


async def let_go(me: Rank, word: str) -> None:
    """Wait for the test to say a word."""
    while not Path(me.arguments["disk"], word).exists():  # another process makes it
        await asyncio.sleep(0.01)


async def bulk_without(me: Rank, communicator: Communicator) -> list[float]:
    """Seconds until transfers with the dead were given up; those with the living go on meanwhile and after."""
    deadline, dead = me.arguments["deadline"], me.size - 1

    async def in_vain(transfer: Callable[..., Coroutine[Any, Any, None]]) -> float:
        begin = time.monotonic()
        try:
            await transfer(dead, memoryview(bytearray(64 << 20)), tag=1, timeout=deadline)
        except RanksUnavailable:
            return time.monotonic() - begin
        raise AssertionError("the dead have answered")

    async with asyncio.TaskGroup() as group:
        sending = group.create_task(in_vain(communicator.send_bulk))
        receiving = group.create_task(in_vain(communicator.recv_bulk))
        await pass_round(me.rank, dead, communicator)
    await pass_round(me.rank, dead, communicator)
    return [sending.result(), receiving.result()]


async def cancelled_bulk(me: Rank, communicator: Communicator) -> float | None:
    """Seconds that rank 0 needs to cancel a receive under way, whose memory nothing touches afterwards."""
    if me.rank == 1:
        await communicator.send_bulk(0, memoryview(b"x" * (5 << 20)), tag=3, timeout=DEADLINE)
        await communicator.recv(0, "cancelled", timeout=DEADLINE)
        with suppress(RanksUnavailable):
            await communicator.send_bulk(0, memoryview(b"x" * 1000), tag=3, timeout=1.0)
        await communicator.send([0], "sent", b"")
    if me.rank != 0:
        return None
    into = bytearray(9 << 20)  # more than is sent, so that it waits
    receiving = asyncio.create_task(communicator.recv_bulk(1, memoryview(into), tag=3, timeout=DEADLINE))
    while not into[(5 << 20) - 1] and not receiving.done():  # a thread fills it
        await asyncio.sleep(0.001)
    begin = time.monotonic()
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    seconds = time.monotonic() - begin
    assert receiving.cancelled()
    before = bytes(into)
    await communicator.send([1], "cancelled", b"")
    await communicator.recv(1, "sent", timeout=DEADLINE)
    assert into == before
    return seconds


async def leave(me: Rank) -> None:
    """Two stores open at once, in another order on every second rank; nobody closes them or what waits in bulk."""
    configs = [config_of(me).model_copy(update={"name": name}) for name in ("one", "another")]
    ranks = [communicator_of("auto", config) for config in configs]
    await asyncio.gather(*(each.open(timeout=DEADLINE) for each in (ranks if me.rank % 2 else reversed(ranks))))
    said = [f"{each} of {me.rank}".encode() for each in range(2)]
    heard = await asyncio.gather(*(exchange(ranks[each], "hello", said[each], timeout=DEADLINE) for each in range(2)))
    assert heard == [[f"{each} of {rank}".encode() for rank in range(me.size)] for each in range(2)]
    for each in ranks:
        receive = each.recv_bulk((me.rank + 1) % me.size, memoryview(bytearray(10)), tag=0, timeout=3600.0)
        WAITING.append(asyncio.create_task(receive))
    await barrier(ranks[0], "end", timeout=DEADLINE)


def exit_without_closing(me: Rank) -> None:
    """The loop goes on in its thread while the interpreter ends."""
    loop = EngineLoop("tieredckpt engine")
    loop.submit(leave(me)).result(DEADLINE)
    me.tell("left")


async def meet_again(me: Rank) -> None:
    """The first attempt leaves messages that nobody takes, and is killed; the second must not see them."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    communicator = await opened(me)
    everybody = range(me.size)
    if attempt == 0:
        for number in range(20):
            await communicator.send(everybody, f"word/{number}", b"first")
        await barrier(communicator, "posted", timeout=DEADLINE)
        if me.rank == me.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(3600)
    await communicator.send(everybody, "word/0", b"second")
    words = [await communicator.recv(other, "word/0", timeout=DEADLINE) for other in everybody]
    stale = []
    for other in everybody:
        with suppress(RanksUnavailable):
            stale.append(str(await communicator.recv(other, "word/1", timeout=0.2)))
    await barrier(communicator, "end", timeout=DEADLINE)
    await communicator.close()
    me.tell({"words": [word.decode() for word in words], "stale": stale})


def main() -> None:
    with rank_of_this_process() as me:
        match me.arguments["task"]:
            case "speak":
                speak_beside_training(me)
            case "leave":
                exit_without_closing(me)
            case "meet again":
                asyncio.run(meet_again(me))
            case "outlive":
                asyncio.run(outlive(me))
                if me.engine != "torch":
                    os._exit(0)  # without a farewell to the engine, which would wait for the dead


if __name__ == "__main__":
    main()
