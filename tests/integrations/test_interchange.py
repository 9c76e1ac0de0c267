"""`import` and `export`: checkpoints of other libraries come in and go out bit for bit, read by those libraries."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from support.command_line import run
from support.frameworks import require
from support.interchange import save

from tieredckpt import CheckpointStore, Conflict, Corrupt, Invalid, _registry
from tieredckpt.config.formats import GROUP
from tieredckpt.interchange import export_step, import_step, read_checkpoint
from tieredckpt.interchange.formats import find

torch = require("torch")
safetensors_torch = require("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def test_names_are_those_that_a_map_gives(store: Path, tmp_path: Path) -> None:
    """Patterns in order, the signs of each in the place of what they matched; the rest keeps its names."""
    layers = {f"layers_{at}": {"kernel": np.full((2, 3), at), "bias": np.full(3, -at)} for at in range(2)}
    save(store, {"params": {"net": layers, "head": np.ones(4)}, "step": 3})
    to = tmp_path / "w.safetensors"
    patterns = ("params/net/layers_*/kernel=model.layers.*.weight", "params/net/**=model.**")
    result = run("export", store, "--to", f"safetensors:{to}", "--rename", patterns[0], "--rename", patterns[1])
    assert result.exit_code == 0
    assert "left out, for the format holds arrays alone: 1 (step)" in result.stdout
    found = safetensors_torch.load_file(to)
    names = [f"model.layers.{at}.weight" for at in range(2)] + [f"model.layers_{at}.bias" for at in range(2)]
    assert sorted(found) == sorted([*names, "params.head"])
    assert found["model.layers.1.weight"].tolist() == [[1, 1, 1], [1, 1, 1]]
    for rename, refused in (
        ("params/**=model", "'model' should have the signs"),
        ("lost/**=model.**", "'lost/**' matches no array"),
        ("params/**", "write PATTERN=NAME"),
        ("params/net/layers_*/bias=b*", "matches"),
        ("params/net/*/kernel=*", None),
        ("params/**/kernel=x.**", None),
    ):
        result = run("export", store, "--to", f"safetensors:{tmp_path / 'x'}", "--rename", rename)
        if rename == "params/net/layers_*/bias=b*":
            assert result.exit_code == 0
            assert {"b0", "b1"} <= safetensors_torch.load_file(tmp_path / "x" / "model.safetensors").keys()
            shutil.rmtree(tmp_path / "x")
        elif refused is None:
            assert result.exit_code == 0
            shutil.rmtree(tmp_path / "x")
        else:
            assert refused in result.stderr
            assert not (tmp_path / "x").exists()
    two = ("params/net/*/kernel=same", "params/net/*/bias=same")
    result = run("export", store, "--to", f"safetensors:{tmp_path / 'x'}", *(f"--rename={each}" for each in two))
    assert "should have the signs" in result.stderr


@pytest.mark.parametrize(
    "to",
    [
        *("safetensors:w.npz", "safetensors:w.safetensor", "safetensors:w.ckpt", "safetensors:w.sft"),
        *("npz:w.safetensors", "npz:w.csv", "npy:w.npy", "dcp:w.pt", "dcp:m.json", "orbax:m.gz", "w.safetensors"),
    ],
)
def test_the_name_of_a_file_of_another_format_is_refused(store: Path, tmp_path: Path, to: str) -> None:
    save(store, {"w": np.ones(3)})
    scheme, separator, name = to.rpartition(":")
    result = run("export", store, "--to", f"{scheme}{separator}{tmp_path / name}")
    assert result.stderr.startswith("Invalid: ")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["step-1.0", "run.v2", "llama-3.1-8b", "w.ckpt/", "there.out", "one.SafeTensors"])
def test_the_name_of_a_folder_may_have_a_full_stop(store: Path, tmp_path: Path, name: str) -> None:
    """One that looks like a suffix, where a slash follows or the folder is there."""
    save(store, {"w": np.ones(3)})
    (tmp_path / "there.out").mkdir()
    result = run("export", store, "--to", f"safetensors:{tmp_path}/{name}")
    assert result.exit_code == 0, result.output
    to = tmp_path / name
    assert to.is_file() if name.startswith("one") else (to / "model.safetensors").is_file()


@pytest.mark.parametrize("source", ["lost", "number", "damaged", "leaf"])
def test_a_refused_import_leaves_no_new_store_behind(store: Path, tmp_path: Path, source: str) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "named.pt")
    torch.save({"w": torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)}, tmp_path / "step_2.pt")
    (tmp_path / "step_1.pt").write_bytes(b"damaged")
    path = {"lost": "step_9.pt", "number": "named.pt", "damaged": "step_1.pt", "leaf": "step_2.pt"}[source]
    result = run("import", f"torch:{tmp_path / path}", store)
    assert result.exit_code == 1, result.output
    assert not (tmp_path / "disk").exists()


# -- the commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_is_no_wrong_input(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    save(store, {"model": {"w": np.arange(100.0)}})

    def full(*arguments: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr("tieredckpt.engine.exporting.folder.new_file", full)
    result = run("export", store, "--to", f"npz:{tmp_path / 'out.npz'}")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"NoSpace: {tmp_path / 'out.npz'} cannot be written: {os.strerror(code)}")
    assert sorted(os.listdir(tmp_path)) == before


def test_what_was_written_is_read_back_and_compared(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that stores another byte than it was given: nothing appears under the name."""
    save(store, {"model": {"w": np.arange(100.0), "b": np.ones(2)}})

    def damaging(write: Any) -> Any:
        def damaged(step: Any, given: Any, **options: Any) -> Any:
            told = write(step, given, **options)
            to = getattr(given, "path", given)
            values = np.arange(100.0).tobytes()
            file = next(path for path in (to, *to.rglob("*")) if path.is_file() and values in path.read_bytes())
            data = bytearray(file.read_bytes())
            data[data.index(values) + 300] ^= 1
            file.write_bytes(data)
            return told

        return damaged

    before = sorted(os.listdir(tmp_path))
    for scheme in ("safetensors", "npz", "npy", "dcp"):
        (entry,) = _registry.offered(GROUP)[scheme]
        found = entry.load()
        way = "write" if found.stream is None else "stream"
        broken = dataclasses.replace(found, **{way: damaging(getattr(found, way))})
        monkeypatch.setattr(require(entry.module), entry.attr, broken)
        result = run("export", store, "--to", f"{scheme}:{tmp_path / 'out'}", "--part", "model")
        assert result.exit_code == 1
        assert result.stderr.startswith("Corrupt: ")
        assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("scheme", ["safetensors", "npz", "npy", "dcp"])
def test_nothing_is_replaced(store: Path, tmp_path: Path, scheme: str) -> None:
    save(store, {"model": {"w": np.arange(100.0)}})
    (tmp_path / "out").write_text("mine")
    result = run("export", store, "--to", f"{scheme}:{tmp_path / 'out'}")
    assert result.stderr.startswith("Conflict: ")
    assert (tmp_path / "out").read_text() == "mine"


def test_an_export_beside_one_that_fails_makes_their_folder_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that failed takes the folder away which both have made."""
    made = tempfile.mkdtemp

    def removed(**more: Any) -> str:
        monkeypatch.undo()
        more["dir"].rmdir()
        return made(**more)

    save(store, {"w": np.arange(100.0)})
    with CheckpointStore.open_sync(store, read_only=True) as opened:
        monkeypatch.setattr(tempfile, "mkdtemp", removed)
        export_step(opened, f"npz:{tmp_path}/new/arrays.npz")
    assert (tmp_path / "new" / "arrays.npz").is_file()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
@pytest.mark.parametrize("came", [False, True])
def test_a_file_is_exported_where_files_have_one_name_alone(
    number: int, came: bool, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such are exFAT, some shares of SMB, and buckets that are mounted; also there nothing is replaced."""
    save(store, {"w": np.arange(100.0)})
    to = tmp_path / "w.safetensors"

    def link(*paths: Path) -> None:
        if came:
            to.write_text("mine")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with CheckpointStore.open(store).sync() as opened:
        if came:
            with pytest.raises(Conflict, match="exists already"):
                export_step(opened, f"safetensors:{to}")
            assert to.read_text() == "mine"
        else:
            export_step(opened, f"safetensors:{to}")
            np.testing.assert_array_equal(safetensors_torch.load_file(to)["w"].numpy(), np.arange(100.0))
    assert not list(tmp_path.glob(".tieredckpt-*"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("export", "STORE", "--to", "w.safetensors"),
            "with a SCHEME of dcp, npy, npz, orbax, safetensors",
        ),
        (
            ("export", "STORE", "--to", "torch:w.pt"),
            "torch is not a format to export; take dcp, npy, npz, orbax, safetensors",
        ),
        (("export", "STORE"), "--to is missing"),
        (("export", "STORE", "--to", "npz:w.npz", "--cast", "bf16"), "npz has no option cast"),
        (("export", "STORE", "--to", "safetensors:w", "--cast", "int4"), "should be one of bf16, fp16"),
        (("export", "STORE", "--to", "npz:w", "--part", "lost"), "NotFound"),
        (("export", "STORE", "--to", "npz:new/folders/w", "--part", "lost"), "NotFound"),
        (("export", "STORE", "--to", "npy:s3://bucket/w"), "s3"),
        (("import", "pickle:x", "STORE"), "names no format"),
        (("import", "safetensors:s3://bucket/model", "STORE"), "import reads local files: copy it to a folder"),
        (("import", "npz:x", "STORE"), "npz is not a format to import; take dcp, orbax, safetensors, torch"),
        (("import", "torch:llama-8.pt", "STORE"), "does not end in the number of a step; give --step"),
        (("import", "safetensors:lost", "STORE", "--step", "2"), "lost is not there"),
        (("import", "safetensors:ckpt.toml/x", "STORE", "--step", "2"), "ckpt.toml/x cannot be read"),
        (("restore", "STORE", "--to", "w.safetensors"), "export STORE --to safetensors:w.safetensors"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(store, {"model": {"w": np.arange(3.0)}})
    before = sorted(os.listdir(tmp_path))
    result = run(*(store if argument == "STORE" else argument for argument in arguments))
    assert result.exit_code == 1
    assert told in result.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_what_is_not_installed_hides_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, a forgotten scheme was told to need it."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("dcp", "torch_files"):
        monkeypatch.delitem(sys.modules, f"tieredckpt.interchange.{name}", raising=False)
    with pytest.raises(Invalid, match="write SCHEME:PATH with a SCHEME of npy, npz, orbax, safetensors"):
        find("w.safetensors", "write")
    with pytest.raises(Invalid, match=r"npz is not a format to import; take orbax, safetensors$"):
        find("npz:w", "read")
    with pytest.raises(Invalid, match="dcp: needs torch, which is not installed: pip install torch"):
        find("dcp:w", "read")


def test_names_begin_below_the_part(store: Path, tmp_path: Path) -> None:
    save(store, {"model": {"net": {"w": np.arange(3.0)}}, "rest": np.ones(1)})
    assert run("export", store, "--to", f"npz:{tmp_path / 'w.npz'}", "--part", "model/net").exit_code == 0
    assert list(np.load(tmp_path / "w.npz")) == ["w"]
    assert run("export", store, "--to", f"npy:{tmp_path / 'w'}", "--part", "model").exit_code == 0
    assert sorted(os.listdir(tmp_path / "w")) == ["index.json", "net%2Fw.npy"]
    assert "NotFound" in run("export", store, "--to", f"safetensors:{tmp_path / 'x'}", "--part", "m*").stderr
    assert run("export", store, "--to", f"npz:{tmp_path / 'all.npz'}", "--keys", "rest").exit_code == 0
    assert list(np.load(tmp_path / "all.npz")) == ["rest"]


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("torch:pipe.pt", "pipe.pt"),
        ("safetensors:pipe.safetensors", "pipe.safetensors"),
        ("safetensors:folder", "folder/model.safetensors"),
        ("safetensors:folder", "folder/model.safetensors.index.json"),
        ("safetensors:shards", "shards/one.safetensors"),
        ("dcp:folder", "folder/.metadata"),
        ("dcp:written", "written/__0_0.distcp"),
    ],
)
def test_a_named_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, source: str, file: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "one.safetensors"}}')
    require("torch.distributed.checkpoint").save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "written", no_dist=True)
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    scheme, _, path = source.partition(":")
    with pytest.raises(Corrupt, match="is no plain file"):
        read_checkpoint(f"{scheme}:{tmp_path / path}", 1)


def test_a_number_that_the_store_has_is_told_before_anything_is_read(store: Path, tmp_path: Path) -> None:
    save(store, {"w": np.ones(1)})
    (tmp_path / "w.pt").write_bytes(b"damaged")
    refused = run("import", f"torch:{tmp_path / 'w.pt'}", store, "--step", 1)
    assert refused.stderr.startswith("Conflict: ")
    assert "--overwrite" in refused.stderr


def test_a_part_is_a_container_and_no_pattern(store: Path, tmp_path: Path) -> None:
    save(store, {"model": {"**": np.ones(1), "w": np.arange(3.0)}, "bare": np.ones(1)})
    assert run("export", store, "--to", f"npz:{tmp_path / 'w.npz'}", "--part", "model").exit_code == 0
    assert sorted(np.load(tmp_path / "w.npz")) == ["**", "w"]
    for part in ("m*", "bare", "lost"):
        assert "NotFound" in run("export", store, "--to", f"npz:{tmp_path / 'x'}", "--part", part).stderr


def test_an_import_outlives_the_process_whatever_the_policy(store: Path, tmp_path: Path) -> None:
    text = store.read_text()
    store.write_text(text.replace('retain = "all"', 'retain = "all"\n        promote = "never"'))
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    with CheckpointStore.open(store).sync() as opened:
        done = import_step(f"torch:{tmp_path / 'w.pt'}", opened, 5)
        assert done.tier == "disk"
        assert "disk" in opened.where(5)
        assert opened.restore() is not None
        exported = export_step(opened, f"npz:{tmp_path / 'w.npz'}", 5)
    assert np.load(tmp_path / "w.npz")["w"].tolist() == [1, 1, 1]
    assert exported.names == ("w.npy",)
    store.write_text(text[: text.index("[tiers.disk]")].replace("[store]", '[store]\n        name = "alone"'))
    with (
        CheckpointStore.open(store).sync() as opened,
        pytest.raises(Invalid, match="has no tier that outlives this process"),
    ):
        import_step(f"torch:{tmp_path / 'w.pt'}", opened, 6)


def test_an_import_names_the_tier_that_cannot_be_opened(store: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    (tmp_path / "disk").write_text("no folder")
    result = run("import", f"torch:{tmp_path / 'w.pt'}", store, "--step", 1)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"TierUnavailable: tier 'disk' cannot be opened: {tmp_path / 'disk'} ")
