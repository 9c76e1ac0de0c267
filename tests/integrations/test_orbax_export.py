"""A step goes out as a folder that stock Orbax restores to the last bit, over links to the store's own packs."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from integrations.test_orbax_import import equal
from support.command_line import run
from support.frameworks import require
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, Conflict, Corrupt, Invalid, NoSpace, Shard, Sharded, SyncStore
from tieredckpt.interchange import export_step, import_step, linked_packs, orbax_write

jax = require("jax")
jnp = require("jax.numpy")
ocp = require("orbax.checkpoint")
optax = require("optax")
linen = require("flax.linen")
train_state = require("flax.training.train_state")
CheckpointManager = require("tieredckpt.integrations.orbax").CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore")

Opened = Callable[..., SyncStore]


@pytest.fixture
def opened(tmp_path: Path, shared_memory: Path) -> Iterator[Opened]:
    """Opens the store of the test, with these settings of its disk."""
    stores = []

    def open_(**settings: Any) -> SyncStore:
        tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", **settings)}
        stores.append(CheckpointStore.open_sync(config(tiers), ranks=None))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def saved(store: SyncStore, tree: Any, step: int = 1) -> None:
    store.save(step, tree)
    store.flush()


def links(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and file.stat().st_nlink > 1]


def large(seed: int = 0, items: int = 30_000) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(items).astype(np.float32)


def trained() -> Any:
    """The state of a model of flax after a step of optax, with its PRNG key."""
    model = linen.Sequential([linen.Dense(64), linen.relu, linen.Dense(8, dtype=jnp.bfloat16)])
    x = jnp.ones((4, 32))
    params = model.init(jax.random.key(0), x)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    gradients = jax.grad(lambda params: model.apply(params, x).astype(jnp.float32).sum())(params)
    return state.apply_gradients(grads=gradients)


def test_orbax_to_ours_to_orbax_is_equal_to_the_last_bit(tmp_path: Path, opened: Opened) -> None:
    state = trained()
    tree = {"state": state, "rng": jax.random.key(7), "data": {"at": 12, "order": [np.arange(5), 0.5, None, {}, []]}}
    first, second = tmp_path / "checkpoint-1", tmp_path / "out"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(first, tree)
    store = opened()
    import_step(f"orbax:{first}", store)
    export_step(store, f"orbax:{second}")
    # With a target, as trainings restore: the very containers, kinds of arrays and keys.
    target = jax.tree.map(lambda leaf: leaf, tree)
    before, after = (ocp.StandardCheckpointer().restore(path, target) for path in (first, second))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert type(one) is type(other)
        equal(one, other)
    # Without one.
    del tree["rng"]
    for path in (first, second):
        shutil.rmtree(path)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(first, tree)
    import_step(f"orbax:{first}", store, 2)
    export_step(store, f"orbax:{second}")
    for restore in (ocp.StandardCheckpointer().restore, ocp.PyTreeCheckpointer().restore):
        equal(restore(first), restore(second))
    # And again into a store.
    import_step(f"orbax:{second}", store, 3)
    one, other = store.restore(2, resume=False), store.restore(3, resume=False)
    assert one is not None
    assert other is not None
    equal(one.tree, other.tree)


def test_a_state_of_flax_is_restored_by_orbax(tmp_path: Path, opened: Opened) -> None:
    """Also where there never was Orbax: named tuples, typed keys and empty states as the target has them."""
    state = trained()
    store = opened()
    saved(store, {"state": state, "rng": jax.random.split(jax.random.key(1), 2)})
    export_step(store, f"orbax:{tmp_path / 'out'}")
    target = {"state": state, "rng": jax.random.split(jax.random.key(9), 2)}
    found = ocp.StandardCheckpointer().restore(tmp_path / "out", target)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert (jax.random.key_data(found["rng"]) == jax.random.key_data(jax.random.split(jax.random.key(1), 2))).all()
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(found["state"]), strict=True):
        equal(one, other)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("tree", [np.arange(3000.0), {"": np.arange(3000.0), "c": np.ones(2)}, {"a": {"": np.ones(2)}}])
def test_an_array_without_a_name_is_restored_by_orbax(tree: Any, copy: bool, tmp_path: Path, opened: Opened) -> None:
    """Promise 9: a tree that is one array, and an empty key, have no folder in Orbax's database."""
    store = opened()
    saved(store, tree)
    export_step(store, f"orbax:{tmp_path / 'out'}", copy=copy)
    equal(tree, ocp.PyTreeCheckpointer().restore(tmp_path / "out"))
    import_step(f"orbax:{tmp_path / 'out'}", store, 2)
    restored = store.restore(2, resume=False)
    assert restored is not None
    equal(tree, restored.tree)


@pytest.mark.parametrize("codec", ["none", "fast", "small"])
def test_arrays_are_linked_and_not_copied(codec: str, tmp_path: Path, opened: Opened) -> None:
    if codec != "none":
        require("numcodecs")
    store = opened(codec=codec)
    tree = {
        "w": large().reshape(300, 100),
        "padded": large(1, 10_007),
        "half": large(2).astype(ml_dtypes.bfloat16),
        "zeros": np.zeros(50_000),
        "big-endian": np.arange(9_000, dtype=">f8"),
        "none": np.zeros((0, 3)),
        "int4": np.arange(8).astype(ml_dtypes.int4),
        "one": np.float64(2.5),
        "a.b": {"c/d": large(3)},
    }
    saved(store, tree)
    export_step(store, f"orbax:{tmp_path / 'out'}")
    assert sorted(path.parent.name for path in links(tmp_path / "out")) == ["packs"]
    assert (tmp_path / "out" / "d" / "arrays").stat().st_size == 0
    for restore in (ocp.StandardCheckpointer().restore, ocp.PyTreeCheckpointer().restore):
        found = restore(tmp_path / "out")
        expected = {**tree, "big-endian": tree["big-endian"].astype("<f8")}
        equal(expected, found)


def test_an_export_outlives_the_step_in_the_store(tmp_path: Path, opened: Opened) -> None:
    store = opened()
    saved(store, {"w": large()})
    export_step(store, f"orbax:{tmp_path / 'out'}")
    (pack,) = links(tmp_path / "out")
    saved(store, {"w": large(1)}, 2)
    store.delete(1)
    store.collect()
    store.close()
    assert not list((tmp_path / "disk").rglob(pack.name))  # collected there
    assert pack.stat().st_nlink == 1
    equal({"w": large()}, ocp.StandardCheckpointer().restore(tmp_path / "out"))


def refuse(number: int) -> Callable[..., None]:
    def link(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    return link


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT])
def test_where_nothing_can_be_linked_it_is_copied(
    number: int, tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    tree = {"w": large().reshape(300, 100), "padded": large(1, 10_007), "small": np.arange(3), "n": 3}
    saved(store, tree)
    monkeypatch.setattr(linked_packs.os, "link", refuse(number))
    export_step(store, f"orbax:{tmp_path / 'out'}")
    assert not links(tmp_path / "out")
    equal(tree, ocp.StandardCheckpointer().restore(tmp_path / "out"))


def test_to_another_file_system_and_from_ram_it_is_copied(shared_memory: Path, opened: Opened) -> None:
    store = opened()
    saved(store, {"w": large()})
    export_step(store, f"orbax:{shared_memory / 'out'}")
    equal({"w": large()}, ocp.StandardCheckpointer().restore(shared_memory / "out"))
    with CheckpointStore.open_sync(config({"ram": ram(shared_memory / "other")}, name="alone"), ranks=None) as alone:
        alone.save(1, {"w": large()})
        export_step(alone, f"orbax:{shared_memory / 'ram'}")  # and no slab, which the store writes to again, is linked
    for path in ("out", "ram"):
        assert not links(shared_memory / path)
        equal({"w": large()}, ocp.StandardCheckpointer().restore(shared_memory / path))
        shutil.rmtree(shared_memory / path)


def test_a_copy_can_be_asked_for(tmp_path: Path, opened: Opened) -> None:
    store = opened()
    saved(store, {"w": large()})
    done = export_step(store, f"orbax:{tmp_path / 'out'}", copy=True)
    assert sum(done.sources.values()) == large().nbytes
    assert not links(tmp_path / "out")
    equal({"w": large()}, ocp.StandardCheckpointer().restore(tmp_path / "out"))


def test_arrays_in_blocks_are_copied_and_others_linked(tmp_path: Path, opened: Opened) -> None:
    array = large().reshape(300, 100)
    pieces = [Shard(array[start:end], array.shape, (start, 0)) for start, end in ((0, 50), (50, 151), (151, 300))]
    store = opened()
    saved(store, {"blocks": Sharded(pieces), "whole": large(1)})
    assert store.spec(1, "blocks", "disk")["driver"] == "stack"
    export_step(store, f"orbax:{tmp_path / 'out'}")
    assert links(tmp_path / "out")
    equal({"blocks": array, "whole": large(1)}, ocp.StandardCheckpointer().restore(tmp_path / "out"))


def test_a_folder_called_by_a_number_is_a_step_of_a_manager(tmp_path: Path, opened: Opened) -> None:
    store = opened()
    saved(store, {"w": large()}, 5)
    saved(store, {"w": large(1)}, 6)
    for step in (5, 6):
        export_step(store, f"orbax:{tmp_path / 'run' / str(step)}", step)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [5, 6]
        equal({"w": large(1)}, manager.restore(6))
        equal({"w": large()}, manager.restore(5, args=ocp.args.StandardRestore({"w": large(2)})))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        equal({"w": large()}, manager.restore(5, args=ocp.args.PyTreeRestore()))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, args=ocp.args.StandardSave({"w": jnp.ones(3)}))


def test_items_go_out_as_they_came_in(tmp_path: Path, opened: Opened) -> None:
    state = {"w": jnp.asarray(large()), "list": [1, None]}
    items = {
        "state": ocp.args.StandardSave(state),
        "config": ocp.args.JsonSave({"layers": [1, None, {"x": 0.5}]}),
        "seed": ocp.args.NumpyRandomKeySave(np.random.get_state()),
    }
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.Composite(**items))
    store = opened()
    import_step(f"orbax:{tmp_path / 'run'}", store)
    export_step(store, f"orbax:{tmp_path / 'again' / '1'}")
    wanted = ocp.args.Composite(
        state=ocp.args.StandardRestore(state), config=ocp.args.JsonRestore(), seed=ocp.args.NumpyRandomKeyRestore()
    )
    found = []
    for root in ("run", "again"):
        with ocp.CheckpointManager(tmp_path / root) as manager:
            found.append(manager.restore(1, args=wanted))
    before, after = found
    equal(before.state, after.state)
    assert before.config == after.config
    equal(before.seed[1], after.seed[1])
    export_step(store, f"orbax:{tmp_path / 'state'}", part="state")
    equal(before.state, ocp.StandardCheckpointer().restore(tmp_path / "state", state))
    with pytest.raises(Invalid, match="give a path that ends in a number"):
        export_step(store, f"orbax:{tmp_path / 'all'}")


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"t": np.zeros(3, "M8[s]")}, "array 't': Orbax has no dtype datetime64"),
        ({"a": {"b.c": 1}, "a.b": {"c": 2}}, r"would both be called 'a\.b\.c'"),
        ({"b": b"bytes"}, "leaf 'b': Orbax cannot have bytes"),
        ({"n": 1 << 70}, "leaf 'n': Orbax cannot have int"),
        ({"e": {}}, "no checkpoint without a value"),
    ],
)
def test_what_orbax_cannot_have_is_refused_by_name(tree: Any, says: str, tmp_path: Path, opened: Opened) -> None:
    store = opened()
    saved(store, tree)
    with pytest.raises(Invalid, match=says):
        export_step(store, f"orbax:{tmp_path / 'out'}")
    assert sorted(os.listdir(tmp_path)) == ["disk"]


@pytest.mark.parametrize(
    "items",
    [{"../../evil": "json"}, {"absent": "json"}, {"x": "pickle"}, {"x": 3}, 3],
)
def test_items_that_a_step_names_lead_to_no_other_folder(items: Any, tmp_path: Path, opened: Opened) -> None:
    store = opened()
    saved(store, {"_CHECKPOINT_METADATA": items, "../../evil": {"a": 1}, "x": {"a": 1}})
    with pytest.raises(Invalid, match="item"):
        export_step(store, f"orbax:{tmp_path / 'out' / '1'}")
    assert not (tmp_path / "out" / "evil").exists()
    assert not (tmp_path / "evil").exists()


def test_nothing_appears_where_it_did_not_come_back(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that the device changed, and a crash before the end, leave nothing; what is there is not replaced."""
    store = opened()
    saved(store, {"w": large()})
    write = orbax_write.write_index

    def damaged(path: Path, arrays: Any) -> None:
        write(path, arrays)
        data = bytearray((path / "d" / "arrays").read_bytes())
        data[100] ^= 1
        (path / "d" / "arrays").write_bytes(data)

    monkeypatch.setattr(orbax_write, "write_index", damaged)
    with pytest.raises(Corrupt, match="did not come back as written"):
        export_step(store, f"orbax:{tmp_path / 'out'}", copy=True)
    monkeypatch.setattr(orbax_write, "write_index", refuse(errno.ENOSPC))
    with pytest.raises(NoSpace, match="No space left"):
        export_step(store, f"orbax:{tmp_path / 'out'}")
    assert sorted(os.listdir(tmp_path)) == ["disk"]
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(Conflict):
        export_step(store, f"orbax:{tmp_path / 'out'}")


def test_a_pack_that_is_cut_off_is_not_exported(tmp_path: Path, opened: Opened) -> None:
    store = opened()
    saved(store, {"w": large()})
    (pack,) = (tmp_path / "disk" / "packs").rglob("*.pack")
    os.truncate(pack, 8192)
    with pytest.raises(Corrupt, match="is no file of at least"):
        export_step(store, f"orbax:{tmp_path / 'out'}")


def test_the_command_line_exports(tmp_path: Path, opened: Opened) -> None:
    store = opened()
    saved(store, {"w": large()})
    store.close()
    for arguments in (["--to", f"orbax:{tmp_path / 'one'}"], ["--to", f"orbax:{tmp_path / 'two'}", "--copy"]):
        result = run("export", tmp_path / "disk", *arguments)
        assert result.exit_code == 0, result.stderr
    assert links(tmp_path / "one")
    assert not links(tmp_path / "two")
    result = run("export", tmp_path / "disk", "--to", f"npz:{tmp_path / 'w.npz'}", "--copy")
    assert "npz has no option copy" in result.stderr


def test_a_lossy_tier_is_not_linked(tmp_path: Path, shared_memory: Path) -> None:
    """What it has is another content, also where it is the nearest tier with files."""
    rules = [{"keys": ["**"], "max_error": "1%"}]
    tiers = {
        "ram": ram(shared_memory),
        "small": folder(tmp_path / "small", lossy=rules, codec="small"),
        "disk": folder(tmp_path / "disk"),
    }
    with CheckpointStore.open_sync(config(tiers), ranks=None) as store:
        saved(store, {"w": large()})
        assert [info.steps for info in store.tier_infos()] == [1, 1, 1]
        export_step(store, f"orbax:{tmp_path / 'out'}")
    equal({"w": large()}, ocp.StandardCheckpointer().restore(tmp_path / "out"))
    (pack,) = links(tmp_path / "out")
    assert list((tmp_path / "disk").rglob(pack.name))
    (tmp_path / "again").mkdir()
    tiers = {
        "ram": ram(shared_memory / "again"),
        "small": folder(tmp_path / "again" / "small", lossy=rules, codec="small"),
        "disk": folder(tmp_path / "again" / "disk", promote={"kind": "never"}),
    }
    with CheckpointStore.open_sync(config(tiers), ranks=None) as store:
        assert import_step(f"orbax:{tmp_path / 'out'}", store, 1).tier == "disk"
        with CheckpointManager(store) as manager:
            assert manager.directory == tmp_path / "again" / "disk"


def test_an_export_behind_the_training_is_restored_by_orbax(tmp_path: Path, shared_memory: Path) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    exports = {"orbax": {"format": "orbax", "to": str(tmp_path / "out")}}
    state = {"w": large(), "list": [1, None, 0.5], "step": 7}
    with CheckpointStore.open_sync(config(tiers, exports=exports), ranks=None) as store:
        saved(store, state, 7)
    equal(state, ocp.StandardCheckpointer().restore(tmp_path / "out" / "step-7"))
