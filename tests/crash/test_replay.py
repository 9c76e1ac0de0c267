"""After a crash at any change of a life, with what was not settled lost, kept or torn, nothing promised is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from reliability.journal import Failure, files_after
from reliability.life import CODEC_CHANGED, KINDS, LOSSY, SLOW, Life, live
from reliability.replay import Lost, replay
from support.file_systems import kind_on, system_of
from support.limits import limit

from tieredckpt.blobs.posix.paths import Folders
from tieredckpt.blobs.posix.system import LUSTRE, NFS
from tieredckpt.config.kinds import replaced
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId

EVERY = {"posix": 20, "chfs": 40, "object": 16, CODEC_CHANGED: 20, **dict.fromkeys(LOSSY, 32)}
"""Of the crashes that differ, one in so many is survived in the default run; all are by ``pytest -m slow``."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tieredckpt")  # torn files are told of, each time


async def lived(kind: str, shared_memory: Path) -> Life:
    return await live(kind, shared_memory / "life")


@pytest.mark.parametrize("kind", KINDS)
async def test_no_change_to_a_tier_escapes_the_journal(kind: str, shared_memory: Path) -> None:
    life = await lived(kind, shared_memory)
    for tier in life.media:
        assert files_after(life.entries, tier) == life.left[tier]
    assert len(life.entries) > 200


@pytest.mark.parametrize("failure", ["process", "node"])
@pytest.mark.parametrize("kind", [*KINDS, CODEC_CHANGED, *LOSSY])
async def test_a_crash_at_any_change_costs_nothing_that_was_promised(
    kind: str, failure: Failure, shared_memory: Path
) -> None:
    life = await lived(kind, shared_memory)
    found = await replay(life, failure, shared_memory / "life", every=EVERY[kind])
    assert found.states > 4
    assert found.crashes > len(life.entries)
    assert found.steps > found.states


@pytest.mark.parametrize("file_system", [NFS, LUSTRE], ids=["nfs", "lustre"])
async def test_a_crash_at_any_change_on_a_file_system_that_nodes_share_costs_nothing_that_was_promised(
    file_system: int, shared_memory: Path
) -> None:
    with replaced(kind_on("posix", system_of(file_system))):
        life = await lived("posix", shared_memory)
        assert files_after(life.entries, SLOW) == life.left[SLOW]
        found = await replay(life, "node", shared_memory / "life", every=EVERY["posix"])
    assert found.states > 4


@pytest.mark.parametrize("kind", KINDS)
async def test_a_crash_at_any_change_around_a_catalog_costs_nothing_that_was_promised(
    kind: str, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, catalog_entries=1)
    life = await lived(kind, shared_memory)
    assert any(path.startswith(layout.CATALOGS) for path in life.left[SLOW])
    found = await replay(life, "node", shared_memory / "life", every=EVERY[kind])
    assert found.states > 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("failure", ["process", "node"])
@pytest.mark.parametrize("kind", [*KINDS, CODEC_CHANGED, *LOSSY])
async def test_a_crash_at_every_change_costs_nothing_that_was_promised(
    kind: str, failure: Failure, shared_memory: Path
) -> None:
    found = await replay(await lived(kind, shared_memory), failure, shared_memory / "life")
    assert found.states > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", KINDS)
async def test_lives_in_any_order_survive_crashes(kind: str, seed: int, shared_memory: Path) -> None:
    life = await live(kind, shared_memory / "life", seed=seed)
    for tier in life.media:
        assert files_after(life.entries, tier) == life.left[tier]
    for failure in get_args(Failure):
        await replay(life, failure, shared_memory / "life", every=8)


# -- and a store that breaks its promises is found out ------------------------------------------------------


async def test_names_that_are_not_synced_are_found_out(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folders, "sync_names", lambda *_: None)
    life = await lived("posix", shared_memory)
    with pytest.raises(Lost, match="'slow'"):
        await replay(life, "node", shared_memory / "life")


@pytest.mark.parametrize("kind", [pytest.param("chfs", marks=pytest.mark.slow), "object"])
async def test_packs_that_go_before_their_manifest_are_found_out(
    kind: str, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retract = commit_file.retract

    async def packs_first(tier: Tier, step: StepId, check: Callable[[], None]) -> None:
        own = await step_index.packs(tier, step)
        others = [await step_index.packs(tier, other) for other in tier.steps.held if other != step]
        for key in own.difference(*others):
            await tier.store.delete(key)
            del tier.packs.sizes[key]
        await asyncio.sleep(0)
        await retract(tier, step, check)

    monkeypatch.setattr(commit_file, "retract", packs_first)
    life = await lived(kind, shared_memory)
    with pytest.raises(Lost, match="is listed"):
        await replay(life, "node", shared_memory / "life")
