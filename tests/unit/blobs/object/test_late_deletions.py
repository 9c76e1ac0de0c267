"""Deletions that something between a store and its server carries out long after they were given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.insight import tier_of
from support.object_stores import Place
from support.overdue import only_held_calls_are_late
from support.proxy import Postponed, Proxy, deny, internal_error, lose_reply
from support.scenes import SOON, Heard, assert_same, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.events import StepEvicted

MANIFEST = "0000000001-000001/manifest.ocdbt"


async def steps_one_and_two(store: CheckpointStore) -> None:
    for step in (1, 2):
        await store.save(step, tree(step))
        await store.promote(step, "s3")


@pytest.fixture
async def store(settings: StoreConfig) -> AsyncIterator[CheckpointStore]:
    async with CheckpointStore.open(settings) as store:
        await steps_one_and_two(store)
        yield store


async def given_up(store: CheckpointStore, between: Proxy) -> Postponed:
    """An eviction of step 1 that fails, and whose deletion is still on its way."""
    postponed = Postponed()
    between.fail("DELETE", postponed, key=MANIFEST)
    with pytest.raises(TierUnavailable):
        await store.evict(1, "s3")
    assert postponed.reached.is_set()
    return postponed


def deletions(between: Proxy) -> int:
    return sum(verb == "DELETE" and MANIFEST in path for verb, path in between.asked)


async def test_a_deletion_that_failed_is_repeated(store: CheckpointStore, between: Proxy, s3_place: Place) -> None:
    heard = Heard(store)
    postponed = await given_up(store, between)
    assert (await heard.first(StepEvicted)).step == 1
    assert deletions(between) == 2
    assert not any(MANIFEST in key for key in s3_place.bucket.sizes())
    assert await store.where(1) == ("ram",)
    postponed.let_on()
    await store.collect()
    assert await store.where(2) == ("ram", "s3")


async def test_a_step_is_not_committed_again_while_a_deletion_of_it_may_come(
    store: CheckpointStore, between: Proxy
) -> None:
    heard = Heard(store)
    postponed = await given_up(store, between)
    await heard.first(StepEvicted)
    await store.collect()
    between.restart_count()
    with pytest.raises(Conflict, match=r"tier 's3': a deletion of step 1 .* has failed and may still be carried out"):
        await store.promote(1, "s3")
    assert between.count["PUT"] == 0, "packs of a step that cannot be committed"
    postponed.let_on()
    assert await store.where(1) == ("ram",)
    await store.promote(2, "s3")  # as it is there, nothing happens
    assert all(found.intact for found in await store.verify(2))


async def test_after_grace_it_is_committed_again(settings: StoreConfig, between: Proxy) -> None:
    brief = settings.model_copy(update={"grace": 4.0, "lease_ttl": 2.0})
    async with CheckpointStore.open(brief) as store:
        await steps_one_and_two(store)
        postponed = await given_up(store, between)
        postponed.let_on()
        async with asyncio.timeout(SOON):
            while tier_of(store, "s3").steps.deletions:
                await store.collect()
        await store.promote(1, "s3")
        assert await store.where(1) == ("ram", "s3")
        assert all(found.intact for found in await store.verify(1))


async def test_a_step_that_may_be_deleted_yet_counts_as_no_copy(settings: StoreConfig, between: Proxy) -> None:
    """Also when the tier is looked at anew: the step is there, and may go at any moment."""
    async with CheckpointStore.open(settings) as store:
        await steps_one_and_two(store)
        postponed = await given_up(store, between)
        between.fail("DELETE", Postponed(), key=MANIFEST, times=None)
        tier, engine = tier_of(store, "s3"), store._life.engine

        async def look_anew() -> None:
            tier.marker = None
            await engine._reconnect(tier)
            await engine.collector.evictor.find_out(tier)

        await store._life.loop.call(look_anew())
        assert await store.where(1) == ("ram",)
        postponed.let_on()


async def test_a_deletion_that_the_server_refuses_comes_no_more(store: CheckpointStore, between: Proxy) -> None:
    """So the step is held as before, and nobody needs to look."""
    between.fail("DELETE", deny, key=MANIFEST, times=None)
    with pytest.raises(TierUnavailable, match="credentials do not allow it, or a retention policy does not"):
        await store.evict(1, "s3")
    assert deletions(between) == 1
    await store.evict(1, "ram")
    assert_same((await store.restore(1)).tree, tree(1))
    assert not any(verb == "HEAD" and MANIFEST in path for verb, path in between.asked)


async def test_a_refusal_does_not_hide_that_an_attempt_before_it_may_have_deleted_the_step(
    shared_memory: Path, s3_place: Place, between: Proxy
) -> None:
    """As where a session token ends during an outage: the step counted as held, and was gone."""
    far = s3_place.tier(between.url, promote="never", retain="all", retries=1)
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "s3": far})) as store:
        await steps_one_and_two(store)
        heard = Heard(store)
        between.fail("DELETE", lose_reply, key=MANIFEST)
        between.fail("DELETE", deny, key=MANIFEST)
        with pytest.raises(TierUnavailable, match="credentials do not allow it"):
            await store.evict(1, "s3")
        assert await store.where(1) == ("ram",)
        assert (await heard.first(StepEvicted)).step == 1


async def test_a_thread_that_hangs_in_a_deletion_takes_no_step_that_was_committed_since(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_held_calls_are_late(monkeypatch)
    disk = folder(tmp_path / "disk", promote="never", retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk})) as store:
        for step in (1, 2):
            await store.save(step, tree(step))
            await store.promote(step, "disk")
        heard = Heard(store)
        hold = faults["disk"].hold("delete", key=f"steps/{MANIFEST}", stubborn=True)
        try:
            with pytest.raises(TierUnavailable):
                await store.evict(1, "disk")
            await heard.first(StepEvicted)  # by the deletion that came after it
            with pytest.raises(Conflict, match="may still be carried out"):
                await store.promote(1, "disk")
        finally:
            hold.release()
        async with asyncio.timeout(SOON):
            while tier_of(store, "disk").steps.deletions:
                await store.collect()
        await store.promote(1, "disk")
        assert all(found.intact for found in await store.verify(1))


async def test_deletions_that_fail_are_not_all_repeated_at_each_commit(
    shared_memory: Path, s3_place: Place, between: Proxy
) -> None:
    """Each is, in its turn: of a server that fails them for long, each save would ask for every one of them."""
    far = s3_place.tier(between.url, retain={"kind": "last_n", "n": 1})
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "s3": far})) as store:

        async def saved(steps: range) -> int:
            between.restart_count()
            for step in steps:
                await store.save(step, {"w": np.full(10, step)})
                await store.flush()
            return between.count["DELETE"] + between.count["HEAD"]

        between.fail("DELETE", internal_error, times=None)
        await saved(range(2))
        few = await saved(range(2, 12))
        assert await saved(range(12, 22)) <= few + 10
        repeated = {path for verb, path in between.asked if verb == "DELETE"}
        assert len(repeated) > 10
        between.heal()
        await saved(range(22, 23))
        await store.collect()
        assert [key for key in s3_place.bucket.sizes() if key.endswith("manifest.ocdbt")] == [
            "steps/0000000022-000023/manifest.ocdbt"
        ]
