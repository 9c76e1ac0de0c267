"""Whatever becomes of the files of one tier, no step is lost; of several, what comes back is what was saved."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reliability.forging import tampered_bytes
from support.limits import limit
from support.scenes import CHUNK, assert_restored, config, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import TieredCkptError

TIERS = ("ram", "disk", "far")
STEPS = (1, 2, 3)


def state(step: int) -> dict[str, Any]:
    """An array of three chunks that is always the same, one that is not, and one that lies in the index."""
    return {
        "kept": np.frombuffer(np.random.default_rng(0).bytes(3 * CHUNK), np.uint8).copy(),
        "moved": np.frombuffer(np.random.default_rng(step).bytes(2 * CHUNK), np.uint8).copy(),
        "small": np.full(5, step),
        "step": step,
    }


def over(place: Path) -> StoreConfig:
    tiers = {"ram": ram(place, on_close="keep", retain="all", capacity="1 MiB")}
    tiers |= {name: folder(place / "of-test" / name, retain="all") for name in TIERS[1:]}
    return config(tiers, name="of-test")


@pytest.fixture(autouse=True, scope="module")
def _few_steps_are_enough_for_a_catalog() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, catalog_entries=1)
        yield


def new_place() -> Path:
    return new_shared_folder()


@cache
def saved() -> dict[str, dict[str, bytes]]:
    """Every file of a store that was closed, by tier and relative name."""
    place = new_place()

    async def save() -> None:
        async with CheckpointStore.open(over(place)) as store:
            for step in STEPS:
                await store.save(step, state(step))
            await store.flush()

    try:
        asyncio.run(save())
        return {
            tier: {
                file.relative_to(place / "of-test" / tier).as_posix(): file.read_bytes()
                for file in sorted((place / "of-test" / tier).rglob("*"))
                if file.is_file()
            }
            for tier in TIERS
        }
    finally:
        shutil.rmtree(place)


@st.composite
def changes(draw: st.DrawFn, tiers: tuple[str, ...]) -> dict[tuple[str, str], bytes | None]:
    """One to four files of these tiers with other bytes, or none."""
    found: dict[tuple[str, str], bytes | None] = {}
    for _ in range(draw(st.integers(1, 4))):
        tier = draw(st.sampled_from(tiers))
        # What a step or a tier stands and falls with, as often as the rest.
        names = [name for name in saved()[tier] if draw(st.booleans()) or not name.startswith("packs/")]
        name = draw(st.sampled_from(names or sorted(saved()[tier])))
        data = saved()[tier][name]
        found[tier, name] = draw(tampered_bytes(data, [saved()["far"]["tieredckpt.json"]]) | st.none())
    return found


def written(place: Path, changed: dict[tuple[str, str], bytes | None]) -> Iterator[Path]:
    for tier, files in saved().items():
        for name, data in files.items():
            now = changed.get((tier, name), data)
            path = place / "of-test" / tier / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if now is not None:
                path.write_bytes(now)
                yield path


async def restored(store: CheckpointStore, step: int) -> bool:
    """Whether a step comes back; if it does, it is what was saved."""
    try:
        found = await store.restore(step, resume=False)
    except TieredCkptError:
        return False
    assert_restored(found, state(step))
    return True


async def live(place: Path, *, whole: bool) -> None:
    """Open the store, and ask it for all; where the damage is that of one tier, everything is there."""
    async with CheckpointStore.open(over(place)) as store:
        assert all([await restored(store, step) for step in STEPS]) or not whole
        with suppress(TieredCkptError):
            await store.flush()
        repaired = await store.scrub(repair=True)
        assert not whole or not any(each.lost for each in repaired)
        assert all([await restored(store, step) for step in STEPS]) or not whole
        await store.save(4, state(4))
        assert await restored(store, 4)
    async with CheckpointStore.open(over(place)) as store:
        assert await restored(store, 4)
        assert all([await restored(store, step) for step in STEPS]) or not whole


def in_a_place(changed: dict[tuple[str, str], bytes | None], *, whole: bool) -> None:
    place = new_place()
    try:
        list(written(place, changed))
        asyncio.run(live(place, whole=whole))
    finally:
        shutil.rmtree(place)


one_tier = st.sampled_from(TIERS).flatmap(lambda tier: changes((tier,)))


@settings(max_examples=15)
@given(changed=one_tier)
def test_whatever_becomes_of_the_files_of_one_tier_no_step_is_lost(
    changed: dict[tuple[str, str], bytes | None],
) -> None:
    in_a_place(changed, whole=True)


@settings(max_examples=10)
@given(changed=changes(TIERS))
def test_whatever_becomes_of_the_files_of_all_tiers_what_comes_back_is_what_was_saved(
    changed: dict[tuple[str, str], bytes | None],
) -> None:
    with suppress(TieredCkptError):  # a store may refuse to open, or to go on, and nothing else
        in_a_place(changed, whole=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500)
@given(changed=one_tier)
def test_whatever_becomes_of_the_files_of_one_tier_no_step_is_lost_in_the_long_run(
    changed: dict[tuple[str, str], bytes | None],
) -> None:
    in_a_place(changed, whole=True)
