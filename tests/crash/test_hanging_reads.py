"""A file system over a network stops answering, or remembers what was: a real one, played on this machine."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fuse import Network, mounted
from support.scenes import SOON, Heard, assert_restored, assert_same, config, folder, tree

from tieredckpt import CheckpointStore, TierHangs, TierUnavailable
from tieredckpt.blobs.posix.kind import POSIX
from tieredckpt.config import PosixTier
from tieredckpt.testing.backdoor import listed

LARGE = 2 << 20


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    (tmp_path / "server").mkdir(exist_ok=True)
    with mounted(tmp_path / "server", tmp_path / "mount") as network:
        yield network


def tiers(path: Path, **more: Any) -> dict[str, Any]:
    return {"network": folder(path, **({"deadline": 1.0, "direct": None, "fsync": True} | more))}


@pytest.fixture
async def saved(tmp_path: Path) -> dict[str, Any]:
    """The tree of step 1, which a store on the server holds."""
    saved = tree(1, nbytes=LARGE)
    async with CheckpointStore.open(config(tiers(tmp_path / "server"))) as store:
        await store.save(1, saved)
    return saved


async def none_hangs(store: CheckpointStore) -> None:
    async with asyncio.timeout(SOON):
        while any(info.hanging for info in await store.tier_infos()):
            await asyncio.sleep(0.01)


async def test_a_restore_that_hangs_in_the_device_is_cancelled_and_leaves_the_arrays_alone(
    tmp_path: Path, saved: dict[str, Any], network: Network
) -> None:
    into = tree(2, nbytes=LARGE)
    late = threading.Timer(SOON, network.answer)  # or a failure would last for ever
    late.start()
    async with CheckpointStore.open(config(tiers(tmp_path / "mount", deadline=600)), read_only=True) as store:
        network.hang()
        restoring = asyncio.ensure_future(store.restore(into=into))
        await asyncio.to_thread(network.asked.wait, SOON)
        began = time.monotonic()
        restoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restoring
        assert time.monotonic() - began < SOON / 2
        late.cancel()
        expected = tree(3, nbytes=LARGE)
        for name, array in into["params"].items():
            array[:] = expected["params"][name]
        assert sum(info.hanging for info in await store.tier_infos()) > 0
        network.answer()
        await none_hangs(store)
        assert_same(into["params"], expected["params"])
        assert_restored(await store.restore(), saved)


async def test_what_a_tier_that_hangs_holds_is_read_from_the_next_and_it_is_told_of_once(
    tmp_path: Path, saved: dict[str, Any], network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    both = tiers(tmp_path / "mount") | {"server": folder(tmp_path / "copy")}
    await asyncio.to_thread(shutil.copytree, tmp_path / "server", tmp_path / "copy")
    async with CheckpointStore.open(config(both), read_only=True) as store:
        heard = Heard(store)
        network.hang()
        for _ in range(3):
            assert_restored(await store.restore(), saved)
        hangs = await heard.first(TierHangs)
        assert (hangs.tier, hangs.calls > 0) == ("network", True)
        network.answer()
        await none_hangs(store)
        assert len(heard.of(TierHangs)) == 1
        assert caplog.text.count("hangs in the device") == 1


async def test_a_name_that_the_kernel_remembers_as_missing_is_not_said_to_be(tmp_path: Path, network: Network) -> None:
    store = await POSIX.open(PosixTier(name="network", path=tmp_path / "mount"), read_only=True)
    assert "FUSE" in store.facts()["file system"]
    (tmp_path / "server/a").mkdir()
    for name in ("a/key", "a/other"):
        assert not await asyncio.to_thread((tmp_path / "mount" / name).exists)
    (tmp_path / "server/a/key").write_bytes(b"x")
    assert not await asyncio.to_thread((tmp_path / "mount/a/key").exists)  # the kernel still believes so
    for verb in (store.stat("a/key"), store.get("a/key", limit=9), listed(store)):
        with pytest.raises(TierUnavailable, match="is listed"):
            await verb
    assert not await asyncio.to_thread((tmp_path / "mount/b").exists)
    (tmp_path / "server/b").mkdir()
    (tmp_path / "server/b/key").write_bytes(b"x")
    with pytest.raises(TierUnavailable, match="is listed"):
        await listed(store, "b/")
    await store.close()
