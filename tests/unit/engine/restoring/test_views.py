"""``restore(copy=False)`` shows a step where it lies in RAM, and nobody overwrites what is being looked at."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.agents import eventually
from support.frameworks import need_modules, require
from support.insight import arrays_in, bytes_of_listed_steps, flip_chunk, mapped_below, opened_below, slab_of, tier_of
from support.scenes import CHUNK, Heard, assert_restored, assert_same, config, folder, new_shared_folder, ram

from tieredckpt import AS_SAVED, CheckpointStore, Restored
from tieredckpt.blobs.mapping import Addresses
from tieredckpt.blobs.ram import slab
from tieredckpt.config import StoreConfig
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.events import ChunkRepaired, StepRestored
from tieredckpt.format.manifest import StepId, StepIndex

CHUNKS = 8
KIB = 1 << 10
STATE = CHUNKS * slab_size(CHUNK)


def state(seed: int) -> dict[str, Any]:
    """Arrays of several chunks, of one, of one that ends within a page, of none, and inline ones."""
    rng = np.random.default_rng(seed)
    return {
        "many": rng.integers(0, 255, (4 * CHUNK // 256, 256), dtype=np.uint8),
        "few": rng.standard_normal((2, CHUNK // 8)),
        "one": rng.integers(0, 1000, 5001, dtype=np.int16),
        "half": rng.standard_normal(100).astype(ml_dtypes.bfloat16),
        "none": np.empty((0, 3), dtype=np.float32),
        "scalar": np.array(seed, dtype=np.int64),
        "step": seed,
    }


@pytest.fixture
def two_tiers(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    tiers = {"ram": ram(shared_memory, capacity=4 * STATE), "disk": folder(tmp_path / "disk", retain="all")}
    return config(tiers)


async def view(store: CheckpointStore, step: int | None = None) -> Restored:
    restored = await store.restore(step, copy=False, resume=False)
    assert restored is not None
    return restored


def lies_in_ram(array: np.ndarray[Any, Any]) -> bool:
    """Whether the array's memory is a mapping of a slab."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(".pack")
    return False


# -- what is seen -----------------------------------------------------------------------------------------


async def test_views_show_every_bit_of_the_step_and_cannot_be_written(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        heard = Heard(store)
        restored = await view(store)
        assert_same(restored.tree, state(1))
        nbytes = sum(array.nbytes for array in arrays_in(restored.tree))
        assert restored.sources == {"ram": nbytes}
        assert [event.sources for event in heard.of(StepRestored)] == [{"ram": nbytes}]
        for key, array in restored.tree.items():
            if key == "step":
                continue
            assert not array.flags.writeable
            if array.size:
                assert lies_in_ram(array) == (key in ("many", "few", "one")), key
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
        await restored.verified()


async def test_part_of_a_step_can_be_seen(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        assert_restored(await store.restore(keys=["many"], copy=False), {"many": state(1)["many"]})


async def test_views_take_the_shape_of_a_tree_that_is_alike(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        restored = await store.restore(like=state(2), copy=False)
        assert_restored(restored, state(1))
        assert lies_in_ram(restored.tree["many"])


async def test_what_comes_back_as_it_was_saved_is_seen_where_it_is_an_array(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        restored = await store.restore(like=state(0) | {"many": AS_SAVED}, copy=False)
        assert restored is not None
        assert_same(restored.tree, state(1))
        assert lies_in_ram(restored.tree["many"])


async def test_views_cannot_fill_arrays(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        with pytest.raises(Invalid, match="nothing to fill `into` with"):
            await store.restore(into=state(2), copy=False)


async def test_an_array_whose_chunks_end_within_pages_is_copied_and_the_others_are_seen(
    two_tiers: StoreConfig,
) -> None:
    rng = np.random.default_rng(3)
    odd = {"odd": rng.standard_normal((21, 999)), "planes": rng.standard_normal((3, 11, 256))}
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1) | odd)
        restored = await view(store)
        assert_same(restored.tree, state(1) | odd)
        assert lies_in_ram(restored.tree["many"])
        assert not any(lies_in_ram(restored.tree[key]) for key in odd)
        assert not restored.tree["odd"].flags.writeable, "all of a tree is alike"
        assert restored.sources == {"ram": sum(array.nbytes for array in arrays_in(restored.tree))}
        await restored.verified()


@pytest.mark.parametrize("shape", [(3, 5, 512), (2, 3, 5, 512), (5, 512)])
async def test_chunks_that_end_with_padding_are_seen_without_it(two_tiers: StoreConfig, shape: tuple[int, ...]) -> None:
    padded = {"padded": np.random.default_rng(3).standard_normal(shape)}
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, padded)
        restored = await view(store)
        assert lies_in_ram(restored.tree["padded"])
        assert_same(restored.tree, padded)
        await restored.verified()


async def test_rows_that_do_not_fill_pages_are_seen_where_whole_chunks_of_them_do(two_tiers: StoreConfig) -> None:
    tree = {"narrow": np.random.default_rng(3).standard_normal((4090, 12))}
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, tree)
        restored = await view(store)
        assert lies_in_ram(restored.tree["narrow"])
        assert_same(restored.tree, tree)
        await restored.verified()


async def test_where_the_system_maps_pages_of_64_kib_chunks_that_begin_with_one_are_seen(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ARM systems with such pages do; others are copied, and no array shows what lies beside it."""
    page, place = 64 * KIB, Addresses.place

    def map_whole_pages(
        at: Addresses, position: int, fd: int, offset: int, nbytes: int, *, writable: bool = False
    ) -> None:
        if offset % page or (position % page and (at.start + position) % page):  # addresses here begin anywhere
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        place(at, position, fd, offset, -(-nbytes // page) * page, writable=writable)

    monkeypatch.setattr(slab, "PAGE", page)
    monkeypatch.setattr(Addresses, "place", map_whole_pages)
    rng = np.random.default_rng(3)
    tree = {
        "small": rng.integers(0, 255, 5001, dtype=np.uint8),
        "large": rng.standard_normal((64, 4096)),
        "one": rng.standard_normal(9000),
        "odd": rng.standard_normal((30, 4608)),
    }
    settings = config({"ram": ram(shared_memory, capacity=8 << 20)}, name="paged", chunk_size=128 * KIB)
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree)
        restored = await view(store)
        assert [key for key, array in restored.tree.items() if lies_in_ram(array)] == ["small", "large", "one"]
        assert_same(restored.tree, tree)
        await restored.verified()


@pytest.mark.parametrize("gone", ["the step", "its index"])
async def test_a_step_that_is_not_in_ram_is_copied(two_tiers: StoreConfig, gone: str) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        await store.save(2, state(2))
        await store.flush()
        if gone == "the step":
            await store.evict(1, "ram")
        else:
            (manifest,) = Path(tier_of(store, "ram").store.location).glob("steps/*1-*/manifest.ocdbt")
            manifest.unlink()
        restored = await view(store, 1)
        assert set(restored.sources) == {"disk"}
        assert_same(restored.tree, state(1))
        restored.tree["many"][:] = 0
        await restored.verified()


async def test_a_step_whose_ram_is_made_anew_before_it_is_seen_is_copied(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_index = step_index.load

    async def disconnect(tier: Tier, step: StepId) -> StepIndex:
        index = await load_index(tier, step)
        if tier.in_memory:
            monkeypatch.undo()
            shutil.rmtree(tier.store.location)
            await tier.disconnect()  # as the promoter of RAM does whose folder went away
        return index

    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        await store.flush()
        monkeypatch.setattr(step_index, "load", disconnect)
        restored = await view(store)
        assert set(restored.sources) == {"disk"}
        assert_same(restored.tree, state(1))


async def test_without_a_ram_tier_it_is_a_copy(tmp_path: Path) -> None:
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk")})) as store:
        await store.save(1, state(1))
        restored = await view(store)
        assert_same(restored.tree, state(1))
        assert set(restored.sources) == {"disk"}


# -- how long it is seen ----------------------------------------------------------------------------------


async def test_memory_is_not_reused_while_a_view_lives_and_is_when_it_is_gone(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        taken = slab_of(store).used
        tree = (await view(store)).tree
        part = tree["many"][3:5]
        for step in range(2, 12):
            await store.save(step, state(step))
            await store.flush()
            assert "ram" not in await store.where(1) or step < 5
            assert_same(tree, state(1))
        assert slab_of(store).used == await bytes_of_listed_steps(store) + taken
        del tree
        await store.collect()
        assert slab_of(store).used > await bytes_of_listed_steps(store), "a slice of an array is a view as well"
        assert (part == state(1)["many"][3:5]).all()
        del part
        await store.collect()
        assert slab_of(store).used == await bytes_of_listed_steps(store)


async def test_views_outlive_the_store(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        tree = (await view(store)).tree
    assert_same(tree, state(1))


async def test_views_leave_nothing_open(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        await store.flush()
        ram = Path(two_tiers.tiers[0].path)
        before, mapped = len(opened_below(ram)), len(mapped_below(ram))
        trees = [(await view(store)).tree for _ in range(20)]
        assert len(opened_below(ram)) == before + 20
        del trees

        def as_before() -> bool:  # the thread that opened the last one holds it for a moment
            gc.collect()
            return (len(opened_below(ram)), len(mapped_below(ram))) == (before, mapped)

        eventually(as_before, "views that nobody has any more leave nothing open")


def test_a_view_may_be_looked_at_until_the_process_ends(shared_memory: Path, tmp_path: Path) -> None:
    script = """
        import atexit, sys
        seen = []
        atexit.register(lambda: print(int(seen[0].sum())))  # the first to come is the last to be called
        import numpy as np
        from tieredckpt import CheckpointStore
        tiers = {"ram": {"kind": "ram", "path": sys.argv[1], "capacity": "1 MiB"},
                 "disk": {"kind": "posix", "path": sys.argv[2]}}
        with CheckpointStore.open({"store": {"chunk_size": 65536}, "tiers": tiers}).sync() as store:
            store.save(1, {"x": np.ones(1 << 18, np.uint8)})
            seen.append(store.restore(copy=False).tree["x"])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), shared_memory / "ram", tmp_path / "disk"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "262144\n"), done.stderr


class ViewsMachine(RuleBasedStateMachine):
    """Saves, evictions and collections, while views come and go."""

    @initialize()
    def open(self) -> None:
        self.place = new_shared_folder()
        tiers = {"ram": ram(self.place, capacity=3 * STATE), "disk": folder(self.place / "disk")}
        self.async_store = CheckpointStore.open(config(tiers))
        self.store = self.async_store.sync()
        self.store.__enter__()
        self.views: list[tuple[int, Any]] = []
        self.step = 0

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.store.close()
            shutil.rmtree(self.place)

    @rule()
    def save(self) -> None:
        self.step += 1
        self.store.save(self.step, state(self.step))
        self.store.flush()

    @precondition(lambda self: self.step)
    @rule(data=st.data())
    def see(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from([info.step for info in self.store.steps()]))
        restored = self.store.restore(step, copy=False, resume=False)
        assert restored is not None
        self.views.append((step, restored.tree))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def look_away(self, data: st.DataObject) -> None:
        del self.views[data.draw(st.integers(0, len(self.views) - 1))]

    @rule()
    def collect(self) -> None:
        self.store.collect()

    @invariant()
    def every_view_shows_its_step(self) -> None:
        for step, tree in getattr(self, "views", []):
            assert_same(tree, state(step))

    @precondition(lambda self: self.step and not self.views)
    @rule()
    def nothing_is_kept_that_nobody_sees(self) -> None:
        self.store.collect()
        assert slab_of(self.async_store).used == asyncio.run(bytes_of_listed_steps(self.async_store))


TestViews = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")(ViewsMachine.TestCase)
TestViews.settings = settings(max_examples=25, stateful_step_count=15)


# -- what is damaged --------------------------------------------------------------------------------------


async def test_verified_names_the_arrays_whose_bits_flipped_and_repairs_them(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await store.save(1, state(1))
        await store.flush()
        restored = await view(store)
        await restored.verified()
        await flip_chunk(store, "ram", 1, "few", 1)
        with pytest.raises(Corrupt, match=r"views of step 1 \(serial 1\) in RAM are damaged: 'few'; restore it with"):
            await restored.verified()
        await store.flush()
        assert heard.of(ChunkRepaired) == [ChunkRepaired(1, "few", "ram", "disk", CHUNK)]
        await restored.verified()
        assert_same(restored.tree, state(1))


HOWS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": lambda: {"as_": "torch"},
    "jax": lambda: {"as_": "jax"},
    "like": lambda: {"like": {"w": require("torch").zeros(CHUNK // 4), "b": np.float32(0)}},
    "cast": lambda: {"like": {"w": np.zeros(CHUNK // 4, np.float16), "b": 0.0}, "cast": True},
    "as it was saved": lambda: {"like": {"w": AS_SAVED, "b": np.float32(0)}},
}


@pytest.mark.parametrize("how", HOWS)
async def test_what_is_no_view_of_ram_is_verified_before_it_is_handed_out(two_tiers: StoreConfig, how: str) -> None:
    if how in ("torch", "jax"):
        need_modules(how)
    tree = {"w": np.ones(CHUNK // 4, np.float32), "b": np.float32(2)}
    saved = tree | {"w": require("torch").ones(CHUNK // 4)} if how == "as it was saved" else tree
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, saved)
        await store.flush()
        await flip_chunk(store, "ram", 1, "w")
        restored = await store.restore(copy=False, **HOWS[how]())
        assert restored is not None
        await store.verify(1, "ram", repair=True)  # which repairs the memory in its place
        await store.flush()
        await restored.verified()
        assert np.array_equal(np.asarray(restored.tree["w"]), tree["w"])
        assert float(restored.tree["b"]) == 2
        assert not restored.views


async def test_bits_that_flipped_elsewhere_do_not_trouble_a_view(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        restored = await store.restore(keys=["many"], copy=False)
        assert restored is not None
        await flip_chunk(store, "ram", 1, "few")
        await restored.verified()


async def test_views_of_a_step_that_has_left_ram_can_still_be_verified(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, state(1))
        await store.save(2, state(2))
        await store.flush()
        restored = await view(store, 1)
        await store.evict(1, "ram")
        await restored.verified()
        slab_of(store).array[:] ^= 1
        with pytest.raises(Corrupt, match="'many'"):
            await restored.verified()
