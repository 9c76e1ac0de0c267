"""torch.distributed.checkpoint over a store: its own calls, any number of ranks, and nothing pickled."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.launch import SOON, launch
from reliability.tiers import FaultyTiers
from support.frameworks import require
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, Invalid, NoSpace, SyncStore, TierRecovered, TierUnavailable

torch = require("torch")
dcp = require("torch.distributed.checkpoint")
integration = require("tieredckpt.integrations.dcp")

pytestmark = [
    pytest.mark.timeout(4 * SOON),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

PROGRAM = Path(__file__).with_name("dcp_program.py")


@pytest.fixture
def store(tmp_path: Path, shared_memory: Path, faults: FaultyTiers) -> Iterator[SyncStore]:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    with CheckpointStore.open(config(tiers), ranks=None).sync() as opened:
        yield opened


def save(store: SyncStore, step: int, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=integration.TieredWriter(store, step, **options), no_dist=True)


def async_save(store: SyncStore, step: int, state: dict[str, Any], **options: Any) -> Any:
    return dcp.async_save(state, storage_writer=integration.TieredWriter(store, step, **options), no_dist=True)


def load(store: SyncStore, state: dict[str, Any], step: int | None = None, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=integration.TieredReader(store, step), no_dist=True, **options)
    return state


class Mode(Enum):
    FAST = 1
    SLOW = 2


def state(value: float, mode: object = 2) -> dict[str, Any]:
    """Nested as trainers nest it: lists with and without tensors, a tuple, what is empty, and what is no tensor."""
    return {
        "model": {"layers": [torch.full((4, 6), value), torch.full((3,), value, dtype=torch.bfloat16)]},
        "count": torch.tensor(int(value)),
        "pair": (torch.full((2,), value), "text", np.float32(value)),
        "groups": [{"lr": value, "betas": (0.9, 0.99), "params": [0, 1]}],
        "array": np.full(5, value),
        "nothing": [],
        "small": [{"mode": mode, "dtype": torch.bfloat16, "path": Path("/data"), "seen": {1, 2}}],
        "by": {("a", 1): torch.full((2,), value)},  # DCP itself has text for keys, and of objects alone no other
        "step": int(value),
    }


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return type(found) is type(expected) and bool(np.array_equal(found, expected))


def test_a_store_whose_calls_are_awaited_is_refused(tmp_path: Path) -> None:
    """DCP awaits nothing: its save would have ended well, and stored nothing."""
    awaited = CheckpointStore.open(tmp_path / "store")
    with pytest.raises(Invalid, match=r"takes a SyncStore, not .*CheckpointStore\.open_sync"):
        integration.TieredWriter(awaited, 1)
    with pytest.raises(Invalid, match=r"takes a SyncStore, not .*CheckpointStore\.open_sync"):
        integration.TieredReader(awaited)


def test_the_refusal_of_a_configuration_in_place_of_a_store_shows_no_secret() -> None:
    with pytest.raises(Invalid, match="not a dict") as refused:
        integration.TieredWriter({"tiers": {"s3": {"secret_access_key": "hidden"}}}, 1)
    assert "hidden" not in str(refused.value)


def test_what_is_loaded_is_what_was_saved_when_the_call_returned(store: SyncStore) -> None:
    changing = state(1.0, Mode.SLOW)  # of which a step has the value
    first = async_save(store, 1, changing)
    changing["model"]["layers"][0].fill_(-1.0)
    first.result()
    assert store.where(1) == ("ram", "disk")
    save(store, 2, state(2.0))
    for step, value in ((1, 1.0), (None, 2.0), (1, 1.0)):
        assert same(load(store, state(0.0), step), state(value))


def test_a_step_is_the_users_tree_by_either_door(store: SyncStore) -> None:
    save(store, 1, {"model": {"w": torch.ones(3)}, "lr": 0.5})
    found = store.restore(like={"model": {"w": torch.zeros(3)}, "lr": 0.0})
    assert found is not None
    assert same(found.tree, {"model": {"w": torch.ones(3)}, "lr": 0.5})
    store.save(2, {"optim": {"state": {0: {"exp_avg": torch.full((2, 2), 7.0)}}}})
    loaded = load(store, {"optim": {"state": {0: {"exp_avg": torch.zeros(2, 2)}}}})
    assert same(loaded["optim"]["state"][0]["exp_avg"], torch.full((2, 2), 7.0))


def test_integer_keys_come_back_where_a_pattern_has_them(store: SyncStore) -> None:
    """DCP knows none."""
    save(store, 1, {"state": {0: {"m": torch.ones(2)}, 1: {"m": torch.ones(3)}}})
    pattern = {"state": {0: {"m": torch.zeros(2)}, 1: {"m": torch.zeros(3)}}}
    for how, keys in (({"as_": "saved"}, ["0", "1"]), ({"like": pattern}, [0, 1]), ({"into": pattern}, [0, 1])):
        restored = store.restore(**how)
        assert restored is not None
        assert list(restored.tree["state"]) == keys


def test_tensors_are_filled_in_place_whatever_their_layout_and_dtype(store: SyncStore) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    save(store, 1, {"plain": values, "turned": values, "half": values})
    plain, turned, half = torch.zeros(3, 4), torch.zeros(4, 3).T, torch.zeros(3, 4, dtype=torch.float16)
    load(store, {"plain": plain, "turned": turned, "half": half})
    assert same([plain, turned.contiguous(), half], [values, values, values.half()])


def test_a_part_is_loaded_where_the_planner_allows_it(store: SyncStore) -> None:
    save(store, 1, state(1.0))
    layers = {"model": {"layers": [torch.zeros(4, 6), torch.zeros(3, dtype=torch.bfloat16)]}}
    assert same(load(store, layers), {"model": state(1.0)["model"]})
    more = {"step": 0, "new": torch.zeros(2)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    assert same(load(store, more, planner=planner), {"step": 1, "new": torch.zeros(2)})
    with pytest.raises(dcp.api.CheckpointException, match="Missing key in checkpoint state_dict: new"):
        load(store, {"new": torch.zeros(2)})


def test_an_older_step_is_loaded_to_train_on(store: SyncStore) -> None:
    for step in (1, 2, 3):
        save(store, step, {"w": torch.full((2,), float(step))})
    load(store, {"w": torch.zeros(2)}, 1)
    save(store, 4, {"w": torch.full((2,), 4.0)})
    assert store.all_steps() == (1, 4)


def test_a_failing_tier_ends_no_training_and_the_future_tells_of_it(store: SyncStore, faults: FaultyTiers) -> None:
    save(store, 1, state(1.0))
    faults.kill("disk", TierUnavailable("the cable was pulled"))
    future = async_save(store, 2, state(2.0))
    save(store, 3, state(3.0))
    with pytest.raises(dcp.api.CheckpointException, match="the cable was pulled"):
        future.result()
    assert same(load(store, state(0.0)), state(3.0))
    recovered = threading.Event()
    store.subscribe(lambda event: recovered.set() if isinstance(event, TierRecovered) else None)
    faults.revive("disk")
    assert recovered.wait(SOON)
    async_save(store, 4, state(4.0)).result()
    assert "disk" in store.where(3)


def test_a_save_waits_for_no_tier_of_lossy_copies(tmp_path: Path, shared_memory: Path) -> None:
    rounded = folder(tmp_path / "rounded", codec="small", lossy=[{"keys": ["**"], "max_error": "0.4%"}])
    tiers = {"ram": ram(shared_memory), "rounded": rounded, "disk": folder(tmp_path / "disk")}
    with CheckpointStore.open(config(tiers), ranks=None).sync() as opened:
        async_save(opened, 1, state(1.0)).result()
        assert "disk" in opened.where(1)


def test_a_step_for_which_there_is_no_room_ends_no_training(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise NoSpace("no tier can take it")

    with monkeypatch.context() as patched:
        patched.setattr(store, "save", full)
        save(store, 1, state(1.0))
        assert "step 1 was not saved, training goes on" in caplog.text
        with pytest.raises(dcp.api.CheckpointException, match="no tier can take it"):
            save(store, 2, state(2.0), reached="disk")
    save(store, 3, state(3.0))
    assert store.all_steps() == (3,)


def test_what_cannot_be_stored_is_refused_by_name_before_anything_is_saved(store: SyncStore) -> None:
    for attempt in (save, lambda *arguments: async_save(*arguments).result()):
        with pytest.raises(dcp.api.CheckpointException, match="leaf 'a/odd': a object cannot be stored"):
            attempt(store, 1, {"a": {"odd": object(), "w": torch.ones(2)}})
    assert store.all_steps() == ()
    with pytest.raises(dcp.api.CheckpointException, match=r"no step to load|metadata is None"):  # as 2.10 says
        load(store, {"w": torch.ones(2)})


def test_what_would_not_do_as_it_is_told_is_refused(store: SyncStore, tmp_path: Path) -> None:
    class Halves(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: Any, tensor: Any) -> Any:
            return tensor.half()

    writer = integration.TieredWriter(store, 1)
    with pytest.raises(Invalid, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(writer)
    with pytest.raises(dcp.api.CheckpointException, match="Halves changes what is saved"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=Halves(), no_dist=True)
    with pytest.raises(Invalid, match="leave out checkpoint_id"):
        dcp.save({}, checkpoint_id=tmp_path, storage_writer=writer, no_dist=True)
    assert store.all_steps() == ()


def test_ranks_that_were_killed_go_on_in_other_numbers(tmp_path: Path, shared_memory: Path) -> None:
    def arguments(task: str) -> dict[str, Any]:
        return {"ram": str(shared_memory / "ram"), "disk": str(tmp_path / "disk"), "task": task}

    with launch("torch", PROGRAM, ranks=3, folder=tmp_path / "train", arguments=arguments("train")) as job:
        for rank in range(3):
            job.wait_for("saved", rank=rank)
        told = job.told(0)
        assert told["where"] == ["ram", "disk"]
        for rank in range(3):
            job.kill(rank)
    digest = told["digest"]
    for ranks, step in ((2, 4), (3, 5)):
        with launch("torch", PROGRAM, ranks=ranks, folder=tmp_path / str(ranks), arguments=arguments("go_on")) as job:
            job.succeed()
            for rank in range(ranks):
                assert (job.told(rank)["loaded"], job.told(rank)["step"]) == (digest, step)
                assert job.told(rank)["refused"]
            digest = job.told(0)["saved"]
