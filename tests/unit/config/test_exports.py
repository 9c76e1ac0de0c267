"""The tables ``[exports.NAME]`` of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.frameworks import need_modules

from tieredckpt import ExportConfig, Invalid, StoreConfig
from tieredckpt.config import dump_with_secrets, load, to_toml

TABLE = """
[tiers.disk]
kind = "posix"
path = "disk"

[exports.hf]
format = "safetensors"
to = "exported"
when = { kind = "best", metric = "loss" }
keys = ["params/**"]
cast = "bf16"
keep = 3
shard_size = "2 GB"
rename = { "params/**" = "model.**" }

[exports.far]
format = "npz"
to = "s3://bucket/exports/"
"""


FAR = {"kind": "s3", "url": "s3://bucket/run"}


def written(folder: Path, text: str = TABLE) -> Path:
    path = folder / "ckpt.toml"
    path.write_text(text)
    return path


def test_a_file_says_what_is_exported(tmp_path: Path) -> None:
    """Relative folders start at the file's; a number of exports that stay is `last_n`."""
    config = load(written(tmp_path))
    hf, far = config.exports
    assert (hf.name, hf.format, hf.folder) == ("hf", "safetensors", tmp_path / "exported")
    assert (hf.when.kind, hf.keep.model_dump(), hf.keys) == ("best", {"kind": "last_n", "n": 3}, ("params/**",))
    assert hf.options == {"cast": "bf16", "shard_size": 2_000_000_000, "rename": {"params/**": "model.**"}}
    assert (far.to, far.folder, far.when.kind, far.keep.kind) == ("s3://bucket/exports", None, "always", "all")
    assert far.place().location == "s3://bucket/exports"


def test_what_was_loaded_loads_again(tmp_path: Path) -> None:
    config = load(written(tmp_path))
    assert StoreConfig.model_validate(config.model_dump(mode="json")) == config
    assert load(dump_with_secrets(config)) == config
    assert load(written(tmp_path, to_toml(config))) == config


def test_exports_may_be_given_in_python(tmp_path: Path) -> None:
    export = ExportConfig(name="hf", format="safetensors", to=str(tmp_path / "out"))
    given = load(
        {
            "tiers": {"disk": {"kind": "posix", "path": tmp_path / "disk"}},
            "exports": {"hf": {"format": "safetensors", "to": tmp_path / "out"}},
        }
    )
    assert given.exports == (export,)
    assert load(given.model_copy(update={"exports": (export,)})).exports == (export,)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "safetensor"}, "exports.hf.format: `safetensor` is not a format; did you mean `safetensors`?"),
        ({"format": "torch"}, "exports.hf.format: `torch` is not a format to export"),
        ({"cast": "bf16"}, "exports.hf.cast: is not for the format `npz`; leave it out"),
        ({"format": "safetensors", "cast": "fp8"}, "exports.hf: cast='fp8': should be one of bf16, fp16"),
        ({"format": "safetensors", "rename": {"a/*": "b.**"}}, "exports.hf: rename: 'b.**' should have the signs"),
        ({"to": "s3://bucket/x", "format": "npy"}, "exports.hf.to: is a URL, and `npy` is written by its library"),
        ({"to": "ftp://bucket/x"}, "exports.hf.to: 'ftp://…' is a URL of no kind of tier"),
        ({"to": "s3://a b/x"}, "exports.hf.to: should be a bucket"),
        ({"to": 3}, "exports.hf.to: should be a folder or a URL"),
        ({"when": {"kind": "last_n", "n": 1}}, "exports.hf.when.kind: `last_n` is not a kind of promotion"),
        ({"keep": 0}, "exports.hf.keep.n"),
        ({"part": "a", "keys": ["b"]}, "exports.hf.part: and `keys`: give one of them"),
        ({"whem": "always"}, "exports.hf.whem: `whem` is not a setting of an export; did you mean `when`?"),
        ({"retain": "all"}, "exports.hf.retain: `retain` is not a setting of an export; there are: cast, format, keep"),
        ({"to": "disk/out"}, "lie in each other"),
        ({"format": "safetensors", "to": "s3://bucket/run/out"}, "s3://bucket/run of the tier far lie in each other"),
        ({"to": "other"}, "is {folder}/other like that of the export hf"),
    ],
)
def test_what_cannot_work_is_refused_at_its_place(
    tmp_path: Path, change: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == {"format": "torch"}:
        need_modules("torch")
    monkeypatch.chdir(tmp_path)
    tables = {"hf": {"format": "npz", "to": "out"} | change, "other": {"format": "npz", "to": "other"}}
    with pytest.raises(Invalid) as refused:
        load({"tiers": {"disk": {"kind": "posix", "path": "disk"}, "far": FAR}, "exports": tables})
    assert told.format(folder=tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("exports", "told"),
    [
        ({"hf": 3}, r"exports\.hf: should be a table of settings, not 3"),
        (
            [{"name": "hf", "format": "npz", "to": f"/{to}"} for to in "ab"],
            r"exports\.hf: there are two exports of this",
        ),
    ],
)
def test_what_is_not_one_table_for_each_export_is_refused(exports: Any, told: str) -> None:
    with pytest.raises(Invalid, match=told):
        load({"tiers": {"far": FAR}, "exports": exports})


def test_a_wrong_line_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"ckpt\.toml:11: exports\.hf\.cast"):
        load(written(tmp_path, TABLE.replace('format = "safetensors"', 'format = "npz"')))
    with pytest.raises(Invalid, match=r"store\.exports: every export is a table of its own, \[exports\.NAME\]"):
        load({"store": {"exports": {}}, "tiers": {"disk": {"kind": "posix", "path": tmp_path}}})
