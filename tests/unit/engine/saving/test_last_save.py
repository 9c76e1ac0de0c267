"""What has not changed since the last save is not read again, and every step holds what its tree held."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.frameworks import require
from support.limits import limit
from support.scenes import CHUNK, SOON, Heard, assert_same, config, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore, FrozenChanged, StepSaved
from tieredckpt.engine.saving import frozen, snapshot
from tieredckpt.engine.saving.last_save import LastSave
from tieredckpt.tree import flatten
from tieredckpt.tree.leaf import ArrayLeaf

jax, torch = require("jax"), require("torch")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the arrays whose cells a save has cut, in order."""
    return spy(monkeypatch, snapshot, "cells_here", "cells_of")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the arrays that were read behind the training, in order."""
    return spy(monkeypatch, frozen, "cells_of")


def spy(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[str]:
    seen: list[str] = []

    def noting(cut: Callable[..., Any]) -> Callable[..., Any]:
        def cells(array: int, leaf: ArrayLeaf, *arguments: Any) -> Any:
            seen.append(leaf.key)
            return cut(array, leaf, *arguments)

        return cells

    for name in names:
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    return seen


def values(seed: int, nbytes: int = 4 * CHUNK) -> Any:
    return np.random.default_rng(seed).standard_normal(nbytes // 4).astype(np.float32)


def opened(shared_memory: Path, tmp_path: Path, *keys: str, capacity: str = "16 MiB") -> Any:
    tiers = {"ram": ram(shared_memory, capacity=capacity), "disk": folder(tmp_path / "disk")}
    return CheckpointStore.open(config(tiers, frozen=keys))


async def test_a_jax_array_that_is_the_same_object_is_not_read(
    tmp_path: Path, shared_memory: Path, read: list[str]
) -> None:
    base, adapter = jax.numpy.asarray(values(0)), [jax.numpy.asarray(values(seed)) for seed in (1, 2)]
    async with opened(shared_memory, tmp_path) as store:
        heard = Heard(store)
        await store.save(1, {"base": base, "adapter": adapter[0]})
        read.clear()
        await store.save(2, {"base": base, "adapter": adapter[1]})
        assert read == ["adapter"]
        first, second = heard.of(StepSaved)
        assert second.new_bytes == first.new_bytes // 2 == base.nbytes
        assert_same((await store.restore(as_="numpy")).tree, {"base": values(0), "adapter": values(2)})
    async with CheckpointStore.open(str(tmp_path / "disk"), read_only=True) as store:
        assert_same((await store.restore(as_="numpy")).tree, {"base": values(0), "adapter": values(2)})


async def test_what_the_slab_has_lost_is_read(tmp_path: Path, shared_memory: Path, read: list[str]) -> None:
    base = jax.numpy.asarray(values(0))
    async with opened(shared_memory, tmp_path) as store:
        await store.save(1, {"base": base})
        await store.flush()
        await store.evict(1, "ram")
        read.clear()
        await store.save(2, {"base": base})
        assert read == ["base"]
        assert_same((await store.restore(as_="numpy")).tree, {"base": values(0)})


async def test_a_tree_that_streams_past_ram_is_read_where_it_must_be(tmp_path: Path, shared_memory: Path) -> None:
    still, base = values(0), jax.numpy.asarray(values(1, 1 << 20))
    async with opened(shared_memory, tmp_path, "frozen", capacity="256 KiB") as store:
        for step in (1, 2, 3):
            await store.save(step, {"frozen": still, "base": base, "other": values(step)})
            expected = {"frozen": values(0), "base": values(1, 1 << 20), "other": values(step)}
            assert_same((await store.restore(as_="numpy")).tree, expected)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
async def test_a_frozen_array_is_not_read_by_a_save(
    tmp_path: Path, shared_memory: Path, read: list[str], checked: list[str], kind: str
) -> None:
    """A `state_dict` has another tensor each time, over the same memory in the same version."""
    base = torch.from_numpy(values(0)) if kind == "torch" else values(0)
    async with opened(shared_memory, tmp_path, "model/base/**") as store:
        heard = Heard(store)
        for step in (1, 2, 3):
            again = base.detach() if kind == "torch" else base[:]
            await store.save(step, {"model": {"base": {"w": again}, "head": values(step)}})
            await store.flush()
        assert read == ["model/base/w", *["model/head"] * 3]
        assert checked == ["model/base/w"] * 2
        assert not heard.of(FrozenChanged)
        assert_same((await store.restore(as_="numpy")).tree, {"model": {"base": {"w": values(0)}, "head": values(3)}})


async def test_a_frozen_array_that_changes_is_reported_and_read_from_then_on(
    tmp_path: Path, shared_memory: Path
) -> None:
    base = values(0)
    async with opened(shared_memory, tmp_path, "base") as store:
        heard = Heard(store)
        for step in (1, 2):
            await store.save(step, {"base": base, "step": step})
            await store.flush()
        base[-1] += 1
        await store.save(3, {"base": base, "step": 3})
        await store.flush()
        assert heard.of(FrozenChanged) == [FrozenChanged(3, "base", 2)]
        for step in (4, 5, 6):
            base[0] += 1
            await store.save(step, {"base": base, "step": step})
            if step == 4:
                assert_same((await store.restore(as_="numpy")).tree, {"base": base, "step": step})
            await store.flush()
        assert [event.step for event in heard.of(FrozenChanged)] in ([3, 5], [3, 6])


async def test_a_tensor_whose_version_counts_a_write_is_read_though_it_is_declared_frozen(
    tmp_path: Path, shared_memory: Path
) -> None:
    weight = torch.from_numpy(values(0))
    async with opened(shared_memory, tmp_path, "weight") as store:
        heard = Heard(store)
        for step in range(1, 4):
            await store.save(step, {"weight": weight})
            assert_same((await store.restore(as_="numpy")).tree, {"weight": weight.numpy()})
            weight += 1
        await store.flush()
        assert not heard.of(FrozenChanged), "all steps are right"


async def test_a_tensor_of_inference_mode_may_be_declared_frozen(tmp_path: Path, shared_memory: Path) -> None:
    """It counts no versions."""
    with torch.inference_mode():
        weight = torch.arange(CHUNK)
    async with opened(shared_memory, tmp_path, "weight") as store:
        for step in (1, 2):
            await store.save(step, {"weight": weight})
        assert_same((await store.restore(as_="numpy")).tree, {"weight": weight.numpy()})


@pytest.mark.parametrize("kind", ["numpy", "torch"])
async def test_another_array_at_the_address_of_one_that_is_gone_is_read(
    tmp_path: Path, shared_memory: Path, kind: str
) -> None:
    """As memory that was freed and taken again; copies that are made for each save lie so, version and all."""
    memory = bytearray(values(0).tobytes())
    of = torch if kind == "torch" else np
    async with opened(shared_memory, tmp_path, "base") as store:
        for step in (1, 2):
            memory[:] = values(step).tobytes()
            await store.save(step, {"base": of.frombuffer(memory, dtype=of.float32)})
            assert_same((await store.restore(as_="numpy")).tree, {"base": values(step)})


@pytest.mark.parametrize("kind", ["numpy", "torch"])
async def test_a_frozen_array_that_a_restore_has_filled_is_read(tmp_path: Path, shared_memory: Path, kind: str) -> None:
    """A restore counts no version, and leaves every array where it is."""
    bases = [torch.from_numpy(values(step)) if kind == "torch" else values(step) for step in range(3)]
    async with opened(shared_memory, tmp_path, "base") as store:
        for step in (1, 2):
            await store.save(step, {"base": bases[step]})
        await store.restore(1, into={"base": bases[2]}, resume=True)
        await store.save(3, {"base": bases[2]})
        assert_same((await store.restore(as_="numpy")).tree, {"base": values(1)})


async def test_a_change_found_while_the_next_save_runs_has_the_one_after_read_it(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = values(0)
    async with opened(shared_memory, tmp_path, "base") as store:
        heard = Heard(store)
        writer = store._life.engine._writer
        await store.save(1, {"base": base})
        base[0] += 1
        learn = writer._last.learn
        monkeypatch.setattr(writer._last, "learn", lambda *found: (writer._last.forget("base"), learn(*found)))
        await store.save(2, {"base": base})
        monkeypatch.undo()
        await store.save(3, {"base": base})
        assert_same((await store.restore(as_="numpy")).tree, {"base": base})
        await store.flush()
        assert len(heard.of(FrozenChanged)) <= 1


async def test_an_array_that_cannot_be_read_again_keeps_no_other_from_its_check(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework raises what it likes for memory or a device that is gone."""
    cells_of = frozen.cells_of

    def gone(array: int, leaf: ArrayLeaf, grid: Any) -> Any:
        if leaf.key == "gone":
            raise RuntimeError("the device is lost")
        return cells_of(array, leaf, grid)

    monkeypatch.setattr(frozen, "cells_of", gone)
    tree = {"gone": values(0), "here": values(1)}
    async with opened(shared_memory, tmp_path, "**") as store:
        heard = Heard(store)
        await store.save(1, tree)
        tree["here"][0] += 1
        await store.save(2, tree)
        await store.flush()
        assert heard.of(FrozenChanged) == [FrozenChanged(2, "here", 1)]
        monkeypatch.setattr(frozen, "cells_of", cells_of)
        tree["gone"][0] += 1
        await store.save(3, tree)
        await store.flush()
        assert FrozenChanged(3, "gone", 1) in heard.of(FrozenChanged)  # step 2 was not checked


async def test_a_check_at_its_own_pace_reads_every_chunk(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing hurries it: it waits after each chunk, as it does in a training."""
    limit(monkeypatch, frozen_rate=20.0 * CHUNK)
    base = values(0)
    async with opened(shared_memory, tmp_path, "base") as store:
        heard = Heard(store)
        await store.save(1, {"base": base})
        base[-1] += 1
        await store.save(2, {"base": base})
        assert await heard.first(FrozenChanged) == FrozenChanged(2, "base", 1)


async def test_closing_does_not_wait_for_a_slow_check(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, frozen_rate=1.0)  # four hours
    base = values(0)
    store = await opened(shared_memory, tmp_path, "base")
    for step in (1, 2):
        await store.save(step, {"base": base})
    async with asyncio.timeout(60):
        await store.close()


async def test_flush_waits_for_the_check_of_the_last_save_too(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, frozen_rate=1.0)
    has_read, digest = threading.Event(), frozen._digest

    def noted(*arguments: Any) -> bytes:
        found = digest(*arguments)
        has_read.set()
        return found

    monkeypatch.setattr(frozen, "_digest", noted)
    base = values(0)
    async with opened(shared_memory, tmp_path, "base") as store:
        heard = Heard(store)
        for step in (1, 2):
            await store.save(step, {"base": base})
        assert await asyncio.to_thread(has_read.wait, SOON)
        base[0] += 1  # in the chunk that the check of step 2 has read
        await store.save(3, {"base": base})
        await store.flush()
        assert heard.of(FrozenChanged) == [FrozenChanged(3, "base", 2)]


@pytest.mark.parametrize("calls", [1, 2])
async def test_each_of_several_flushes_waits_for_the_last_check(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, checked: list[str], calls: int
) -> None:
    limit(monkeypatch, frozen_rate=1.0)
    frozen_one, moving = values(1), values(2)
    async with opened(shared_memory, tmp_path, "frozen") as store:
        for step in range(1, 4):
            moving[0] = step
            await store.save(step, {"frozen": frozen_one, "moving": moving})
        check = store._life.engine._writer.frozen
        before = len(checked)
        await asyncio.gather(*(store.flush() for _ in range(calls)))
        assert len(checked) == before + 1
        assert check._task is not None
        assert check._task.done()


async def test_a_check_reads_nothing_anew_while_a_save_is_made(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, copies, copied = (threading.Event() for _ in range(4))
    digest, work, read = frozen._digest, snapshot.Snapshot.work, 0

    def noted(*arguments: Any) -> bytes:
        nonlocal read
        read += 1
        begun.set()
        assert goes_on.wait(SOON)
        return digest(*arguments)

    def slow(self: snapshot.Snapshot, room: Any) -> None:
        copies.set()
        assert copied.wait(SOON)
        work(self, room)

    monkeypatch.setattr(frozen, "_digest", noted)
    base = values(0)
    async with opened(shared_memory, tmp_path, "base") as store:
        for step in (1, 2):
            await store.save(step, {"base": base, "other": values(step)})
        assert await asyncio.to_thread(begun.wait, SOON)
        monkeypatch.setattr(snapshot.Snapshot, "work", slow)
        saving = asyncio.create_task(store.save(3, {"base": base, "other": values(3)}))
        assert await asyncio.to_thread(copies.wait, SOON)
        goes_on.set()
        await asyncio.sleep(0.2)
        assert read == 1, "the chunk at which the check was, and no other"
        copied.set()
        await saving
        await store.flush()
        assert read == 8, "four chunks after step 2, and four after step 3"


async def test_a_check_keeps_nothing_but_what_it_is_to_read(
    tmp_path: Path, shared_memory: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, frozen_rate=1.0)
    base, still = values(0), jax.numpy.asarray(values(1))
    async with opened(shared_memory, tmp_path, "**") as store:
        for step in (1, 2, 3):
            trained = jax.numpy.asarray(values(step))
            gone = weakref.ref(trained)
            await store.save(step, {"still": still, "base": base, "trained": trained})
            del trained
            gc.collect()
            assert gone() is None
        assert "still" not in checked, "nobody can have changed it"


STEPS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["kept", "new", "grown", "evict"])), max_size=4
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_every_step_holds_what_its_tree_held(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[dict[str, str]]
) -> None:
    """Arrays are kept, replaced, or of another shape; some are declared frozen, and what RAM has may be evicted."""
    shared_memory = new_shared_folder()
    try:
        asyncio.run(_train(shared_memory, tmp_path_factory.mktemp("steps"), steps))
    finally:
        shutil.rmtree(shared_memory)


async def _train(shared_memory: Path, tmp_path: Path, steps: Sequence[dict[str, str]]) -> None:
    make = {"a": jax.numpy.asarray, "b": jax.numpy.asarray, "c": np.array, "d": torch.from_numpy}
    tree = {name: make[name](values(i)) for i, name in enumerate(make)}
    held: dict[int, dict[str, Any]] = {}
    async with opened(shared_memory, tmp_path, "c", "d") as store:
        for step, changes in enumerate([{}, *steps], 1):
            for name, change in changes.items():
                if change in ("new", "grown"):
                    tree[name] = make[name](values(100 * step, (4 + step * (change == "grown")) * CHUNK))
                elif change == "evict" and step > 1:
                    await store.flush()
                    await store.evict(step - 1, "ram")
                    break
            await store.save(step, tree)
            held[step] = {name: np.asarray(value) for name, value in tree.items()}
        await store.flush()
        for step, expected in held.items():
            assert_same((await store.restore(step, as_="numpy", resume=False)).tree, expected)


def test_what_is_frozen_is_chosen_anew_for_another_tree() -> None:
    last = LastSave(["base/**"])
    for tree, chosen in (
        ({"base": {"a": np.ones(2)}, "b": np.ones(2)}, {"base/a"}),
        ({"base": {"a": np.ones(2)}, "b": np.ones(2)}, {"base/a"}),
        ({"base": {"b": np.ones(2)}, "a": np.ones(2)}, {"base/b"}),
    ):
        assert last.frozen(flatten(tree).arrays) == chosen
