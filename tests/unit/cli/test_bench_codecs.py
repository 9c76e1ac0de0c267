"""`bench codecs` measures the codecs on a step of a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.scenes import config, folder
from typer.testing import Result

from tieredckpt import CheckpointStore

TREE = {
    "params": {"w": np.random.default_rng(0).standard_normal(20_000).astype(np.float32)},
    "opt": {"m": np.zeros(9000, np.float32), "count": np.array(7)},
}


async def save(place: Path) -> None:
    async with CheckpointStore.open(config({"disk": folder(place)})) as store:
        await store.save(3, TREE)


async def test_every_codec_is_measured_on_the_arrays_of_a_step(told: Callable[..., Any], tmp_path: Path) -> None:
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


async def test_people_get_a_table(run: Callable[..., Result], tmp_path: Path) -> None:
    await save(tmp_path / "disk")
    shown = run("bench", "codecs", tmp_path / "disk").stdout
    assert "small" in shown
    assert "on devices below" in shown
