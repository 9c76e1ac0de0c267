"""The roots of derived steps and of exact ones are told apart, whatever their markers say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from support.lossy import SEVEN_BITS, derived_in, lossy_config
from support.scenes import assert_restored, config, files_under, folder, ram, save_steps, tree

from tieredckpt import CheckpointStore
from tieredckpt.errors import Conflict, Corrupt
from tieredckpt.format import layout


async def test_exact_readers_refuse_a_root_of_derived_steps_and_the_reverse(
    tmp_path: Path, shared_memory: Path
) -> None:
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await save_steps(store, 1)
    marker = json.loads((tmp_path / "archive" / "derived" / layout.MARKER).read_bytes())
    assert marker["format_version"] == layout.DERIVED_VERSION
    with pytest.raises(Conflict, match="is a root of derived steps"):
        async with CheckpointStore.open(config({"disk": folder(tmp_path / "archive" / "derived")})):
            pass
    (tmp_path / "archive" / "derived" / layout.MARKER).write_bytes(msgspec.json.encode(marker | {"format_version": 1}))
    with pytest.raises(Conflict, match="holds exact steps where derived ones belong"):
        async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)):
            pass


async def test_a_place_may_have_exact_and_derived_steps_as_two_tiers(tmp_path: Path, shared_memory: Path) -> None:
    place = tmp_path / "both"
    exact = folder(place, retain={"kind": "last_n", "n": 1})
    settings_ = config({"ram": ram(shared_memory), "exact": exact, "small": folder(place, lossy=SEVEN_BITS)})
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1, 2)
        await store.collect()
        assert [(info.tiers, info.lossy) for info in await store.steps()][-1] == (("ram", "exact"), ("small",))
    async with CheckpointStore.open(config({"exact": exact})) as store:
        assert_restored(await store.restore(), tree(2))
        await store.collect()
    async with CheckpointStore.open(settings_) as store:
        found = await store.restore(1, lossy=True)
        assert found is not None
        assert found.lossy


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_place_with_lossy_copies_of_another_store_alone_is_no_new_store(
    tmp_path: Path, shared_memory: Path, read_only: bool
) -> None:
    """As where the folders of an exact tier and of a lossy one were swapped: it opened, and was empty."""
    settings_ = lossy_config(tmp_path, shared_memory)
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1)
    for name, other in (("disk", "aside"), ("archive", "disk"), ("aside", "archive")):
        (tmp_path / name).rename(tmp_path / other)
    before = files_under(tmp_path)
    with pytest.raises(Conflict, match=r"tier 'disk' .* holds nothing but lossy copies of steps of store .* swapped"):
        async with CheckpointStore.open(settings_, read_only=read_only):
            pass
    assert files_under(tmp_path) == before


async def test_old_packs_of_the_place_are_untouched_when_a_tier_is_given_rules(tmp_path: Path) -> None:
    plain = config({"disk": folder(tmp_path / "disk"), "archive": folder(tmp_path / "archive")})
    async with CheckpointStore.open(plain) as store:
        await save_steps(store, 1)
    before = files_under(tmp_path / "archive")
    rules = config({"disk": folder(tmp_path / "disk"), "archive": folder(tmp_path / "archive", lossy=SEVEN_BITS)})
    async with CheckpointStore.open(rules) as store:
        await store.flush()
        await store.collect()
        assert (await store.steps())[0].lossy == ("archive",)
    after = files_under(tmp_path / "archive")
    assert before.items() <= after.items()
    async with CheckpointStore.open(plain) as store:
        found = await store.restore()
        assert found is not None
        assert await store.where(1) == ("disk", "archive")


async def test_a_root_of_derived_steps_stays_what_it_is_when_its_marker_is_lost(
    tmp_path: Path, shared_memory: Path
) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1)
    marker = derived_in(tmp_path) / layout.MARKER
    marker.unlink()
    with pytest.raises(Conflict, match="is a root of derived steps"):
        async with CheckpointStore.open(config({"disk": folder(derived_in(tmp_path))})):
            pass
    assert not marker.exists()
    async with CheckpointStore.open(settings_) as store:
        assert [info.lossy for info in await store.steps()] == [("archive",)]
    assert json.loads(marker.read_bytes())["format_version"] == layout.DERIVED_VERSION


async def test_a_derived_step_among_exact_ones_is_refused(tmp_path: Path, shared_memory: Path) -> None:
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await save_steps(store, 1)
    for part in ("steps", "packs"):
        shutil.rmtree(tmp_path / "disk" / part)
        shutil.copytree(derived_in(tmp_path) / part, tmp_path / "disk" / part)
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk")}), read_only=True) as store:
        with pytest.raises(Corrupt):
            await store.restore()
        (info,) = await store.tier_infos()
        assert "a derived step where exact ones belong" in info.damaged[0].problem
