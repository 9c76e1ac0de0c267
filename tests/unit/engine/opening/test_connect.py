"""What is opened for a tier is closed with it, whatever error ends the opening."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.insight import tier_of
from support.scenes import config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward
from tieredckpt.config import TierConfig
from tieredckpt.config.tiers import PosixTier
from tieredckpt.engine.opening import ram as opening_ram
from tieredckpt.engine.opening.connect import move_to_earlier_place, reopen
from tieredckpt.testing.tiers import Opening, tiers_opened_by


class Counted(Forward):
    """Raises what a test says, and tells whether it was closed."""

    closed = False
    on_get: BaseException | None = None
    on_close: BaseException | None = None

    async def get(self, key: str, *, limit: int) -> bytes:
        if self.on_get is not None:
            raise self.on_get
        return await super().get(key, limit=limit)

    async def close(self) -> None:
        await super().close()
        self.closed = True
        if self.on_close is not None:
            raise self.on_close


@pytest.fixture
def opened() -> Iterator[list[Counted]]:
    """The blob stores of slower tiers, as they are opened."""
    stores: list[Counted] = []

    async def count(tier: TierConfig, opening: Opening) -> BlobStore:
        stores.append(Counted(await opening()))
        return stores[-1]

    with tiers_opened_by(count):
        yield stores


async def test_a_tier_that_is_opened_again_in_vain_leaves_nothing_open(
    shared_memory: Path, tmp_path: Path, opened: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(both) as store:
        await (await store.save(1, tree(1))).reached("disk")
        with monkeypatch.context() as patch:
            patch.setattr(Counted, "on_get", MemoryError())
            with pytest.raises(MemoryError):
                await store._life.loop.call(reopen(store._life.engine.state, tier_of(store, "disk")))
        assert [each.closed for each in opened] == [False, True]
    assert [each.closed for each in opened] == [True, True]


async def test_a_tier_that_moves_to_its_earlier_place_leaves_nothing_open(
    shared_memory: Path, tmp_path: Path, opened: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "before")})) as store:
        await store.save(1, tree(1))
        marker = tier_of(store, "disk").marker
    assert marker is not None
    opened.clear()
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(tmp_path / "now")})) as store:
        with monkeypatch.context() as patch:
            patch.setattr(PosixTier, "earlier", lambda tier: tier.model_copy(update={"path": tmp_path / "before"}))
            patch.setattr(opened[0], "on_close", MemoryError())
            move = move_to_earlier_place(store._life.engine.state, tier_of(store, "disk"), {marker.store})
            with pytest.raises(MemoryError):
                await store._life.loop.call(move)
    assert [each.closed for each in opened] == [True, True]


async def test_ram_is_used_though_an_error_that_nobody_expected_keeps_no_earlier_version_out(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*what: object) -> None:
        raise MemoryError

    monkeypatch.setattr(opening_ram, "keep_earlier_versions_out", broken)
    for step in (1, 2):  # its lock was held till the end of the process
        async with CheckpointStore.open(config({"ram": ram(shared_memory, on_close="keep")}, name="run")) as store:
            await store.save(step, tree(step))
