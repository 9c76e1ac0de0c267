"""Each wrapper adds its behaviour and leaves the store as it is."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import stamina
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scenes import SOON

from tieredckpt.blobs.base import BlobInfo, Stretch, Unanswered
from tieredckpt.blobs.kvstore.store import KvStoreBlobs
from tieredckpt.blobs.posix.paths import Folders
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.wrap import Deadline, Limited, Metered, Pace, Paced, Retrying, VerbUsage, forward
from tieredckpt.blobs.wrap.deadline import Overdue
from tieredckpt.errors import Conflict, Corrupt, Invalid, NoSpace, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.testing.backdoor import listed
from tieredckpt.testing.faulty import Faulty, Hold

T = TypeVar("T")

DOWN = TierUnavailable("no answer")

retrying = partial(Retrying, wait_initial=0.0, wait_jitter=0.0)


@pytest.fixture
async def faulty() -> AsyncIterator[Faulty]:
    store = Faulty(await KvStoreBlobs.open("memory://"))
    yield store
    await store.close()


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(call: Coroutine[Any, Any, T], held: Hold) -> asyncio.Task[T]:
    """The call, once it waits in what is held."""
    task = asyncio.ensure_future(call)
    await held.reached()
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a call, which must end so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class TestRetrying:
    async def test_what_fails_for_a_while_succeeds(self, faulty: Faulty) -> None:
        store = retrying(faulty)
        into = bytearray(3)
        faulty.fail("*", DOWN, times=2)
        await store.put("key", [b"a", b"bc"])
        faulty.fail("get", DOWN, times=3)
        assert await store.get("key", limit=3) == b"abc"
        faulty.fail("get_into", DOWN)
        await store.get_into("key", 0, memoryview(into))
        assert into == b"abc"
        faulty.fail("stat", DOWN)
        assert (await store.stat("key")).size == 3
        faulty.fail("delete", DOWN, after=True)
        await store.delete("key")
        assert await listed(store) == {}

    async def test_attempts_are_counted(self, faulty: Faulty) -> None:
        faulty.kill()
        with pytest.raises(TierUnavailable):
            await retrying(faulty, attempts=3).stat("key")
        assert [call.verb for call in faulty.calls] == ["stat"] * 3

    async def test_what_nothing_but_time_helps_is_not_repeated(self, faulty: Faulty) -> None:
        faulty.fail("stat", Unanswered("a server is silent"), times=None)
        with pytest.raises(Unanswered):
            await retrying(faulty).stat("key")
        assert len(faulty.calls) == 1

    async def test_what_was_closed_is_a_tier_that_does_not_answer(self, faulty: Faulty) -> None:
        await faulty.close()
        with pytest.raises(TierUnavailable, match="was closed, to be opened anew"):
            await retrying(faulty).stat("key")
        assert len(faulty.calls) == 1

    async def test_of_what_was_cut_by_its_deadline_a_put_alone_is_repeated(self, faulty: Faulty) -> None:
        store = retrying(faulty)
        await faulty.put("key", [b"x"])
        faulty.fail("*", Overdue("no answer at its deadline"), times=None)
        for call in (
            store.get("key", limit=1),
            store.get_into("key", 0, memoryview(bytearray(1))),
            store.stat("key"),
            listed(store),
            store.delete("key"),
        ):
            before = len(faulty.calls)
            with pytest.raises(Overdue):
                await call
            assert len(faulty.calls) == before + 1
            assert not store.responsive
        faulty.clear()
        faulty.fail("put", Overdue("no answer at its deadline"), times=3)
        await store.put("key", [b"y"])
        assert store.responsive

    async def test_a_store_does_not_respond_from_an_attempt_that_fails_to_one_that_does_not(
        self, faulty: Faulty
    ) -> None:
        store = Metered(retrying(faulty))
        assert store.responsive
        await store.put("key", [b"x"])
        faulty.fail("stat", DOWN)
        second = faulty.hold("stat", nth=2)
        asking = await begun(store.stat("key"), second)
        assert not store.responsive
        second.release()
        await asking
        assert store.responsive

    async def test_a_store_responds_again_as_soon_as_it_answers_whatever_and_to_whom(self, faulty: Faulty) -> None:
        store = retrying(faulty, attempts=2)
        faulty.fail("stat", DOWN, times=2)
        with pytest.raises(TierUnavailable):
            await store.stat("key")
        assert not store.responsive
        with pytest.raises(NotFound):
            await store.stat("key")
        assert store.responsive
        faulty.fail("stat", DOWN, nth=1)
        second = faulty.hold("stat", nth=2)
        asking = await begun(store.stat("key"), second)
        assert not store.responsive
        await store.delete("key")
        assert store.responsive
        await cancelled(asking)

    async def test_a_store_responds_though_a_verb_was_cancelled_after_an_attempt_that_failed(
        self, faulty: Faulty
    ) -> None:
        store = retrying(faulty)
        faulty.fail("stat", DOWN)
        second = faulty.hold("stat", nth=2)
        asking = await begun(store.stat("key"), second)
        await cancelled(asking)
        assert store.responsive

    async def test_a_cancelled_verb_does_not_speak_for_others(self, faulty: Faulty) -> None:
        store = retrying(faulty)
        faulty.fail("*", DOWN, times=2)
        held = [faulty.hold(verb, nth=2) for verb in ("stat", "delete")]
        stat, delete = asyncio.ensure_future(store.stat("key")), asyncio.ensure_future(store.delete("key"))
        for hold in held:
            await hold.reached()
        await cancelled(stat)
        assert not store.responsive
        held[1].release()
        await delete
        assert store.responsive

    async def test_a_verb_that_was_cut_by_its_deadline_is_lost_though_it_is_cancelled_later(
        self, faulty: Faulty
    ) -> None:
        store = retrying(faulty)
        faulty.fail("put", Overdue("no answer at its deadline"))
        second = faulty.hold("put", nth=2)
        putting = await begun(store.put("key", [b"x"]), second)
        await cancelled(putting)
        assert not store.responsive
        await store.delete("key")
        assert store.responsive

    @pytest.mark.parametrize("error", [NotFound, Corrupt, NoSpace, Conflict, Invalid])
    async def test_an_answer_is_not_asked_for_again(self, faulty: Faulty, error: type[TieredCkptError]) -> None:
        faulty.fail("*", error("the answer"), times=None)
        store = retrying(faulty)
        for call in (store.stat("a"), store.put("a", [b"x"]), store.get("a", limit=1), store.delete("a")):
            with pytest.raises(error, match="the answer"):
                await call
        assert len(faulty.calls) == 4

    async def test_a_create_whose_answer_was_lost_is_no_conflict(self, faulty: Faulty) -> None:
        faulty.fail("put", DOWN, after=True)
        await retrying(faulty).put("key", [b"mi", bytearray(b"ne")], create_only=True)
        assert await faulty.get("key", limit=9) == b"mine"

    @pytest.mark.parametrize("theirs", [b"them", b"min", b"mine!", b""])
    async def test_a_create_that_another_won_is_a_conflict(self, faulty: Faulty, theirs: bytes) -> None:
        await faulty.inner.put("key", [theirs])
        faulty.fail("put", DOWN)
        with pytest.raises(Conflict):
            await retrying(faulty).put("key", [b"mi", b"ne"], create_only=True)
        with pytest.raises(Conflict):
            await retrying(faulty).put("key", [theirs], create_only=True)
        assert await faulty.get("key", limit=9) == theirs

    async def test_a_listing_that_broke_off_is_whole_and_without_repeats(self, faulty: Faulty) -> None:
        for number in range(5):
            await faulty.put(str(number), [b"x"])
        faulty.fail("list", DOWN, nth=3)
        faulty.fail("list", DOWN, nth=8)
        assert await listed(retrying(faulty)) == {str(number): 1 for number in range(5)}

    @pytest.mark.unmapped
    async def test_an_error_of_another_library_is_told_once_and_without_its_secrets(
        self, faulty: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = retrying(faulty, attempts=2)
        for verb in ("stat", "get"):
            faulty.fail(verb, RuntimeError("https://host/b?X-Amz-Signature=hidden"), times=None)
        with pytest.raises(TierUnavailable, match="stat of a: RuntimeError: https://host/b") as stat:
            await store.stat("a")
        with pytest.raises(TierUnavailable, match="get of a: RuntimeError") as got:
            await store.get("a", limit=1)
        assert caplog.text.count("Traceback") == 1
        told = [caplog.text, *(line for each in (stat, got) for line in traceback.format_exception(each.value))]
        assert "hidden" not in "".join(told)

    async def test_an_error_for_want_of_memory_is_no_error_of_the_tier(self, faulty: Faulty) -> None:
        faulty.fail("stat", MemoryError())
        with pytest.raises(MemoryError):
            await retrying(faulty).stat("a")

    @pytest.mark.unmapped
    @pytest.mark.parametrize("error", [TierUnavailable, RuntimeError])
    async def test_a_store_that_cannot_be_closed_is_left_behind(
        self, monkeypatch: pytest.MonkeyPatch, faulty: Faulty, error: type[Exception]
    ) -> None:
        async def fail(self: Faulty) -> None:
            raise error("by script")

        with monkeypatch.context() as failing:
            failing.setattr(Faulty, "close", fail)
            await retrying(faulty).close()

    async def test_what_is_repeated_is_told_with_its_cause_and_without_its_parts(
        self, faulty: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Not as stamina tells it, with neither tier nor cause, which Python prints where no log is configured."""
        stamina.instrumentation.set_on_retry_hooks([stamina.instrumentation.LoggingOnRetryHook])
        try:
            faulty.fail("put", DOWN)
            with caplog.at_level(logging.DEBUG):
                await retrying(faulty).put("key", [b"gigabytes"])
        finally:
            stamina.instrumentation.set_on_retry_hooks(None)
        (record,) = [each for each in caplog.records if each.name in ("tieredckpt", "stamina")]
        assert record.levelno == logging.INFO
        assert record.getMessage() == f"{faulty.location}: put of key failed, and may be tried again: {DOWN}"
        assert not any("gigabytes" in str(vars(record)) for record in caplog.records)


class TestDeadline:
    async def test_what_hangs_is_ended_and_named(self, faulty: Faulty) -> None:
        store = Deadline(faulty, "lustre", base=0.02)
        for verb, call in {
            "put": lambda: store.put("packs/1", [b"x"]),
            "get": lambda: store.get("packs/1", limit=1),
            "get_into": lambda: store.get_into("packs/1", 0, memoryview(bytearray(1))),
            "stat": lambda: store.stat("packs/1"),
            "delete": lambda: store.delete("packs/1"),
            "list": lambda: listed(store, "packs/1/"),
        }.items():
            faulty.hold(verb)
            with pytest.raises(Overdue, match=f"lustre: {verb} of packs/1"):
                await call()
        assert store.hanging == 0

    async def test_time_grows_with_the_bytes(self, faulty: Faulty) -> None:
        store = Deadline(faulty, "lustre", base=0.01, min_bandwidth=1000)
        held = faulty.hold("put")
        putting = await begun(store.put("key", [bytes(1_000_000)]), held)
        await asyncio.sleep(0.05)
        assert not putting.done()
        held.release()
        await putting

    async def test_errors_and_results_pass(self, faulty: Faulty) -> None:
        store = Deadline(faulty, "lustre")
        with pytest.raises(NotFound):
            await store.get("key", limit=1)
        await store.put("key", [b"x"])
        assert await store.get("key", limit=1) == b"x"

    async def test_what_does_not_end_is_left_behind(self, faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
        store = Deadline(faulty, "lustre", base=0.01, min_bandwidth=1000)
        held = faulty.hold("put", stubborn=True)
        with pytest.raises(TierUnavailable):
            await store.put("key", [b"x"])
        assert store.hanging == 1
        assert "hangs in the device" in caplog.text
        await store.put("other", [bytes(20_000)])  # which may take 20 s
        held.release()
        async with asyncio.timeout(20):
            while store.hanging:  # whoever asked for it has gone, and nobody else hears of it
                await asyncio.sleep(0.001)

    async def test_calls_that_hang_are_told_of_once_until_none_does(
        self, faulty: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[int] = []
        store = Metered(Deadline(faulty, "lustre", base=0.01, tell=told.append))
        for turn in (1, 2):
            held = [faulty.hold(verb, stubborn=True) for verb in ("put", "stat")]
            for call in (store.put("key", [b"x"]), store.stat("key")):
                with pytest.raises(TierUnavailable):
                    await call
            assert store.hanging == 2
            assert told == [1] * turn
            assert caplog.text.count("hangs in the device") == turn
            for each in held:
                each.release()
            async with asyncio.timeout(20):
                while store.hanging:
                    await asyncio.sleep(0.001)
            await faulty.delete("key")

    async def test_threads_that_hang_in_a_store_that_lets_go_are_told_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = asyncio.get_running_loop().create_future()
        inner = await asyncio.to_thread(PosixStore, tmp_path)
        await inner.put("key", [b"x"])
        release = threading.Event()
        monkeypatch.setattr(Folders, "info", lambda folders, path: release.wait(30))
        store = Deadline(inner, "nfs", base=0.01, tell=told.set_result)
        with pytest.raises(Overdue):
            await store.stat("key")
        async with asyncio.timeout(20):
            assert await told == 1
        assert store.hanging == 1
        release.set()
        await inner.close()

    async def test_a_thread_that_hangs_is_counted_once_and_no_call_is_named_for_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        inner = await asyncio.to_thread(PosixStore, tmp_path)
        release = threading.Event()
        monkeypatch.setattr(Folders, "remove", lambda folders, path: release.wait(30))
        store = Deadline(inner, "nfs", base=0.01)
        with pytest.raises(Overdue):
            await store.delete("key")
        assert store.hanging == 1
        assert "delete of key hangs" in caplog.text
        release.set()
        async with asyncio.timeout(20):
            while store.hanging:
                await asyncio.sleep(0.001)
        release.clear()
        monkeypatch.setattr(Folders, "info", lambda folders, path: release.wait(30))
        caplog.clear()
        monkeypatch.setattr(store, "_told", False)
        with pytest.raises(Overdue):
            await store.stat("other")
        async with asyncio.timeout(20):
            while "hangs in the device" not in caplog.text:
                await asyncio.sleep(0.001)
        assert "other hangs" not in caplog.text
        release.set()
        await inner.close()

    @pytest.mark.parametrize("base", [0.01, 30.0], ids=["overdue", "in time"])
    @pytest.mark.parametrize("digested", [False, True])
    async def test_a_read_that_hangs_keeps_its_memory(self, faulty: Faulty, digested: bool, base: float) -> None:
        await faulty.put("key", [b"late"])
        store = Deadline(faulty, "lustre", base=base)
        held = faulty.hold("get_into", stubborn=True)
        into = memoryview(bytearray(4))
        call = store.get_digested("key", [Stretch(0, 4, into)]) if digested else store.get_into("key", 0, into)
        reading = await begun(call, held)
        await asyncio.sleep(0.06)
        ended = [reading.done()]
        reading.cancel()
        await turns()
        ended.append(reading.done())
        held.release()
        assert ended == [False, False]
        with pytest.raises(asyncio.CancelledError):
            await reading

    async def test_a_cancelled_verb_is_cancelled_below(self, faulty: Faulty) -> None:
        held = faulty.hold("put")
        putting = await begun(Deadline(faulty, "lustre").put("key", [b"x"]), held)
        await cancelled(putting)
        held.release()
        await turns()
        assert await listed(faulty) == {}


async def test_what_a_slow_listing_has_found_is_handed_out_before_it_ends(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines look for progress."""
    monkeypatch.setattr(forward, "_LISTED_SECONDS", -1.0)
    goes_on = asyncio.Event()

    class Slow(forward.Forward):
        async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
            async for info in super().list(prefix):
                yield info
                await goes_on.wait()

    keys = ["a", "b"]
    for key in keys:
        await faulty.put(key, [b"x"])
    async with asyncio.timeout(SOON):
        async for info in forward.Forward(Slow(faulty)).list(""):
            goes_on.set()
            keys.remove(info.key)
    assert not keys


async def test_puts_keep_a_rate_that_idle_time_earns_nothing_for_and_reads_wait_for_nothing(faulty: Faulty) -> None:
    now, waited = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waited.append(seconds)

    store = Paced(faulty, Pace(10.0, clock=lambda: now, sleep=sleep))
    await store.put("a", [bytes(20)])
    await store.get("a", limit=20)
    await store.get_into("a", 0, memoryview(bytearray(20)))
    await store.stat("a")
    await store.delete("a")
    await store.put("b", [bytes(10)])
    now = 100.0
    await store.put("c", [bytes(10)])
    await store.put("d", [bytes(10)])
    assert waited == [0.0, 2.0, 0.0, 1.0]


class TestLimited:
    async def begin(self, store: Limited, nbytes: list[int]) -> list[asyncio.Task[None]]:
        tasks = [asyncio.ensure_future(store.put(f"{number}", [bytes(n)])) for number, n in enumerate(nbytes)]
        await turns()
        return tasks

    def running(self, faulty: Faulty) -> list[str]:
        return [call.key for call in faulty.calls]

    async def finish(self, held: Hold, tasks: list[asyncio.Task[None]]) -> None:
        held.release()
        await asyncio.gather(*tasks)

    async def test_operations_are_bounded(self, faulty: Faulty) -> None:
        held = faulty.hold("put", times=None)
        tasks = await self.begin(Limited(faulty, operations=3, nbytes=100), [1] * 10)
        assert self.running(faulty) == ["0", "1", "2"]
        await self.finish(held, tasks)
        assert self.running(faulty) == [str(number) for number in range(10)]

    async def test_bytes_are_bounded_and_nobody_is_overtaken(self, faulty: Faulty) -> None:
        held = faulty.hold("put", times=None)
        tasks = await self.begin(Limited(faulty, operations=99, nbytes=100), [60, 30, 50, 5, 5])
        assert self.running(faulty) == ["0", "1"]
        await self.finish(held, tasks)
        assert self.running(faulty) == list("01234")

    async def test_what_is_larger_than_the_limit_goes_alone(self, faulty: Faulty) -> None:
        held = faulty.hold("put", times=None)
        tasks = await self.begin(Limited(faulty, operations=99, nbytes=100), [1, 5000, 1])
        assert self.running(faulty) == ["0"]
        await self.finish(held, tasks)
        assert self.running(faulty) == ["0", "1", "2"]

    async def test_who_gives_up_waiting_holds_up_nobody(self, faulty: Faulty) -> None:
        held = faulty.hold("put", times=None)
        tasks = await self.begin(Limited(faulty, operations=99, nbytes=100), [60, 60, 30])
        assert self.running(faulty) == ["0"]
        tasks.pop(1).cancel()
        await turns()
        assert self.running(faulty) == ["0", "2"]
        await self.finish(held, tasks)

    async def test_who_gives_up_when_his_turn_comes_gives_it_back(self, faulty: Faulty) -> None:
        limited = Limited(faulty, operations=1, nbytes=100)
        await limited._acquire(1)
        waiting = asyncio.ensure_future(limited._acquire(1))
        await turns()
        limited._release(1)
        waiting.cancel()
        await turns()
        async with asyncio.timeout(20):
            await limited.put("key", [b"x"])

    @pytest.mark.parametrize(("operations", "nbytes"), [(0, 1), (1, 0), (-1, 5)])
    async def test_a_limit_that_lets_nothing_pass_is_invalid(
        self, faulty: Faulty, operations: int, nbytes: int
    ) -> None:
        with pytest.raises(Invalid):
            Limited(faulty, operations=operations, nbytes=nbytes)

    @settings(max_examples=40)
    @given(
        st.lists(st.integers(0, 150), min_size=1, max_size=10), st.lists(st.tuples(st.integers(0, 9), st.booleans()))
    )
    def test_however_verbs_end_all_room_comes_back(self, sizes: list[int], cancelled: list[tuple[int, bool]]) -> None:
        async def run() -> None:
            faulty = Faulty(await KvStoreBlobs.open("memory://"))
            limited = Limited(faulty, operations=3, nbytes=100)
            faulty.fail("put", DOWN, key="[0-4]", times=None)
            held = faulty.hold("put", key="[5-9]", times=None)
            tasks = await self.begin(limited, sizes)
            for number, wait in cancelled:
                tasks[number % len(sizes)].cancel()
                if wait:
                    await turns(3)
            held.release()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (limited._free_operations, limited._free_bytes) == (3, 100)
            assert not limited._queue

        asyncio.run(run())


class TestMetered:
    async def test_operations_bytes_and_errors_are_counted(self, faulty: Faulty) -> None:
        store = Metered(faulty)
        await store.put("key", [b"12345", b"678"])
        await store.get("key", limit=1000)
        await store.get_into("key", 2, memoryview(bytearray(3)))
        await store.get_digested("key", [Stretch(0, 4, memoryview(bytearray(1)))])
        await store.stat("key")
        with pytest.raises(NotFound):
            await store.stat("none")
        with pytest.raises(Conflict):
            await store.put("key", [b"x"], create_only=True)
        await listed(store)
        faulty.kill()
        for call in (store.put("key", [b"x"]), store.delete("key")):
            with pytest.raises(TierUnavailable):
                await call
        verbs = store.usage().verbs
        assert {verb: (u.operations, u.errors, u.nbytes) for verb, u in verbs.items()} == {
            "put": (3, 1, 8),
            "get": (1, 0, 8),
            "get_into": (2, 0, 7),
            "stat": (2, 0, 0),
            "list": (2, 0, 0),
            "delete": (1, 1, 0),
            "sweep": (0, 0, 0),
        }

    async def test_a_snapshot_does_not_change(self, faulty: Faulty) -> None:
        store = Metered(faulty)
        before = store.usage()
        await store.put("key", [b"x"])
        assert before.verbs["put"] == VerbUsage()
        assert before.write_bandwidth is None

    async def test_bandwidth_is_bytes_over_the_time_that_passed(self, faulty: Faulty) -> None:
        now = 0.0
        store = Metered(faulty, clock=lambda: now)
        for _ in range(3):
            held = faulty.hold("put", times=None)
            tasks = [asyncio.ensure_future(store.put(f"{number}", [bytes(500)])) for number in range(4)]
            await turns()
            now += 2.0
            held.release()
            faulty.clear()
            await asyncio.gather(*tasks)
            now += 1000.0  # idle time says nothing
        usage = store.usage()
        assert usage.verbs["put"].seconds == pytest.approx(3 * 4 * 2.0)
        assert usage.write_bandwidth == pytest.approx(4 * 500 / 2.0, rel=0.2)
        assert usage.read_bandwidth is None

    async def test_bandwidth_follows_what_was_seen_last(self, faulty: Faulty) -> None:
        now = 0.0
        store = Metered(faulty, clock=lambda: now)
        seen = []
        for seconds in (1.0,) * 20 + (10.0,) * 20:
            held = faulty.hold("put")
            putting = await begun(store.put("key", [bytes(1000)]), held)
            now += seconds
            held.release()
            await putting
            seen.append(store.usage().write_bandwidth or 0.0)
        assert seen[19] == pytest.approx(1000, rel=0.2)
        assert seen[-1] == pytest.approx(100, rel=0.3)
        assert all(later < earlier for earlier, later in pairwise(seen[20:]))
