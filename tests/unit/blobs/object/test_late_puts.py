"""Puts that something between a store and its server passes on long after they were given up, and other writers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from support.insight import tier_of
from support.object_stores import Place
from support.proxy import Handler, Hang, Postponed, Proxy, ignore_conditions
from support.scenes import SOON, assert_restored, assert_same, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.errors import Conflict, Corrupt, TierUnavailable

MANIFEST = "manifest.ocdbt"


@pytest.fixture
def often(settings: StoreConfig) -> StoreConfig:
    """Renews its lease often, which tells it the time of the server."""
    return settings.model_copy(update={"lease_ttl": 1.0})


@pytest.fixture
async def store(settings: StoreConfig) -> AsyncIterator[CheckpointStore]:
    async with CheckpointStore.open(settings) as store:
        yield store


async def given_up(store: CheckpointStore, between: Proxy, step: int) -> Postponed:
    """A commit of a step that fails, and is still on its way."""
    postponed = Postponed()
    between.fail("PUT", postponed, key=MANIFEST)
    with pytest.raises(TierUnavailable):
        await store.promote(step, "s3")
    assert postponed.reached.is_set()
    return postponed


def lose_reply_late(request: Handler) -> None:
    """The request is done, and its client has given it up when it is answered."""
    request.forward().read()
    time.sleep(3)
    request.leave()


def shorten_grace(store: CheckpointStore) -> None:
    """Only once the commit has come: what it refers to is kept for no longer than the grace period."""
    state = store._life.engine.state
    state.config = state.config.model_copy(update={"grace": 0.1, "lease_ttl": 0.05})


def manifests(place: Place) -> list[str]:
    return [key for key in place.bucket.sizes() if key.endswith(MANIFEST)]


async def test_a_commit_that_comes_late_is_taken_back(store: CheckpointStore, between: Proxy, s3_place: Place) -> None:
    await store.save(1, tree(1))
    postponed = await given_up(store, between, 1)
    await store.flush()
    await store.collect()
    postponed.let_on()
    assert manifests(s3_place)
    await store.collect()
    assert not manifests(s3_place)


async def test_what_a_commit_refers_to_that_may_come_late_is_kept(
    store: CheckpointStore, between: Proxy, settings: StoreConfig
) -> None:
    await store.save(1, tree(1))
    await store.promote(1, "s3")
    await store.save(2, tree(1))
    postponed = await given_up(store, between, 2)
    await store.flush()
    await store.save(3, tree(3))
    await store.promote(3, "s3")
    await store.evict(1, "s3")
    await store.collect()
    postponed.let_on()
    far = settings.model_copy(update={"tiers": settings.slower})
    async with CheckpointStore.open(far, read_only=True) as reader:
        assert_restored(await reader.restore(2), tree(1))


@pytest.mark.parametrize("honoured", [True, False], ids=["conditions", "no conditions"])
@pytest.mark.usefixtures("no_signature")
async def test_a_commit_that_comes_late_harms_none_that_came_since(
    settings: StoreConfig, between: Proxy, honoured: bool
) -> None:
    if not honoured:
        between.fail("PUT", ignore_conditions, key="tieredckpt-endpoint.json", times=None)
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        postponed = await given_up(store, between, 1)
        await store.flush()
        tier = store._life.engine.state.tier("s3")
        tier.packs.index.clear()  # as of chunks that were found damaged: the next commit refers to others
        await store.promote(1, "s3")
        postponed.let_on()
        await store.collect()
        far = settings.model_copy(update={"tiers": settings.slower})
        async with CheckpointStore.open(far, read_only=True) as reader:
            assert_same((await reader.restore(1)).tree, tree(1))
            assert all(found.intact for found in await reader.verify(1))


async def test_doubt_ends_with_the_grace_period(often: StoreConfig, between: Proxy, s3_place: Place) -> None:
    async with CheckpointStore.open(often) as store:
        await store.save(1, tree(1))
        postponed = await given_up(store, between, 1)
        await store.promote(1, "s3")
        postponed.let_on()
        shorten_grace(store)
        indeterminate = store._life.engine.state.tier("s3").steps.indeterminate
        async with asyncio.timeout(SOON):
            while indeterminate or len([key for key in s3_place.bucket.sizes() if "/btree" in key]) > 1:
                await store.collect()
        assert len([key for key in s3_place.bucket.sizes() if "/btree" in key]) == 1
        assert all(found.intact for found in await store.verify(1))


async def test_what_a_late_commit_of_a_held_step_refers_to_is_kept_and_what_it_replaced_goes(
    often: StoreConfig, between: Proxy, s3_place: Place
) -> None:
    async with CheckpointStore.open(often) as store:
        await store.save(1, tree(1))
        await store.promote(1, "s3")
        engine, tier = store._life.engine, tier_of(store, "s3")
        tier.packs.index.clear()  # so that its chunks are written anew
        postponed = Postponed()
        between.fail("PUT", postponed, key=MANIFEST)
        anew = copy_step(engine.state, engine.admin._collector, engine.state.find(1), tier, again=True)
        with pytest.raises(TierUnavailable):
            await store._life.loop.call(anew)
        await store.flush()
        await store.collect()  # which reads the commit before
        postponed.let_on()
        shorten_grace(store)
        async with asyncio.timeout(SOON):
            while len([key for key in s3_place.bucket.sizes() if "/btree" in key or key.startswith("packs/")]) > 2:
                await store.collect()
        assert all(found.intact for found in await store.verify(1))
    far = often.model_copy(update={"tiers": often.slower})
    async with CheckpointStore.open(far, read_only=True) as reader:
        assert_restored(await reader.restore(1), tree(1))


async def test_a_step_that_another_writer_has_committed_stays_as_it_is(store: CheckpointStore, s3_place: Place) -> None:
    await store.save(1, tree(1))
    key = "steps/0000000001-000001/manifest.ocdbt"
    await s3_place.bucket.put(key, b"of another writer")
    with pytest.raises(Conflict, match=r"tier 's3': another writer has committed step 1 .*a prefix of its own"):
        await store.promote(1, "s3")
    assert s3_place.bucket.read(key) == b"of another writer"
    assert await store.where(1) == ("ram",)


async def test_a_failed_commit_deletes_none_of_another_writer(
    store: CheckpointStore, between: Proxy, s3_place: Place
) -> None:
    await store.save(1, tree(1))
    key = "steps/0000000001-000001/manifest.ocdbt"
    between.fail("PUT", Hang(), key=MANIFEST)
    await s3_place.bucket.put(key, b"of another writer")
    with pytest.raises(Conflict, match="another writer has committed step 1"):
        await store.promote(1, "s3")
    await store.collect()
    assert s3_place.bucket.read(key) == b"of another writer"
    with pytest.raises(Conflict, match="another writer has committed step 1"):
        await store.promote(1, "s3")
    assert s3_place.bucket.read(key) == b"of another writer"


async def test_a_commit_of_a_damaged_step_that_fails_is_not_said_to_meet_another_writer(
    store: CheckpointStore, between: Proxy
) -> None:
    """The commit that is there is the one that was found damaged."""
    await store.save(1, tree(1))
    await store.promote(1, "s3")
    tier = tier_of(store, "s3")

    async def misread() -> None:
        tier.quarantine(store._life.engine.state.find(1), Corrupt("misread"))

    await store._life.loop.call(misread())
    between.fail("PUT", lambda request: request.refuse(500, "InternalError"), key=MANIFEST)
    with pytest.raises(TierUnavailable):
        await store.promote(1, "s3")


async def test_a_damaged_commit_is_replaced_by_one_put_and_is_not_taken_for_another_writers(
    store: CheckpointStore, between: Proxy, s3_place: Place
) -> None:
    await store.save(1, tree(1))
    await store.promote(1, "s3")
    (key,) = manifests(s3_place)
    await s3_place.bucket.put(key, b"damaged")
    between.restart_count()
    (found,) = await store.verify(1, "s3", repair=True)
    assert found.repaired
    assert [verb for verb, path in between.asked if MANIFEST in path].count("PUT") == 1
    assert await store.where(1) == ("ram", "s3")


async def test_a_commit_whose_answer_is_lost_counts(store: CheckpointStore, between: Proxy) -> None:
    await store.save(1, tree(1))
    between.fail("PUT", lose_reply_late, key=MANIFEST)
    await store.promote(1, "s3")
    assert await store.where(1) == ("ram", "s3")
    assert all(found.intact for found in await store.verify(1))
    assert not [path for verb, path in between.asked if verb == "DELETE" and MANIFEST in path]


async def test_after_a_restart_a_late_commit_of_the_same_save_is_replaced(
    settings: StoreConfig, between: Proxy, s3_place: Place
) -> None:
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        postponed = await given_up(store, between, 1)
    async with CheckpointStore.open(settings) as store:
        postponed.let_on()
        (key,) = (key for key in s3_place.bucket.sizes() if key.endswith(MANIFEST))
        late = s3_place.bucket.read(key)
        await store.promote(1, "s3")
        assert await store.where(1) == ("ram", "s3")
        assert all(found.intact for found in await store.verify(1))
        assert s3_place.bucket.read(key) != late, "the commit names an index that nothing keeps"


async def test_a_first_commit_replaces_nothing_and_its_index_has_a_name_of_its_own(
    store: CheckpointStore, s3_place: Place
) -> None:
    await store.save(1, tree(1))
    await store.promote(1, "s3")
    first = {key for key in s3_place.bucket.sizes() if "/btree" in key}
    await store.save(2, tree(2))
    await store.promote(2, "s3")
    await store.evict(1, "s3")
    await store.promote(1, "s3")
    again = {key for key in s3_place.bucket.sizes() if "/btree" in key and "/0000000001" in key}
    assert len(first) == len(again) == 1
    assert first != again
