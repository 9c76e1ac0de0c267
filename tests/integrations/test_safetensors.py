"""Files of safetensors come in and go out bit for bit, read by the library; malformed ones are refused by name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.command_line import run
from support.frameworks import require
from support.interchange import STATE, equal, restored, save

from tieredckpt import CheckpointStore, Corrupt, Invalid, NotFound
from tieredckpt.interchange import safetensors

torch = require("torch")
safetensors_torch = require("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

WEIGHTS = {name: value for name, value in STATE["model"].items() if name != "complex"}


def test_safetensors_come_in_whole_and_in_shards(store: Path, tmp_path: Path) -> None:
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


def test_safetensors_go_out_and_the_library_reads_them(store: Path, tmp_path: Path) -> None:
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


def test_a_cast_rounds_as_torch_does_and_refuses_what_overflows(store: Path, tmp_path: Path) -> None:
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


def test_transformers_reads_an_export(store: Path, tmp_path: Path) -> None:
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
        ({"weight_map": {"w": "\ud800"}}, Invalid, "which is not in its folder"),
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


def test_what_a_file_of_safetensors_cannot_have_is_refused(store: Path, tmp_path: Path) -> None:
    save(store, {"__metadata__": np.ones(2), "scale": np.array([0.5, 2], ml_dtypes.float8_e8m0fnu)})
    refused = run("export", store, "--to", f"safetensors:{tmp_path / 'w.safetensors'}", "--keys", "__metadata__")
    assert "safetensors has '__metadata__' for itself" in refused.stderr
    refused = run("export", store, "--to", f"safetensors:{tmp_path / 'w.safetensors'}", "--shard-size", "1 kB")
    assert "the export is one file" in refused.stderr
    assert not (tmp_path / "w.safetensors").exists()
    assert run("export", store, "--to", f"safetensors:{tmp_path / 's.safetensors'}", "--keys", "scale").exit_code == 0
    found = safetensors_torch.load_file(tmp_path / "s.safetensors")["scale"]
    assert found.dtype == torch.float8_e8m0fnu
    assert run("export", store, "--to", f"dcp:{tmp_path / 'dcp'}", "--keys", "scale").exit_code == 0
    save(store, {"w": np.array([1e300])}, 2)
    refused = run("export", store, "--to", f"safetensors:{tmp_path / 'bf16'}", "--cast", "bf16")
    assert "export it without a cast" in refused.stderr


def test_dtypes_that_numpy_has_not_go_through_safetensors(store: Path, tmp_path: Path) -> None:
    arrays = {
        name: np.array([0.5, 2], getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    }
    save(store, arrays)
    assert run("export", store, "--to", f"safetensors:{tmp_path / 'out'}").exit_code == 0
    assert run("import", f"safetensors:{tmp_path / 'out'}", store, "--step", 2).exit_code == 0
    for name, array in restored(store, 2).items():
        assert (array.dtype, array.tobytes()) == (arrays[name].dtype, arrays[name].tobytes())
