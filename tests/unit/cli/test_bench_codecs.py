"""`bench codecs` measures the codecs on a step of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import run, told
from support.scenes import config, folder

from tieredckpt import CheckpointStore
from tieredckpt.config import to_toml

TREE = {
    "params": {"w": np.random.default_rng(0).standard_normal(20_000).astype(np.float32)},
    "opt": {"m": np.zeros(9000, np.float32), "count": np.array(7)},
}
TWO_AXES = {
    "params": {"w": np.random.default_rng(0).standard_normal((1000, 100)).astype(np.float32)},
    "opt": {
        "m": np.random.default_rng(1).standard_normal(20_000).astype(np.float32),
        "v": np.zeros(9000, np.float32),
        "count": np.array(7),
    },
}


async def save(place: Path, tree: Any = TREE) -> None:
    async with CheckpointStore.open(config({"disk": folder(place)})) as store:
        await store.save(3, tree)


async def test_every_codec_is_measured_on_the_arrays_of_a_step(tmp_path: Path) -> None:
    await save(tmp_path / "disk")
    found = told("bench", "codecs", tmp_path / "disk", "--step", 3)
    assert found["step"] == 3
    shares = {(row["arrays"], row["codec"]): row["stored"] / row["nbytes"] for row in found["rows"]}
    assert shares.keys() == {
        (arrays, codec)
        for arrays in ("params float32", "opt float32", "opt int64", "all")
        for codec in ("none", "fast", "small")
    }
    assert 0.8 < shares["params float32", "small"] < 0.97
    assert shares["opt float32", "fast"] < 0.1
    assert shares["all", "small"] < shares["all", "none"]
    totals = [row for row in found["rows"] if row["arrays"] == "all"]
    assert all(row["nbytes"] == 80_000 + 36_000 + 8 for row in totals)
    assert all(row["encode_seconds"] >= 0 <= row["decode_seconds"] for row in found["rows"])
    some = told("bench", "codecs", tmp_path / "disk", "--keys", "opt/**")
    assert {row["arrays"] for row in some["rows"]} == {"opt float32", "opt int64", "all"}


async def test_people_get_a_table(tmp_path: Path) -> None:
    await save(tmp_path / "disk")
    shown = run("bench", "codecs", tmp_path / "disk").stdout
    assert "small" in shown
    assert "on devices below" in shown


async def test_the_largest_error_of_rounded_values_is_told(tmp_path: Path) -> None:
    await save(tmp_path / "disk", TWO_AXES)
    rows = told("bench", "codecs", tmp_path / "disk", "--max-error", "0.4%")["rows"]
    worst = {row["arrays"]: row["worst"] for row in rows}
    assert 0.0019 < worst["params float32"] <= 0.00390625
    assert worst["opt float32"] is None, "of one axis"
    assert worst["all"] == worst["params float32"]
    assert "error at most" in run("bench", "codecs", tmp_path / "disk", "--max-error", "0.4%").stdout
    assert all(row["worst"] is None for row in told("bench", "codecs", tmp_path / "disk")["rows"])


async def test_the_largest_error_of_each_lossy_rule_is_told(tmp_path: Path) -> None:
    rules = [
        {"keys": ["params/**"], "max_error": "6.25%"},
        {"keys": ["opt/m"], "max_abs_error": 0.01},
        {"keys": ["opt/v", "nothing"], "drop": True},
    ]
    tiers = {"disk": folder(tmp_path / "disk"), "far": folder(tmp_path / "far", codec="small", lossy=rules)}
    path = tmp_path / "ckpt.toml"
    path.write_text(to_toml(config(tiers)))
    async with CheckpointStore.open(path) as store:
        await store.save(3, TWO_AXES)
        await store.flush()
        derived = (await store.describe(3)).derived["far"].arrays
    found = told("bench", "codecs", path)["rules"]
    assert [row["says"] for row in found] == ["max_error=0.0625", "max_abs_error=0.01", "drop", "exact"]
    assert [row["arrays"] for row in found] == [1, 1, 1, 1]
    assert found[0]["worst"] == derived["params/w"].worst
    assert found[1]["worst"] == derived["opt/m"].worst, "named by its whole key"
    assert found[2]["stored"] == 0
    assert found[2]["worst"] is found[3]["worst"] is None
    assert found[0]["stored"] < 0.3 * found[0]["nbytes"] == 0.3 * 400_000
    assert "lossy rules of tiers" in run("bench", "codecs", path).stdout


@pytest.mark.parametrize("more", [(), ("--max-error", "0.4%")], ids=["exact", "lossy"])
async def test_the_time_until_a_step_is_durable_is_measured_through_the_promotion(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    await save(tmp_path / "disk", TWO_AXES)
    (tmp_path / "device").mkdir()
    asked = ("bench", "codecs", tmp_path / "disk", "--folder", tmp_path / "device", *more)
    found = {row["codec"]: row for row in told(*asked, "--bandwidth", "1MB/s")["durable"]}
    assert found.keys() == {"none", "fast", "small"}
    for row in found.values():
        assert row["nbytes"] == 400_000 + 80_000 + 36_000 + 8
        assert row["seconds"] > 0.5 * row["written"] / 1e6, "the device is slowed down"
    assert found["small"]["written"] < (0.6 if more else 0.95) * found["none"]["written"]
    assert found["small"]["seconds"] < found["none"]["seconds"]
    assert not list((tmp_path / "device").iterdir())
    shown = run(*asked)
    assert "durable" in shown.stdout
    assert "configuration:" not in shown.output


async def test_a_part_of_each_array_is_promoted_where_less_is_asked_for(tmp_path: Path) -> None:
    await save(tmp_path / "disk", TWO_AXES)
    found = told("bench", "codecs", tmp_path / "disk", "--folder", tmp_path, "--size", "200 KB")["durable"]
    assert all(170_000 < row["nbytes"] < 230_000 for row in found)


def test_a_bandwidth_of_no_device_is_refused(tmp_path: Path) -> None:
    assert "--folder" in str(run("bench", "codecs", tmp_path, "--bandwidth", "1GB/s").output)


def test_a_largest_error_that_is_no_share_is_refused(tmp_path: Path) -> None:
    refused = run("bench", "codecs", tmp_path, "--max-error", "foo")
    assert (refused.exit_code, "max_error: should be a share" in refused.output) == (1, True)
