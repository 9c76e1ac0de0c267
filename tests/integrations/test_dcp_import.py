"""Folders of torch.distributed.checkpoint become steps, and forged or damaged ones run nothing and are named."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.frameworks import require
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, Corrupt, Invalid, NotFound, TieredCkptError
from tieredckpt.interchange import import_step

torch = require("torch")
dcp = require("torch.distributed.checkpoint")
dcp_metadata = require("torch.distributed.checkpoint.metadata")
read = require("tieredckpt.interchange.dcp").DCP.read

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Storage = torch.distributed.checkpoint.filesystem._StorageInfo


class Forged:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def written(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def changed(path: Path, change: Callable[[Any], object]) -> Path:
    """A folder with a tensor, a value and a list, whose .metadata was changed."""
    written(path, {"w": torch.arange(6.0).reshape(2, 3), "note": "text", "list": [torch.ones(2), torch.ones(1)]})
    found = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301  # this test's own
    change(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))
    return path


def test_a_folder_becomes_a_step(tmp_path: Path, shared_memory: Path) -> None:
    weights = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, dtype=torch.bfloat16)}
    state = {"model": weights, "optim": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}, "step": 7}
    written(tmp_path / "checkpoint-7", state)
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    with CheckpointStore.open(config(tiers), ranks=None).sync() as store:
        assert import_step(f"dcp:{tmp_path / 'checkpoint-7'}", store).step == 7
        found = store.restore(as_="saved")
    assert found is not None
    assert found.tree["optim"] == state["optim"]
    assert found.tree["step"] == 7
    for name, tensor in weights.items():
        assert found.tree["model"][name].dtype == tensor.dtype
        assert torch.equal(found.tree["model"][name], tensor)


def test_a_forged_folder_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    forged = written(tmp_path / "metadata", {"w": torch.ones(2)})
    (forged / ".metadata").write_bytes(pickle.dumps(Forged(mark)))
    with pytest.raises(
        Invalid, match=r"metadata/\.metadata names posix\.system, of which no checkpoint of DCP consists"
    ):
        read(forged)
    forged = written(tmp_path / "item", {"w": torch.ones(2), "odd": Forged(mark)})
    with pytest.raises(Invalid, match="'odd' is more than tensors and plain values"):
        read(forged)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["torch load", "torch hub", "torch nn.Module", "torch serialization.load", "builtins getattr", "torch.nn"]
)
def test_only_dtypes_of_torch_are_looked_up(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.partition(" ")
    path = written(tmp_path / "forged", {"w": torch.ones(2)})
    (path / ".metadata").write_bytes(b"c" + module.encode() + b"\n" + (attribute or "Module").encode() + b"\n.")
    with pytest.raises(Invalid, match="of which no checkpoint of DCP consists"):
        read(path)


def test_a_forged_folder_changes_no_class(tmp_path: Path) -> None:
    """A pickle can set attributes of the classes that it names; those of torch stay as they are."""
    path = written(tmp_path / "forged", {"w": torch.ones(2)})
    before = dict(vars(dcp_metadata.Metadata))
    poison = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'poisoned'\nI1\nstb."
    (path / ".metadata").write_bytes(poison)
    with pytest.raises(Corrupt, match=r"\.metadata"):
        read(path)
    assert dict(vars(dcp_metadata.Metadata)) == before


def test_what_is_missing_or_malformed_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no \.metadata"):
        read(tmp_path)
    lost = written(tmp_path / "lost", {"w": torch.ones(2)})
    (lost / "__0_0.distcp").unlink()
    with pytest.raises(NotFound, match=r"and \.metadata names it for 'w'"):
        read(lost)
    torn = written(tmp_path / "torn", {"w": torch.ones(2)})
    (torn / ".metadata").write_bytes((torn / ".metadata").read_bytes()[:100])
    with pytest.raises(Corrupt, match="malformed"):
        read(torn)


def test_a_metadata_of_few_bytes_takes_little_memory(tmp_path: Path) -> None:
    for put in (b"r" + (20_000_000).to_bytes(4, "little"), b"p20000000\n"):  # it keeps None under that number
        (tmp_path / ".metadata").write_bytes(b"\x80\x02N" + put + b".")
        with pytest.raises(Corrupt, match=r"\.metadata is malformed: .*20000000"):
            read(tmp_path)


def test_a_metadata_of_another_version_of_python_or_torch_is_read(tmp_path: Path) -> None:
    older = require("torch.distributed._shard.sharded_tensor.metadata").TensorProperties
    path = changed(tmp_path / "older", lambda found: setattr(entry(found), "properties", older(torch.float32)))
    assert read(path)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    found = pickle.dumps(pickle.loads((path / ".metadata").read_bytes()), 2)  # noqa: S301  # this test's own
    assert b"cpathlib" in found
    (path / ".metadata").write_bytes(found.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert read(path)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def entry(found: Any) -> Any:
    return found.state_dict_metadata["w"]


def item(found: Any, name: str = "w") -> Any:
    return next(index for index in found.storage_data if index.fqn == name)


def overlapping(found: Any) -> None:
    """Parts of which the numbers of elements add up to the whole."""
    stored = found.storage_data.pop(item(found))
    box, size = dcp_metadata.ChunkStorageMetadata, torch.Size
    entry(found).chunks = [box(size([0, 0]), size([2, 2])), box(size([0, 1]), size([1, 2]))]
    for chunk in entry(found).chunks:
        found.storage_data[dcp_metadata.MetadataIndex("w", chunk.offsets)] = stored


def with_item(**values: Any) -> Callable[[Any], object]:
    return lambda found: vars(found.storage_data[item(found)]).update(values)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (overlapping, Corrupt, "parts of 'w' overlap"),
        (lambda found: found.storage_data.pop(item(found)), Corrupt, "does not have all of 'w'"),
        (lambda found: found.storage_data.pop(item(found, "note")), Corrupt, "does not have all of 'note'"),
        (lambda found: setattr(found, "storage_data", None), Corrupt, "has no metadata of DCP"),
        (lambda found: setattr(entry(found), "size", torch.Size([1 << 40, 1 << 20])), Corrupt, "'w'"),
        (lambda found: setattr(entry(found), "size", (2, -3)), Corrupt, "'w' or a part of it has no shape"),
        (lambda found: setattr(entry(found), "size", ("2", 3)), Corrupt, "'w' or a part of it has no shape"),
        (lambda found: setattr(entry(found), "chunks", None), Corrupt, "does not have all of 'w'"),
        (lambda found: setattr(entry(found), "properties", None), Corrupt, "'w' has no dtype"),
        (lambda found: setattr(entry(found).properties, "dtype", torch.int64), Corrupt, "'w'"),
        (
            lambda found: setattr(entry(found).properties, "dtype", torch.int32),
            Corrupt,
            "'w' is no tensor of torch.int",
        ),
        (lambda found: found.state_dict_metadata.update(w=3), Corrupt, "'w' is neither a tensor nor a value"),
        (lambda found: found.state_dict_metadata.update({3: entry(found)}), Corrupt, "'3' is neither"),
        (with_item(relative_path="../secret"), Invalid, "'../secret' for 'w', which is not in the folder"),
        (with_item(relative_path="a\0b"), Invalid, "which is not in the folder"),
        (with_item(relative_path=7), Corrupt, "no file and range for 'w'"),
        (with_item(length=1 << 50), Corrupt, "is cut off: 'w' ends"),
        (with_item(offset=-1), Corrupt, "no file and range for 'w'"),
        (with_item(length=100), Corrupt, "'w' is damaged"),
        (with_item(transform_descriptors=["zstd"]), Invalid, "'w' was stored through extensions"),
        (lambda found: found.planner_data.update({"list.0": ("list", 1 << 40)}), Corrupt, "'list.0' has no path"),
        (lambda found: found.planner_data.update({"list.0": ("w", "x")}), Corrupt, "contradict each other"),
        (lambda found: found.planner_data.pop("w"), Corrupt, "the paths are not those of the names"),
    ],
)
def test_a_metadata_that_contradicts_itself_or_the_files_is_refused(
    change: Callable[[Any], object], error: type[Exception], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        read(changed(tmp_path / "changed", change))


def test_damage_anywhere_is_told_or_harmless(tmp_path: Path) -> None:
    """Bytes turned over at random: an error of this library, or a state dict, and never another exception."""
    whole = changed(tmp_path / "whole", lambda found: None)
    draw = random.Random(7)
    for name in (".metadata", "__0_0.distcp"):
        data = (whole / name).read_bytes()
        for at in draw.sample(range(len(data)), min(150, len(data))):
            damaged = tmp_path / "damaged"
            shutil.copytree(whole, damaged)
            (damaged / name).write_bytes(data[:at] + bytes([data[at] ^ draw.randrange(1, 256)]) + data[at + 1 :])
            with contextlib.suppress(TieredCkptError):
                read(damaged)
            shutil.rmtree(damaged)
