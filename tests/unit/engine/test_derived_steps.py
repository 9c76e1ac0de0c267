"""A lossy copy is another content: within its bounds, no copy of the exact step, and restored only when asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from support.cohort import cohort
from support.insight import flip_chunk
from support.lossy import SEVEN_BITS, close_to, derived_in, drop_from_ram, lossy_config
from support.scenes import (
    Heard,
    assert_same,
    config,
    crash,
    files_below,
    files_under,
    folder,
    pack_bytes,
    ram,
    save_steps,
    tree,
)

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.engine.keeping.safety import why_kept
from tieredckpt.engine.restoring.source import being_read
from tieredckpt.engine.saving.copy_to_slab import _waiting_helps
from tieredckpt.engine.state.promotions import promoting
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound
from tieredckpt.events import ChunkRepaired, StepEvicted, StepPromoted, StepRestored
from tieredckpt.format import layout


async def test_a_tier_with_rules_gets_rounded_steps_and_the_others_exact_ones(
    tmp_path: Path, shared_memory: Path
) -> None:
    saved = tree(1)
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await store.save(1, saved)
        await store.flush()
        (info,) = await store.steps()
        assert (info.tiers, info.lossy) == (("ram", "disk"), ("archive",))
        assert await store.where(1) == ("ram", "disk")
        exact = await store.restore(1, lossy=True, resume=False)
        assert exact is not None
        assert not exact.lossy
        assert_same(exact.tree, saved)
        spec = await store.spec(1, "params/w0", "archive")
        stock = ts.open(spec, read=True).result().read().result()
        assert close_to(stock, saved["params"]["w0"])
        assert not np.array_equal(stock, saved["params"]["w0"])
        assert int(stock.view(np.uint32)[0, 0]) % (1 << 16) == 0
        assert np.array_equal(ts.open(await store.spec(1, "half", "archive")).result().read().result(), saved["half"])
    assert pack_bytes(derived_in(tmp_path)) < 0.5 * pack_bytes(tmp_path / "disk")
    assert {path.split("/")[0] for path in files_under(tmp_path / "archive")} == {"derived"}


async def test_promise_12_a_lossy_copy_is_no_copy_of_the_step(tmp_path: Path, shared_memory: Path) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    saved = tree(1)
    async with CheckpointStore.open(settings_) as store:
        ckpt = await store.save(1, saved)
        with pytest.raises(Invalid, match="'archive' has `lossy` rules"):
            await ckpt.reached("archive")
        await store.flush()
        engine = store._life.open_engine
        step = engine.state.find(1)
        # It keeps nothing from being the last good copy.
        assert "last good copy" in why_kept(engine.state, step, engine.state.tier("disk"))
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(1, "disk")
        # It repairs nothing: an exact chunk that is damaged everywhere stays lost, though its lossy copy is intact.
        pack = next((tmp_path / "disk" / "packs").rglob("*.pack"))
        data = bytearray(pack.read_bytes())
        for offset in range(0, len(data) - layout.ALIGNMENT, layout.ALIGNMENT):
            data[offset + 5] ^= 1
        pack.write_bytes(data)
        await drop_from_ram(store)
    async with CheckpointStore.open(settings_) as store:
        with pytest.raises(Corrupt, match="is lost"):
            await store.restore()
        (on_disk,) = await store.verify(1, "disk", repair=True)
        assert on_disk.lost
        assert not on_disk.repaired
        (on_archive,) = await store.verify(1, "archive", repair=True)
        assert on_archive.intact
        assert not on_archive.damaged


async def test_without_lossy_true_what_is_left_of_a_step_is_not_restored(tmp_path: Path, shared_memory: Path) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    saved = [tree(0), tree(1), tree(2)]
    async with CheckpointStore.open(settings_) as store:
        for step in (1, 2):
            await store.save(step, saved[step])
            await store.flush()
    async with CheckpointStore.open(settings_) as store:
        heard = Heard(store)
        assert [(info.step, info.tiers, info.lossy) for info in await store.steps()] == [
            (1, (), ("archive",)),
            (2, ("disk",), ("archive",)),
        ]
        assert await store.all_steps() == (2,)
        with pytest.raises(NotFound, match="pass lossy=True"):
            await store.restore(1)
        with pytest.raises(NotFound):
            await store.where(1)
        found = await store.restore(1, lossy=True, resume=False)
        assert found is not None
        assert found.lossy
        assert found.sources.keys() == {"archive"}
        assert close_to(found.tree["params"]["w1"], saved[1]["params"]["w1"])
        assert_same(found.tree["half"], saved[1]["half"])
        assert_same(found.tree["count"], saved[1]["count"])
        assert heard.of(StepRestored)[-1].lossy
        newest = await store.restore(lossy=True)
        assert newest is not None
        assert newest.step == 2
        assert not newest.lossy
        assert_same(newest.tree, saved[2])
        details = await store.describe(1)
        how = details.derived["archive"]
        assert how.rules[0].max_error == 0.004
        assert all(0 < each.worst <= 0.004 for each in how.arrays.values())
        assert details.info.tiers == ()
        assert (await store.describe(2)).derived.keys() == {"archive"}


THREE_BITS = [{"keys": ["params/**"], "max_error": "6.25%"}]


def is_rounded(params: dict[str, Any], bits: int) -> bool:
    """Whether every value of every array has so many bits of its mantissa at most, and more than one less."""
    zeros = [np.bitwise_or.reduce(array.view(np.uint32), axis=None) & ((1 << 23) - 1) for array in params.values()]
    return all(each and not each & ((1 << 23 - bits) - 1) and each & (1 << 23 - bits) for each in zeros)


def damage_all(place: Path) -> None:
    """A bit of every chunk there is another."""
    for pack in (place / "packs").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        for offset in range(0, len(data) - layout.ALIGNMENT, layout.ALIGNMENT):
            data[offset + 40] ^= 1
        pack.write_bytes(data)


@pytest.fixture
async def two_lossy_tiers(tmp_path: Path, shared_memory: Path) -> StoreConfig:
    """Of a store with a step that was saved, and is rounded to 7 bits on one tier and to 3 on the next."""
    tiers = {
        "ram": ram(shared_memory),
        "disk": folder(tmp_path / "disk"),
        "near": folder(tmp_path / "near", codec="small", lossy=SEVEN_BITS),
        "far": folder(tmp_path / "far", codec="small", lossy=THREE_BITS),
    }
    settings_ = config(tiers, name="two")
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1)
    return settings_


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("lost", [(), ("near",)], ids=["exact", "exact and nearest lossy"])
async def test_where_a_chunk_is_lost_all_comes_from_the_nearest_lossy_copy_that_is_whole(
    two_lossy_tiers: StoreConfig, tmp_path: Path, lost: tuple[str, ...], into: bool
) -> None:
    async with CheckpointStore.open(two_lossy_tiers) as store:
        await flip_chunk(store, "disk", 1, "params/w3", 1)
        for name in lost:
            damage_all(tmp_path / name / "derived")
            damage_all(tmp_path / "disk")  # from which the lossy copy would be derived again
        given = tree(9) if into else None
        with pytest.raises(Corrupt, match=r"is lost.*lossy copy is on 'near', 'far'"):
            await store.restore(1, resume=False)
        found = await store.restore(1, into=given, resume=False, lossy=True)
        assert found is not None
        assert found.lossy
        assert set(found.sources) == {"far" if lost else "near"}
        assert is_rounded(found.tree["params"], 3 if lost else 7)
        assert all(close_to(found.tree["params"][f"w{i}"], tree(1)["params"][f"w{i}"], 0.0625) for i in range(4))
        if given is not None:
            assert is_rounded(given["params"], 3 if lost else 7)


async def test_an_index_that_is_lost_leads_to_the_next_lossy_copy(two_lossy_tiers: StoreConfig, tmp_path: Path) -> None:
    async with CheckpointStore.open(two_lossy_tiers) as store:
        damage_all(tmp_path / "disk")
        for path in files_below(tmp_path / "near" / "derived" / "steps"):
            path.unlink()
        for tier in store._life.open_engine.state.every_tier:
            tier.steps.indexes.clear()
        found = await store.restore(lossy=True)
        assert found is not None
        assert found.lossy
        assert set(found.sources) == {"far"}
        assert is_rounded(found.tree["params"], 3)
        await store.save(2, found.tree)
        assert "of tier 'far'" in (await store.describe(2)).provenance["restored_lossy"]


async def test_where_nothing_is_whole_the_error_is_that_of_the_step_as_it_was_saved(
    two_lossy_tiers: StoreConfig, tmp_path: Path
) -> None:
    async with CheckpointStore.open(two_lossy_tiers) as store:
        for place in (tmp_path / "disk", tmp_path / "near" / "derived", tmp_path / "far" / "derived"):
            damage_all(place)
        with pytest.raises(Corrupt, match=r"array 'params/w0'.* is lost"):
            await store.restore(1, lossy=True)


async def test_what_does_not_fit_the_step_is_not_looked_for_in_a_lossy_copy(
    tmp_path: Path, shared_memory: Path
) -> None:
    rules = [{"keys": ["opt"], "drop": True}]
    saved = {"params": tree(1)["params"], "opt": np.ones((90, 64))}
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory, rules)) as store:
        await store.save(1, saved)
        await store.flush()
        with pytest.raises(Invalid, match="opt"):
            await store.restore(1, like={"params": saved["params"]}, resume=False, lossy=True)


async def test_training_goes_on_from_a_lossy_copy_and_says_so(tmp_path: Path, shared_memory: Path) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1, 2)
    shutil.rmtree(tmp_path / "disk")
    async with CheckpointStore.open(settings_) as store:
        with pytest.raises(NotFound, match="lossy copy is on 'archive': pass lossy=True"):
            await store.restore()
        found = await store.restore(lossy=True)
        assert found is not None
        assert (found.step, found.lossy) == (2, True)
        await store.save(3, found.tree)
        await store.flush()
        assert await store.all_steps() == (3,)
        info = (await store.steps())[-1]
        assert (info.step, info.serial, info.restored_from) == (3, 3, 2)
        assert "step 2 (serial 2) of tier 'archive'" in (await store.describe(3)).provenance["restored_lossy"]
    async with CheckpointStore.open(settings_) as store:
        again = await store.restore()
        assert again is not None
        assert again.step == 3
        assert not again.lossy
        await store.save(4, again.tree)
        assert "serial 2" in (await store.describe(4)).provenance["restored_lossy"]
        details = await store.describe(4)
        assert details.line[-1] == (3, 4) or details.line == ((1, 4),)


async def test_what_goes_back_to_a_lossy_copy_says_so_also_when_the_newest_step_was_deleted(
    tmp_path: Path, shared_memory: Path
) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1)
    shutil.rmtree(tmp_path / "disk")
    async with CheckpointStore.open(settings_) as store:
        found = await store.restore(lossy=True)
        assert found is not None
        for step in (2, 3):
            await store.save(step, found.tree)
        await store.flush()
        await store.delete(3, force=True)
        await store.save(4, found.tree)
        assert "serial 1" in (await store.describe(4)).provenance["restored_lossy"]


async def test_a_lossy_copy_is_off_the_branch_once_a_save_has_forked(tmp_path: Path, shared_memory: Path) -> None:
    """One machine is lost; of its last save a lossy copy is left, and another machine goes on from the save before."""

    def on(machine: str) -> StoreConfig:
        tiers = {
            "ram": ram(shared_memory / machine),
            "disk": folder(tmp_path / machine),
            "far": folder(tmp_path / "far", promote={"kind": "every_n_steps", "n": 2}),
            "archive": folder(tmp_path / "archive", lossy=SEVEN_BITS, codec="small"),
        }
        return config(tiers)

    async with CheckpointStore.open(on("one")) as store:
        await save_steps(store, 2, 3)
    async with CheckpointStore.open(on("other")) as store:
        assert (await store.restore()).step == 2
        assert [(info.step, info.tiers, info.off_branch) for info in await store.steps()] == [
            (2, ("far",), False),
            (3, (), False),
        ]
        await store.save(3, tree(4))
        assert [(info.step, info.serial, info.off_branch) for info in await store.steps()] == [
            (2, 1, False),
            (3, 2, True),
            (3, 3, False),
        ]


async def test_rounding_what_was_restored_changes_nothing_more(tmp_path: Path, shared_memory: Path) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1)
        written = pack_bytes(derived_in(tmp_path))
    shutil.rmtree(tmp_path / "disk")
    async with CheckpointStore.open(settings_) as store:
        found = await store.restore(lossy=True)
        assert found is not None
        await store.save(2, found.tree)
        await store.flush()
        assert pack_bytes(derived_in(tmp_path)) == written  # every rounded chunk is there already
        assert (await store.steps())[-1].lossy == ("archive",)


async def test_a_damaged_lossy_copy_is_derived_again_from_an_exact_one(tmp_path: Path, shared_memory: Path) -> None:
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        heard = Heard(store)
        await save_steps(store, 1)
        before = ts.open(await store.spec(1, "params/w0", "archive")).result().read().result()
        for pack in (tmp_path / "archive" / "derived" / "packs").rglob("*.pack"):
            data = bytearray(pack.read_bytes())
            data[300] ^= 1
            pack.write_bytes(data)
        (bad,) = await store.verify(1, "archive")
        assert bad.damaged
        assert not bad.repaired
        (repaired,) = await store.verify(1, "archive", repair=True)
        assert repaired.repaired
        assert not repaired.lost
        assert heard.of(ChunkRepaired)
        (good,) = await store.verify(1, "archive")
        assert good.intact
        assert not good.damaged
        after = ts.open(await store.spec(1, "params/w0", "archive")).result().read().result()
        assert np.array_equal(before, after)


async def test_a_lossy_copy_whose_packs_are_gone_is_derived_again(tmp_path: Path, shared_memory: Path) -> None:
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await save_steps(store, 1)
        for pack in derived_in(tmp_path).glob("packs/*/*.pack"):
            pack.unlink()
        await store.collect()
        await store.flush()
        (found,) = await store.verify(1, "archive")
        assert not found.problem


async def test_a_damaged_commit_of_a_lossy_copy_is_made_anew(tmp_path: Path, shared_memory: Path) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1)
    manifest = next((tmp_path / "archive" / "derived" / "steps").rglob("manifest.ocdbt"))
    manifest.write_bytes(b"torn")
    async with CheckpointStore.open(settings_) as store:
        await store.flush()
        (found,) = await store.verify(1, "archive")
        assert found.intact
        assert (await store.steps())[0].lossy == ("archive",)


async def test_packs_of_a_lossy_tier_are_rewritten_though_no_exact_copy_is_left(
    tmp_path: Path, shared_memory: Path
) -> None:
    settings_ = lossy_config(tmp_path, shared_memory, codec="none", retain={"kind": "last_n", "n": 1})
    saved = tree(1)
    async with CheckpointStore.open(settings_) as store:
        await store.save(1, saved)
        await store.flush()
        kept = saved["params"]["w0"]
        await store.save(2, {"params": {"w0": kept}})
        await store.flush()
        for name in ("disk", "ram"):
            state = store._life.open_engine.state
            await store._life.open_engine.collector.evictor.evict(state.find(2), state.tier(name), deleted=True)
        before = pack_bytes(derived_in(tmp_path))
        (collected,) = [each for each in await store.collect() if each.tier == "archive"]
        assert collected.packs
        assert pack_bytes(derived_in(tmp_path)) < before
        (found,) = await store.verify(2, "archive", repair=True)
        assert found.intact
        restored = await store.restore(2, lossy=True, resume=False)
        assert restored is not None
        assert restored.lossy
        assert close_to(restored.tree["params"]["w0"], kept)


async def test_retention_and_deletion_count_the_derived_step(tmp_path: Path, shared_memory: Path) -> None:
    settings_ = lossy_config(tmp_path, shared_memory, retain={"kind": "last_n", "n": 2})
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, *range(1, 5))
        assert [info.step for info in await store.steps() if info.lossy] == [3, 4]
        await store.delete(3)
        assert [info.step for info in await store.steps() if info.lossy] == [4]
        await store.delete(4, force=True)
        assert not [info.step for info in await store.steps() if info.lossy]


async def test_a_deletion_that_is_refused_leaves_the_lossy_copy(tmp_path: Path, shared_memory: Path) -> None:
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await save_steps(store, 1, 2)
        state = store._life.open_engine.state
        async with being_read(state.tier("ram"), state.find(1)):
            with pytest.raises(Conflict, match="is being read"):
                await store.delete(1)
        assert [info.lossy for info in await store.steps()] == [("archive",), ("archive",)]


async def test_no_save_waits_for_what_a_lossy_tier_reads_that_does_not_answer(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await save_steps(store, 1)
        state = store._life.open_engine.state
        first, (archive,) = state.tier("ram"), state.derived
        async with being_read(first, state.find(1)):
            assert _waiting_helps(state, first)
            with promoting(state, archive):
                monkeypatch.setattr(Tier, "responsive", property(lambda tier: tier is not archive))
                assert not _waiting_helps(state, first)


async def test_a_step_waits_in_ram_until_it_was_derived(tmp_path: Path, shared_memory: Path) -> None:
    disk = folder(tmp_path / "disk", retain={"kind": "last_n", "n": 1})
    archive = folder(tmp_path / "archive", lossy=SEVEN_BITS, rate_limit="500 KB/s", retain="all")
    settings_ = config({"ram": ram(shared_memory, capacity="1 MiB"), "disk": disk, "archive": archive}, name="lossy")
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, *range(1, 9), to="disk")
        await store.flush()
        assert [info.step for info in await store.steps() if info.lossy] == list(range(1, 9))


async def test_a_lossy_tier_that_fails_never_fails_a_save(tmp_path: Path, shared_memory: Path) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    (tmp_path / "archive").write_text("a file where a folder belongs")
    async with CheckpointStore.open(settings_) as store:
        ckpt = await store.save(1, tree(1))
        await ckpt.reached("disk")
        found = await store.restore()
        assert found is not None
        by_name = {tier.name: tier for tier in await store.tier_infos()}
        assert not by_name["archive"].healthy
        assert by_name["disk"].healthy
        await crash(store)


async def test_a_reader_sees_lossy_copies_come(tmp_path: Path, shared_memory: Path) -> None:
    settings_ = lossy_config(tmp_path, shared_memory)
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1)
        async with CheckpointStore.open(settings_, read_only=True) as reader:
            assert [info.lossy for info in await reader.steps()] == [("archive",)]
            await save_steps(store, 2)
            assert [info.lossy for info in await reader.steps()] == [("archive",), ("archive",)]
            await drop_from_ram(store)
            found = await reader.restore(1, lossy=True)
            assert found is not None
            assert found.lossy
            with pytest.raises(NotFound, match="lossy=True"):
                await reader.restore(1)


async def test_an_agent_derives_and_its_trainer_knows(tmp_path: Path, shared_memory: Path) -> None:
    plain = lossy_config(tmp_path, shared_memory)
    settings_ = plain.model_copy(update={"promote_in": "agent"})
    async with CheckpointStore.open(settings_) as store:
        heard = Heard(store)
        await save_steps(store, 1, 2)
        assert [info.lossy for info in await store.steps()] == [("archive",), ("archive",)]
        assert {event.tier for event in heard.of(StepPromoted)} == {"disk", "archive"}
        (found,) = await store.verify(2, "archive")
        assert found.intact
        assert "archive" in {each.tier for each in await store.collect()}
        await store.evict(1, "archive")
        with pytest.raises(Invalid, match="`lossy` rules"):
            await (await store.save(3, tree(3))).reached("archive")
        await store.promote(1, "archive")
        await drop_from_ram(store)
        restored = await store.restore(1, lossy=True, resume=False)
        assert restored is not None
        assert restored.lossy
        (found,) = await store.verify(1)
        assert (found.tier, found.intact) == ("archive", True)


@pytest.mark.parametrize("promote_in", ["trainer", "agent"])
async def test_a_step_of_which_only_a_damaged_lossy_copy_is_left_can_be_verified(
    tmp_path: Path, shared_memory: Path, promote_in: str
) -> None:
    settings_ = lossy_config(tmp_path, shared_memory).model_copy(update={"promote_in": promote_in})
    async with CheckpointStore.open(settings_) as store:
        await save_steps(store, 1, 2)
        await drop_from_ram(store)
        first, _ = await store.steps()
        assert (first.tiers, first.lossy) == ((), ("archive",))
    (manifest,) = (tmp_path / "archive" / "derived" / "steps").glob("*1-*/manifest.ocdbt")
    manifest.write_bytes(b"torn")
    async with CheckpointStore.open(settings_) as store:
        (found,) = await store.verify(1)
        assert (found.tier, found.intact, bool(found.problem)) == ("archive", False, True)


async def test_several_ranks_derive_from_what_all_see(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [{"keys": ["**"], "max_error": "0.4%"}]
    archive = folder(tmp_path / "archive", lossy=rules, retain={"kind": "last_n", "n": 1})
    async with cohort(2, shared_memory, tmp_path / "disk", slower={"archive": archive}) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        await ranks.flush()
        assert (await ranks[0].steps())[0].lossy == ("archive",)
        with pytest.raises(Invalid, match="ranks=None"):
            await ranks[0].restore(1, lossy=True)
        (found,) = await ranks[0].verify(1, "archive")
        assert found.intact
        assert ["archive" in store._life.open_engine.promoters for store in ranks.stores] == [True, False]
        for step in (2, 3):
            await ranks.reached(await ranks.save(step), "disk")
            await ranks.flush()
        await ranks.heard[0].first(StepEvicted, lambda event: event.tier == "archive")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_several_ranks_are_refused_a_lossy_tier_without_a_tier_before_it_that_all_see(
    tmp_path: Path, shared_memory: Path
) -> None:
    tiers = {
        "ram": ram(shared_memory),
        "archive": folder(tmp_path / "archive", lossy=SEVEN_BITS),
        "disk": folder(tmp_path / "disk"),
    }
    with pytest.raises(Invalid, match=r"'archive' has `lossy` rules, and before it is no tier that all ranks see"):
        async with cohort(2, shared_memory, tmp_path / "disk", tiers=tiers):
            pass
    assert not (tmp_path / "archive").exists()
    async with CheckpointStore.open(config(tiers, name="test")) as store:  # one has whole steps in RAM
        await save_steps(store, 1)
        assert (await store.steps())[0].lossy == ("archive",)
