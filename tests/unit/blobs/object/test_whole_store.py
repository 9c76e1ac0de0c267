"""Whole stores over an object store: what they keep, what they ask for, and what fails without harm."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.cohort import RanksPlace, assert_whole
from support.command_line import run
from support.limits import limit
from support.lossy import SEVEN_BITS, close_to
from support.object_stores import CREDENTIALS, Place
from support.proxy import Proxy, abridge, cut, deny, ignore_ranges, internal_error, late, lose_reply, slow_down
from support.scenes import CHUNK, Heard, assert_restored, assert_same, config, crash, ram, steps_on, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobStore
from tieredckpt.config import StoreConfig, dump_with_secrets
from tieredckpt.engine.tier.lease import Holder, Lease
from tieredckpt.errors import Conflict, Invalid, TierUnavailable
from tieredckpt.events import StepEvicted
from tieredckpt.units import parse_size

FIRST, EMPTY, LATER, READING, WITH_STEPS, MANY_OBJECTS = 15, 6, 9, 5, 10, 15
"""Requests of an opening: of a new tier; of one that is known and empty; of one with steps, to write and to read; with
many steps; and where a listing of everything takes several."""


@pytest.fixture
def settings(shared_memory: Path, s3_place: Place, between: Proxy) -> StoreConfig:
    tiers = {"ram": ram(shared_memory), "s3": s3_place.tier(between.url, retain={"kind": "last_n", "n": 2})}
    return config(tiers)


async def total(between: Proxy, store: CheckpointStore) -> int:
    """Requests since the last call, once nothing is under way."""
    await store.flush()
    found = sum(between.count.values())
    between.restart_count()
    return found


async def test_what_is_saved_is_promoted_restored_evicted_and_collected(
    settings: StoreConfig, s3_place: Place, shared_memory: Path
) -> None:
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        for step in range(1, 5):
            ckpt = await store.save(step, tree(step))
            await ckpt.reached("s3")
        await heard.first(StepEvicted, lambda event: (event.step, event.tier) == (2, "s3"))
        assert await steps_on(store, "s3") == [3, 4]
        await store.pin(3)
        with pytest.raises(Conflict, match="pinned"):
            await store.evict(3, "s3")
        await store.pin(3, on=False)
        await store.evict(3, "s3")
        packs = {key for key in s3_place.bucket.sizes() if key.startswith("packs/")}
        assert packs
        await crash(store)
    for path in shared_memory.iterdir():  # and the machine with it
        shutil.rmtree(path)
    async with CheckpointStore.open(settings) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 4
        assert_same(restored.tree, tree(4))
        assert set(restored.sources) == {"s3"}
        assert all(not verified.problem for verified in await store.verify(4))
        await store.collect()
    assert "leases" not in {key.partition("/")[0] for key in s3_place.bucket.sizes()}


async def test_a_bucket_holds_rounded_steps_beside_exact_ones(s3_place: Place, shared_memory: Path) -> None:
    exact = {**s3_place.tier(), "retain": {"kind": "last_n", "n": 1}}
    small = s3_place.tier(lossy=SEVEN_BITS, codec="small", retain="all")
    tiers = {"ram": ram(shared_memory), "exact": exact, "small": small}
    for step in (1, 2):  # with a start between them
        async with CheckpointStore.open(config(tiers)) as store:
            await store.save(step, tree(step))
            await store.flush()
            await store.collect()
    async with CheckpointStore.open(config(tiers)) as store:
        assert_restored(await store.restore(), tree(2))
        rounded = await store.restore(1, lossy=True)
        assert rounded is not None
        assert close_to(rounded.tree["params"]["w0"], tree(1)["params"]["w0"])
        assert not any(verified.problem for verified in await store.verify(1))
    assert not [key for key in s3_place.bucket.sizes() if "leases/" in key]


async def test_few_requests_are_made(settings: StoreConfig, between: Proxy) -> None:
    async with CheckpointStore.open(settings) as store:
        assert await total(between, store) <= FIRST
        await store.save(1, tree(1))
        assert await total(between, store) == 1 + 2  # a pack, its index, the commit
        await store.save(2, tree(1))
        assert await total(between, store) <= 3
        await store.collect()
        assert await total(between, store) <= 2
    assert sum(between.count.values()) <= 3  # a listing, the catalog, the lease
    between.restart_count()
    async with CheckpointStore.open(settings) as store:
        assert await total(between, store) <= LATER
    between.restart_count()
    async with CheckpointStore.open(settings, read_only=True) as store:
        assert sum(between.count.values()) <= READING
        assert [info.step for info in await store.steps()] == [1, 2]
        assert {verb for verb, _ in between.asked} <= {"GET", "LIST", "HEAD"}


@pytest.mark.parametrize("codec", ["none", "fast"])
async def test_a_restore_reads_as_many_ranges_at_a_time_as_the_tier_takes(
    s3_place: Place, between: Proxy, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Compressed packs too, whose frames wait in scratch memory, which is bounded, until they are decoded."""
    limit(monkeypatch, read_run=CHUNK)
    saved = {f"w{at}": np.arange(at, at + CHUNK // 8) for at in range(120)}
    async with CheckpointStore.open(config({"s3": s3_place.tier(between.url, codec=codec, concurrency=9)})) as store:
        await store.save(1, saved)
        await total(between, store)
        between.most_under_way = 0
        between.fail("GET", late, key="packs/", times=None)
        restored = await store.restore()
    assert_restored(restored, saved)
    assert between.most_under_way == 2 * 9


@pytest.mark.parametrize(
    ("nbytes", "object_size"),
    [(40 << 20, "5 MiB"), pytest.param(1 << 30, "64 MiB", marks=pytest.mark.slow)],
    ids=["40 MiB", "1 GiB"],
)
async def test_a_large_save_takes_a_request_for_each_pack_and_few_more(
    s3_place: Place,
    between: Proxy,
    shared_memory: Path,
    nbytes: int,
    object_size: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, catalog_interval=3600.0)  # what is due by time alone is not of the save
    tiers = {
        "ram": ram(shared_memory, capacity=nbytes + (64 << 20)),
        "s3": s3_place.tier(between.url, object_size=object_size),
    }
    async with CheckpointStore.open(config(tiers, chunk_size="1 MiB", lease_ttl="20 min")) as store:
        await total(between, store)
        await store.save(1, {"w": np.random.default_rng(1).integers(0, 1 << 62, nbytes // 8)})
        requests = await total(between, store)
        packs = [size for key, size in s3_place.bucket.sizes().items() if key.startswith("packs/")]
        assert sum(packs) >= nbytes
        assert len(packs) <= 2 * nbytes // parse_size(object_size)
        assert requests <= len(packs) + 4
        await store.save(2, {"w": np.random.default_rng(1).integers(0, 1 << 62, nbytes // 8)})
        assert await total(between, store) <= 3
        await store.collect()
        assert await total(between, store) <= 2


async def test_an_empty_tier_that_is_known_is_opened_with_few_requests(settings: StoreConfig, between: Proxy) -> None:
    async with CheckpointStore.open(settings):
        pass
    between.restart_count()
    async with CheckpointStore.open(settings) as store:
        assert await total(between, store) <= EMPTY


async def test_a_hundred_steps_are_opened_with_few_requests(
    s3_place: Place, between: Proxy, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = {"ram": ram(shared_memory), "s3": s3_place.tier(between.url, retain="all")}
    settings = config(tiers)
    async with CheckpointStore.open(settings) as store:
        for step in range(100):
            await store.save(step, {"in the index": np.full(10, step), "in a pack": np.arange(9000)})
        await store.flush()
    between.restart_count()
    async with CheckpointStore.open(settings) as store:
        assert await total(between, store) <= WITH_STEPS
        assert len(await store.steps()) == 100
    for module in ("client", "store"):
        monkeypatch.setattr(f"tieredckpt.blobs.object.{module}.LISTED_AT_ONCE", 90)
    between.restart_count()
    async with CheckpointStore.open(settings) as store:
        assert await total(between, store) <= MANY_OBJECTS
        assert len(await store.steps()) == 100


async def test_a_first_collection_reads_each_index_once_and_several_at_a_time(
    s3_place: Place, between: Proxy, shared_memory: Path
) -> None:
    settings = config({"ram": ram(shared_memory), "s3": s3_place.tier(between.url, retain="all")})
    async with CheckpointStore.open(settings) as store:
        for step in range(30):
            await store.save(step, {"w": np.arange(step, 3000)})
        await store.flush()
    async with CheckpointStore.open(settings) as store:
        await total(between, store)
        between.most_under_way = 0
        between.fail("GET", late, key="/steps/", times=None)
        await store.collect()
        assert await total(between, store) <= 2 + 2 * 30
        assert between.most_under_way >= 8


async def test_a_writer_that_came_at_the_same_moment_is_seen(
    settings: StoreConfig, s3_place: Place, between: Proxy
) -> None:
    """By the request that tells what the tier holds as well: of two, both of which found no lease, one remains."""
    holder = Holder(
        host="node17",
        machine="node17/another-boot",
        process=1,
        process_started="1",
        taken_at=time.time() - 1,
        renewed_at=time.time() - 1,
    )

    def beside(request: Any) -> None:
        asyncio.run(s3_place.bucket.put("leases/00112233445566aa", msgspec.json.encode(holder)))
        request.answer(request.forward())

    between.fail("PUT", beside, key="/leases/")
    with pytest.raises(Conflict, match="node17"):
        await CheckpointStore.open(settings)
    assert {key for key in s3_place.bucket.sizes() if key.startswith("leases/")} == {"leases/00112233445566aa"}


async def test_what_lies_beside_the_leases_of_a_bucket_is_not_taken_for_a_torn_one(store: BlobStore) -> None:
    await store.put("packs/ab/pack", [b"x"])
    lease = Lease(store, "s3", ttl=0.0)
    await lease.acquire()
    assert (await store.stat("packs/ab/pack")).size == 1
    await lease.release()


async def test_packs_are_put_several_at_a_time(s3_place: Place, between: Proxy, shared_memory: Path) -> None:
    tiers = {
        "ram": ram(shared_memory, capacity="160 MiB"),
        "s3": s3_place.tier(between.url, object_size="5 MiB", concurrency=4, retries=3),
    }
    settings = config(tiers, chunk_size="1 MiB")
    hang = between.hang("PUT", key="/packs/", times=4)
    async with CheckpointStore.open(settings) as store:
        ckpt = await store.save(1, {"w": np.random.default_rng(1).standard_normal(5 << 20)})
        async with asyncio.timeout(60):
            while sum("/packs/" in path for _, path in between.asked) < 4:
                await asyncio.sleep(0.01)
        hang.release()
        between.heal()
        await asyncio.wait_for(store.flush(), 60)
        await ckpt.reached("s3")
    sizes = [size for key, size in s3_place.bucket.sizes().items() if key.startswith("packs/")]
    assert len(sizes) >= 8
    assert max(sizes) <= 6 << 20


async def test_packs_that_die_are_deleted_several_at_a_time(
    s3_place: Place, between: Proxy, shared_memory: Path
) -> None:
    far = s3_place.tier(between.url, object_size="5 MiB", retries=3, retain={"kind": "last_n", "n": 1})
    settings = config({"ram": ram(shared_memory, capacity="160 MiB"), "s3": far}, chunk_size="1 MiB")
    async with CheckpointStore.open(settings) as store:
        await store.save(1, {"w": np.random.default_rng(1).standard_normal(5 << 20)})
        await store.flush()
        hang = between.hang("DELETE", key="/packs/", times=4)
        await store.save(2, {"w": np.random.default_rng(2).standard_normal(5 << 20)})
        async with asyncio.timeout(60):
            while sum(verb == "DELETE" and "/packs/" in path for verb, path in between.asked) < 4:
                await asyncio.sleep(0.01)
        hang.release()
        between.heal()
        await store.flush()
        await store.collect()
        sizes = {key: size for key, size in s3_place.bucket.sizes().items() if key.startswith("packs/")}
        assert sum(sizes.values()) < 50 << 20
        assert_same((await store.restore()).tree["w"], np.random.default_rng(2).standard_normal(5 << 20))


@pytest.mark.parametrize("fault", [slow_down, internal_error, cut, lose_reply])
async def test_whatever_fails_for_a_while_is_made_good(
    settings: StoreConfig, between: Proxy, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, first_retry=0.02)
    async with CheckpointStore.open(settings) as store:
        for verb in ("PUT", "DELETE", "GET", "LIST"):
            between.fail(verb, fault, times=2)
        for step in range(1, 5):
            await store.save(step, tree(step))
        async with asyncio.timeout(60):
            while not await _is_promoted(store, 4):
                await asyncio.sleep(0.05)
        between.heal()
        assert_restored(await store.restore(4), tree(4))


async def _is_promoted(store: CheckpointStore, step: int) -> bool:
    return any(info.step == step and "s3" in info.tiers for info in await store.steps())


async def test_several_ranks_share_a_tier(shared_memory: Path, s3_place: Place, between: Proxy) -> None:
    tiers = {"ram": ram(shared_memory / "a"), "s3": s3_place.tier(between.url)}
    place = RanksPlace(shared_memory, shared_memory, settings={"tiers": tiers})
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "s3")
        assert len([path for verb, path in between.asked if path.endswith("manifest.ocdbt") and verb == "PUT"]) == 1
    place.lose_ram("a")
    async with place.open() as ranks:
        for restored in await ranks.restored():
            assert restored is not None
            assert "ram" not in restored.sources
            assert_whole(restored, 1)


async def test_training_goes_on_beside_a_server_that_hangs(settings: StoreConfig, between: Proxy) -> None:
    async with CheckpointStore.open(settings) as store:
        hang = between.hang("*", times=None)
        for step in (1, 2):
            await asyncio.wait_for(store.save(step, tree(step)), 30)
        assert_same((await store.restore(2)).tree, tree(2))
        hang.release()
        between.heal()
        async with asyncio.timeout(60):
            while not await _is_promoted(store, 2):
                await asyncio.sleep(0.05)


async def test_a_reader_needs_no_right_to_write(settings: StoreConfig, between: Proxy) -> None:
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        await store.flush()
    far = settings.model_copy(update={"tiers": settings.slower})
    between.fail("PUT", deny, times=None)
    between.fail("DELETE", deny, times=None)
    async with CheckpointStore.open(far, read_only=True) as store:
        assert_same((await store.restore()).tree, tree(1))
    with pytest.raises(TierUnavailable, match="credentials do not allow"):
        await CheckpointStore.open(far)


@pytest.mark.usefixtures("no_signature")
async def test_an_unfit_server_refuses_the_store(settings: StoreConfig, between: Proxy) -> None:
    between.fail("GET", ignore_ranges, times=None)
    with pytest.raises(Invalid, match="cannot be a tier"):
        await CheckpointStore.open(settings)


async def test_an_object_of_somebody_else_keeps_nobody_from_the_store_whatever_its_name(
    settings: StoreConfig, s3_place: Place
) -> None:
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        await store.flush()
    far = settings.model_copy(update={"tiers": settings.slower})
    for name in ("/no folder", "notes/../x", "%zz", "a tab\t"):
        await s3_place.bucket.put(name, b"")
    for read_only in (True, False):
        async with CheckpointStore.open(far, read_only=read_only) as store:
            assert_restored(await store.restore(), tree(1))
    await s3_place.bucket.put("packs//x", b"")  # among the store's own
    async with CheckpointStore.open(settings) as store:
        assert "packs//x" in (await store.tier_infos())[1].problem
        assert "delete it" in (await store.tier_infos())[1].problem


@pytest.mark.parametrize("fault", [deny, lambda request: request.refuse(404, "NoSuchKey")], ids=["refused", "gone"])
async def test_a_pack_that_cannot_be_read_is_told_once_and_not_asked_for_by_each_of_its_chunks(
    settings: StoreConfig, between: Proxy, caplog: pytest.LogCaptureFixture, fault: Any
) -> None:
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        await store.flush()
        between.fail("GET", fault, key="/packs/", times=None)
        between.restart_count()
        (_, verified) = await store.verify(1)
        assert verified.problem
        assert sum("/packs/" in path for _, path in between.asked) <= 2
        (told,) = [record.getMessage() for record in caplog.records if "does not have" in record.getMessage()]
        assert "'params/w0' and 3 more: tier 's3' does not have 12 chunks intact" in told


async def test_a_url_and_the_environment_are_enough(
    s3_place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS["secret_access_key"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_place.server)
    async with CheckpointStore.open(s3_place.url) as store:
        ckpt = await store.save(1, tree(1))
        await ckpt.reached("s3")
    listed = await asyncio.to_thread(run, "ls", s3_place.url, "--json")
    assert listed.exit_code == 0, listed.output
    assert '"s3"' in listed.output
    assert list(tmp_path.iterdir()) == []


async def test_stock_tensorstore_opens_what_is_there(settings: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorstore as ts

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS["secret_access_key"])
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("s3")
    far = settings.model_copy(update={"tiers": settings.slower})
    async with CheckpointStore.open(far, read_only=True) as store:
        spec = await store.spec(1, "params/w0")
        assert CREDENTIALS["secret_access_key"] not in str(spec)
        found = await (await ts.open(spec)).read()
    assert_same(found, tree(1)["params"]["w0"])


@pytest.mark.usefixtures("no_signature")
async def test_no_secret_is_stored_or_told(
    s3_place: Place, between: Proxy, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "c4n4ry-c4n4ry"
    secrets = {"secret_access_key": canary, "session_token": f"{canary}-token"}
    settings = config({"ram": ram(shared_memory), "s3": s3_place.tier(between.url, **secrets)})
    with caplog.at_level(logging.DEBUG):
        async with CheckpointStore.open(settings) as store:
            await store.save(1, tree(1))
            await store.flush()
            for fault in (deny, internal_error, lambda request: request.refuse(403, canary)):
                between.fail("*", fault)
                await store.verify(1)
        between.heal()
    stored = b"".join(s3_place.bucket.read(key) or b"" for key in s3_place.bucket.sizes())
    assert canary.encode() not in stored
    assert canary not in caplog.text
    assert "was not" in caplog.text
    assert canary in str(dump_with_secrets(settings))  # as an agent gets them


@pytest.mark.parametrize("fault", [internal_error, deny, cut])
async def test_what_a_server_does_not_deliver_is_asked_for_once_more_and_not_called_lost(
    settings: StoreConfig, between: Proxy, fault: Any
) -> None:
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        await store.flush()
    far = settings.model_copy(update={"tiers": settings.slower})
    async with CheckpointStore.open(far, read_only=True) as reader:
        between.fail("GET", fault, key="/packs/")
        assert_same((await reader.restore()).tree, tree(1))
        between.fail("GET", fault, key="/packs/", times=None)
        with pytest.raises(TierUnavailable, match=r"'s3' may have it; try again when that works \(tier 's3': packs/"):
            await reader.restore()
        between.heal()
        assert_same((await reader.restore()).tree, tree(1))


@pytest.mark.parametrize(
    "fault", [abridge, lambda request: request.refuse(404, "NoSuchKey"), deny], ids=["short", "missing", "refused"]
)
async def test_a_commit_that_is_answered_wrongly_once_is_read_once_more(
    settings: StoreConfig, between: Proxy, fault: Any
) -> None:
    """Else a training that is started again would go on from an older step."""
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2):
            await store.save(step, tree(step))
            await store.flush()
    between.fail("GET", fault, key="manifest.ocdbt")
    async with CheckpointStore.open(settings.model_copy(update={"tiers": settings.slower})) as store:
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree, tree(2))


@pytest.mark.parametrize("with_ram", [False, True], ids=["s3 alone", "ram and s3"])
async def test_a_writer_takes_no_answer_that_is_no_listing_for_an_empty_tier(
    s3_place: Place, between: Proxy, shared_memory: Path, with_ram: bool
) -> None:
    """As of a proxy that asks for a login. Else a training that is started again would begin anew."""

    def login(request: Any) -> None:
        request.answer_with(200, "<html><body>Who are you?</body></html>")

    s3 = {"s3": s3_place.tier(between.url)}
    settings = config({"ram": ram(shared_memory), **s3} if with_ram else s3)
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("s3")
    between.fail("LIST", login, times=None)
    with pytest.raises(TierUnavailable, match="lacks the lease written just before"):
        async with CheckpointStore.open(settings) as store:
            await store.restore()
