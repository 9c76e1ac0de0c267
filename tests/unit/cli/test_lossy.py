"""`restore` and `export` take lossy copies with `--lossy` alone, say so, and mix them with nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import run, told
from support.insight import flip_chunk
from support.scenes import folder, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import load, to_toml
from tieredckpt.errors import Corrupt
from tieredckpt.interchange import exporting, stored_step

WEIGHTS = [f"params/w{i}" for i in range(4)]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A store with step 1 as a lossy copy alone, and step 2 as it was saved as well, with a chunk that is damaged."""
    tiers = {
        "disk": folder(tmp_path / "disk", retain={"kind": "last_n", "n": 1}),
        "archive": folder(tmp_path / "archive", codec="small", lossy=[{"keys": ["params/**"], "max_error": "0.4%"}]),
    }
    path = tmp_path / "ckpt.toml"
    path.write_text(to_toml(load({"store": {"chunk_size": "16 KiB"}, "tiers": tiers})))
    with CheckpointStore.open(path).sync() as store:
        for step in (1, 2):
            store.save(step, tree(step))
            store.flush()
    return path


async def damage(config: Path) -> None:
    """Of step 2, one chunk of the last array is lost as it was saved."""
    async with CheckpointStore.open(config, read_only=True) as store:
        await flip_chunk(store, "disk", 2, WEIGHTS[-1], 1)


def is_rounded(array: np.ndarray[Any, Any]) -> bool:
    return not (array.view(np.uint32) & 0xFFFF).any()


VERBS = [("restore", "--to", "{}.npz"), ("export", "--to", "npz:{}.npz")]


@pytest.mark.parametrize("verb", VERBS, ids=["restore", "export"])
def test_a_lossy_copy_is_taken_where_it_is_asked_for_and_told(
    kept: Path, tmp_path: Path, verb: tuple[str, str, str]
) -> None:
    name, option, target = verb
    refused = run(name, kept, 1, option, target.format(tmp_path / "refused"))
    assert refused.exit_code == 1
    assert "lossy copy is on 'archive'" in refused.stderr
    assert "--lossy" in refused.stderr
    assert not (tmp_path / "refused.npz").exists()
    found = told(name, kept, 1, option, target.format(tmp_path / "one"), "--lossy")
    assert found["lossy"] is True
    assert set(found["sources"]) == {"archive"}
    with np.load(tmp_path / "one.npz") as archive:
        for key in WEIGHTS:
            saved = tree(1)["params"][key.removeprefix("params/")]
            assert is_rounded(archive[key])
            np.testing.assert_allclose(archive[key], saved, rtol=0.004)
        np.testing.assert_array_equal(archive["count"], tree(1)["count"])
    assert "lossy copy" in run(name, kept, 1, option, target.format(tmp_path / "shown"), "--lossy").stdout


@pytest.mark.parametrize("verb", VERBS, ids=["restore", "export"])
def test_a_step_as_it_was_saved_goes_before_its_lossy_copy(
    kept: Path, tmp_path: Path, verb: tuple[str, str, str]
) -> None:
    name, option, target = verb
    found = told(name, kept, option, target.format(tmp_path / "two"), "--lossy")
    assert (found["step"], found["lossy"]) == (2, False)
    with np.load(tmp_path / "two.npz") as archive:
        for key in WEIGHTS:
            np.testing.assert_array_equal(archive[key], tree(2)["params"][key.removeprefix("params/")])
    assert "lossy" not in run(name, kept, option, target.format(tmp_path / "shown"), "--lossy").stdout


@pytest.mark.parametrize("verb", VERBS, ids=["restore", "export"])
async def test_arrays_that_are_read_one_by_one_are_all_of_the_lossy_copy_if_one_is_lost(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, str, str]
) -> None:
    monkeypatch.setattr(stored_step, "_PART", 1)
    await damage(kept)
    name, option, target = verb
    refused = run(name, kept, 2, option, target.format(tmp_path / "refused"))
    assert refused.stderr.startswith("Corrupt: array 'params/w3'")
    assert "--lossy" in refused.stderr
    found = told(name, kept, 2, option, target.format(tmp_path / "two"), "--lossy")
    assert found["lossy"] is True
    with np.load(tmp_path / "two.npz") as archive:
        assert all(is_rounded(archive[key]) for key in WEIGHTS)


async def test_a_summary_is_of_one_content(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_step, "_PART", 1)
    await damage(kept)
    found = told("restore", kept, 2, "--lossy")
    assert found["lossy"] is True
    firsts = [each["first"] for each in found["arrays"] if each["key"] in WEIGHTS]
    assert len(firsts) == len(WEIGHTS)
    assert all(is_rounded(np.array(first, np.float32)) for first in firsts)


def test_what_an_export_did_not_write_well_is_not_written_from_another_copy(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []

    def compare(_: object, path: Path, *__: object) -> None:
        written.append(path)
        raise Corrupt("it did not come back as written")

    monkeypatch.setattr(exporting, "_compare", compare)
    result = run("export", kept, 2, "--to", f"npz:{tmp_path / 'out.npz'}", "--lossy")
    assert result.exit_code == 1
    assert "did not come back" in result.stderr
    assert len(written) == 1


def test_a_lossy_copy_is_promoted_by_hand(kept: Path) -> None:
    assert told("promote", kept, 2, "archive")["tier"] == "archive"


def test_each_save_of_a_step_that_only_a_lossy_tier_has_is_shown(kept: Path) -> None:
    with CheckpointStore.open(kept).sync() as store:
        store.save(2, tree(3), overwrite=True)
    shown = told("show", kept, 2, "--serial", 2)
    assert (shown["serial"], shown["tiers"], shown["lossy"]) == (2, [], ["archive"])
    assert told("show", kept, "--serial", 1)["step"] == 1
    assert run("show", kept, 2, "--serial", 1).exit_code == 1
