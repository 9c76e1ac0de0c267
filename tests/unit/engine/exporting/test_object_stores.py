"""Exports to an object store: files first, last the one without which readers find nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.agents import eventually
from support.exports import heard, replace_writer
from support.frameworks import require
from support.limits import limit
from support.object_stores import CREDENTIALS, Place
from support.proxy import Fault, cut, internal_error, proxy, slow_down

require("obstore")

from tieredckpt import CheckpointStore, Closed, Conflict, Corrupt, Invalid, SyncStore, TierUnavailable
from tieredckpt.blobs.object.client import Client
from tieredckpt.blobs.object.store import ObjectStore
from tieredckpt.blobs.wrap import Deadline
from tieredckpt.blobs.wrap.forward import Operation
from tieredckpt.engine.exporting.objects import ObjectFiles, Objects
from tieredckpt.events import ExportFailed, StepExported
from tieredckpt.interchange import export_step
from tieredckpt.interchange.safetensors import SAFETENSORS

Open = Callable[..., SyncStore]


@pytest.fixture
def open_store(tmp_path: Path, shared_memory: Path, s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the store of the test with an export ``hf`` to the object store of the test."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_place.server)
    opened: list[SyncStore] = []

    def open_with(**settings: Any) -> SyncStore:
        source = {
            "tiers": {
                "ram": {"kind": "ram", "path": str(shared_memory / "ram"), "capacity": "64 MiB"},
                "disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False, "retain": "all"},
            },
            "exports": {"hf": {"format": "safetensors", "to": s3_place.url} | settings},
        }
        opened.append(CheckpointStore.open_sync(source))
        return opened[-1]

    yield open_with
    for store in opened:
        store.close()


def tree(seed: int = 0, nbytes: int = 1 << 20) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"w{at}": rng.standard_normal(nbytes // 8) for at in range(3)} | {"count": seed}


def read_back(s3_place: Place, step: int, folder: Path) -> dict[str, Any]:
    """The tensors of an export, as its files are when they are copied to a folder."""
    folder.mkdir()
    for key in s3_place.bucket.sizes():
        if key.startswith(f"step-{step}/"):
            data = s3_place.bucket.read(key)
            assert data is not None
            (folder / key.partition("/")[2]).write_bytes(data)
    assert SAFETENSORS.read is not None
    return {name: np.array(value) for name, value in SAFETENSORS.read(folder).items()}


def equal(found: dict[str, Any], saved: dict[str, Any]) -> None:
    assert found.keys() == saved.keys() - {"count"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, saved[name])


def test_what_is_due_is_in_the_bucket_bit_for_bit(open_store: Open, s3_place: Place, tmp_path: Path) -> None:
    """In parts of several requests where a file is large; the restart knows what is there."""
    store = open_store()
    store.save(1, tree(1, 12 << 20))
    store.flush()
    assert set(s3_place.bucket.sizes()) == {"step-1/model.safetensors", "step-1/tieredckpt.json"}
    equal(read_back(s3_place, 1, tmp_path / "read"), tree(1, 12 << 20))
    store.close()
    store = open_store()
    events = heard(store, StepExported)
    store.save(2, tree(2))
    store.flush()
    assert [event.step for event in events] == [2]
    assert events[0].to == f"{s3_place.url}/step-2"
    assert store.export_infos()[0].steps == (1, 2)


def test_the_index_comes_after_all_files(
    open_store: Open, s3_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that fails in the middle: no index, so that readers find nothing; then the export is made anew."""
    failing, written = threading.Event(), list[str]()
    failing.set()
    put = Client.put_stream

    async def put_stream(self: Client, key: str, pieces: Any, **size: Any) -> None:
        if failing.is_set() and "00003" in key.rpartition("/")[2][:11]:
            raise TierUnavailable("the server is away")
        await put(self, key, pieces, **size)
        written.append(key)

    monkeypatch.setattr(Client, "put_stream", put_stream)
    store = open_store(shard_size="1 MiB")
    failed = heard(store, ExportFailed)
    store.save(1, tree(1))
    with pytest.raises(TierUnavailable, match="the server is away"):
        store.flush()
    assert written[:2] == [f"step-1/model-0000{at}-of-00003.safetensors" for at in (1, 2)]
    assert "step-1/model.safetensors.index.json" not in s3_place.bucket.sizes()
    assert store.export_infos()[0].steps == ()
    assert failed[0].retry_in is not None
    exported = threading.Event()
    store.subscribe(lambda event: exported.set() if isinstance(event, StepExported) else None)
    failing.clear()
    assert exported.wait(60)
    equal(read_back(s3_place, 1, tmp_path / "read"), tree(1))
    assert "step-1/model.safetensors.index.json" in s3_place.bucket.sizes()


@pytest.mark.parametrize("ends", ["fails", "is given up"])
def test_an_export_that_does_not_end_leaves_no_parts_of_a_file(
    ends: str, open_store: Open, s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no listing, and are paid for."""
    stream, begun = SAFETENSORS.stream, threading.Event()
    assert stream is not None

    def ending(step: Any, files: Any, **options: Any) -> Any:
        pieces = step.pieces

        def some(*arguments: Any) -> Any:
            sent = 0
            for info, piece in pieces(*arguments):
                yield info, piece
                sent += piece.nbytes
                if sent > 64 << 20:  # of which parts are there by then
                    begun.set()
                    while ends == "is given up" and not step.given_up:
                        threading.Event().wait(0.01)
                    raise ValueError("no more")

        step.pieces = some
        return stream(step, files, **options)

    replace_writer(monkeypatch, ending)
    limit(monkeypatch, export_gives_up=60.0)
    store = open_store()
    store.save(1, {f"w{at}": np.ones(1 << 20) for at in range(12)})
    assert begun.wait(60)
    if ends == "fails":
        with pytest.raises(Invalid, match="no more"):
            store.flush()
    else:
        store.__exit__(ZeroDivisionError, ZeroDivisionError(), None)

    eventually(
        lambda: not s3_place.bucket.uploads(), "parts of a file are left on the server"
    )  # which may hear of it later
    assert set(s3_place.bucket.sizes()) == {"step-1/tieredckpt.json"}


def test_the_index_of_an_export_that_was_not_completed_goes_first(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record names no files, and the server tells times in seconds."""
    put, delete = Objects.put, ObjectStore.delete
    deleted: list[str] = []

    async def interrupted(self: Objects, record: Any) -> None:
        if record.complete and not deleted:
            raise TierUnavailable("the server is away")
        await put(self, record)

    async def noted(self: ObjectStore, key: str) -> None:
        deleted.append(key)
        await delete(self, key)

    monkeypatch.setattr(Objects, "put", interrupted)
    monkeypatch.setattr(ObjectStore, "delete", noted)
    store = open_store(shard_size="1 MiB")
    exported = threading.Event()
    store.subscribe(lambda event: exported.set() if isinstance(event, StepExported) else None)
    store.save(1, tree(1, 1 << 10) | {"large": np.ones(1 << 17)})
    assert exported.wait(60)
    assert deleted[0].rpartition("/")[2] == "model.safetensors.index.json"


def test_an_export_that_was_not_completed_is_deleted_also_if_it_is_not_due_any_more(
    open_store: Open, s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no index, and what its files take is paid for."""
    put = Objects.put

    async def interrupted(self: Objects, record: Any) -> None:
        if record.complete:
            raise TierUnavailable("the process was killed here")
        await put(self, record)

    store = open_store()
    with monkeypatch.context() as killed:
        killed.setattr(Objects, "put", interrupted)
        store.save(1, tree(1))
        with pytest.raises(TierUnavailable):
            store.flush()
        store.close()
    assert "step-1/tieredckpt.json" in s3_place.bucket.sizes()
    store = open_store(when={"kind": "every_n_steps", "n": 2})
    store.save(2, tree(2))
    store.flush()
    assert {key.partition("/")[0] for key in s3_place.bucket.sizes()} == {"step-2"}


def test_a_deletion_that_was_interrupted_is_ended_also_if_the_step_has_left(
    open_store: Open, s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = ObjectStore.delete

    async def interrupted(self: ObjectStore, key: str) -> None:
        if key.startswith("step-1/") and key.endswith("tensors"):
            raise TierUnavailable("the process was killed here")
        await delete(self, key)

    store = open_store(keep=1)
    with monkeypatch.context() as killed:
        killed.setattr(ObjectStore, "delete", interrupted)
        for step in (1, 2):
            store.save(step, tree(step))
            store.flush()
        store.delete(1)
        store.close()
    assert "step-1/model.safetensors" in s3_place.bucket.sizes()
    open_store(keep=1).flush()
    assert {key.partition("/")[0] for key in s3_place.bucket.sizes()} == {"step-2"}


def test_exports_that_are_not_kept_are_deleted(open_store: Open, s3_place: Place, tmp_path: Path) -> None:
    """A step that was saved again takes the place of what was there, though that had more files."""
    store = open_store(keep=1, shard_size="1 MiB")
    for step in (1, 2):
        store.save(step, tree(step))
        store.flush()
    assert {key.partition("/")[0] for key in s3_place.bucket.sizes()} == {"step-2"}
    store.save(2, {"w0": np.ones(10)}, overwrite=True)
    store.flush()
    assert set(s3_place.bucket.sizes()) == {"step-2/model.safetensors", "step-2/tieredckpt.json"}
    equal(read_back(s3_place, 2, tmp_path / "read"), {"w0": np.ones(10)})


async def test_no_file_is_begun_after_an_export_was_given_up() -> None:
    """Such as the index, by which readers would find it."""
    files = ObjectFiles(cast(Any, None), "step-1", asyncio.get_running_loop())
    files.give_up()
    with pytest.raises(Closed), files.open("model.safetensors.index.json"):
        pass
    assert files.begun == []


def test_objects_of_others_are_not_replaced(open_store: Open, s3_place: Place) -> None:
    client = s3_place.bucket._client
    client.put_object(Bucket=s3_place.url.split("/")[2], Key=f"{s3_place.prefix}/step-1/mine", Body=b"mine")
    store = open_store()
    store.save(1, tree(1))
    with pytest.raises(Conflict, match="is no export of this store"):
        store.flush()
    assert set(s3_place.bucket.sizes()) == {"step-1/mine"}


def test_a_format_that_its_library_writes_is_refused_for_a_url(open_store: Open) -> None:
    with pytest.raises(Invalid, match=r"exports\.hf\.to: is a URL, and `npy` is written by its library"):
        open_store(format="npy")


def test_the_command_exports_to_a_url_and_replaces_nothing(
    open_store: Open, s3_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read back and compared; what came back otherwise is deleted."""
    store = open_store(when="never")
    store.save(1, tree(1, 12 << 20))
    store.flush()
    url = f"{s3_place.url}/by-hand/step-1"
    with monkeypatch.context() as patched:

        async def get_digested(self: ObjectStore, key: str, stretches: Any) -> list[bytes]:
            return [bytes(16) for _ in stretches]

        patched.setattr(ObjectStore, "get_digested", get_digested)
        with pytest.raises(Corrupt, match="did not come back as written"):
            export_step(store, f"safetensors:{url}", 1)
    assert not s3_place.bucket.sizes()
    done = export_step(store, f"safetensors:{url}", 1, shard_size=13 << 20)
    assert (done.path, done.left_out) == (url, ("count",))
    by_hand = {key.removeprefix("by-hand/") for key in s3_place.bucket.sizes()}
    assert by_hand == {f"step-1/model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)} | {
        "step-1/model.safetensors.index.json"
    }
    folder = tmp_path / "read"
    folder.mkdir()
    for key in by_hand:
        data = s3_place.bucket.read(f"by-hand/{key}")
        assert data is not None
        (folder / key.partition("/")[2]).write_bytes(data)
    assert SAFETENSORS.read is not None
    equal({name: np.array(value) for name, value in SAFETENSORS.read(folder).items()}, tree(1, 12 << 20))
    with pytest.raises(Conflict, match="has objects already"):
        export_step(store, f"npz:{url}", 1)
    with pytest.raises(Invalid, match="npy is written by its library"):
        export_step(store, f"npy:{url}2", 1)


def test_a_file_whose_outcome_is_unknown_is_deleted_with_the_others(
    open_store: Open, s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server took the index, and its answer was lost: readers would find an index without its files."""
    put = Client.put_stream

    async def answer_lost(self: Client, key: str, pieces: Any, **size: Any) -> None:
        await put(self, key, pieces, **size)
        if key.endswith("index.json"):
            raise TierUnavailable("no answer")

    store = open_store(when={"kind": "every_n_steps", "n": 100})
    store.save(1, tree(1))
    store.flush()
    monkeypatch.setattr(Client, "put_stream", answer_lost)
    with pytest.raises(TierUnavailable, match="no answer"):
        export_step(store, f"safetensors:{s3_place.url}/by-hand", 1, shard_size=1 << 20)
    assert not s3_place.bucket.sizes()


@pytest.mark.parametrize(("verb", "fault"), [("LIST", internal_error), ("GET", internal_error), ("GET", cut)])
def test_one_request_that_fails_is_made_again_by_the_command_and_the_export_stays(
    verb: str, fault: Fault, open_store: Open, s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(when="never")
    store.save(1, tree(1))
    store.flush()
    with proxy(s3_place.server) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        between.fail(verb, fault, key="by-hand")
        export_step(store, f"safetensors:{s3_place.url}/by-hand", 1)
    assert set(s3_place.bucket.sizes()) == {"by-hand/model.safetensors"}


@pytest.mark.parametrize("fails", ["hangs", "wants fewer requests"])
@pytest.mark.parametrize("verb", ["LIST", "GET"])
def test_the_command_ends_where_the_server_does_not_answer(
    fails: str, verb: str, open_store: Open, s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it wait for the deletion of each of its files."""
    store = open_store(when="never")
    store.save(1, tree(1))
    store.flush()
    around = Deadline.around
    asks = {"delete": "DELETE"} | ({"list": "LIST"} if verb == "LIST" else {"get": "GET", "get_into": "GET"})

    async def soon(self: Deadline, operation: Operation, call: Callable[[], Awaitable[Any]]) -> Any:
        """A request that gets no answer has a short deadline, which begins when the server has it."""
        asked = asks.get(operation.verb, "")
        self._base, before = 1.0 if asked else 60.0, between.count[asked]
        running = asyncio.ensure_future(call())
        while asked and between.count[asked] == before and not running.done():
            await asyncio.sleep(0.01)
        return await around(self, operation, lambda: running)

    monkeypatch.setattr(Deadline, "around", soon)
    with proxy(s3_place.server) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        for each in (verb, "DELETE"):
            if fails == "hangs":
                between.hang(each, key="by-hand", times=None)
            else:
                between.fail(each, slow_down, key="by-hand", times=None)
        with pytest.raises(TierUnavailable, match="had not ended after"):
            export_step(store, f"safetensors:{s3_place.url}/by-hand", 1, shard_size=1 << 20)
        deleted = {path for each, path in between.asked if each == "DELETE"}
    assert len(deleted) == (verb == "GET")


def test_of_two_exports_to_one_place_the_second_is_refused_and_deletes_nothing(
    open_store: Open, s3_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where neither has written a file yet: one that failed later had deleted what the other had exported."""
    store = open_store(when="never")
    store.save(1, tree(1))
    url, put = f"{s3_place.url}/step-1", Client.put_stream
    tried: list[str] = []

    async def put_stream(self: Client, key: str, pieces: Any, **size: Any) -> None:
        tried.append(key)
        if len(tried) == 1:
            with ThreadPoolExecutor(1) as pool, pytest.raises(Conflict, match="is being exported to"):
                await asyncio.wrap_future(pool.submit(export_step, second, f"safetensors:{url}"))
        await put(self, key, pieces, **size)

    store.flush()
    with CheckpointStore.open_sync(str(tmp_path / "disk"), read_only=True) as second:
        monkeypatch.setattr(Client, "put_stream", put_stream)
        export_step(store, f"safetensors:{url}")
    assert len(tried) == 1
    assert set(s3_place.bucket.sizes()) == {"step-1/model.safetensors"}
    equal(read_back(s3_place, 1, tmp_path / "read"), tree(1))
