"""Loops written for Orbax run over a store after a change of one import, and steps go there and back."""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integrations.test_orbax_import import equal
from reliability.tiers import FaultyTiers
from support.frameworks import require
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, Conflict, Invalid, NotFound, SyncStore, TierUnavailable
from tieredckpt.interchange import export_step, import_step
from tieredckpt.policy.base import Retention, parse

jax = require("jax")
jnp = require("jax.numpy")
ocp = require("orbax.checkpoint")
policies = require("orbax.checkpoint.checkpoint_managers")
optax = require("optax")
ours = require("tieredckpt.integrations.orbax")
config_for = require("tieredckpt.integrations.orbax.options").config_for

pytestmark = pytest.mark.filterwarnings("ignore")

CheckpointManager = ours.CheckpointManager
Options = ocp.CheckpointManagerOptions


@pytest.fixture
def store(tmp_path: Path, shared_memory: Path, faults: FaultyTiers) -> Iterator[SyncStore]:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain={"kind": "all"})}
    with CheckpointStore.open_sync(config(tiers), ranks=None) as opened:
        yield opened


def trained(steps: int = 1) -> dict[str, Any]:
    """A state as flax and optax have it, with a typed key."""
    params = {"dense": {"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(32, jnp.bfloat16)}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt = optimizer.init(params)
    for step in range(steps):
        gradients = jax.tree.map(lambda leaf, step=step: leaf * 0.1 + step, params)
        updates, opt = optimizer.update(gradients, opt, params)
        params = optax.apply_updates(params, updates)
    return {"params": params, "opt": opt, "step": jnp.int32(steps), "rng": jax.random.key(steps)}


def same(one: Any, other: Any) -> None:
    """The same containers, kinds of arrays and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert isinstance(left, jax.Array) == isinstance(right, jax.Array)
        equal(left, right)


# -- the face ---------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def test_every_method_of_orbax_is_there_with_its_arguments() -> None:
    theirs = {name: value for name, value in inspect.getmembers(ocp.CheckpointManager) if not name.startswith("_")}
    for name in ("__init__", "__enter__", "__exit__"):
        theirs[name] = getattr(ocp.CheckpointManager, name)
    assert len(theirs) >= 19
    for name, member in theirs.items():
        mine = inspect.getattr_static(CheckpointManager, name)
        if isinstance(member, property):
            assert isinstance(mine, property), name
        elif name == "__exit__":
            assert len(parameters(mine)) == len(parameters(member))
        else:
            assert parameters(mine) == parameters(member), name
    assert ours.args is ocp.args
    assert ours.CheckpointManagerOptions is Options


def test_every_option_is_in_the_table_of_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "orbax.md").read_text()
    missing = [field.name for field in dataclasses.fields(Options) if f"`{field.name}`" not in guide]
    assert not missing


# -- a tree -----------------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was(store: SyncStore) -> None:
    state = trained()
    with CheckpointManager(store) as manager:
        assert manager.latest_step() is None
        assert manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()
        same(state, manager.restore(1, args=ocp.args.StandardRestore(trained(2))))
        same(state, manager.restore(None, args=ocp.args.PyTreeRestore(jax.eval_shape(trained))))
        found = manager.restore(1)
    assert found["opt"][1][0]["count"] == 1
    assert isinstance(found["params"]["dense"]["kernel"], jax.Array)
    natively = store.restore(like=trained(2))  # what the manager saves is what a training without it would
    assert natively is not None
    same(state, natively.tree)


def test_a_donated_state_is_saved_as_it_was(store: SyncStore) -> None:
    train = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2 + 1, state), donate_argnums=0)
    state = {f"w{at}": jnp.full((256, 256), float(at)) for at in range(8)}
    expected: dict[int, Any] = {}
    with CheckpointManager(store) as manager:
        for step in range(4):
            expected[step] = jax.tree.map(np.array, state)
            assert manager.save(step, args=ocp.args.PyTreeSave(state))
            state = train(state)
        manager.wait_until_finished()
        for step, tree in expected.items():
            equal(tree, manager.restore(step, args=ocp.args.StandardRestore(jax.eval_shape(lambda tree=tree: tree))))


def test_arrays_take_the_dtype_and_numbers_the_kind_of_their_target(store: SyncStore) -> None:
    tree = {"w": jnp.full((3, 4), 1.5), "wide": np.arange(3.0), "n": 3, "x": 0.5, "one": np.float32(2)}
    target = {
        "w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16),
        "wide": jax.ShapeDtypeStruct((3,), jnp.float32),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
        "x": 0.0,
        "one": 0.0,
    }
    with CheckpointManager(store) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        found = manager.restore(1, args=ocp.args.StandardRestore(target))
        assert found["w"].dtype == jnp.bfloat16
        equal(np.full((3, 4), 1.5, jnp.bfloat16), found["w"])
        equal(np.arange(3, dtype=np.float32), found["wide"])
        assert isinstance(found["n"], jax.Array)
        assert (found["n"].dtype, int(found["n"])) == (jnp.int32, 3)
        assert (found["x"], found["one"]) == (0.5, 2.0)
        saved = jax.tree.map(lambda _: ocp.SaveArgs(dtype=jnp.bfloat16), {"w": 0})
        manager.save(2, args=ocp.args.PyTreeSave({"w": tree["w"]}, save_args=saved))
        assert manager.item_metadata(2)["w"].dtype == jnp.bfloat16
        args = {"w": ocp.ArrayRestoreArgs(dtype=jnp.float32, restore_type=jax.Array)}
        assert manager.restore(2, args=ocp.args.PyTreeRestore(restore_args=args))["w"].dtype == jnp.float32
        numpy = {"w": ocp.RestoreArgs(restore_type=np.ndarray)}
        assert type(manager.restore(2, args=ocp.args.PyTreeRestore(restore_args=numpy))["w"]) is np.ndarray


def test_a_target_of_shapes_alone_gets_arrays_of_numpy_where_those_were_saved(store: SyncStore) -> None:
    """As of Orbax: whatever their dtype, and without asking for jax_enable_x64."""
    tree = {"w": jnp.ones(3), "seen": np.arange(3, dtype=np.int64), "one": np.float64(2)}
    with CheckpointManager(store) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        found = manager.restore(1, args=ocp.args.StandardRestore(target))
        assert {name: type(leaf) for name, leaf in found.items()} == {
            "w": type(tree["w"]),
            "seen": np.ndarray,
            "one": np.ndarray,
        }
        same(found, {**tree, "one": np.asarray(tree["one"])})


def test_a_target_on_an_abstract_mesh_takes_the_mesh_that_is_set(store: SyncStore) -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"w": jax.device_put(jnp.ones(4), sharding), "half": jax.device_put(jnp.ones(4), sharding), "n": 3}
    target = jax.eval_shape(lambda: {"w": tree["w"] + 1, "half": tree["half"].astype(jnp.bfloat16), "n": 3})
    number = jax.sharding.NamedSharding(mesh.abstract_mesh, jax.sharding.PartitionSpec())
    target["n"] = jax.ShapeDtypeStruct((), jnp.float32, sharding=number)
    with CheckpointManager(store) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        with pytest.raises(Invalid, match=r"'half' has the sharding of an abstract mesh \{'x': 1\}.*jax\.set_mesh"):
            manager.restore(1, args=ocp.args.StandardRestore(target))
        with jax.set_mesh(mesh):
            found = manager.restore(1, args=ocp.args.StandardRestore(target))
    assert {name: array.sharding.mesh for name, array in found.items()} == dict.fromkeys(target, mesh)
    assert {name: array.dtype for name, array in found.items()} == {name: leaf.dtype for name, leaf in target.items()}


def test_arrays_that_come_onto_one_of_several_devices_are_told(
    store: SyncStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax would give them the shardings that it stored, which a store does not keep."""
    tree = {"w": jnp.ones(3), "seen": np.ones(3, np.float32), "n": 3}
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), {"w": tree["w"]})
    with CheckpointManager(store) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        for target in ({**tree, **abstract}, None):
            told: list[list[str]] = []
            for devices in (1, 8):
                caplog.clear()
                monkeypatch.setattr(jax, "device_count", lambda devices=devices: devices)
                manager.restore(1, args=ocp.args.StandardRestore(target))
                told.append([record.getMessage() for record in caplog.records if "no sharding" in record.getMessage()])
            assert told[0] == []
            assert len(told[1]) == 1
            assert "step 1: 1 arrays" in told[1][0]
        caplog.clear()
        manager.restore(1, args=ocp.args.StandardRestore(tree))
        assert "no sharding" not in caplog.text


def test_what_does_not_fit_is_named(store: SyncStore) -> None:
    with CheckpointManager(store) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3), "b": jnp.ones(2)}))
        for target, says in (
            ({"w": jnp.ones(3)}, "only the step has 'b'"),
            ({"w": jnp.ones(3), "b": jnp.ones(2), "c": 1}, "the step lacks 'c'"),
            ({"w": jnp.ones(4), "b": jnp.ones(2)}, r"'w' has the shape \(4,\) in the target, and \(3,\)"),
        ):
            with pytest.raises(Invalid, match=says):
                manager.restore(1, args=ocp.args.StandardRestore(target))
        with pytest.raises(NotFound, match="step 7"):
            manager.restore(7)
        with pytest.raises(NotFound, match="no item 'state'"):
            manager.restore(1, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
        with pytest.raises(Invalid, match="transforms run on folders"):
            manager.restore(1, args=ocp.args.PyTreeRestore({"w": 0}, legacy_transform_fn=lambda *_: None))
        with pytest.raises(Invalid, match="import orbax:/elsewhere"):
            manager.restore(1, directory="/elsewhere")
        with pytest.raises(Conflict):
            manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}), force=True)


def test_a_part_is_restored_and_the_rest_is_not_read(store: SyncStore) -> None:
    state = {"params": {"w": jnp.ones(10_000)}, "opt": [jnp.ones(20_000), {"m": jnp.ones(30_000)}], "step": 3}
    with CheckpointManager(store) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(state))
        read: list[int] = []
        restore = store.restore

        def watched(*args: Any, **options: Any) -> Any:
            found = restore(*args, **options)
            assert found is not None
            read.append(sum(found.sources.values()))
            return found

        store.restore = watched
        weights = {"params": jax.eval_shape(lambda: state["params"])}
        found = manager.restore(1, args=ocp.args.PyTreeRestore(weights, partial_restore=True))
        same({"params": state["params"]}, found)
        assert sum(read) < 60_000
        found = manager.restore(1, args=ocp.args.PyTreeRestore({"opt": [..., {"m": 0}]}, partial_restore=True))
        assert found["opt"][0] is ...
        found = manager.restore(1, args=ocp.args.PyTreeRestore({"step": 0}, transforms={}))
        assert found == {"step": 3}


# -- items ------------------------------------------------------------------------------------------------


class Counter:
    """A data loader, as one of Orbax's handlers stores it."""

    def __init__(self, at: int = 0) -> None:
        self.at = at


class CounterHandler(ocp.CheckpointHandler):
    def save(self, directory: Any, args: Any) -> None:
        (directory / "of").mkdir()
        (directory / "of" / "process_0.json").write_text(json.dumps(args.item.at))
        (directory / "empty").touch()

    def restore(self, directory: Any, args: Any) -> Any:
        assert (directory / "empty").exists()
        args.item.at = json.loads((directory / "of" / "process_0.json").read_text())
        return args.item


@ocp.args.register_with_handler(CounterHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class CounterArgs(ocp.args.CheckpointArgs):
    item: Counter


def test_items_go_to_their_own_handlers(store: SyncStore) -> None:
    state, notes = trained(), {"layers": [1, None, {"x": 0.5}], "deep": {"1": "one"}}
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        notes=ocp.args.JsonSave(notes),
        data=CounterArgs(Counter(12)),
        array=ocp.args.ArraySave(jnp.arange(5)),
        seed=ocp.args.NumpyRandomKeySave(np.random.get_state()),
    )
    with CheckpointManager(store, item_names=("state", "notes", "data", "array", "seed")) as manager:
        manager.save(1, args=args, custom_metadata={"run": "seven"})
        data = Counter()
        found = manager.restore(
            1,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(trained(2)),
                notes=ocp.args.JsonRestore(),
                data=CounterArgs(data),
                array=ocp.args.ArrayRestore(jnp.zeros(5, jnp.int32)),
                seed=ocp.args.NumpyRandomKeyRestore(),
            ),
        )
        same(state, found.state)
        assert found.notes == notes
        assert data.at == 12
        equal(jnp.arange(5), found.array)
        seed: Any = np.random.get_state()
        equal(found.seed[1], seed[1])
        assert set(manager.restore(1)) == {"state", "notes", "array"}  # no arguments tell a handler of the others
        assert manager.restore(1, args=ocp.args.Composite(notes=None)).notes == notes
        assert manager.item_metadata(1).state["params"]["dense"]["kernel"].shape == (64, 32)
        assert manager.metadata(1).custom_metadata == {"run": "seven"}
    with pytest.raises(Invalid, match="item 'default': no handler is known for object"):
        CheckpointManager(store).save(2, args=object())
    with pytest.raises(Invalid, match="item 'notes' is no JSON"):
        CheckpointManager(store).save(2, args=ocp.args.Composite(notes=ocp.args.JsonSave({"x": object()})))


def test_the_older_interface_of_items_is_understood(store: SyncStore) -> None:
    state = {"w": jnp.ones(3)}
    checkpointers = {"state": ocp.Checkpointer(ocp.PyTreeCheckpointHandler()), "more": ocp.PyTreeCheckpointer()}
    with CheckpointManager(store, checkpointers) as manager:
        manager.save(1, {"state": state, "more": {"n": 1}}, save_kwargs={"state": {"save_args": None}})
        args = {"state": {"restore_args": ocp.checkpoint_utils.construct_restore_args(state)}}
        found = manager.restore(1, {"state": state, "more": None}, restore_kwargs=args)
        same(state, found["state"])
        assert found["more"] == {"n": 1}
        same(state, manager.restore(1, {"state": state})["state"])
    with CheckpointManager(store) as manager:
        manager.save(2, state)
        same(state, manager.restore(2, state))


# -- when, and what stays ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"save_interval_steps": 3},
        {"save_interval_steps": 4, "save_on_steps": [5, 9]},
        {"should_save_fn": lambda step, last: last is None or step > last + 4},
        {"save_decision_policy": policies.FixedIntervalPolicy(5)},
        {"read_only": False},
    ],
)
def test_the_same_steps_are_saved_as_by_orbax(options: dict[str, Any], tmp_path: Path, store: SyncStore) -> None:
    tree = {"w": jnp.ones(3)}
    theirs = ocp.CheckpointManager(tmp_path / "theirs", options=Options(enable_async_checkpointing=False, **options))
    with theirs, CheckpointManager(store, options=Options(**options)) as mine:
        for step in (1, *range(3, 15), 12, 20):
            args = ocp.args.StandardSave(tree)
            assert mine.should_save(step) == theirs.should_save(step), step
            assert mine.save(step, args=args) == theirs.save(step, args=args), step
        assert mine.save(21, args=args, force=True)
        assert theirs.save(21, args=args, force=True)
        assert mine.all_steps() == sorted(theirs.all_steps())
        assert mine.latest_step() == theirs.latest_step()


def loss(metrics: Any) -> float:
    return float(metrics["loss"])


@pytest.mark.parametrize(
    "options",
    [
        {"max_to_keep": 2},
        {"max_to_keep": 2, "keep_period": 4},
        {"max_to_keep": None},
        {"max_to_keep": 2, "best_fn": loss, "best_mode": "min"},
        {"preservation_policy": policies.LatestN(3)},
        {"preservation_policy": policies.AnyPreservationPolicy([policies.LatestN(1), policies.EveryNSteps(3)])},
    ],
)
def test_a_folder_keeps_what_the_options_say(options: dict[str, Any], tmp_path: Path) -> None:
    losses = [5, 1, 4, 2, 8, 3, 9, 7]
    theirs = ocp.CheckpointManager(tmp_path / "theirs", options=Options(enable_async_checkpointing=False, **options))
    with theirs, CheckpointManager(tmp_path / "mine", options=Options(**options)) as mine:
        assert mine.directory == Path(tmp_path / "mine")
        for step, value in enumerate(losses):
            for manager in (theirs, mine):
                manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(3)}), metrics={"loss": value})
            mine.store.flush()
        expected = set(theirs.all_steps()) | {7}  # the newest stays, whatever is best
        assert {info.step for info in mine.store.steps() if "disk" in info.tiers} == expected
        assert expected <= set(mine.all_steps())  # others may still be in RAM
        assert mine.best_step() == (1 if "best_fn" in options else 7)
        assert mine.metrics(7) == {"loss": 7.0}


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run"])
def test_a_url_keeps_what_the_options_say(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tieredckpt"):
        found = config_for(url, Options(max_to_keep=3, keep_period=10))
    assert not caplog.records
    kept = [{"kind": "last_n", "n": 3}, {"kind": "every_k", "k": 10}]
    assert found.tiers[-1].retain == parse(Retention, {"kind": "union", "policies": kept})


def test_the_best_step_is_none_of_which_a_lossy_copy_alone_is_left(tmp_path: Path, shared_memory: Path) -> None:
    tiers = {
        "ram": ram(shared_memory, on_close="release"),
        "disk": folder(tmp_path / "disk", retain={"kind": "last_n", "n": 1}),
        "rounded": folder(tmp_path / "rounded", codec="small", lossy=[{"keys": ["**"], "max_error": "0.4%"}]),
    }
    options = Options(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with CheckpointStore.open_sync(config(tiers), ranks=None) as opened:
        for step in (1, 2):
            opened.save(step, {"w": jnp.ones(3)}, metrics={"loss": float(step)})
            opened.flush()
    with CheckpointStore.open_sync(config(tiers), ranks=None) as opened:
        assert [(info.step, info.tiers) for info in opened.steps()] == [(1, ()), (2, ("disk",))]
        assert CheckpointManager(opened, options=options).best_step() == 2


def test_options_without_an_equal_are_refused_or_told(
    tmp_path: Path, store: SyncStore, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Invalid, match="keep_time_interval has no equal here"):
        CheckpointManager(tmp_path / "mine", options=Options(keep_time_interval=dt.timedelta(hours=1)))
    policy = policies.LatestDuration(dt.timedelta(hours=1))
    with pytest.raises(Invalid, match="LatestDuration has no equal here"):
        CheckpointManager(tmp_path / "mine", options=Options(preservation_policy=policy))
    with pytest.raises(NotFound, match="create=False"):
        CheckpointManager(tmp_path / "mine", options=Options(create=False))
    with pytest.raises(Invalid, match="metadata of a root folder"):
        CheckpointManager(store, metadata={"a": 1})
    assert not (tmp_path / "mine").exists()
    with caplog.at_level(logging.WARNING, "tieredckpt"):
        CheckpointManager(store, options=Options(max_to_keep=3))
    assert "a configuration says that itself" in caplog.text


def test_a_reader_saves_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        manager.wait_until_finished()
        with CheckpointManager(tmp_path / "run", options=Options(read_only=True)) as reader:
            assert not reader.should_save(2)
            assert not reader.save(2, args=ocp.args.StandardSave({"w": jnp.ones(3)}), force=True)
            assert reader.restore(None)["w"].tolist() == [1, 1, 1]


def test_a_step_that_was_gone_back_to_is_continued(store: SyncStore) -> None:
    """And what was saved after it comes back by its number alone."""
    with CheckpointManager(store) as manager:
        for step in range(1, 6):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, step)}))
        manager.restore(2, args=ocp.args.StandardRestore({"w": jnp.ones(3, jnp.int32)}))
        assert not manager.should_save(2)
        assert manager.should_save(3)
        assert manager.save(3, args=ocp.args.StandardSave({"w": jnp.full(3, 30)}))
        assert manager.all_steps() == [1, 2, 3]
        assert manager.restore(None)["w"].tolist() == [30, 30, 30]
        manager.delete(1)
        assert manager.all_steps() == [2, 3]
        with pytest.raises(NotFound):
            manager.delete(1)


def test_a_restore_that_failed_goes_back_to_nothing(store: SyncStore) -> None:
    """The training that goes on after it keeps the steps since."""
    with CheckpointManager(store) as manager:
        for step in range(1, 5):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, step)}))
        with pytest.raises(Invalid):
            manager.restore(2, args=ocp.args.StandardRestore({"other": jnp.ones(3)}))
        assert manager.save(5, args=ocp.args.StandardSave({"w": jnp.full(3, 5)}))
        assert manager.all_steps() == [1, 2, 3, 4, 5]


def test_a_step_that_was_just_saved_counts_before_this_process_lists_it(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several processes one may list a step later than another; all must decide alike."""
    manager = CheckpointManager(store, options=Options(save_interval_steps=2))
    monkeypatch.setattr(SyncStore, "steps", lambda _: [])
    assert manager.save(2, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    assert not manager.should_save(2)
    assert not manager.should_save(3)
    assert manager.should_save(4)


def test_a_tier_that_fails_stops_no_training(store: SyncStore, faults: FaultyTiers) -> None:
    manager = CheckpointManager(store)
    faults.kill("disk", TierUnavailable("the cable was pulled"))
    assert manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(10_000)}))
    with pytest.raises(TierUnavailable, match="the cable was pulled"):
        manager.wait_until_finished()
    with pytest.raises(TierUnavailable, match="step 1 is not on tier 'disk'"):
        manager.check_for_errors()
    assert manager.is_saving_in_progress()
    assert manager.save(2, args=ocp.args.StandardSave({"w": jnp.ones(10_000)}))
    faults.revive("disk")
    for step in (1, 2):
        store.promote(step, "disk")
    manager.wait_until_finished()
    manager.check_for_errors()
    assert store.where(1) == ("ram", "disk")


@pytest.mark.parametrize(("mode", "best"), [("max", 1), ("min", 4)])
def test_a_step_whose_metric_is_no_number_is_not_the_best(mode: str, best: int, store: SyncStore) -> None:
    with CheckpointManager(store, options=Options(best_fn=lambda metrics: metrics["loss"], best_mode=mode)) as manager:
        for step in range(1, 5):
            metrics = {"loss": math.nan if step == 2 else -float(step)}
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(3)}), metrics=metrics)
        assert manager.best_step() == best


def test_metrics_that_are_no_numbers_are_kept_for_best_fn_and_stop_no_save(store: SyncStore) -> None:
    """Orbax takes any JSON, and stores it if there is a ``best_fn``."""
    state = {"w": jnp.ones(3)}
    given = [
        {"loss": 2.0, "commit": "abc"},
        {"eval": {"loss": 1.0}, "names": ["a", None], "skipped": None},
        {"loss": 3.0},
    ]

    def of(metrics: Any) -> float:
        return float(metrics["eval"]["loss"] if "eval" in metrics else metrics["loss"])

    with CheckpointManager(store, options=Options(best_fn=of, best_mode="min")) as manager:
        for step, metrics in enumerate(given):
            assert manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics, custom_metadata={"by": "me"})
        assert [manager.metrics(step) for step in range(3)] == given
        assert manager.metadata(1).metrics == given[1]
        assert manager.metadata(1).custom_metadata == {"by": "me"}
        assert manager.best_step() == 1
        same(manager.restore(1, args=ocp.args.StandardRestore(state)), state)
        with pytest.raises(Invalid, match="_METRICS"):
            manager.save(3, args=ocp.args.Composite(_METRICS=ocp.args.StandardSave(state)))
    with CheckpointManager(store) as manager:
        assert manager.save(5, args=ocp.args.StandardSave(state), metrics={"loss": 1.0, "commit": "abc"})
        assert manager.metrics(5) == {"loss": 1.0}
    found = store.restore(like=state)
    assert found is not None
    same(found.tree, state)


def test_a_step_that_its_tier_does_not_want_is_not_in_progress(tmp_path: Path, shared_memory: Path) -> None:
    """A policy that saves when nothing is in progress would never save again."""
    disk = folder(tmp_path / "disk", promote={"kind": "every_n_steps", "n": 100})
    options = Options(save_decision_policy=policies.ContinuousCheckpointingPolicy())
    with CheckpointStore.open_sync(config({"ram": ram(shared_memory), "disk": disk}), ranks=None) as store:
        manager = CheckpointManager(store, options=options)
        for step in (1, 2, 3):
            deadline = time.monotonic() + 30
            while not manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(3)})):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()
        assert store.where(3) == ("ram",)


# -- there and back ---------------------------------------------------------------------------------------


def test_a_run_moves_in_and_back_out(tmp_path: Path, store: SyncStore) -> None:
    """Orbax's manager, ours and Orbax's again, each from the step that the one before saved."""
    state = trained(3)
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    import_step(f"orbax:{tmp_path / 'old'}", store)
    with CheckpointManager(store) as manager:
        found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(trained(1)))
        same(state, found)
        manager.save(4, args=ocp.args.StandardSave(found))
    export_step(store, f"orbax:{tmp_path / 'new' / '4'}")
    with ocp.CheckpointManager(tmp_path / "new") as manager:
        same(state, manager.restore(4, args=ocp.args.StandardRestore(trained(1))))


def test_items_move_in_and_back_out(tmp_path: Path, store: SyncStore) -> None:
    items = ocp.args.Composite(
        items=ocp.args.PyTreeSave(trained(3)), notes=ocp.args.JsonSave({"a": 1}), data=CounterArgs(Counter(5))
    )
    wanted = ocp.args.Composite(
        items=ocp.args.PyTreeRestore(trained(1), ocp.checkpoint_utils.construct_restore_args(trained(1))),
        notes=ocp.args.JsonRestore(),
        data=CounterArgs(Counter()),
    )
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        manager.save(3, args=items, custom_metadata={"scan_layers": True})
    import_step(f"orbax:{tmp_path / 'old'}", store)
    with CheckpointManager(store) as manager:
        found = manager.restore(3, args=wanted)
        assert manager.metadata(3).custom_metadata == {"scan_layers": True}
        manager.save(4, args=items, custom_metadata={"scan_layers": True})
    export_step(store, f"orbax:{tmp_path / 'new' / '4'}")
    with ocp.CheckpointManager(tmp_path / "new") as manager:
        again = manager.restore(4, args=wanted)
        assert manager.metadata(4).custom_metadata == {"scan_layers": True}
    for restored in (found, again):
        same(trained(3), restored["items"])
        assert restored.notes == {"a": 1}
        assert restored.data.at == 5
