"""Exports behind the training: what is due is made, whole or not at all, and never stops a training."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.frameworks import require
from support.limits import limit

from tieredckpt import CheckpointStore, Closed, Conflict, Invalid, SyncStore, TierUnavailable, _registry
from tieredckpt.blobs.posix import stream
from tieredckpt.blobs.posix.stream import Blocks
from tieredckpt.config.formats import GROUP
from tieredckpt.engine import limits
from tieredckpt.engine.exporting import exporter, held_step
from tieredckpt.engine.exporting.held_step import Reading
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.promoting import copy_step
from tieredckpt.engine.saving import copy_to_slab
from tieredckpt.engine.saving.save import Writer
from tieredckpt.engine.tier import commit_file
from tieredckpt.events import Event, ExportFailed, StepExported
from tieredckpt.interchange.safetensors import SAFETENSORS

Open = Callable[..., SyncStore]


@pytest.fixture
def open_store(tmp_path: Path, shared_memory: Path) -> Iterator[Open]:
    """Opens the store of the test with exports; closed at the end of the test."""
    opened: list[SyncStore] = []

    def open_with(ram: dict[str, Any] | None = None, disk: dict[str, Any] | None = None, **exports: Any) -> SyncStore:
        tiers = {
            "ram": {"kind": "ram", "path": str(shared_memory / "ram"), "capacity": "16 MiB", **(ram or {})},
            "disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False, **(disk or {})},
        }
        for table in exports.values():
            table.setdefault("to", str(tmp_path / "out"))
        source = {"store": {"chunk_size": "8 KiB"}, "tiers": tiers, "exports": exports}
        opened.append(CheckpointStore.open_sync(source))
        return opened[-1]

    yield open_with
    for store in opened:
        store.close()


def tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    params = {
        "w": rng.standard_normal((300, 71)).astype(np.float32),
        "deep": rng.standard_normal((2, 3, 5, 7)).astype(np.float16),
        "b": np.arange(10, dtype=np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5),
    }
    return {"params": params, "opt": {"m": np.ones((50, 40), np.float32), "count": seed}}


def exported(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a folder of safetensors."""
    assert SAFETENSORS.read is not None
    return {name: np.array(value) for name, value in SAFETENSORS.read(path).items()}


def heard(store: SyncStore, kind: type[Event]) -> list[Any]:
    found: list[Any] = []
    store.subscribe(lambda event: found.append(event) if isinstance(event, kind) else None)
    return found


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


class Paused:
    """Replaces the writing of safetensors by one that waits after its first file was begun, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.when_given_up = False
        assert SAFETENSORS.stream is not None
        write = SAFETENSORS.stream

        def stream(step: Any, files: Any, **options: Any) -> Any:
            parts = step._parts

            def slowly(*arguments: Any, **named: Any) -> Any:
                for at, piece in enumerate(parts(*arguments, **named)):
                    yield piece
                    if not at:
                        self.begun.set()
                        while not (self.go_on.wait(0.01) or (self.when_given_up and step.given_up)):
                            pass

            step._parts = slowly
            return write(step, files, **options)

        (entry,) = _registry.offered(GROUP)["safetensors"]
        monkeypatch.setattr(require(entry.module), entry.attr, dataclasses.replace(SAFETENSORS, stream=stream))


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paused]:
    found = Paused(monkeypatch)
    yield found
    found.go_on.set()


def test_what_is_due_is_exported_bit_for_bit(open_store: Open, tmp_path: Path) -> None:
    """The values are those of the step, of what `keys` choose, cast as asked; an event says what was left out."""
    store = open_store(
        hf={"format": "safetensors", "cast": "bf16", "keys": ["params/**"], "when": {"kind": "every_n_steps", "n": 2}},
        all={"format": "safetensors", "to": str(tmp_path / "all")},
        npz={"format": "npz", "to": str(tmp_path / "npz")},
    )
    events = heard(store, StepExported)
    for step in range(5):
        store.save(step, tree(step), metrics={"loss": float(step)})
        store.flush()
    assert names(tmp_path / "out") == ["step-0", "step-2", "step-4"]
    assert names(tmp_path / "all") == [f"step-{step}" for step in range(5)]
    for step in (0, 2, 4):
        found, saved = exported(tmp_path / "out" / f"step-{step}"), tree(step)["params"]
        assert found.keys() == {f"params.{name}" for name in saved}
        assert found["params.w"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found["params.w"], saved["w"].astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(found["params.deep"], saved["deep"].astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(found["params.b"], saved["b"])
    found = exported(tmp_path / "all" / "step-3")
    np.testing.assert_array_equal(found["params.w"], tree(3)["params"]["w"])
    with np.load(tmp_path / "npz" / "step-3" / "arrays.npz") as archive:
        np.testing.assert_array_equal(archive["params/w"], tree(3)["params"]["w"])
        np.testing.assert_array_equal(archive["params/empty"], tree(3)["params"]["empty"])
        assert archive["params/scalar"] == 2.5
    last = next(event for event in events if (event.step, event.export) == (4, "all"))
    assert last.to == str(tmp_path / "all" / "step-4")
    assert (last.left_out, last.left_out_count) == (("opt/count",), 1)
    assert last.nbytes == (tmp_path / "all" / "step-4" / "model.safetensors").stat().st_size
    (info,) = (each for each in store.export_infos() if each.name == "hf")
    assert (info.steps, info.problem, info.exporting) == ((0, 2, 4), "", None)


@pytest.mark.parametrize("part", [1000, 5000, 1 << 24])
def test_an_export_is_the_step_whatever_is_read_together(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Parts end anywhere in a page, a header has more than one, and several files follow each other."""
    limit(monkeypatch, export_part=part)
    rng = np.random.default_rng(part)
    saved: dict[str, Any] = {f"with a name that is rather long {at}": rng.bytes(at) for at in range(1, 60)}
    saved = {key: np.frombuffer(data, np.uint8) for key, data in saved.items()}
    saved |= {"odd": np.frombuffer(rng.bytes(20_001), np.uint8), "none": np.zeros(0, np.float32)}
    saved |= {"wide": rng.standard_normal(3), "more": rng.standard_normal((123, 31)).astype(np.float32)}
    store = open_store(
        one={"format": "safetensors", "to": str(tmp_path / "one")},
        many={"format": "safetensors", "to": str(tmp_path / "many"), "shard_size": "7 kB"},
        cast={"format": "safetensors", "to": str(tmp_path / "cast"), "cast": "bf16"},
    )
    store.save(1, saved)
    store.flush()
    assert len(names(tmp_path / "many" / "step-1")) > 3
    for export in ("one", "many", "cast"):
        found = exported(tmp_path / export / "step-1")
        assert found.keys() == saved.keys()
        for key, value in saved.items():
            wanted = value.astype(ml_dtypes.bfloat16) if export == "cast" and value.dtype.kind == "f" else value
            np.testing.assert_array_equal(found[key], wanted)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_an_export_uses_its_memory_again(open_store: Open, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of many parts, and of one export after the other."""
    limit(monkeypatch, export_part=5000)
    made: list[int] = []
    new = stream.private_memory
    monkeypatch.setattr(stream, "private_memory", lambda nbytes: made.append(nbytes) or new(nbytes))
    store = open_store(hf={"format": kind})
    for step in (1, 2):
        store.save(step, {"a": np.full(30_000, step)})
        store.flush()
    assert 0 < len(made) <= 6


def test_a_restart_exports_what_was_due_and_is_not_there(open_store: Open, tmp_path: Path) -> None:
    """What is there is not made again; what a crash left under another name goes."""
    store = open_store(disk={"retain": "all"})
    for step in range(3):
        store.save(step, tree(step))
    store.close()
    table = {"format": "safetensors", "when": {"kind": "every_n_steps", "n": 2}}
    store = open_store(disk={"retain": "all"}, hf=dict(table))
    store.flush()
    store.close()
    assert names(tmp_path / "out") == ["step-0", "step-2"]
    made = (tmp_path / "out" / "step-2" / "model.safetensors").stat()
    owner = json.loads((tmp_path / "out" / "step-2" / "tieredckpt.json").read_text())["store"][:8]
    (tmp_path / "out" / f".tieredckpt-{owner}-hf-crashed").mkdir()
    for file in (tmp_path / "out" / "step-0").iterdir():
        file.unlink()
    (tmp_path / "out" / "step-0").rmdir()
    store = open_store(disk={"retain": "all"}, hf=dict(table))
    store.flush()
    assert names(tmp_path / "out") == ["step-0", "step-2"]
    assert (tmp_path / "out" / "step-2" / "model.safetensors").stat().st_ino == made.st_ino


def test_a_reader_sees_a_whole_export_or_none(open_store: Open, tmp_path: Path, paused: Paused) -> None:
    """While it is written nothing has its name, and what is given up leaves nothing."""
    store = open_store(hf={"format": "safetensors"})
    store.save(1, tree())
    assert paused.begun.wait(60)
    assert [name for name in names(tmp_path / "out") if not name.startswith(".")] == []
    (info,) = store.export_infos()
    assert (info.steps, info.exporting) == ((), 1)
    paused.go_on.set()
    store.flush()
    assert names(tmp_path / "out") == ["step-1"]
    assert names(tmp_path / "out" / "step-1") == ["model.safetensors", "tieredckpt.json"]


def test_a_store_that_is_closed_after_an_exception_gives_up_an_export(
    open_store: Open, tmp_path: Path, paused: Paused
) -> None:
    store = open_store(hf={"format": "safetensors"})
    store.save(1, tree())
    assert paused.begun.wait(60)
    paused.when_given_up = True
    store.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert names(tmp_path / "out") == []
    paused.go_on.set()
    store = open_store(hf={"format": "safetensors"})
    store.flush()
    assert names(tmp_path / "out") == ["step-1"]


def test_a_failed_export_does_not_reach_the_training_and_is_made_later(open_store: Open, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    store = open_store(hf={"format": "safetensors"})
    failed, again = heard(store, ExportFailed), threading.Event()
    store.subscribe(lambda event: again.set() if isinstance(event, ExportFailed) else None)
    store.save(1, tree())
    with pytest.raises(TierUnavailable, match="export 'hf'"):
        store.flush()
    store.save(2, tree(2))
    assert again.wait(60)  # the first time was perhaps before anybody listened
    assert failed[0].export == "hf"
    assert failed[0].retry_in is not None
    assert "out" in store.export_infos()[0].problem
    (tmp_path / "out").unlink()
    waited = threading.Event()
    store.subscribe(lambda event: waited.set() if isinstance(event, StepExported) else None)
    assert waited.wait(60)
    store.flush()
    assert names(tmp_path / "out") == ["step-1", "step-2"]
    assert store.export_infos()[0].problem == ""


def test_a_step_that_a_format_cannot_hold_is_named_and_not_tried_again(open_store: Open, tmp_path: Path) -> None:
    store = open_store(hf={"format": "safetensors", "keys": ["params/**"]})
    failed = heard(store, ExportFailed)
    store.save(1, {"params": {"w": np.ones(3, np.complex128)}})
    with pytest.raises(Invalid, match="params/w"):
        store.flush()
    assert [(event.step, event.retry_in) for event in failed] == [(1, None)]
    store.save(2, tree())
    store.flush()  # which has told of step 1
    assert names(tmp_path / "out") == ["step-2"]
    assert "params/w" in store.export_infos()[0].problem
    assert len(failed) == 1


def test_an_export_that_had_no_memory_is_made_later(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays are read whole for formats that a library writes; another process may have the memory just then."""
    empty, failed_once = np.empty, threading.Event()

    def refusing(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread().name.endswith("export out") and not failed_once.is_set():
            failed_once.set()
            raise MemoryError("Unable to allocate")
        return empty(*arguments, **named)

    monkeypatch.setattr(np, "empty", refusing)
    store = open_store(out={"format": "npy"})
    exported_later = threading.Event()
    store.subscribe(lambda event: exported_later.set() if isinstance(event, StepExported) else None)
    store.save(1, tree())
    assert exported_later.wait(60)
    assert failed_once.is_set()
    assert names(tmp_path / "out") == ["step-1"]


def test_keep_says_how_many_exports_stay(open_store: Open, tmp_path: Path) -> None:
    """A number, or a policy; those that all tiers have let go are counted, and do not come back after a restart."""
    best = {"kind": "best", "metric": "loss"}
    tables: dict[str, Any] = {
        "two": {"format": "safetensors", "keep": 2},
        "best": {"format": "safetensors", "when": best, "keep": best, "to": str(tmp_path / "best")},
    }
    store = open_store(disk={"retain": {"kind": "last_n", "n": 1}}, **tables)
    for step, loss in enumerate([5.0, 2.0, 4.0, 3.0, 6.0]):
        store.save(step, tree(step), metrics={"loss": loss})
        store.flush()
    assert names(tmp_path / "out") == ["step-3", "step-4"]
    assert names(tmp_path / "best") == ["step-1"]
    store.close()
    store = open_store(disk={"retain": {"kind": "last_n", "n": 1}}, **tables)
    assert store.all_steps() == (4,)
    store.flush()
    assert names(tmp_path / "out") == ["step-3", "step-4"]
    assert names(tmp_path / "best") == ["step-1"]


def test_what_is_no_export_of_this_store_is_not_replaced(open_store: Open, tmp_path: Path) -> None:
    (tmp_path / "out" / "step-1").mkdir(parents=True)
    (tmp_path / "out" / "step-1" / "mine").write_text("mine")
    store = open_store(hf={"format": "safetensors"})
    store.save(1, tree())
    with pytest.raises(Conflict, match="step-1 exists and is no export of this store"):
        store.flush()
    assert names(tmp_path / "out" / "step-1") == ["mine"]


def test_a_step_that_is_saved_again_is_exported_again(open_store: Open, tmp_path: Path) -> None:
    """On another branch, too: the export has the values of the branch."""
    store = open_store(disk={"retain": "all"}, hf={"format": "safetensors"})
    for step in (1, 2):
        store.save(step, tree(step))
        store.flush()
    assert store.restore(1, resume=True) is not None
    store.save(2, tree(7))
    store.flush()
    found = exported(tmp_path / "out" / "step-2")
    np.testing.assert_array_equal(found["params.w"], tree(7)["params"]["w"])
    assert names(tmp_path / "out") == ["step-1", "step-2"]


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
        parts = step._parts

        def paused(*arguments: Any, **named: Any) -> Any:
            for at, piece in enumerate(parts(*arguments, **named)):
                yield piece
                if not at:
                    begun.set()
                    assert go_on.wait(60)

        step._parts = paused
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

    (entry,) = _registry.offered(GROUP)["safetensors"]
    monkeypatch.setattr(require(entry.module), entry.attr, dataclasses.replace(SAFETENSORS, stream=slowly))
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
        (Collector, "make_room"),
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
    assert 1 in seen.pop("make_room")  # and open where it waits for a promotion, which an export need not
    assert seen == {name: {1} for name in ("_planned_snapshot", "copy_cells", "encode_now")}
    assert gate._saving == 0


def test_an_export_that_hangs_blocks_neither_flush_nor_eviction_nor_the_others(
    open_store: Open, tmp_path: Path, paused: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left behind and holds no step. When the device answers again, the export is made."""
    store = open_store(
        disk={"retain": {"kind": "last_n", "n": 1}},
        hf={"format": "safetensors"},
        npz={"format": "npz", "to": str(tmp_path / "npz")},
    )
    failed, told = heard(store, ExportFailed), threading.Event()
    store.subscribe(lambda event: told.set() if isinstance(event, ExportFailed) else None)
    patient = limits.in_force.export_silence
    limit(monkeypatch, export_silence=0.3, first_retry=0.01, last_retry=0.05)
    blocks: list[Blocks] = []
    monkeypatch.setattr(exporter, "Blocks", lambda: blocks.append(Blocks()) or blocks[-1])
    for step in (1, 2, 3):
        store.save(step, tree(step))
        assert told.wait(60)
        limit(monkeypatch, export_silence=patient)  # or an export on a slow machine would count as hanging, too
        with pytest.raises(TierUnavailable, match="export 'hf'"):
            store.flush()
    assert [event.step for event in failed] == [1]
    assert ["disk" in store.where(step) for step in (1, 2, 3)] == [False, False, True]
    assert names(tmp_path / "npz") == ["step-1", "step-2", "step-3"]
    assert len(blocks) == 2  # the thread that hangs keeps its own
    paused.go_on.set()
    waited = threading.Event()
    store.subscribe(lambda event: waited.set() if isinstance(event, StepExported) else None)
    assert waited.wait(60)
    store.flush()
    assert names(tmp_path / "out") == ["step-1", "step-2", "step-3"]


def test_a_format_may_read_pieces_of_several_arrays_side_by_side_and_stop_early(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is filled again while somebody may read it, nor given to the next export."""
    found: list[bool] = []
    read: list[Any] = []

    def stream(step: Any, files: Any) -> dict[str, bytes]:
        first, second = (step.pieces([info]) for info in step.arrays[:2])
        (_, one), (_, other) = next(first), next(second)
        found.append(bool((one == 1).all() and (other == 2).all()))
        read.extend([one, other])
        return {}

    (entry,) = _registry.offered(GROUP)["safetensors"]
    monkeypatch.setattr(require(entry.module), entry.attr, dataclasses.replace(SAFETENSORS, stream=stream))
    store = open_store(hf={"format": "safetensors"})
    for step in (1, 2):
        store.save(step, {"a": np.full(5000, 1.0), "b": np.full(5000, 2.0), "c": np.full(step, 3.0)})
        store.flush()
    assert found == [True, True]
    assert not any(np.shares_memory(one, other) for one, other in combinations(read, 2))


def test_nothing_is_read_for_an_export_that_has_ended(open_store: Open) -> None:
    """A thread that was left behind asks late: the step would be held for ever."""
    store = open_store()
    store.save(1, tree())
    store.flush()
    state = store._life.engine.state
    (step,) = state.records()

    async def late() -> None:
        reading = Reading(state, step, lambda *_: None)
        await reading.index()
        await reading.close()
        with pytest.raises(Closed):
            await reading.fill({"params/b": np.empty(10, np.int64)})
        assert not any(tier.steps.pins for tier in state.tiers)

    store._run(late())


def test_a_save_gets_the_memory_of_a_step_whose_reads_wait_for_the_save(open_store: Open) -> None:
    """Else it would wait for reads that wait for it; they go on from the next tier."""
    store = open_store()
    store.save(1, tree())
    store.flush()
    state = store._life.engine.state
    (step,) = state.records()

    async def read_beside_a_save() -> None:
        reading = Reading(state, step, lambda *_: None)
        await reading.index()
        assert [bool(tier.steps.pins) for tier in state.tiers] == [True, False]
        with state.ram_gate.saving():
            wanted = [np.empty(10, np.int64) for _ in range(2)]
            reads = [asyncio.ensure_future(reading.fill({"params/b": array})) for array in wanted]
            await asyncio.sleep(0)  # both wait for the gate
            await asyncio.wait_for(reading.give_way(must=True), 60)
            assert not state.tiers[0].steps.pins
            assert not any(read.done() for read in reads)
        await asyncio.gather(*reads)
        assert all((array == wanted[0]).all() for array in wanted)
        assert [bool(tier.steps.pins) for tier in state.tiers] == [False, True]
        await reading.close()

    store._run(read_beside_a_save())


def test_what_was_put_in_the_place_of_an_export_is_neither_replaced_nor_deleted(
    open_store: Open, tmp_path: Path
) -> None:
    store = open_store(disk={"retain": "all"}, hf={"format": "safetensors", "keep": 2})
    for step in (1, 2):
        store.save(step, tree(step))
        store.flush()
    for step in (1, 2):
        (tmp_path / "out" / f"step-{step}").rename(tmp_path / f"moved-{step}")
        (tmp_path / "out" / f"step-{step}").mkdir()
        (tmp_path / "out" / f"step-{step}" / "mine").touch()
    store.save(2, tree(7), overwrite=True)
    with pytest.raises(Conflict, match="step-2 exists and is no export of this store"):
        store.flush()
    store.save(3, tree(3))
    store.flush()
    store.save(4, tree(4))
    store.flush()
    assert names(tmp_path / "out") == ["step-1", "step-2", "step-3", "step-4"]
    assert names(tmp_path / "out" / "step-1") == names(tmp_path / "out" / "step-2") == ["mine"]


def test_an_export_that_somebody_removed_is_made_anew(open_store: Open, tmp_path: Path) -> None:
    store = open_store(disk={"retain": "all"}, hf={"format": "safetensors"})
    failed = heard(store, ExportFailed)
    store.save(1, tree(1))
    store.flush()
    (tmp_path / "out" / "step-1").rename(tmp_path / "moved")
    store.save(1, tree(7), overwrite=True)
    store.flush()
    np.testing.assert_array_equal(exported(tmp_path / "out" / "step-1")["params.w"], tree(7)["params"]["w"])
    assert not failed
