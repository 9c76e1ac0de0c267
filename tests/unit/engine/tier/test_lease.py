"""One writer at a time: a second is told who the first is, and a dead one stops no other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from reliability.tiers import FaultyTiers
from support.commit_scene import Scene
from support.insight import tier_of
from support.scenes import SOON, Heard, assert_restored, config, folder, leases, ram, taken_over, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobInfo, Unanswered
from tieredckpt.blobs.kvstore.store import KvStoreBlobs
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.config import StoreConfig
from tieredckpt.engine.opening.connect import connect, connect_late
from tieredckpt.engine.tier import lease as lease_module
from tieredckpt.engine.tier.lease import Holder, Lease
from tieredckpt.errors import Conflict, Invalid, NoSpace, TierUnavailable
from tieredckpt.events import TierFailed, TierRecovered
from tieredckpt.testing.faulty import Faulty

HOLDER = """
import asyncio, sys
from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig

async def main():
    store = await CheckpointStore.open(StoreConfig.model_validate_json(sys.argv[1]))
    await (await store.save(1, {"x": 1})).reached("disk")
    print("held", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""

UNSEEN = """
mount -t proc -o hidepid=2,gid=54321 proc /proc || exit
exec setpriv --bounding-set=-sys_ptrace "$@"
"""
"""Runs a command of root that is not shown the processes of other users."""


@pytest.fixture
def on_disk(disk: Path) -> StoreConfig:
    return config({"disk": folder(disk)})


@pytest.mark.parametrize("with_ram", [False, True], ids=["disk", "ram and disk"])
async def test_a_second_store_is_told_who_holds_the_first(shared_memory: Path, disk: Path, with_ram: bool) -> None:
    tiers = {"ram": ram(shared_memory)} if with_ram else {}
    settings = config({**tiers, "disk": folder(disk)})
    async with CheckpointStore.open(settings) as store:
        with pytest.raises(Conflict) as refused:
            await CheckpointStore.open(settings)
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
        await (await store.save(1, tree(1))).reached("disk")
    async with CheckpointStore.open(settings) as store:
        assert [info.step for info in await store.steps()] == [1]


async def test_a_holder_that_was_killed_is_in_nobodys_way(shared_memory: Path, disk: Path) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(disk)})
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, settings.model_dump_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(Conflict, match=f"process {holder.pid} on"):
                await CheckpointStore.open(settings)
            async with CheckpointStore.open(settings, read_only=True) as reader:
                assert [info.step for info in await reader.steps()] == [1]
        finally:
            holder.send_signal(signal.SIGKILL)
    begin = time.monotonic()
    async with CheckpointStore.open(settings) as store:
        assert time.monotonic() - begin < settings.lease_ttl / 4
        restored = await store.restore()
        assert restored is not None
        assert restored.tree == {"x": 1}
        assert len(leases(disk)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_holder_whose_process_is_hidden_counts_while_it_renews(on_disk: StoreConfig, disk: Path) -> None:
    """Clusters mount /proc with hidepid: it shows nobody the processes of others."""
    hidden = ["unshare", "--mount", "sh", "-c", UNSEEN, "sh"]
    try:
        subprocess.run([*hidden, "true"], capture_output=True, check=True, timeout=300)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount /proc, or a program for it is missing")
    opened = [sys.executable, "-c", HOLDER, on_disk.model_dump_json()]
    with subprocess.Popen(["sleep", "1000"], user=54322) as other:
        try:
            holder = lease_module.holder_of(other.pid, time.time())
            started = holder.process_started
            lease(disk, time.time(), machine=holder.machine, process=other.pid, process_started=started)
            refused = subprocess.run([*hidden, *opened], capture_output=True, text=True, check=False, timeout=300)
        finally:
            other.kill()
    assert f"process {other.pid} on" in refused.stderr.splitlines()[-1]


def test_a_holder_that_has_ended_is_dead_before_its_parent_has_noticed() -> None:
    """In a container the first process may notice none."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        holder = lease_module.holder_of(process.pid, time.time())
        assert lease_module.lives_here(holder)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not lease_module.lives_here(holder)


async def test_a_process_may_have_a_name_that_is_no_text(on_disk: StoreConfig) -> None:
    """The system cuts the name of a process to 15 bytes, also within a character."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes("тренировка".encode()[:15])
        async with CheckpointStore.open(on_disk):
            with pytest.raises(Conflict, match=f"process {os.getpid()} on"):
                await CheckpointStore.open(on_disk)
    finally:
        name.write_bytes(before)


def lease(disk: Path, renewed_at: float, *, late: float = 0.0, **settings: object) -> Path:
    """A lease as a process on another host writes it, whose clock may be ``late``."""
    path = disk / "leases" / "00112233445566aa"
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = {
        "host": "node17",
        "machine": "node17/other-boot/pid:[1]",
        "process": os.getpid(),
        "process_started": "1",
        "taken_at": renewed_at - late,
        "renewed_at": renewed_at - late,
    }
    path.write_text(json.dumps(holder | settings))
    os.utime(path, (renewed_at, renewed_at))
    return path


async def test_a_holder_on_another_host_counts_while_it_renews(on_disk: StoreConfig, disk: Path) -> None:
    lease(disk, time.time() - on_disk.lease_ttl / 2)
    with pytest.raises(Conflict, match="on node17"):
        await CheckpointStore.open(on_disk)
    assert [path.name for path in (disk / "leases").iterdir()] == ["00112233445566aa"]
    lost = lease(disk, time.time() - 2 * on_disk.lease_ttl)
    async with CheckpointStore.open(on_disk) as store:
        assert not lost.exists()
        await store.save(1, tree(1))


async def test_a_late_clock_does_not_oust_a_holder(on_disk: StoreConfig, disk: Path) -> None:
    lease(disk, time.time(), taken_at=time.time() + 1000)
    with pytest.raises(Conflict, match="on node17"):
        await CheckpointStore.open(on_disk)


@pytest.mark.parametrize("hours", [-5, 5])
async def test_the_clock_of_another_host_makes_it_neither_dead_nor_immortal(
    on_disk: StoreConfig, disk: Path, hours: int
) -> None:
    lease(disk, time.time(), late=hours * 3600)
    with pytest.raises(Conflict, match="on node17"):
        await CheckpointStore.open(on_disk)
    assert [path.name for path in (disk / "leases").iterdir()] == ["00112233445566aa"]
    lost = lease(disk, time.time() - 2 * on_disk.lease_ttl, late=hours * 3600)
    async with CheckpointStore.open(on_disk):
        assert not lost.exists()


async def test_where_the_machine_that_writes_stamps_a_clock_may_be_late_by_almost_two_thirds_of_the_ttl(
    on_disk: StoreConfig, disk: Path
) -> None:
    renewed = time.time() - on_disk.lease_ttl / 3  # the next renewal is due
    lease(disk, renewed - on_disk.lease_ttl * 0.6)
    with pytest.raises(Conflict, match="on node17"):
        await CheckpointStore.open(on_disk)


async def test_stale_leases_that_may_not_be_deleted_are_in_nobodys_way(
    on_disk: StoreConfig, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials of an object store often write and do not delete, and a crash leaves a lease."""
    lost = lease(disk, time.time() - 2 * on_disk.lease_ttl)
    delete = PosixStore.delete

    async def denied(self: PosixStore, key: str) -> None:
        if key.startswith("leases/"):
            raise Unanswered(f"{key} was not deleted: the credentials do not allow it")
        await delete(self, key)

    monkeypatch.setattr(PosixStore, "delete", denied)
    for step in (1, 2):
        async with CheckpointStore.open(on_disk) as store:
            await (await store.save(step, tree(step))).reached("disk")
    assert lost.exists()


@pytest.mark.parametrize("torn", [b"", b"{", b'{"host": 1}', b"\xff\xfe", b"x" * 10_000], ids=repr)
async def test_a_torn_lease_holds_nothing_and_is_removed_once_nobody_can_be_at_it(
    on_disk: StoreConfig, disk: Path, torn: bytes
) -> None:
    path = lease(disk, time.time())
    path.write_bytes(torn)
    async with CheckpointStore.open(on_disk) as store:
        await store.save(1, tree(1))
        assert path.exists()
    long_ago = time.time() - 2 * on_disk.lease_ttl
    os.utime(path, (long_ago, long_ago))
    async with CheckpointStore.open(on_disk):
        assert not path.exists()


async def test_a_writer_that_another_took_over_from_stops_writing(
    disk: Path, shared_memory: Path, faults: FaultyTiers
) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(disk)}, lease_ttl=0.3, grace=10)
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        # Unheard of for long, it was taken for dead: its lease is gone, and another's is there.
        renewing = faults["disk"].hold("stat", key="leases/*")
        await renewing.reached()  # until then the folder may have a temporary file besides
        (mine,) = (disk / "leases").iterdir()
        other = lease(disk, time.time() + 1000, taken_at=time.time())
        mine.unlink()
        renewing.release()
        failed = await heard.first(TierFailed)
        assert isinstance(failed.error, Conflict)
        before = sorted(path.name for path in (disk / "steps").iterdir())
        with pytest.raises(Conflict, match="node17"):
            await (await store.save(2, tree(2))).reached("disk")
        await heard.first(TierFailed, lambda _: len(heard.of(TierFailed)) >= 4)
        assert heard.of(TierRecovered) == []
        assert sorted(path.name for path in (disk / "steps").iterdir()) == before
        other.unlink()
        await heard.first(TierRecovered)
        await store.flush()
        assert await store.where(2) == ("ram", "disk")


async def test_a_tier_is_not_opened_again_while_another_writer_is_at_work(disk: Path) -> None:
    """Though no lease of this one runs out for long: it would commit beside the other."""
    settings = config({"disk": folder(disk)}, lease_ttl=1000, grace=2000)
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        engine, tier = store._life.engine, tier_of(store, "disk")
        lose_lease(disk)
        other = lease(disk, time.time() + 1000, taken_at=time.time())
        with pytest.raises(Conflict, match=r"tier 'disk'.* is being written to by process .* on node17"):
            await store._life.loop.call(connect_late(engine.state, tier))
        with pytest.raises(TierUnavailable, match="another one has been there"):
            await store._life.loop.call(tier.confirm_lease())
        other.unlink()
        await store._life.loop.call(connect_late(engine.state, tier))
        await store.save(2, tree(2))


async def test_a_writer_that_was_paused_while_another_came_and_went_reads_anew_what_there_is(
    disk: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would refer to packs that the other has collected, and take the other's steps for leftovers."""
    keep = {"retain": {"kind": "last_n", "n": 3}}
    settings = config({"ram": ram(shared_memory), "disk": folder(disk, **keep)}, lease_ttl=1000, grace=2000)
    async with CheckpointStore.open(settings) as paused:
        await (await paused.save(1, tree(1))).reached("disk")
        await taken_over(disk, lease_ttl=1000, grace=2000)
        later(monkeypatch, 1001)
        heard = Heard(paused)
        await paused.save(3, tree(1))  # of the values of step 1
        await heard.first(TierRecovered)
        await paused.flush()
        await paused.collect()
        assert 2 in [info.step for info in await paused.steps()]
    for step, seed in ((2, 2), (3, 1)):
        async with CheckpointStore.open(config({"disk": folder(disk)}), read_only=True) as reader:
            assert_restored(await reader.restore(step, resume=False), tree(seed))


async def test_nothing_is_deleted_once_another_writer_has_been_there(
    on_disk: StoreConfig, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what the collection under way found before the pause."""
    async with CheckpointStore.open(on_disk) as store:
        await (await store.save(1, tree(1))).reached("disk")
        delete = PosixStore.delete
        paused: list[str] = []
        await (await store.save(2, tree(2))).reached("disk")
        packs = {path.name for path in (disk / "packs").rglob("*") if path.is_file()}

        async def then_pause(self: PosixStore, key: str) -> None:
            await delete(self, key)
            if key.startswith("steps/") and not paused:
                paused.append(key)
                lose_lease(disk)
                later(monkeypatch, 2 * on_disk.lease_ttl)

        monkeypatch.setattr(PosixStore, "delete", then_pause)
        with pytest.raises(TierUnavailable, match="another one has been there"):
            await store.evict(1, "disk")
        assert paused
        assert {path.name for path in (disk / "packs").rglob("*") if path.is_file()} == packs


async def test_a_writer_that_was_paused_evicts_nothing_before_it_knows_what_there_is(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 6: what it knows of as newer may have left, and the step be the last good copy."""
    settings = config({"disk": folder(disk, retain="all")}, lease_ttl=1000)
    async with CheckpointStore.open(settings) as paused:
        for step in 1, 2:
            await (await paused.save(step, tree(step))).reached("disk")
        lose_lease(disk)
        async with CheckpointStore.open(settings) as other:
            await other.delete(2, force=True)
        later(monkeypatch, 1001)
        with pytest.raises(TierUnavailable, match="another one has been there"):
            await paused.evict(1, "disk")
    async with CheckpointStore.open(settings, read_only=True) as reader:
        assert_restored(await reader.restore(), tree(1))


async def test_a_lease_is_renewed_after_a_failure_that_nobody_foresaw(
    shared_memory: Path, disk: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs = [RuntimeError("a bug")] * 3
    renew = Lease.renew

    async def renew_badly(lease: Lease) -> None:
        if bugs:
            raise bugs.pop()
        await renew(lease)

    settings = config({"ram": ram(shared_memory), "disk": folder(disk)}, lease_ttl=0.3, grace=10)
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        monkeypatch.setattr(Lease, "renew", renew_badly)
        assert isinstance((await heard.first(TierFailed)).error, RuntimeError)
        await heard.first(TierRecovered)
        bugs.append(RuntimeError("another"))  # is met only by a task that is still there
        await heard.first(TierFailed, lambda event: "another" in str(event.error))


async def test_a_reader_beside_the_writer_sees_its_steps_and_changes_nothing(shared_memory: Path, disk: Path) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(disk)})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
        async with CheckpointStore.open(settings, read_only=True) as reader:
            assert_restored(await reader.restore(), tree(1))
            for change in (
                reader.save(2, tree(2)),
                reader.promote(1, "disk"),
                reader.evict(1, "disk"),
                reader.delete(1),
                reader.collect(),
                reader.verify(repair=True),
            ):
                with pytest.raises(Invalid, match="read_only"):
                    await change
            assert len(leases(disk)) == 1
        async with CheckpointStore.open(settings, read_only=True) as reader:
            await store.save(2, tree(2))
            await store.flush()
            assert [info.step for info in await reader.steps()] == [1, 2]
            assert await reader.all_steps() == (1, 2)
            assert await reader.latest_step() == 2


class SlowToAnswer(PosixStore):
    """The first `stat` of a lease is answered late."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def stat(self, key: str) -> BlobInfo:
        try:
            return await super().stat(key)
        finally:
            if not self.asked.is_set():
                self.asked.set()
                await self.answers.wait()


async def test_of_two_that_take_a_lease_at_once_the_slower_one_is_refused(disk: Path) -> None:
    """Though it began first: the other has looked around before there was a lease to be seen."""
    slow, quick = Faulty(PosixStore(disk)), PosixStore(disk)
    listed = slow.hold("list", after=True)
    first, second = Lease(slow, "disk", 30), Lease(quick, "disk", 30)
    taking = asyncio.create_task(first.acquire())
    await listed.reached()
    await second.acquire()
    listed.release()
    with pytest.raises(Conflict, match="is being written to by"):
        await taking
    await second.renew()
    assert len(leases(disk)) == 1
    await second.release()
    for store in (slow, quick):
        await store.close()


async def test_of_two_renewals_at_once_the_slow_one_does_not_take_the_new_lease_for_a_lost_one(disk: Path) -> None:
    """Of a full device, where a step made room for the lease: promotions failed until all was read again."""
    store = SlowToAnswer(disk)
    held = Lease(store, "disk", ttl=60.0)

    async def renew_and_read() -> None:
        await held.renew()
        held.taken_over = False

    async with asyncio.TaskGroup() as both:
        both.create_task(held.renew())
        await store.asked.wait()
        fast = both.create_task(renew_and_read())
        await asyncio.wait({fast}, timeout=0.2)
        store.answers.set()
    assert not held.taken_over


@pytest.fixture
async def store(disk: Path) -> AsyncIterator[Faulty]:
    store = Faulty(PosixStore(disk))
    yield store
    store.clear()
    await store.close()


@pytest.fixture
async def held(store: Faulty) -> AsyncIterator[Lease]:
    """The lease of this process, for 30 s."""
    held = Lease(store, "disk", 30)
    await held.acquire()
    yield held
    await held.release()


def lose_lease(disk: Path) -> None:
    """Another writer took the one of a disk for dead, and has gone."""
    (mine,) = (disk / "leases").iterdir()
    mine.unlink()


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Move this writer's clock on, as while its process is stopped."""
    now = lease_module._now
    monkeypatch.setattr(lease_module, "_now", lambda: now() + seconds)


async def test_a_writer_looks_for_its_lease_while_other_clocks_may_take_it_for_dead(
    held: Lease, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_lease(disk)
    later(monkeypatch, 21)
    with pytest.raises(TierUnavailable, match="another one has been there"):
        await held.confirm()


async def test_a_lease_holds_from_when_its_renewal_began(
    held: Lease, store: Faulty, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put may have been there long before its answer."""
    answered = store.hold("put", after=True)
    async with asyncio.TaskGroup() as renewing:
        renewing.create_task(held.renew())
        await answered.reached()
        later(monkeypatch, 31)
        answered.release()
    lose_lease(disk)
    with pytest.raises(TierUnavailable, match="another one has been there"):
        await held.confirm()


async def test_a_clock_that_is_asked_after_the_lease_was_lost_says_that_another_writer_has_been_there(
    held: Lease, disk: Path
) -> None:
    lose_lease(disk)
    with pytest.raises(TierUnavailable, match="another one has been there"):
        await held.now()


async def test_a_writer_that_met_another_reads_anew_what_there_is_once_that_has_gone(held: Lease, disk: Path) -> None:
    other = lease(disk, time.time(), taken_at=time.time() - 10)
    with pytest.raises(Conflict, match="node17"):
        await held.renew()
    other.unlink()
    with pytest.raises(TierUnavailable, match="another one has been there"):
        await held.confirm()


async def test_a_writer_for_whose_lease_there_is_no_room_deletes_nothing_beside_another(
    store: Faulty, disk: Path
) -> None:
    store.fail("put", NoSpace("full"), times=None)
    without = Lease(store, "disk", 30)
    with pytest.raises(NoSpace):
        await without.acquire()
    await without.confirm(deleting=True)  # it makes room for one
    lease(disk, time.time())
    with pytest.raises(Conflict, match="node17"):
        await without.confirm(deleting=True)
    await without.release()


@pytest.mark.parametrize(("hours", "refusal"), [(0.9, Conflict), (1.1, NoSpace)])
async def test_where_a_full_device_does_not_tell_its_time_a_holder_counts_for_an_hour_more(
    store: Faulty, disk: Path, hours: float, refusal: type[Exception]
) -> None:
    """By as much its clock may be late."""
    lease(disk, time.time() - hours * 3600)
    store.fail("put", NoSpace("full"), times=None)
    with pytest.raises(refusal):
        await Lease(store, "disk", 30).acquire()


@pytest.mark.parametrize("looks", [1, 3])
async def test_a_lease_that_is_being_renewed_in_place_is_looked_at_again(disk: Path, looks: int) -> None:
    spec = {"driver": "file", "path": str(disk), "file_io_locking": {"mode": "non_atomic"}}
    store = Faulty(await KvStoreBlobs.open(spec))
    assert not store.traits.atomic_put
    holder = Lease(store, "disk", ttl=60.0)
    await holder.acquire()
    store.cut("get", 20, key="leases/*", times=looks)
    with pytest.raises(Conflict):
        await Lease(store, "disk", ttl=60.0).acquire()
    await holder.release()
    await Lease(store, "disk", ttl=60.0).acquire()
    await store.close()


async def test_a_store_that_was_closed_while_its_tier_was_silent_blocks_no_other(
    shared_memory: Path, disk: Path, faults: FaultyTiers
) -> None:
    """Its lease could not be deleted, and its process lives on."""
    settings = config({"ram": ram(shared_memory), "disk": folder(disk)})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
        faults["disk"].kill()
    assert list((disk / "leases").iterdir())
    faults["disk"].revive()
    async with CheckpointStore.open(settings) as store:
        await (await store.save(2, tree(2))).reached("disk")
        assert len(leases(disk)) == 1


async def test_a_lease_that_another_writer_took_while_a_reconnection_waited_is_not_taken_for_ones_own(
    quiet: Scene,
) -> None:
    """That is known once, and was forgotten: two writers committed beside each other."""
    place, now = quiet.disk / "leases", time.time()
    other = Holder(host="other", machine="other/1", process=7, process_started="1", taken_at=now, renewed_at=now)

    async def reconnect() -> None:
        tier, state = quiet.tier, quiet.store._life.engine.state
        assert tier.lease is not None
        async with tier.packs.guard:  # as a long promotion has it
            again = asyncio.create_task(connect(state, tier))
            async with asyncio.timeout(SOON):
                while not tier.packs.guard._waiters:  # it has renewed, and waits
                    await asyncio.sleep(0.01)
            for mine in place.iterdir():
                mine.unlink()
            (place / "0123456789abcdef").write_bytes(msgspec.json.encode(other))
            with pytest.raises(Conflict):
                await tier.lease.renew()
        with pytest.raises(Conflict):
            await again
        assert tier.lease.taken_over

    await quiet.store._life.loop.call(reconnect())
    (place / "0123456789abcdef").unlink()
