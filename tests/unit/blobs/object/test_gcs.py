"""A store with a tier in Google Cloud Storage: a server that refuses for a while costs no step, and no key is told."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from support.gcs import gcs, key_without_signature
from support.object_stores import BUCKET, Place
from support.proxy import deny
from support.scenes import SOON, assert_restored, config, ram, tree

from tieredckpt import CheckpointStore

KEY_ID = "not-to-be-told"


@pytest.mark.usefixtures("no_signature")
async def test_steps_come_to_google_cloud_storage_and_back(
    s3_server: str, s3_place: Place, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with gcs(s3_server) as between:
        key = json.dumps(json.loads(key_without_signature(between.url)) | {"private_key_id": KEY_ID})
        where = f"gs://{BUCKET}/{s3_place.prefix}"
        far = {"kind": "gcs", "url": where, "endpoint": between.url, "service_account_key": key, "retries": 0}
        far |= {"retain": {"kind": "last_n", "n": 2}, "deadline": 3}
        settings = config({"ram": ram(shared_memory), "far": far})
        async with CheckpointStore.open(settings) as store:
            for step in (1, 2, 3):
                await (await store.save(step, tree(step))).reached("far")
            between.fail("*", deny, times=3, first=True)
            await store.save(4, tree(4))
            async with asyncio.timeout(SOON):
                while "far" not in await store.where(4):
                    await asyncio.sleep(0.05)
            shown = repr(await store.tier_infos()) + repr(settings)
        far_alone = settings.model_copy(update={"tiers": settings.slower})
        async with CheckpointStore.open(far_alone, read_only=True) as reader:
            assert_restored(await reader.restore(), tree(4))
            assert [info.step for info in await reader.steps()] == [3, 4]
            for found in await reader.verify():
                assert not found.problem
    assert KEY_ID not in shown + caplog.text
