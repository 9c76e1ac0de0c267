"""What stock Orbax wrote becomes a step to the last bit; forged and damaged folders run nothing and are named."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.frameworks import require
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, Corrupt, Invalid, NotFound, SyncStore, TieredCkptError
from tieredckpt.blobs.memory import memory_limit
from tieredckpt.interchange import import_step, orbax_folders, orbax_read, read_checkpoint
from tieredckpt.interchange.orbax import ORBAX

jax = require("jax")
jnp = require("jax.numpy")
ocp = require("orbax.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore")

HANDLERS = [(True, False), (True, True), (False, False), (False, True)]


def read(path: Path) -> Any:
    assert ORBAX.read is not None
    return ORBAX.read(ORBAX.locate(path))


def state() -> dict[str, Any]:
    """Of every kind of leaf and container that Orbax stores."""
    return {
        "params": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.full(3, 1.5, jnp.bfloat16)},
        "list": [jnp.ones(2), np.arange(3), 7, [], {"x": np.float32(0.1)}],
        "tuple": (1.5, np.ones((2, 1), np.int16)),
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "steps": {1: np.zeros(2), 2: 5},
        "numbers": {"true": True, "pi": 3.14159265358979, "big": 2**40},
        "keys": {"one": jax.random.key(3), "many": jax.random.split(jax.random.key(4, impl="rbg"), 3)},
        "narrow": {"fp8": jnp.ones(4, jnp.float8_e4m3fn), "int4": jnp.arange(4, dtype=jnp.int4)},
        "a.b": {"c/d": np.ones(2)},
    }


def equal(one: Any, other: Any) -> None:
    """That two trees are the same to the last bit, tuples being lists and keys text, as Orbax gives them back."""
    if isinstance(one, dict):
        assert isinstance(other, dict)
        assert {str(key) for key in one} == {str(key) for key in other}
        for key, value in one.items():
            equal(value, other[key if key in other else str(key)])
    elif isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            equal(left, right)
    elif hasattr(one, "dtype") and jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
        assert one.dtype == other.dtype
        equal(jax.random.key_data(one), jax.random.key_data(other))
    elif hasattr(one, "dtype"):
        left, right = np.asarray(one), np.asarray(other)
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    else:
        assert type(one) is type(other)
        assert one == other


@pytest.fixture
def store(tmp_path: Path, shared_memory: Path) -> Any:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    with CheckpointStore.open(config(tiers), ranks=None).sync() as opened:
        yield opened


def written(path: Path, tree: Any, ocdbt: bool = True, zarr3: bool = False) -> Path:
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)).save(path, tree)
    return path


@pytest.mark.parametrize(("ocdbt", "zarr3"), HANDLERS)
def test_a_tree_of_orbax_becomes_a_step(ocdbt: bool, zarr3: bool, tmp_path: Path, store: SyncStore) -> None:
    tree = {**state(), "text": "hello"}
    if not ocdbt:
        del tree["a.b"]  # a full stop and a slash in a name, which files have not
    path = written(tmp_path / "checkpoint_7", tree, ocdbt, zarr3)
    assert import_step(f"orbax:{path}", store).step == 7
    found = store.restore(as_="saved")
    assert found is not None
    expected = ocp.PyTreeCheckpointer().restore(path)
    equal(expected, found.tree)
    assert isinstance(found.tree["tuple"], list)  # as Orbax has it
    assert found.tree["steps"]["1"].tolist() == [0, 0]


def test_a_step_of_a_manager_is_the_newest_or_the_one_named(tmp_path: Path, store: SyncStore) -> None:
    root = tmp_path / "run"
    with ocp.CheckpointManager(root) as manager:
        for step in (9, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, step)}))
    for unfinished in ("11.orbax-checkpoint-tmp", "11.orbax-checkpoint-tmp-1700000000000000"):  # as of earlier versions
        shutil.copytree(root / "10", root / unfinished)
    assert import_step(f"orbax:{root / '9'}", store).step == 9
    assert import_step(f"orbax:{root}", store).step == 10
    found = store.restore()
    assert found is not None
    assert found.tree["w"].tolist() == [10, 10, 10]
    with pytest.raises(NotFound, match="did not finish"):
        import_step(f"orbax:{root / '11.orbax-checkpoint-tmp'}", store)


def test_items_keep_their_names_and_a_step_its_metrics(tmp_path: Path, store: SyncStore) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    items = {
        "state": ocp.args.StandardSave(state()),
        "config": ocp.args.JsonSave({"layers": [1, None, {"x": 0.5}]}),
        "seed": ocp.args.NumpyRandomKeySave(np.random.get_state()),
    }
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(1, args=ocp.args.Composite(**items), metrics={"loss": 0.25})
    import_step(f"orbax:{tmp_path / 'run'}", store)
    found = store.restore(as_="saved")
    assert found is not None
    assert found.metrics == {"loss": 0.25}
    kinds = {"config": "json", "seed": "files", "state": "tree"}
    assert found.tree["_CHECKPOINT_METADATA"] == kinds
    assert found.tree["config"] == {"layers": [1, None, {"x": 0.5}]}
    equal(ocp.StandardCheckpointer().restore(tmp_path / "run" / "1" / "state"), found.tree["state"])
    # An item of a kind that only its own handler knows comes as its files.
    files = {path: data.tobytes() for path, data in found.tree["seed"].items()}
    assert files
    assert all((tmp_path / "run" / "1" / "seed" / path).read_bytes() == data for path, data in files.items())


def test_sharding_does_not_change_values(tmp_path: Path, store: SyncStore) -> None:
    """Saved on 8 devices, in blocks of two axes, by a process of its own; read by one that has one device."""
    program = """
import sys, jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
tree = {str(zarr3): jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec)) for zarr3, spec in
        enumerate((P("x", "y"), P("y"), P(None, ("x", "y")), P()))}
for zarr3 in (False, True):
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=zarr3)).save(sys.argv[1] + f"/{zarr3:d}", tree)
"""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment, capture_output=True)
    for name in ("0", "1"):
        import_step(f"orbax:{tmp_path / name}", store)
        found = store.restore()
        assert found is not None
        for array in found.tree.values():
            assert np.array_equal(array, np.arange(64, dtype=np.float32).reshape(8, 8))


def test_orbax_itself_is_not_needed(tmp_path: Path) -> None:
    written(tmp_path / "tree", {"w": np.ones(3), "list": [1, None]})
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["orbax", "jax", "flax"]))  # an import of them fails
from pathlib import Path
from tieredckpt.interchange.orbax import ORBAX
print(ORBAX.read(Path({str(tmp_path / "tree")!r})))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "{'list': [1, None], 'w': array([1., 1., 1.])}\n"


# -- what is damaged or forged ----------------------------------------------------------------------------


def changed(path: Path, change: Callable[[dict[str, Any]], object], **options: bool) -> Path:
    written(path, {"w": np.arange(6.0), "list": [np.ones(2), 3]}, **options)
    found = json.loads((path / "_METADATA").read_bytes())
    change(found)
    (path / "_METADATA").write_text(json.dumps(found))
    return path


def entry(found: dict[str, Any], name: str = "('w',)") -> dict[str, Any]:
    return found["tree_metadata"][name]


def test_a_forged_name_leads_to_no_other_folder(tmp_path: Path) -> None:
    secret = written(tmp_path / "secret", {"key": np.ones(1)}, ocdbt=False)

    def elsewhere(found: dict[str, Any]) -> None:
        entry(found)["key_metadata"][0]["key"] = "../secret/key"

    forged = changed(tmp_path / "forged", elsewhere, ocdbt=False)
    assert (forged / "../secret/key/.zarray").is_file()
    with pytest.raises(Corrupt, match=r"'\.\./secret/key' is no path in the folder"):
        read(forged)
    assert secret.is_dir()


def test_what_metadata_says_takes_no_memory_that_the_machine_has_not(tmp_path: Path) -> None:
    limit, _ = memory_limit()
    path = written(tmp_path / "forged", {"w": np.arange(6.0)}, ocdbt=False)
    about = json.loads((path / "w" / ".zarray").read_text())
    for shape, chunks, says in (
        ([limit // 8 + 1], [6], "more than the .* in which an import holds all"),
        ([6], [limit // 8 + 1 << 10], "a chunk of 'w' is said to have the shape"),
    ):
        (path / "w" / ".zarray").write_text(json.dumps({**about, "shape": shape, "chunks": chunks}))
        with pytest.raises((Invalid, Corrupt), match=says):
            read(path)


def test_a_list_is_as_long_as_its_items(tmp_path: Path) -> None:
    def far(found: dict[str, Any]) -> None:
        entry(found, "('list', '1')")["key_metadata"][1]["key"] = "999999999"

    with pytest.raises(NotFound, match=r"list\.999999999"):
        read(changed(tmp_path / "far", far))

    def twice(found: dict[str, Any]) -> None:
        found["tree_metadata"]["other"] = entry(found)

    with pytest.raises(Corrupt, match="two values have one name"):
        read(changed(tmp_path / "twice", twice))

    def skipped(found: dict[str, Any]) -> None:
        entry(found, "('list', '0')")["value_metadata"]["skip_deserialize"] = True
        entry(found, "('list', '0')")["key_metadata"][1]["key"] = "999999999"

    with pytest.raises(Corrupt, match="a list lacks items"):
        read(changed(tmp_path / "skipped", skipped))


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [],
        {"w": None},
        {"w": {"key_metadata": 3, "value_metadata": {"value_type": "np.ndarray"}}},
        {"w": {"key_metadata": [{"key": "w", "key_type": 3}], "value_metadata": {"value_type": "np.ndarray"}}},
        {"w": {"key_metadata": [{"key": [], "key_type": 2}], "value_metadata": {"value_type": "np.ndarray"}}},
        {"w": {"key_metadata": [{"key": "w", "key_type": 2}] * 300, "value_metadata": {"value_type": "x"}}},
        {"w": {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": 7}}},
    ],
)
def test_malformed_metadata_is_corrupt(entries: Any, tmp_path: Path) -> None:
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": entries}))
    with pytest.raises(Corrupt, match="_METADATA"):
        read(tmp_path)


@pytest.mark.parametrize(("ocdbt", "zarr3"), HANDLERS)
def test_a_tree_that_is_one_array_comes_in(ocdbt: bool, zarr3: bool, tmp_path: Path) -> None:
    written(tmp_path / "1", np.arange(3), ocdbt, zarr3)
    assert np.array_equal(read(tmp_path / "1"), np.arange(3))


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "metrics/metrics", "tree/array_metadatas/process_0"])
def test_a_named_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    written(tmp_path / "1" / "tree", {"w": np.ones(3)})
    (tmp_path / "1" / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "1" / name)
    with pytest.raises(Corrupt, match="is no plain file"):
        read_checkpoint(f"orbax:{tmp_path / '1'}")


@pytest.mark.parametrize("file", [".zarray", "0"])
def test_a_named_pipe_among_the_files_of_an_array_is_not_waited_for(file: str, tmp_path: Path) -> None:
    written(tmp_path / "1", {"w": np.ones(3)}, ocdbt=False)
    (tmp_path / "1" / "w" / file).unlink()
    os.mkfifo(tmp_path / "1" / "w" / file)
    with pytest.raises(Corrupt, match="is no plain file"):
        read_checkpoint(f"orbax:{tmp_path / '1'}")


@pytest.mark.parametrize("lost", ["one", "run/1/default", "items/1/tree"])
def test_a_tree_that_lost_its_metadata_is_no_item_of_files(lost: str, tmp_path: Path) -> None:
    """Its database came in as bytes, and the import was called verified."""
    tree = ocp.args.StandardSave({"w": np.ones(3)})
    ocp.Checkpointer(ocp.StandardCheckpointHandler()).save(tmp_path / "one", args=tree)
    for run, args in (("run", tree), ("items", ocp.args.Composite(tree=tree, other=tree))):
        with ocp.CheckpointManager(tmp_path / run) as manager:
            manager.save(1, args=args)
    (tmp_path / lost / "_METADATA").unlink()
    with pytest.raises(NotFound, match=f"{lost}/_METADATA is not there"):
        read_checkpoint(f"orbax:{tmp_path / lost.partition('/')[0]}", 1)


def test_an_item_of_files_takes_no_more_memory_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_folders, "memory_limit", lambda: (3 << 20, "this machine"))
    for number in range(4):
        with (tmp_path / str(number)).open("wb") as file:
            file.truncate(1 << 20)
    with pytest.raises(Invalid, match="take more memory than this machine has"):
        orbax_folders.files_of(tmp_path)


def test_deep_json_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "_METADATA").write_text("[" * 200_000)
    with pytest.raises(Corrupt, match="is no JSON"):
        read(tmp_path)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is no folder of Orbax"):
        read(tmp_path)
    with pytest.raises(NotFound, match="is not there"):
        read(tmp_path / "nowhere")
    lost = written(tmp_path / "lost", {"w": np.ones(3)})
    (lost / "manifest.ocdbt").unlink()
    with pytest.raises(NotFound, match=r"manifest\.ocdbt is not there"):
        read(lost)
    torn = written(tmp_path / "torn", {"w": np.arange(3 << 20)})
    for file in torn.rglob("d/*"):
        file.write_bytes(file.read_bytes()[: 100 << 10])
    with pytest.raises(Corrupt, match="'w' cannot be"):
        read(torn)
    files = written(tmp_path / "files", {"w": np.ones(3), "v": np.ones(2)}, ocdbt=False)
    shutil.rmtree(files / "w")
    with pytest.raises(NotFound, match="'w' cannot be opened"):
        read(files)
    chunk = written(tmp_path / "chunk", {"w": np.ones(3)}, ocdbt=False)
    (chunk / "w" / "0").unlink()
    with pytest.raises(Corrupt, match="'w' cannot be read"):  # and no zeros in its place
        read(chunk)


def test_a_value_of_an_unknown_type_is_refused_by_name(tmp_path: Path) -> None:
    def odd(found: dict[str, Any]) -> None:
        entry(found)["value_metadata"]["value_type"] = "os.system"

    with pytest.raises(Invalid, match=r"'w' is of the type 'os\.system'"):
        read(changed(tmp_path / "odd", odd))


def test_a_key_of_jax_without_jax_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "tree", {"seed": jax.random.key(1)})
    assert orbax_read.prng_keys(tmp_path / "tree") == {"seed": "threefry2x32"}
    monkeypatch.setitem(sys.modules, "tieredckpt.tree.jax_leaves", None)
    with pytest.raises(Invalid, match="'seed' is a typed PRNG key, which needs"):
        read(tmp_path / "tree")


@pytest.mark.parametrize(("ocdbt", "zarr3"), HANDLERS)
def test_a_mutated_folder_is_read_or_refused(ocdbt: bool, zarr3: bool, tmp_path: Path) -> None:
    tree = {"w": np.arange(6.0), "list": [np.ones((2, 3), np.int16), None, 7], "text": "x", "seed": jax.random.key(1)}
    original = written(tmp_path / "original", tree, ocdbt, zarr3)
    files = [file.relative_to(original) for file in original.rglob("*") if file.is_file() and file.stat().st_size]
    rng = random.Random(7)
    for at in range(60):
        mutated = shutil.copytree(original, tmp_path / str(at))
        file = mutated / rng.choice(files)
        data = bytearray(file.read_bytes())
        place = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                del data[place:]
            case _:
                data[place:place] = rng.choice([b"99999", b"-1", b"null", b"[]", b"{}", b'"x"', b"1e400", b"true"])
        file.write_bytes(data)
        with contextlib.suppress(TieredCkptError):
            read(mutated)
