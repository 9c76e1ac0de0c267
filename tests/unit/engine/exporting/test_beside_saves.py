"""Exports beside saves: a save waits for no export, and an export reads nothing while a save copies."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.exports import Open, Paused, exported, names, replace_writer, stop_after_first_part, tree
from support.limits import limit

from tieredckpt import Closed, SyncStore
from tieredckpt.engine.exporting import held_step
from tieredckpt.engine.exporting.held_step import Reading
from tieredckpt.engine.promoting import copy_step
from tieredckpt.engine.saving import copy_to_slab
from tieredckpt.engine.saving.save import Writer
from tieredckpt.engine.tier import commit_file
from tieredckpt.interchange.safetensors import SAFETENSORS


def test_the_step_that_is_exported_stays_until_it_is(open_store: Open, tmp_path: Path, paused: Paused) -> None:
    """RAM keeps one step, and no tier the one that is exported: it stays while it is read, though newer ones come."""
    store = open_store(
        ram={"capacity": "auto"},
        disk={"promote": {"kind": "every_n_steps", "n": 100}},
        hf={"format": "safetensors", "when": {"kind": "every_n_steps", "n": 10}},
    )
    store.save(10, tree(10))
    assert paused.begun.wait(60)
    for step in range(11, 16):
        store.save(step, tree(step))
    assert 10 in store.all_steps()
    paused.go_on.set()
    store.flush()
    found = exported(tmp_path / "out" / "step-10")
    np.testing.assert_array_equal(found["params.w"], tree(10)["params"]["w"])


def test_a_save_does_not_wait_for_the_memory_of_a_step_that_is_exported(
    open_store: Open, tmp_path: Path, paused: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM has room for two steps. The export goes on from the disk, which has the step as well."""
    store = open_store(
        ram={"capacity": "8 MiB"}, hf={"format": "safetensors", "when": {"kind": "every_n_steps", "n": 10}}
    )
    limit(monkeypatch, export_part=1 << 19)  # one array, so that most are read after the pause
    read_from = read_tiers(monkeypatch)
    ckpt = store.save(10, large(10))
    ckpt.reached("disk")
    assert paused.begun.wait(60)
    for step in range(11, 15):
        saved = store.save(step, large(step)).saved
        assert saved is not None
        assert saved.tier == "ram"
        assert not saved.skipped
    assert "ram" not in store.where(10)
    paused.go_on.set()
    store.flush()
    assert read_from == {"ram", "disk"}
    found = exported(tmp_path / "out" / "step-10")
    for name, value in large(10).items():
        np.testing.assert_array_equal(found[name], value)


def large(seed: int) -> dict[str, Any]:
    """Six arrays, 3 MiB."""
    rng = np.random.default_rng(seed)
    return {f"w{at}": rng.standard_normal(1 << 16) for at in range(6)}


def read_tiers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The tiers that exports read from, from now on."""
    fill, found = held_step.fill, set[str]()

    async def noted(state: Any, source: Any, targets: Any) -> Any:
        sources = await fill(state, source, targets)
        found.update(sources)
        return sources

    monkeypatch.setattr(held_step, "fill", noted)
    return found


def test_a_save_that_waits_for_a_promotion_does_not_wait_for_an_export_that_began_anew(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM has room for one step, which is to come to the disk first. It is exported, let go for the save, and exported
    again: that lets it go, too."""
    limit(monkeypatch, export_part=1 << 19)  # one array, so that most are read after a pause
    promote, gave_way = threading.Event(), threading.Event()
    pauses = [(threading.Event(), threading.Event()) for _ in range(2)]
    attempts: list[int] = []
    stream, write, give_way = SAFETENSORS.stream, copy_step.write_packs, Reading.give_way
    assert stream is not None

    def slowly(step: Any, files: Any, **options: Any) -> Any:
        begun, go_on = pauses[min(len(attempts), 1)]
        attempts.append(1)

        def wait() -> None:
            begun.set()
            assert go_on.wait(60)

        stop_after_first_part(step, wait)
        return stream(step, files, **options)

    async def later(*arguments: Any) -> Any:
        while not promote.is_set():
            await asyncio.sleep(0.01)
        return await write(*arguments)

    async def giving_way(self: Reading, *, must: bool) -> None:
        while gave_way.is_set() and not pauses[1][0].is_set():  # the next export is to hold RAM first
            await asyncio.sleep(0.01)
        await give_way(self, must=must)
        gave_way.set()

    replace_writer(monkeypatch, slowly)
    monkeypatch.setattr(copy_step, "write_packs", later)
    monkeypatch.setattr(Reading, "give_way", giving_way)
    limit(monkeypatch, look_for_room=0.2)
    store = open_store(ram={"capacity": "8 MiB"}, hf={"format": "safetensors"})
    saving = threading.Thread(target=store.save, args=(2, large(2)), daemon=True)
    try:
        store.save(1, large(1))
        assert pauses[0][0].wait(60)
        saving.start()
        assert gave_way.wait(60)
        pauses[0][1].set()
        assert pauses[1][0].wait(60)  # it has begun anew, in RAM
        assert saving.is_alive()
        promote.set()
        saving.join(30)
        assert not saving.is_alive()
    finally:
        promote.set()
        for _, go_on in pauses:
            go_on.set()
    store.flush()
    for step in (1, 2):
        found = exported(tmp_path / "out" / f"step-{step}")
        for name, value in large(step).items():
            np.testing.assert_array_equal(found[name], value)


def test_an_export_reads_nothing_while_a_save_copies(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take the memory's bandwidth, and a training waits for the save alone."""
    store = open_store(hf={"format": "safetensors"})
    state, loop = store._life.engine.state, store._life.loop
    seen: list[int] = []
    fill = held_step.fill

    async def watched(*arguments: Any) -> Any:
        seen.append(state.ram_gate._saving)
        return await fill(*arguments)

    monkeypatch.setattr(held_step, "fill", watched)

    async def copy(until: asyncio.Event) -> None:
        with state.ram_gate.saving():
            await until.wait()

    async def begin() -> tuple[asyncio.Event, asyncio.Task[None]]:
        end = asyncio.Event()
        return end, asyncio.create_task(copy(end))

    async def wait_for_export() -> None:
        while not store._life.engine.exporter or store._life.engine.exporter.infos()[0].exporting is None:
            await state.changed.wait(0.05)
        await asyncio.sleep(0.2)  # in which it would have begun to read

    end, copying = loop.call_blocking(begin())
    store.save(1, tree())
    loop.call_blocking(wait_for_export())
    assert not seen
    loop.soon(end.set)
    store.flush()
    assert copying.done()
    assert set(seen) == {0}
    assert names(tmp_path / "out") == ["step-1"]


def test_a_save_closes_the_gate_while_it_plans_makes_room_copies_and_commits(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export that reads in between delays what comes next."""
    store = open_store(ram={"capacity": "4 MiB"})
    gate = store._life.engine.state.ram_gate
    seen: dict[str, set[int]] = {}
    for owner, name in (
        (Writer, "_planned_snapshot"),
        (copy_to_slab, "evict_until"),
        (copy_to_slab, "copy_cells"),
        (commit_file, "encode_now"),
    ):
        function = getattr(owner, name)

        def watched(*arguments: Any, function: Any = function, name: str = name) -> Any:
            if name != "encode_now" or arguments[0].in_memory:
                seen.setdefault(name, set()).add(gate._saving)
            return function(*arguments)

        monkeypatch.setattr(owner, name, watched)
    for step in range(4):
        store.save(step, {"w": np.arange(320_000) + step})  # RAM has room for one
    assert 1 in seen.pop("evict_until")  # and open where it waits for a promotion, which an export need not
    assert seen == {name: {1} for name in ("_planned_snapshot", "copy_cells", "encode_now")}
    assert gate._saving == 0


def with_a_step(open_store: Open) -> tuple[SyncStore, Any, Any]:
    """A store, the state of its engine, and the one step that is on all of its tiers."""
    store = open_store()
    store.save(1, tree())
    store.flush()
    state = store._life.engine.state
    (step,) = state.records()
    return store, state, step


def test_nothing_is_read_for_an_export_that_has_ended(open_store: Open) -> None:
    """A thread that was left behind asks late: the step would be held for ever."""
    store, state, step = with_a_step(open_store)

    async def late() -> None:
        reading = Reading(state, step, lambda *_: None)
        await reading.index()
        await reading.close()
        with pytest.raises(Closed):
            await reading.fill({"params/b": np.empty(10, np.int64)})
        assert not any(tier.steps.readers for tier in state.tiers)

    store._run(late())


def test_a_save_gets_the_memory_of_a_step_whose_reads_wait_for_the_save(open_store: Open) -> None:
    """Else it would wait for reads that wait for it; they go on from the next tier."""
    store, state, step = with_a_step(open_store)

    async def read_beside_a_save() -> None:
        reading = Reading(state, step, lambda *_: None)
        await reading.index()
        assert [bool(tier.steps.readers) for tier in state.tiers] == [True, False]
        with state.ram_gate.saving():
            wanted = [np.empty(10, np.int64) for _ in range(2)]
            reads = [asyncio.ensure_future(reading.fill({"params/b": array})) for array in wanted]
            await asyncio.sleep(0)  # both wait for the gate
            await asyncio.wait_for(reading.give_way(must=True), 60)
            assert not state.tiers[0].steps.readers
            assert not any(read.done() for read in reads)
        await asyncio.gather(*reads)
        assert all((array == wanted[0]).all() for array in wanted)
        assert [bool(tier.steps.readers) for tier in state.tiers] == [False, True]
        await reading.close()

    store._run(read_beside_a_save())
