"""Processes that end, fork or are interrupted with a store open: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.scenes import SOON, config, folder, ram

from tieredckpt import CheckpointStore, StoreConfig

PREAMBLE = """
import asyncio, gc, json, os, signal, sys, threading, time
import numpy as np
from tieredckpt import CheckpointStore, Closed, StoreConfig, TieredCkptError
settings = StoreConfig.model_validate_json(sys.argv[1])

def state(step):
    return {"w": np.full(5000, step), "step": step}
"""


@pytest.fixture
def settings(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    return config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})


def run(settings: StoreConfig, script: str, *options: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """What a process printed that ran the script, and ended with the status."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", *options, "-c", PREAMBLE + script]
    done = subprocess.run(
        [*command, settings.model_dump_json()], capture_output=True, text=True, timeout=4 * SOON, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


async def assert_holds(settings: StoreConfig, step: int, *tiers: str) -> None:
    """The store restores a step, and has it where it should be."""
    async with CheckpointStore.open(settings) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == restored.tree["step"] == step
        assert restored.tree["w"].tolist() == [step] * 5000
        assert await store.where(step) == tiers


# -- the end without close --------------------------------------------------------------------------------

BLOCKING = """
store = CheckpointStore.open(settings).sync().__enter__()
for step in range(1, 4):
    saved = store.save(step, state(step))
"""
ASYNC = """
async def train():
    global store, saved
    store = await CheckpointStore.open(settings)
    for step in range(1, 4):
        saved = await store.save(step, state(step))
asyncio.run(train())
"""
IN_A_CYCLE = """
class Plugin:
    def __init__(self):
        self.me, self.store = self, CheckpointStore.open(settings).sync().__enter__()
        self.store.subscribe(self.hear)
    def hear(self, event):
        pass
plugin = Plugin()
for step in range(1, 4):
    plugin.store.save(step, state(step))
"""


@pytest.mark.parametrize("face", [BLOCKING, ASYNC, IN_A_CYCLE], ids=["blocking", "async", "in a cycle"])
async def test_a_process_that_ends_without_close_is_quiet_and_everything_is_promoted(
    settings: StoreConfig, face: str
) -> None:
    done = run(settings, face)
    assert (done.stdout, done.stderr) == ("", "")
    await assert_holds(settings, 3, "disk")  # and its memory is given back, as at any end without an error


async def test_an_exit_status_is_kept_and_nothing_is_said(settings: StoreConfig) -> None:
    assert run(settings, f"{BLOCKING}sys.exit(3)", status=3).stderr == ""
    await assert_holds(settings, 3, "disk")


async def test_an_exception_without_close_shows_its_own_traceback_alone_and_memory_keeps_what_it_has(
    settings: StoreConfig,
) -> None:
    done = run(settings, f"{BLOCKING}saved.reached('disk')\nraise ZeroDivisionError", status=1)
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError"
    assert len(done.stderr.splitlines()) <= 4
    await assert_holds(settings, 3, "ram", "disk")


async def test_the_end_of_a_process_waits_so_long_for_promotions_and_memory_keeps_the_rest(
    shared_memory: Path, tmp_path: Path
) -> None:
    slow = folder(tmp_path / "disk", rate_limit="1 KB/s", min_bandwidth="100 B/s")
    settings = config({"ram": ram(shared_memory), "disk": slow})
    done = run(
        settings,
        f"from tieredckpt import _opened as opened\nopened.EXIT_SECONDS, opened._TOLD_AFTER = 1.0, 0.1\n{ASYNC}",
    )
    assert len(done.stderr.splitlines()) == 1
    assert "the process ends and waits 1 s at most for what the checkpoint store opened at <string>:" in done.stderr
    async with CheckpointStore.open(settings, read_only=True) as store:  # a writer would promote them at that rate
        assert await store.where(3) == ("ram",)
        restored = await store.restore()
        assert restored is not None
        assert restored.tree["w"].tolist() == [3] * 5000


HUNG = """
from tieredckpt import _opened as opened
opened.EXIT_SECONDS = opened._TOLD_AFTER = opened._RELEASE_SECONDS = 0.5
hung = threading.Event()
def hang(*_):
    hung.set()
    threading.Event().wait()
store = CheckpointStore.open(settings).sync().__enter__()
store.save(1, state(1))
"""
HUNG_IN_A_PUT = """
os.replace = hang
threading.Thread(target=lambda: store.save(2, state(2)), daemon=True).start()
"""
HUNG_IN_A_READ = """
os.preadv = hang
threading.Thread(target=store.restore, daemon=True).start()
"""


@pytest.mark.parametrize("call", [HUNG_IN_A_PUT, HUNG_IN_A_READ], ids=["put", "read"])
async def test_a_process_ends_though_a_file_system_never_answers(tmp_path: Path, call: str) -> None:
    settings = config({"disk": folder(tmp_path / "disk")})
    assert run(settings, f"{HUNG}{call}hung.wait()\nprint('over')").stdout == "over\n"
    async with CheckpointStore.open(settings) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 1


async def test_a_store_that_was_only_looked_at_ends_as_quietly(tmp_path: Path) -> None:
    settings = config({"disk": folder(tmp_path / "disk")})
    run(settings, BLOCKING)
    looking = "store = CheckpointStore.open(settings, read_only=True).sync().__enter__()\nprint(store.restore().step)"
    done = run(settings, looking)
    assert (done.stdout, done.stderr) == ("3\n", "")


async def test_a_trainer_with_an_agent_that_ends_without_close_leaves_everything_promoted(
    settings: StoreConfig,
) -> None:
    done = run(settings.model_copy(update={"promote_in": "agent"}), BLOCKING)
    assert done.stderr == ""
    await assert_holds(settings, 3, "disk")


# -- forks ------------------------------------------------------------------------------------------------

FORKED = """
def check(call):
    begin = time.monotonic()
    try:
        call()
    except Closed as error:
        assert f"forked process has no part in the checkpoint store of its parent, process {os.getppid()}" in str(error)
    else:
        raise AssertionError("no error")
    assert time.monotonic() - begin < 10

def child(store, saved, end):
    for call in (
        lambda: store.save(9, state(9)),
        store.restore,
        store.flush,
        store.steps,
        lambda: store.due(9),
        store.observed,
        lambda: store.signal("preempt"),
        lambda: saved.reached("disk"),
        lambda: asyncio.run(store._store.save(9, state(9))),
        lambda: asyncio.run(store._store.restore()),
    ):
        check(call)
    store.close()
    asyncio.run(store._store.close())
    store.__exit__(None, None, None)
    end()

def fork(store, saved, end):
    if not (number := os.fork()):
        try:
            child(store, saved, end)
        except Exception:
            import traceback
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit()"])
async def test_a_forked_process_is_told_so_at_once_and_ends_without_a_trace(settings: StoreConfig, end: str) -> None:
    script = f"""{FORKED}
def end():
    global store, saved
    store = saved = None
    gc.collect()
    {end}

with CheckpointStore.open(settings).sync() as store:
    saved = store.save(1, state(1))
    fork(store, saved, end)
    saved.reached("disk")
    store.save(2, state(2))
    assert [info.step for info in store.steps()] == [1, 2]
    try:
        CheckpointStore.open(settings, ranks=None).sync().__enter__()
    except TieredCkptError as error:
        assert "has not closed it" in str(error)
        print("still locked")
    store.flush()
"""
    done = run(settings, script)
    assert (done.stdout, done.stderr) == ("still locked\n", "")
    await assert_holds(settings, 2, "disk")


async def test_a_store_that_a_forked_process_left_by_its_with_is_the_parents_still(settings: StoreConfig) -> None:
    script = """
with CheckpointStore.open(settings).sync() as store:
    store.save(1, state(1))
    number = os.fork()
    if number:
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
        store.save(2, state(2))
        print("saved")
"""
    done = run(settings, script)
    assert (done.stdout, done.stderr) == ("saved\n", "")
    await assert_holds(settings, 2, "disk")


async def test_workers_of_multiprocessing_end_as_they_always_do(settings: StoreConfig) -> None:
    script = """
import multiprocessing
def work(queue):
    queue.put(1)
with CheckpointStore.open(settings).sync() as store:
    store.save(1, state(1))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=work, args=(queue,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        queue.get()
        worker.join(60)
        assert worker.exitcode == 0
    store.save(2, state(2))
"""
    assert run(settings, script).stderr == ""
    await assert_holds(settings, 2, "disk")


async def test_a_forked_process_of_a_preemptible_training_ends_by_sigterm_as_any(settings: StoreConfig) -> None:
    script = """
from tieredckpt.preempt import preemption
with CheckpointStore.open(settings).sync() as store, preemption(store) as notice:
    store.save(1, state(1))
    ready, begun = os.pipe()
    if not (number := os.fork()):
        os.write(begun, b"1")  # a signal that arrives during the fork itself is lost by CPython
        while True:
            time.sleep(0.05)
    os.read(ready, 1)
    os.kill(number, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == -signal.SIGTERM
    assert not notice.raised
"""
    assert run(settings, script).stderr == ""
    await assert_holds(settings, 1, "disk")


# -- signal handlers --------------------------------------------------------------------------------------


async def test_handlers_of_a_storm_of_signals_may_call_the_store(settings: StoreConfig) -> None:
    """Whatever the signal interrupts: a call, the wait for one, a question, or nothing of the store's."""
    script = """
calls, depth, step = 0, 0, 0

def following():
    global step
    step += 1
    return step

def handle(number, frame):
    global calls, depth
    if depth == 2:  # or handlers that take longer than the storm's pause would pile up
        return
    depth += 1
    calls += 1
    mine = following()
    store.due(mine)
    store.observed()
    store.signal("storm", on=calls % 2 == 0)
    unsubscribe = store.subscribe(lambda event: None)
    if calls % 3 == 0:
        store.save(mine, state(mine))
    store.steps()
    unsubscribe()
    depth -= 1

with CheckpointStore.open(settings).sync() as store:
    store.save(following(), state(step))
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    end = time.monotonic() + 2
    while time.monotonic() < end or calls <= 200:
        mine = following()
        store.save(mine, state(mine))
        for _ in range(300):
            store.due(mine)
            store.observed()
        store.subscribe(lambda event: None)()
        store.steps()
    signal.setitimer(signal.ITIMER_REAL, 0)
    last = following()
    store.save(last, state(last)).reached("disk")
    assert store.restore().step == last
    print(calls > 100, len(store.steps()) > 0)
"""
    done = run(settings, script)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize("where", ["store.save(step, state(step))", "store.due(step)", "time.sleep(0.001)"])
async def test_a_handler_of_sigterm_saves_closes_and_exits(settings: StoreConfig, where: str) -> None:
    script = f"""
store = CheckpointStore.open(settings).sync().__enter__()
step = 0

def save_and_leave(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store.save(10**6, state(10**6))
    store.close()
    sys.exit(0)

signal.signal(signal.SIGTERM, save_and_leave)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
while True:
    step += 1
    {where}
"""
    assert run(settings, script).stderr == ""
    await assert_holds(settings, 10**6, "disk")


async def test_the_thread_of_the_engine_outlives_an_exit_that_some_work_of_it_raises(settings: StoreConfig) -> None:
    script = """
async def leave():
    sys.exit(5)
with CheckpointStore.open(settings).sync() as store:
    try:
        store._life.loop.call_blocking(leave())
    except SystemExit as error:
        print(error.code)
    store.save(1, state(1))
"""
    assert run(settings, script).stdout == "5\n"
    await assert_holds(settings, 1, "disk")
