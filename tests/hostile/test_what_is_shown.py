"""What a made-up store says of itself reaches no terminal as it is, and no program as what it cannot parse."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reliability.forging import BTREE, ESCAPES, as_json, forged_record, marker_json, sample_arrays, tree_of
from support.command_line import run
from typer.testing import Result

from tieredckpt import CheckpointStore
from tieredckpt.cli.console import jsonable
from tieredckpt.config import load, to_toml
from tieredckpt.engine.tier import lease
from tieredckpt.errors import Invalid
from tieredckpt.format import layout
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.keys import child_key
from tieredckpt.format.manifest import encode_step
from tieredckpt.format.structure import ArrayNode, DictNode, IntNode, Node, StrNode

FORBIDDEN = set(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x200B])) - {"\n"}


def assert_harmless(result: Result) -> None:
    """No character that a terminal obeys, and no defect: an error is told in a line of its own."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not FORBIDDEN & set(result.output), result.output


def talkative(root: Path) -> None:
    """A store whose step has terminal escapes in every text that a step has."""
    arrays = sample_arrays()
    key = child_key("", f"w{ESCAPES}\0")
    arrays[key] = arrays.pop("small")
    tree = tree_of({name: array for name, array in arrays.items() if name != key})
    assert isinstance(tree, DictNode)
    names = [*tree.keys, f"w{ESCAPES}\0", ESCAPES, "huge"]
    children: list[Node] = [*tree.children, ArrayNode(key, "float32", (4,), "numpy"), StrNode(ESCAPES)]
    children.append(IntNode("0x" + "f" * 20_000))
    record = forged_record(
        DictNode(names, children),
        metrics={ESCAPES: 1.0, "loss": ESCAPES},
        provenance={ESCAPES: ESCAPES, "host": ESCAPES},
        policy={ESCAPES: {"kind": ESCAPES, ESCAPES: [ESCAPES]}, "tiers": [{"name": ESCAPES, "kind": ESCAPES}, ESCAPES]},
    )
    files = encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C)
    for name, data in {
        layout.MARKER: as_json(marker_json()),
        BTREE: files.btree,
        record.id.manifest_key: files.manifest,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    talkative(tmp_path / "disk")
    path = tmp_path / "ckpt.toml"
    tiers = {"disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False}}
    path.write_text(to_toml(load({"tiers": tiers})))
    return path


VERBS = [
    ("ls",),
    ("show",),
    ("verify",),
    ("verify", "--repair"),
    ("restore",),
    ("restore", "--keys", "w*"),
    ("restore", "--keys", "when"),
    ("restore", "--keys", ESCAPES),
    ("collect",),
    ("evict", "20", "disk"),
    ("promote", "20", ESCAPES),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_terminal_escape_of_a_step_reaches_the_terminal(config: Path, verb: tuple[str, ...]) -> None:
    assert_harmless(run("--verbose", verb[0], config, *verb[1:]))


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb[0] in ("ls", "show", "verify")], ids=" ".join)
def test_what_programs_read_is_json_whatever_a_step_says(config: Path, verb: tuple[str, ...]) -> None:
    result = run("--verbose", verb[0], config, *verb[1:], "--json")
    assert_harmless(result)
    assert json.loads(result.stdout)


def test_no_terminal_escape_of_a_lease_reaches_the_terminal(config: Path, tmp_path: Path) -> None:
    another = os.getppid()  # which lives as long as this test does
    started = lease._started(another) or ""
    holder = msgspec.structs.replace(lease._this_process(1.7e9), host=ESCAPES, process=another, process_started=started)
    (tmp_path / "disk" / "leases").mkdir()
    (tmp_path / "disk" / "leases" / "0000000000000000").write_bytes(msgspec.json.encode(holder))
    result = run("--verbose", "collect", config)
    assert "is being written to by process" in result.output
    assert_harmless(result)


def test_no_terminal_escape_of_what_differs_reaches_the_terminal(config: Path) -> None:
    with CheckpointStore.open(config).sync() as store:
        store.restore(keys=["scalar"])
        store.save(40, {"huge": 1, ESCAPES: [ESCAPES]})
    for steps in ((20, 40), (40, 20)):
        result = run("--verbose", "diff", config, *steps)
        assert "only in OTHER" in result.output
        assert_harmless(result)
        told = run("--verbose", "diff", config, *steps, "--json")
        assert_harmless(told)
        assert json.loads(told.stdout)["differences"]
    assert_harmless(run("--verbose", "diff", config, 20, 40, "--keys", ESCAPES + "*x"))


def test_arrays_are_extracted_into_their_folder_whatever_their_keys_are(config: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {name: np.arange(3) for name in ("../../escape", "/abs", "a\nb", ".", "..", "~", "con\0")}
    with CheckpointStore.open(config).sync() as store:
        store.restore(keys=["scalar"])
        store.save(40, names)
    out = tmp_path / "out"
    for to in (out / "folder", out / "archive.npz"):
        assert_harmless(run("--verbose", "restore", config, "40", "--to", to))
    assert {path.name for path in out.iterdir()} == {"folder", "archive.npz"}
    assert sum(path.suffix == ".npy" for path in (out / "folder").iterdir()) == len(names)
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "ckpt.toml", "out"}


@given(exponent=st.integers(0, 5000), sign=st.sampled_from((1, -1)))
def test_an_integer_of_any_size_is_told_to_programs(exponent: int, sign: int) -> None:
    value = sign * 10**exponent
    told = json.loads(json.dumps(jsonable({"n": [value]})))["n"][0]
    assert (told if isinstance(told, int) else int(told, 16)) == value


@settings(max_examples=20)
@given(depth=st.integers(1, 3000))
def test_a_configuration_of_any_depth_is_read_or_refused(depth: int) -> None:
    promote: Any = "always"
    for _ in range(depth):
        promote = {"kind": "any_of", "policies": [promote]}
    tiers = {"ram": {"kind": "ram"}, "disk": {"kind": "posix", "path": "/checkpoints", "promote": promote}}
    try:
        load({"tiers": tiers})
    except Invalid:
        assert depth > 10


def test_a_configuration_file_a_thousand_levels_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(Invalid, match="is not a TOML file"):
        load(path)


@pytest.mark.parametrize("place", [("\ud800",), ("store", "\ud800"), ("tiers", "\ud800"), ("tiers", "disk", "\ud800")])
def test_a_setting_whose_name_is_no_text_is_refused_in_words_that_are(place: tuple[str, ...]) -> None:
    data: dict[str, Any] = {"store": {}, "tiers": {"disk": {"kind": "posix", "path": "/checkpoints"}}}
    table = data
    for part in place[:-1]:
        table = table[part]
    table[place[-1]] = 1
    with pytest.raises(Invalid) as refused:
        load(data)
    assert str(refused.value).encode()
