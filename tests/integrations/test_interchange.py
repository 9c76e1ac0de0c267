"""`import` and `export`: checkpoints of other libraries come in and go out bit for bit, read by those libraries."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.frameworks import require
from typer.testing import CliRunner, Result

from tieredckpt import CheckpointStore, Corrupt, Invalid, NotFound
from tieredckpt.cli.app import app
from tieredckpt.interchange import base, export_step, import_step, safetensors
from tieredckpt.interchange.formats import FORMATS

torch = require("torch")
dcp = require("torch.distributed.checkpoint")
safetensors_torch = require("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

Run = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path, shared_memory: Path) -> Path:
    """The configuration of a store that nobody opened yet."""
    path = tmp_path / "ckpt.toml"
    path.write_text(
        f"""
        [store]
        chunk_size = "8 KiB"
        [tiers.ram]
        kind = "ram"
        path = "{shared_memory / "ram"}"
        capacity = "8 MiB"
        [tiers.disk]
        kind = "posix"
        path = "{tmp_path / "disk"}"
        retain = "all"
        fsync = false
        """
    )
    return path


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


def save(store: Path, tree: Any, step: int = 1) -> None:
    with CheckpointStore.open(store).sync() as opened:
        opened.save(step, tree)
        opened.flush()


def restored(store: Path, step: int | None = None) -> Any:
    with CheckpointStore.open(store, read_only=True).sync() as opened:
        found = opened.restore(step, as_="saved")
    assert found is not None
    return found.tree


def equal(one: Any, other: Any) -> None:
    """That two state dicts are the same to the last bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            equal(a, b)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.contiguous().reshape(-1).view(torch.uint8).tolist() == (
            other.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    else:
        assert one == other


STATE: dict[str, Any] = {
    "model": {
        "w": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
        "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "eighth": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
    },
    "optim": {"state": [{"m": torch.ones(3)}, {"m": torch.zeros(3)}], "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
    "pair": (torch.ones(2), 3),
    "step": 7,
    "note": None,
}


def written(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_dcp_goes_in_and_out_again_to_the_last_bit(run: Run, store: Path, tmp_path: Path) -> None:
    written(tmp_path / "checkpoint-7", STATE)
    result = run("import", f"dcp:{tmp_path / 'checkpoint-7'}", store)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("step 7 (serial ")
    assert result.stdout.endswith("imported, and verified on tier disk\n")
    equal(restored(store, 7), STATE)
    result = run("export", store, 7, "--to", f"dcp:{tmp_path / 'out'}")
    assert result.exit_code == 0, result.output
    template = {
        "model": {name: torch.empty_like(value) for name, value in STATE["model"].items()},
        "optim": {"state": [{"m": torch.empty(3)}, {"m": torch.empty(3)}], "groups": None},
        "pair": None,
        "step": 0,
        "note": 0,
    }
    template["optim"]["groups"] = [{"lr": 0.0, "betas": None}]
    dcp.load(template, checkpoint_id=tmp_path / "out", no_dist=True)  # the stock reader
    equal(template, STATE)
    result = run("import", f"dcp:{tmp_path / 'out'}", store, "--step", 8)
    assert result.exit_code == 0, result.output
    equal(restored(store, 8), STATE)


def test_arrays_of_numpy_become_tensors_of_dcp(run: Run, store: Path, tmp_path: Path) -> None:
    save(store, {"w": np.arange(6.0).reshape(2, 3), "n": np.float32(2), "day": date(2026, 1, 2)})
    assert run("export", store, "--to", f"dcp:{tmp_path / 'out'}").exit_code == 0
    state = {"w": torch.empty(2, 3, dtype=torch.float64), "n": torch.empty(())}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["n"].item() == 2
    save(store, {"times": np.array(["2026-01-02"], "datetime64[D]")}, 2)
    result = run("export", store, 2, "--to", f"dcp:{tmp_path / 'times'}")
    assert "array 'times': torch has no dtype datetime64[D]" in result.stderr
    assert not (tmp_path / "times").exists()


def test_arrays_in_another_byte_order_become_the_same_numbers(run: Run, store: Path, tmp_path: Path) -> None:
    numbers = {f"{order}{kind}": np.arange(5).astype(order + kind) for order in "<>" for kind in ("f4", "i4")}
    save(store, numbers)
    for scheme in ("dcp", "safetensors"):
        out = tmp_path / scheme
        assert run("export", store, "--to", f"{scheme}:{out}").exit_code == 0
        with CheckpointStore.open(store).sync() as opened:
            import_step(f"{scheme}:{out}", opened, 2, overwrite=True)
            found = opened.restore(2, as_="torch")
        assert found is not None
        assert all(found.tree[name].tolist() == [0, 1, 2, 3, 4] for name in numbers)


def test_files_of_torch_save_come_in_as_weights_only(run: Run, store: Path, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "step_7.pt")
    old = {"model": STATE["model"] | {"eighth": None}}  # of which the old format knows nothing
    torch.save(old, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert run("import", f"torch:{tmp_path / 'step_7.pt'}", store).exit_code == 0
    assert run("import", f"torch:{tmp_path / 'old.pt'}", store, "--step", 8).exit_code == 0
    equal(restored(store, 7), STATE)
    equal(restored(store, 8), old)


class Forged:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_a_forged_file_of_torch_runs_nothing(run: Run, store: Path, tmp_path: Path) -> None:
    torch.save({"odd": Forged(tmp_path / "ran")}, tmp_path / "forged.pt")
    result = run("import", f"torch:{tmp_path / 'forged.pt'}", store, "--step", 1)
    assert result.exit_code == 1
    assert result.stderr.startswith("Invalid: ")
    assert "is more than tensors and plain values; nothing was run" in result.stderr
    assert "posix" in result.stderr
    torch.save({"f": subprocess.run}, tmp_path / "function.pt")
    assert run("import", f"torch:{tmp_path / 'function.pt'}", store, "--step", 1).exit_code == 1
    assert not (tmp_path / "ran").exists()


def test_damaged_and_missing_files_of_torch_are_told(tmp_path: Path) -> None:
    read = require("tieredckpt.interchange.torch_files").TORCH.read
    with pytest.raises(NotFound, match="is not there"):
        read(tmp_path / "none.pt")
    with pytest.raises(Invalid, match="is it dcp:"):
        read(tmp_path)
    torch.save(STATE, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:900])
    with pytest.raises(Corrupt, match=r"cut\.pt is damaged"):
        read(tmp_path / "cut.pt")


def test_a_small_file_of_torch_becomes_no_large_step(tmp_path: Path) -> None:
    read = require("tieredckpt.interchange.torch_files").TORCH.read
    torch.save({"model": [torch.ones(1).expand(1 << 40)]}, tmp_path / "large.pt")
    with pytest.raises(Invalid, match=r"large\.pt has a tensor of shape \[1099511627776\] in 4 bytes"):
        read(tmp_path / "large.pt")
    tree: Any = 1
    for _ in range(60):
        tree = [tree, tree]
    torch.save(tree, tmp_path / "many.pt")
    with pytest.raises(Invalid, match=r"many\.pt has more values than bytes"):
        read(tmp_path / "many.pt")
    weight = torch.ones(8, 8)
    torch.save({"a": weight, "b": weight, "half": weight[:4]}, tmp_path / "tied.pt")
    assert torch.equal(read(tmp_path / "tied.pt")["b"], weight)


# -- safetensors ------------------------------------------------------------------------------------------

WEIGHTS = {name: value for name, value in STATE["model"].items() if name != "complex"}


def test_safetensors_come_in_whole_and_in_shards(run: Run, store: Path, tmp_path: Path) -> None:
    safetensors_torch.save_file(WEIGHTS, tmp_path / "one.safetensors", metadata={"format": "pt"})
    assert run("import", f"safetensors:{tmp_path / 'one.safetensors'}", store, "--step", 1).exit_code == 0
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    files = {name: f"model-{len(name) % 2 + 1:05}-of-00002.safetensors" for name in WEIGHTS}
    for file in set(files.values()):
        safetensors_torch.save_file({n: WEIGHTS[n] for n in WEIGHTS if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert run("import", f"safetensors:{folder}", store).exit_code == 0
    for step in (1, 2):
        with CheckpointStore.open(store, read_only=True).sync() as opened:
            found = opened.restore(step, as_="torch")
        assert found is not None
        equal({name: found.tree[name] for name in WEIGHTS}, WEIGHTS)


def shards(path: Path) -> Any:
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


def test_safetensors_go_out_and_the_library_reads_them(run: Run, store: Path, tmp_path: Path) -> None:
    save(store, {"model": WEIGHTS, "optimizer": {"m": torch.ones(3)}})
    assert run("export", store, "--to", f"safetensors:{tmp_path / 'one.safetensors'}").exit_code == 0
    found = safetensors_torch.load_file(tmp_path / "one.safetensors")
    equal({name: found.pop(name) for name in WEIGHTS}, WEIGHTS)
    assert not found  # the optimizer is not of the model
    result = run("export", store, "--to", f"safetensors:{tmp_path / 'two'}", "--shard-size", "1 kB")
    assert result.exit_code == 0, result.output
    files = shards(tmp_path / "two")
    assert len(set(files.values())) == 2
    found = {name: safetensors_torch.load_file(tmp_path / "two" / files[name])[name] for name in WEIGHTS}
    equal(found, WEIGHTS)
    assert run("export", store, "--to", f"safetensors:{tmp_path / 'all'}", "--part", "optimizer").exit_code == 0
    assert list(safetensors_torch.load_file(tmp_path / "all" / "model.safetensors")) == ["m"]


def test_a_cast_rounds_as_torch_does_and_refuses_what_overflows(run: Run, store: Path, tmp_path: Path) -> None:
    weights = {"w": torch.randn(1000), "d": torch.randn(9, dtype=torch.float64), "n": torch.arange(3)}
    weights["w"][:3] = torch.tensor([float("nan"), float("inf"), 1e-30])
    save(store, {"model": weights})
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        path = tmp_path / f"{name}.safetensors"
        assert run("export", store, "--to", f"safetensors:{path}", "--cast", name).exit_code == 0
        found = safetensors_torch.load_file(path)
        assert found["w"][0].isnan()
        assert found["w"].dtype == found["d"].dtype == dtype
        assert torch.equal(found["w"][1:], weights["w"][1:].to(dtype))
        assert torch.equal(found["d"], weights["d"].to(dtype))
        assert torch.equal(found["n"], weights["n"])
    save(store, {"model": {"w": torch.tensor([1e5, float("inf")])}}, 2)
    result = run("export", store, "--to", f"safetensors:{tmp_path / 'large'}", "--cast", "fp16")
    assert "array 'model/w' has values beyond the largest of float16; cast to bf16" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["bf16.safetensors", "ckpt.toml", "disk", "fp16.safetensors"]


def test_transformers_reads_an_export(run: Run, store: Path, tmp_path: Path) -> None:
    transformers = require("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=40,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    save(store, {"model": model.state_dict()})
    out = tmp_path / "out"
    result = run("export", store, "--to", f"safetensors:{out}", "--cast", "bf16", "--shard-size", "2 kB")
    assert result.exit_code == 0, result.output
    assert len(set(shards(out).values())) > 1
    config.save_pretrained(out)
    found, told = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert found.lm_head.weight is found.model.embed_tokens.weight
    equal(dict(found.state_dict()), dict(model.to(torch.bfloat16).state_dict()))
    model.save_pretrained(tmp_path / "checkpoint-3", max_shard_size="2kB")  # and what it writes comes in
    assert run("import", f"safetensors:{tmp_path / 'checkpoint-3'}", store).exit_code == 0
    with CheckpointStore.open(store, read_only=True).sync() as opened:
        found = opened.restore(3, as_="torch")
    assert found is not None
    state = model.state_dict()
    assert found.tree.keys() >= state.keys() - {"lm_head.weight"}
    for name, value in found.tree.items():
        equal(value, state[name])


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(*, dtype: Any = "F32", shape: Any = (2,), at: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


@pytest.mark.parametrize(
    ("data", "error", "told"),
    [
        (b"", Corrupt, "is no file of safetensors"),
        (struct.pack("<Q", 1 << 40) + b"{}", Corrupt, "is no file of safetensors, or cut off"),
        (file_of(b"{"), Corrupt, "no JSON"),
        (file_of(b"[" * 100_000), Corrupt, "no JSON"),
        (file_of([1]), Corrupt, "no JSON object"),
        (file_of({"w": 3}), Corrupt, "entry of 'w' is malformed"),
        (file_of({"w": tensor(shape=None)}), Corrupt, "entry of 'w' is malformed"),
        (file_of({"w": tensor(dtype="F4")}, bytes(8)), Invalid, "'w' has the dtype 'F4'"),
        (file_of({"w": tensor(dtype=["F32"])}, bytes(8)), Invalid, "'w' has the dtype"),
        (file_of({"w": tensor(shape=[-2])}, bytes(8)), Corrupt, "negative or no integers"),
        (file_of({"w": tensor(shape=[True, 2])}, bytes(8)), Corrupt, "negative or no integers"),
        (file_of({"w": tensor(shape=[3])}, bytes(8)), Corrupt, "are not 8 bytes"),
        (file_of({"w": tensor(shape=[0, 1 << 63], at=[0, 0])}), Corrupt, "'w' has a shape that no array can have"),
        (file_of({"w": tensor(shape=[1] * 70, at=[0, 4])}, bytes(4)), Corrupt, "'w' has a shape that no array can"),
        (file_of({"w": tensor()}, bytes(7)), Corrupt, "ends within 'w'"),
        (file_of({"w": tensor()}, bytes(9)), Corrupt, "1 bytes of no tensor"),
        (file_of({"w": tensor(), "v": tensor(at=[4, 12])}, bytes(12)), Corrupt, "'v' begins at 4"),
        (file_of({"w": tensor(at=[4, 12])}, bytes(12)), Corrupt, "'w' begins at 4"),
    ],
)
def test_a_malformed_file_of_safetensors_is_named(
    data: bytes, error: type[Exception], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    assert safetensors.SAFETENSORS.read is not None
    with pytest.raises(error, match=told) as found:
        safetensors.SAFETENSORS.read(path)
    assert "bad.safetensors" in str(found.value)


@pytest.mark.parametrize(
    ("index", "error", "told"),
    [
        ({"weight_map": {"w": "../secret.safetensors"}}, Invalid, "which is not in its folder"),
        ({"weight_map": {"w": "lost.safetensors"}}, NotFound, "lost.safetensors is not there"),
        ({"weight_map": {"v": "one.safetensors"}}, Corrupt, "'v' is in one.safetensors, which does not have it"),
        ({"weight_map": {"w": "a\0b"}}, Invalid, "which is not in its folder"),
        ({"weight_map": {"w": ".."}}, Invalid, "which is not in its folder"),
        ({"weight_map": {}}, Corrupt, "no weight_map"),
        ({"weight_map": [1]}, Corrupt, "no weight_map"),
        ({"weight_map": {"w": 1}}, Corrupt, "no weight_map"),
    ],
)
def test_a_malformed_index_is_named(index: Any, error: type[Exception], told: str, tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(file_of({"w": tensor()}, bytes(8)))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert safetensors.SAFETENSORS.read is not None
    with pytest.raises(error, match=told):
        safetensors.SAFETENSORS.read(tmp_path)


def test_shards_of_the_hugging_face_cache_are_read_through_its_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    index = json.dumps({"weight_map": {"w": "one.safetensors"}}).encode()
    for name, data in (
        ("one.safetensors", file_of({"w": tensor()}, bytes(8))),
        ("model.safetensors.index.json", index),
    ):
        (blobs / name[:3]).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{name[:3]}")
    assert safetensors.SAFETENSORS.read is not None
    assert safetensors.SAFETENSORS.read(snapshot)["w"].tolist() == [0, 0]


def test_what_a_file_of_safetensors_cannot_have_is_refused(run: Run, store: Path, tmp_path: Path) -> None:
    save(store, {"__metadata__": np.ones(2), "scale": np.array([0.5, 2], ml_dtypes.float8_e8m0fnu)})
    refused = run("export", store, "--to", f"safetensors:{tmp_path / 'w.safetensors'}", "--keys", "__metadata__")
    assert "safetensors has '__metadata__' for itself" in refused.stderr
    refused = run("export", store, "--to", f"safetensors:{tmp_path / 'w.safetensors'}", "--shard-size", "1 kB")
    assert "w.safetensors is one file" in refused.stderr
    assert not (tmp_path / "w.safetensors").exists()
    assert run("export", store, "--to", f"safetensors:{tmp_path / 's.safetensors'}", "--keys", "scale").exit_code == 0
    found = safetensors_torch.load_file(tmp_path / "s.safetensors")["scale"]
    assert found.dtype == torch.float8_e8m0fnu
    assert run("export", store, "--to", f"dcp:{tmp_path / 'dcp'}", "--keys", "scale").exit_code == 0
    save(store, {"w": np.array([1e300])}, 2)
    refused = run("export", store, "--to", f"safetensors:{tmp_path / 'bf16'}", "--cast", "bf16")
    assert "export it without a cast" in refused.stderr


# -- the commands -----------------------------------------------------------------------------------------


def test_what_was_written_is_read_back_and_compared(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that stores another byte than it was given: nothing appears under the name."""
    save(store, {"model": {"w": np.arange(100.0), "b": np.ones(2)}})

    def damaging(write: Any) -> Any:
        def damaged(step: Any, to: Path, **options: Any) -> Any:
            told = write(step, to, **options)
            values = np.arange(100.0).tobytes()
            file = next(path for path in (to, *to.rglob("*")) if path.is_file() and values in path.read_bytes())
            data = bytearray(file.read_bytes())
            data[data.index(values) + 300] ^= 1
            file.write_bytes(data)
            return told

        return damaged

    before = sorted(os.listdir(tmp_path))
    for scheme in ("safetensors", "npz", "npy", "dcp"):
        module = require(FORMATS[scheme][0])
        found = getattr(module, FORMATS[scheme][1])
        broken = base.Format(found.read, damaging(found.write), found.read_back, found.parts, found.options)
        monkeypatch.setattr(module, FORMATS[scheme][1], broken)
        result = run("export", store, "--to", f"{scheme}:{tmp_path / 'out'}", "--part", "model")
        assert result.exit_code == 1
        assert result.stderr.startswith("Corrupt: ")
        assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("scheme", ["safetensors", "npz", "npy", "dcp"])
def test_nothing_is_replaced(run: Run, store: Path, tmp_path: Path, scheme: str) -> None:
    save(store, {"model": {"w": np.arange(100.0)}})
    (tmp_path / "out").write_text("mine")
    result = run("export", store, "--to", f"{scheme}:{tmp_path / 'out'}")
    assert result.stderr.startswith("Conflict: ")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("export", "STORE", "--to", "w.safetensors"), "write SCHEME:PATH with a SCHEME of dcp, npy, npz, safetensors"),
        (("export", "STORE", "--to", "torch:w.pt"), "torch is not a format to export"),
        (("export", "STORE"), "--to is missing"),
        (("export", "STORE", "--to", "npz:w.npz", "--cast", "bf16"), "npz has no option cast"),
        (("export", "STORE", "--to", "safetensors:w", "--cast", "int4"), "should be one of bf16, fp16"),
        (("export", "STORE", "--to", "npz:w", "--part", "lost"), "NotFound"),
        (("export", "STORE", "--to", "npz:s3://bucket/w"), "s3"),
        (("import", "pickle:x", "STORE"), "names no format"),
        (("import", "npz:x", "STORE"), "npz is not a format to import"),
        (("import", "torch:llama-8.pt", "STORE"), "does not end in the number of a step; give --step"),
        (("import", "safetensors:lost", "STORE", "--step", "2"), "lost is not there"),
        (("import", "safetensors:ckpt.toml/x", "STORE", "--step", "2"), "ckpt.toml/x cannot be read"),
        (("restore", "STORE", "--to", "w.safetensors"), "export STORE --to safetensors:w.safetensors"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(store, {"model": {"w": np.arange(3.0)}})
    before = sorted(os.listdir(tmp_path))
    result = run(*(store if argument == "STORE" else argument for argument in arguments))
    assert result.exit_code == 1
    assert told in result.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_names_begin_below_the_part(run: Run, store: Path, tmp_path: Path) -> None:
    save(store, {"model": {"net": {"w": np.arange(3.0)}}, "rest": np.ones(1)})
    assert run("export", store, "--to", f"npz:{tmp_path / 'w.npz'}", "--part", "model/net").exit_code == 0
    assert list(np.load(tmp_path / "w.npz")) == ["w"]
    assert run("export", store, "--to", f"npy:{tmp_path / 'w'}", "--part", "model").exit_code == 0
    assert sorted(os.listdir(tmp_path / "w")) == ["index.json", "net%2Fw.npy"]
    assert "NotFound" in run("export", store, "--to", f"safetensors:{tmp_path / 'x'}", "--part", "m*").stderr
    assert run("export", store, "--to", f"npz:{tmp_path / 'all.npz'}", "--keys", "rest").exit_code == 0
    assert list(np.load(tmp_path / "all.npz")) == ["rest"]


def test_a_number_that_the_store_has_is_told_before_anything_is_read(run: Run, store: Path, tmp_path: Path) -> None:
    save(store, {"w": np.ones(1)})
    (tmp_path / "w.pt").write_bytes(b"damaged")
    refused = run("import", f"torch:{tmp_path / 'w.pt'}", store, "--step", 1)
    assert refused.stderr.startswith("Conflict: ")
    assert "--overwrite" in refused.stderr


def test_a_part_is_a_container_and_no_pattern(run: Run, store: Path, tmp_path: Path) -> None:
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


def test_dtypes_that_numpy_has_not_go_through_safetensors(store: Path, run: Run, tmp_path: Path) -> None:
    arrays = {
        name: np.array([0.5, 2], getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    }
    save(store, arrays)
    assert run("export", store, "--to", f"safetensors:{tmp_path / 'out'}").exit_code == 0
    assert run("import", f"safetensors:{tmp_path / 'out'}", store, "--step", 2).exit_code == 0
    for name, array in restored(store, 2).items():
        assert (array.dtype, array.tobytes()) == (arrays[name].dtype, arrays[name].tobytes())
