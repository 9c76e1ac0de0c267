"""Exports behind the training: what is due is made, whole or not at all, and never stops a training."""

from __future__ import annotations

import json
import threading
import time
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from support.exports import Open, Paused, exported, heard, names, replace_writer, tree
from support.limits import limit
from support.scenes import SOON

from tieredckpt import Conflict, Corrupt, Invalid, TierUnavailable
from tieredckpt.blobs.posix import stream
from tieredckpt.blobs.posix.stream import Blocks
from tieredckpt.engine import limits
from tieredckpt.engine.exporting import exporter
from tieredckpt.engine.exporting.folder import Folder
from tieredckpt.engine.exporting.held_step import Reading
from tieredckpt.engine.exporting.places import Record
from tieredckpt.events import ExportFailed, StepExported
from tieredckpt.format.manifest import StepIndex
from tieredckpt.policy import Promotion, Retention, StepView, StoreView, TierView


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


class FailsToSay(Promotion):
    kind: Literal["test_fails_to_say"] = "test_fails_to_say"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return step.step % 2 == 0

    def by_step_alone(self) -> bool:
        raise RuntimeError("no claim")


@pytest.mark.parametrize("keep", ["all", 2], ids=["all", "last_n"])
def test_a_policy_that_fails_to_say_how_long_its_answer_holds_is_asked_again(
    open_store: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: Any
) -> None:
    store = open_store(hf={"format": "safetensors", "when": FailsToSay(), "keep": keep})
    for step in (1, 2, 3, 4):
        store.save(step, tree())
        store.flush()
    assert names(tmp_path / "out") == ["step-2", "step-4"]
    assert "by_step_alone() failed" in caplog.text


class FailsToPromote(FailsToSay):
    kind: Literal["test_fails_to_promote"] = "test_fails_to_promote"  # type: ignore[assignment]  # not its base's

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        raise RuntimeError("no answer")


class FailsToRetain(Retention):
    kind: Literal["test_fails_to_retain"] = "test_fails_to_retain"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        raise RuntimeError("no answer")


@pytest.mark.parametrize("fails", [{"when": FailsToPromote()}, {"keep": FailsToRetain()}], ids=["when", "keep"])
def test_a_policy_that_fails_exports_and_deletes_nothing(
    open_store: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: dict[str, Any]
) -> None:
    table = {"format": "safetensors", "to": str(tmp_path / "out")}
    store = open_store(hf=dict(table))
    store.save(1, tree())
    store.close()
    store = open_store(hf=table | fails)
    store.save(2, tree())
    store.flush()
    assert names(tmp_path / "out") == ["step-1"]
    assert f"the policy `{next(iter(fails))}` of the export 'hf' failed" in caplog.text


@pytest.mark.parametrize("what", ["next_due", "not_kept"])
def test_a_look_that_fails_unexpectedly_is_told_and_made_again(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Else the exporter would have ended, and a flush would wait for it for ever."""
    works, found = threading.Event(), getattr(exporter.due, what)

    def look(*arguments: Any, **settings: Any) -> Any:
        if not works.is_set():
            raise KeyError("a fault of the engine")
        return found(*arguments, **settings)

    monkeypatch.setattr(exporter.due, what, look)
    store = open_store(hf={"format": "safetensors"})
    store.save(1, tree())
    with pytest.raises(TierUnavailable, match=r"export 'hf': .*a fault of the engine"):
        store.flush()
    waited = threading.Event()
    store.subscribe(lambda event: waited.set() if isinstance(event, StepExported) else None)
    works.set()
    assert waited.wait(60)
    store.flush()
    assert names(tmp_path / "out") == ["step-1"]


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


def test_a_step_that_is_lost_is_told_once_and_not_tried_again(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    async def lost(reading: Reading) -> None:
        tries.append(reading.step.step)
        raise Corrupt("its chunk is intact nowhere")

    monkeypatch.setattr(Reading, "index", lost)
    store = open_store(hf={"format": "safetensors"})
    store.save(1, tree())
    with pytest.raises(Corrupt, match="export 'hf': its chunk is intact nowhere"):
        store.flush()
    store.flush()
    assert tries == [1]
    assert "intact nowhere" in store.export_infos()[0].problem


def test_a_step_that_left_before_its_export_is_no_failure(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = Reading.index

    async def left(reading: Reading) -> StepIndex:
        if reading.step.step == 1:
            for tier in reading._state.tiers:
                tier.steps.drop(reading.step)
        return await index(reading)

    monkeypatch.setattr(Reading, "index", left)
    store = open_store(hf={"format": "safetensors"})
    for step in (1, 2):
        store.save(step, tree(step))
        store.flush()
    assert "step 1 (serial 1) left before it was exported" in caplog.text
    assert [(info.steps, info.problem) for info in store.export_infos()] == [((2,), "")]


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


def test_exports_of_another_store_in_one_folder_are_not_counted_and_stay(
    open_store: Open, tmp_path: Path, shared_memory: Path
) -> None:
    theirs = {"ram": {"path": str(shared_memory / "theirs")}, "disk": {"path": str(tmp_path / "theirs")}}
    with open_store(hf={"format": "safetensors"}, **theirs) as store:
        for step in (1, 2):
            store.save(step, tree(step))
        store.flush()
    store = open_store(hf={"format": "safetensors", "keep": 1})
    for step in (3, 4):
        store.save(step, tree(step))
        store.flush()
    assert names(tmp_path / "out") == ["step-1", "step-2", "step-4"]
    assert store.export_infos()[0].steps == (4,)


def test_a_deletion_that_failed_is_made_again(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told to be tried again, and to work again, and was made after the next export alone."""
    delete, tries, deleted = Folder.delete, list[float](), threading.Event()

    async def fail_once(folder: Folder, record: Record) -> None:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise TierUnavailable("the folder does not answer")
        await delete(folder, record)
        deleted.set()

    monkeypatch.setattr(Folder, "delete", fail_once)
    store = open_store(hf={"format": "safetensors", "keep": 1})
    for step in (1, 2):
        store.save(step, tree(step))
        store.flush()
    assert deleted.wait(60)
    assert names(tmp_path / "out") == ["step-2"]
    assert "export 'hf': an export that is not kept cannot be deleted, next try in 0.5 s" in caplog.text
    assert tries[1] - tries[0] >= 0.45
    store.flush()
    assert [(info.steps, info.problem) for info in store.export_infos()] == [((2,), "")]


@pytest.mark.parametrize("error", [TierUnavailable("it may not be deleted"), RuntimeError("unexpected")])
def test_an_export_that_cannot_be_deleted_holds_up_nothing(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As in a bucket where this user may write and not delete: neither newer exports, other deletions nor a flush."""
    delete, gone = Folder.delete, threading.Event()

    async def fail(folder: Folder, record: Record) -> None:
        if record.step == 1:
            raise error
        await delete(folder, record)
        if record.step == 3:
            gone.set()

    monkeypatch.setattr(Folder, "delete", fail)
    store = open_store(hf={"format": "safetensors", "keep": 1})
    for step in (1, 2, 3, 4):
        store.save(step, tree(step))
        store.flush()
        assert f"step-{step}" in names(tmp_path / "out")
    assert gone.wait(60)
    assert names(tmp_path / "out") == ["step-1", "step-4"]
    assert store.export_infos()[0].problem == str(error)


def test_what_is_no_export_of_this_store_is_not_replaced(open_store: Open, tmp_path: Path) -> None:
    (tmp_path / "out" / "step-1").mkdir(parents=True)
    (tmp_path / "out" / "step-1" / "mine").write_text("mine")
    store = open_store(hf={"format": "safetensors"})
    store.save(1, tree())
    with pytest.raises(Conflict, match="step-1 exists and is no export of this store"):
        store.flush()
    assert names(tmp_path / "out" / "step-1") == ["mine"]


def test_a_step_is_exported_once_what_was_in_its_place_was_moved_away(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the error asks for; it took a restart."""
    limit(monkeypatch, last_retry=0.2)
    (tmp_path / "out" / "step-1").mkdir(parents=True)
    store = open_store(hf={"format": "safetensors"})
    done = heard(store, StepExported)
    store.save(1, tree(1))
    with pytest.raises(Conflict, match="step-1 exists and is no export of this store; move it away"):
        store.flush()
    store.save(2, tree(2))
    store.flush()
    assert [event.step for event in done] == [2]
    (tmp_path / "out" / "step-1").rmdir()
    ends = time.monotonic() + SOON
    while len(done) < 2 and time.monotonic() < ends:
        time.sleep(0.01)
    assert [event.step for event in done] == [2, 1]
    assert store.export_infos()[0].problem == ""


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
    open_store: Open, monkeypatch: pytest.MonkeyPatch
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

    replace_writer(monkeypatch, stream)
    store = open_store(hf={"format": "safetensors"})
    for step in (1, 2):
        store.save(step, {"a": np.full(5000, 1.0), "b": np.full(5000, 2.0), "c": np.full(step, 3.0)})
        store.flush()
    assert found == [True, True]
    assert not any(np.shares_memory(one, other) for one, other in combinations(read, 2))


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
