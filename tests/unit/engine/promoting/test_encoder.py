"""Chunks are compressed unless that holds up somebody who waits for them to be written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.insight import extents
from support.limits import limit
from support.scenes import CHUNK, assert_restored, config, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.engine.promoting import pack_writer
from tieredckpt.engine.promoting.copy_step import _is_overtaken

TREE = {"soft": np.arange(16 * CHUNK // 8)}


@pytest.mark.parametrize("bandwidth", [1.0, 1e15], ids=["slow device", "fast device"])
async def test_a_save_that_waits_for_a_device_faster_than_the_codec_is_compressed_no_longer(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bandwidth: float
) -> None:
    limit(monkeypatch, pack_size=5 * CHUNK)
    monkeypatch.setattr(pack_writer, "write_bandwidth", lambda *_: bandwidth)
    tiers = {"ram": ram(shared_memory, capacity=6 * 2 * CHUNK), "disk": folder(tmp_path / "disk", codec="small")}
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, TREE)  # more than RAM holds
        lengths = [extent.length for _, extent in await extents(store, "disk", 1, "soft")]
        if bandwidth == 1.0:
            assert max(lengths) < CHUNK
        else:
            assert 0 < lengths.count(CHUNK + 20) < len(lengths)  # what was compressed before that was known
        assert_restored(await store.restore(), TREE)


async def test_a_promotion_is_waited_for_when_a_newer_step_is_due(shared_memory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiers = {
        "ram": ram(shared_memory, capacity="16 MiB", on_close="release", retain="all"),
        "disk": folder(tmp_path / "file" / "disk", codec="small"),  # which is not there
    }
    async with CheckpointStore.open(config(tiers, name="test")) as store:
        for step in (1, 2):
            await store.save(step, TREE)
        state = store._life.engine.state

        async def overtaken() -> list[bool]:
            return [_is_overtaken(state, state.find(step), state.tiers[1]) for step in (1, 2)]

        assert await store._life.loop.call(overtaken()) == [True, False]
