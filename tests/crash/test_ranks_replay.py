"""After a crash at any change of a life of several ranks, whoever comes back finds what was promised."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import get_args

import pytest
from reliability.journal import files_after
from reliability.life import KINDS
from reliability.ranks_life import RanksLife, live_together
from reliability.ranks_replay import COMEBACKS, Death, replay_ranks
from reliability.replay import Lost

from tieredckpt.blobs.posix.paths import Folders
from tieredckpt.engine.ranks.commit import commit

EVERY = 90
"""Of the crashes that differ, one in so many is survived in the default run."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tieredckpt")  # torn files are told of, each time


@pytest.mark.parametrize("kind", KINDS)
async def test_no_change_by_any_rank_escapes_the_journal(kind: str, shared_memory: Path) -> None:
    life = await live_together(kind, shared_memory / "life")
    for medium in life.media:
        assert files_after(life.entries, medium) == life.left[medium]
    assert len(life.trees) == 7
    assert len(life.entries) > 400


@pytest.mark.parametrize(("kind", "death"), [("posix", "all processes"), ("object", "one node"), ("chfs", "all nodes")])
async def test_a_crash_of_all_ranks_at_any_change_costs_nothing_that_was_promised(
    kind: str, death: Death, shared_memory: Path
) -> None:
    life = await live_together(kind, shared_memory / "life")
    found = await replay_ranks(life, death, shared_memory / "life", every=EVERY)
    assert found.states >= 5 * len(COMEBACKS)
    assert found.crashes > len(life.entries)
    assert found.steps > found.states


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("death", get_args(Death))
@pytest.mark.parametrize("kind", KINDS)
async def test_a_crash_of_all_ranks_at_every_change_costs_nothing_that_was_promised(
    kind: str, death: Death, shared_memory: Path
) -> None:
    life = await live_together(kind, shared_memory / "life")
    assert (await replay_ranks(life, death, shared_memory / "life", every=3)).states > 100


# -- and ranks that break their promises are found out ------------------------------------------------------


async def replay_denser_and_denser(life: RanksLife, death: Death, again: Path, what: str = "") -> None:
    """The order in which ranks write is chance, and with it how many of the crashes show what is wrong."""
    for every in (3, 1) if what else (10, 3, 1):
        await replay_ranks(life, death, again, every=every, what=what)


async def test_names_on_the_shared_tier_that_are_not_synced_are_found_out(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folders, "sync_names", lambda *_: None)
    life = await live_together("posix", shared_memory / "life")
    with pytest.raises(Lost, match="'slow'"):
        await replay_denser_and_denser(life, "all nodes", shared_memory / "life")


@pytest.mark.slow
async def test_ranks_that_refer_to_torn_packs_are_found_out(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def believe(*_: object) -> None:
        pass

    monkeypatch.setattr(commit, "refer_to_intact", believe)
    life = await live_together("chfs", shared_memory / "life")
    with pytest.raises(Exception, match=r"is lost|is damaged"):
        await replay_denser_and_denser(
            life, "all processes", shared_memory / "life", what="^slow: .* torn after 1 bytes"
        )
