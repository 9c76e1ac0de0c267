"""Whatever becomes of the worker, the call that met it fails with the reason, and the next one works."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
from support.scenes import SOON

from tieredckpt._decoders import msgpack_decoder
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.errors import NoSpace, NotFound, TierUnavailable
from tieredckpt.testing.backdoor import listed, pattern

MIB = 1 << 20


def worker(store: ChfsStore) -> psutil.Process:
    assert store.link is not None
    assert store.link.process.number is not None
    return psutil.Process(store.link.process.number)


async def works(store: ChfsStore) -> None:
    await store.put("after/all", [pattern(3 * MIB)])
    assert await store.get("after/all", limit=3 * MIB) == pattern(3 * MIB)


@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        ("exit.pwrite = 2:7", "exit status 7"),
        ("crash.pwrite = 2", "SIGSEGV"),
        ("exit.create = 1", "exit status 1"),
        ("crash.mkdir = *", "SIGSEGV"),
    ],
)
async def test_a_worker_that_ends_fails_its_call_with_how_it_ended(
    chfs: Any, store: ChfsStore, switch: str, reason: str
) -> None:
    await store.put("before", [b"x"])
    chfs.switch(switch)
    with pytest.raises(TierUnavailable, match=reason):
        await store.put("folder/key", [pattern(12 * MIB)])
    chfs.switch()
    await works(store)
    assert await store.get("before", limit=1) == b"x"


@pytest.mark.parametrize("fault", ["exit.pwrite = *", "crash.create = *", "exit.truncate = *"])
async def test_a_small_object_that_is_replaced_is_there_whole_whenever_the_worker_dies(
    chfs: Any, store: ChfsStore, fault: str
) -> None:
    old, new = pattern(700, 1), pattern(720, 2)
    await store.put("steps/1/manifest", [old])
    chfs.switch(fault)
    with suppress(TierUnavailable):
        await store.put("steps/1/manifest", [new[:300], new[300:]])
    chfs.switch()
    assert await chfs.back_door.get("steps/1/manifest") == (old if "pwrite" in fault else new)
    await store.put("steps/1/manifest", [new])
    assert await store.get("steps/1/manifest", limit=720) == new
    await store.put("steps/1/manifest", [old[:10]])  # a shorter one leaves nothing of the longer
    assert await chfs.back_door.get("steps/1/manifest") == old[:10]


async def test_what_the_worker_said_last_is_told(chfs: Any, store: ChfsStore) -> None:
    chfs.switch("fail.init = *:EIO")
    with pytest.raises(TierUnavailable, match=r"exit status 2; it said last: .*told to fail in chfs_init"):
        await store.put("key", [b"x"])
    chfs.switch()
    await works(store)


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_a_killed_worker_fails_what_it_was_doing(chfs: Any, store: ChfsStore, verb: str) -> None:
    await store.put("key", [pattern(4 * MIB)])
    chfs.switch("hang.pwrite = *", "hang.pread = *")
    into = memoryview(bytearray(4 * MIB))
    call = store.put("key", [pattern(4 * MIB, 1)]) if verb == "put" else store.get_into("key", 0, into)
    calling = asyncio.ensure_future(call)
    await chfs.hangs("pwrite" if verb == "put" else "pread")
    worker(store).send_signal(signal.SIGKILL)
    with pytest.raises(TierUnavailable, match="SIGKILL"):
        await calling
    chfs.switch()
    await works(store)


async def test_a_cancelled_read_that_hangs_lets_go_of_the_memory_by_ending_the_worker(
    chfs: Any, store: ChfsStore
) -> None:
    await store.put("key", [b"\xff" * (4 * MIB)])
    process = worker(store)
    chfs.switch("delay.open = 100", "hang.pread = *")  # a machine may be slow to get there
    into = bytearray(4 * MIB)
    reading = asyncio.ensure_future(store.get_into("key", 0, memoryview(into)))
    other = asyncio.ensure_future(store.get("key", limit=4 * MIB))
    await chfs.hangs("pread")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not process.is_running()
    chfs.switch()
    with pytest.raises(TierUnavailable, match="cancelled and had not ended"):
        await other
    assert into == bytes(4 * MIB)
    await works(store)


async def test_a_cancelled_put_that_hangs_ends(chfs: Any, store: ChfsStore) -> None:
    await store.connect()
    process = worker(store)
    chfs.switch("delay.create = 100", "hang.pwrite = *")  # a machine may be slow to get there
    putting = asyncio.ensure_future(store.put("key", [pattern(4 * MIB)]))
    await chfs.hangs("pwrite")
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert not process.is_running()
    chfs.switch()
    await works(store)


async def test_a_connection_that_hangs_ends_when_its_time_is_over(
    chfs: Any, stores: Callable[..., ChfsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()
    chfs.switch("hang.init = *")
    with monkeypatch.context() as hasty:
        hasty.setattr(store._connection, "within", 0.5)
        with pytest.raises(TierUnavailable, match="had not connected"):
            await store.connect()
    chfs.switch()
    await works(store)


async def test_a_full_tier_has_nothing_of_the_put(chfs: Any, store: ChfsStore) -> None:
    await store.put("small", [b"x"])
    chfs.switch("capacity = 2MiB")
    with pytest.raises(NoSpace):
        await store.put("large", [pattern(32 * MIB)])
    assert await listed(store) == {"small": 1}
    assert await chfs.back_door.list() == {"small"}
    chfs.switch()
    await works(store)


async def test_without_libchfs_the_tier_is_unavailable(stores: Callable[..., ChfsStore]) -> None:
    with pytest.raises(TierUnavailable, match=r"/nowhere/libchfs\.so"):
        await stores(library="/nowhere/libchfs.so").put("key", [b"x"])


@pytest.mark.parametrize("server", ["ofi+tcp://127.0.0.1:1", "nonsense"])
async def test_without_a_server_the_tier_is_unavailable(stores: Callable[..., ChfsStore], server: str) -> None:
    with pytest.raises(TierUnavailable, match=server.replace("+", r"\+")):
        await stores(server=server).put("key", [b"x"])


async def test_a_closed_store_leaves_no_process_and_no_descriptor(stores: Callable[..., ChfsStore]) -> None:
    me = psutil.Process()
    await stores().close()  # whatever the first one of a process loads stays
    before, children = len(os.listdir("/proc/self/fd")), len(me.children(recursive=True))
    for _ in range(3):
        store = stores()
        await store.put("key", [pattern(3 * MIB)])
        await store.get("key", limit=3 * MIB)
        process = worker(store)
        await store.close()
        assert not process.is_running()
    deadline = time.monotonic() + SOON
    while len(os.listdir("/proc/self/fd")) > before:
        # A thread that has copied from the arena forgets it only after its result is known.
        assert time.monotonic() < deadline, os.listdir("/proc/self/fd")
        await asyncio.sleep(0.01)
    assert len(me.children(recursive=True)) == children


TRAINER = """
import asyncio, sys
from tieredckpt.blobs.chfs.store import ChfsStore

async def main():
    store = ChfsStore("/root", server=sys.argv[1], library=sys.argv[2])
    await store.put("key", [b"x"])
    print(store.link.process.number, flush=True)
    sys.stdin.readline()
    await store.get("key", limit=1)

asyncio.run(main())
"""


@pytest.mark.parametrize("switch", ["delay.stat = 0", "hang.stat = *"], ids=["idle", "hanging"])
def test_a_worker_ends_with_its_trainer(chfs: Any, switch: str) -> None:
    from support.lookalike import library

    command = [sys.executable, "-c", TRAINER, f"directory:{chfs.directory}", str(library())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdin is not None
        process = psutil.Process(int(trainer.stdout.readline()))
        chfs.switch(switch)
        trainer.stdin.write("go on\n")
        trainer.stdin.flush()
        trainer.kill()
        _, alive = psutil.wait_procs([process], timeout=SOON)
    assert not alive


async def test_an_object_that_is_not_there_costs_no_worker(store: ChfsStore) -> None:
    await store.connect()
    process = worker(store)
    with pytest.raises(NotFound):
        await store.get("nothing", limit=1)
    assert worker(store) == process


@pytest.mark.parametrize("kind", [frames.Request, frames.Close, int])
async def test_a_worker_whose_answers_make_no_sense_is_replaced_and_nobody_waits_for_ever(
    store: ChfsStore, kind: type[Any]
) -> None:
    await store.put("before", [b"x"])
    link = store.link
    assert link is not None
    link._decoder = msgpack_decoder(kind)  # so that what comes is nonsense
    async with asyncio.timeout(SOON):
        with pytest.raises(TierUnavailable, match="what it sent is no answer"):
            await store.get("before", limit=1)
        await works(store)
        assert await store.get("before", limit=1) == b"x"
