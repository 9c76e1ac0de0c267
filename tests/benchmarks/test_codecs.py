"""What compression brings, on states that were really trained; `docs/explanation/encodings.md` has the figures."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tieredckpt import CheckpointStore
from tieredckpt.bench.codecs import CodecRow, measure_codecs
from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.config import TierConfig
from tieredckpt.testing.tiers import Opening, tiers_opened_by
from tieredckpt.tree.flatten import flatten

T = TypeVar("T")

MIB = 1 << 20


def shares(state: dict[str, Any]) -> dict[tuple[str, str], float]:
    def array(leaf: Any) -> np.ndarray[Any, Any]:
        source = leaf.source
        if hasattr(source, "numpy"):  # NumPy has no bfloat16; of 16 bits the items are two bytes either way
            source = (source if source.element_size() == 4 else source.view(__import__("torch").uint16)).numpy()
        return np.asarray(source)

    leaves = flatten(state).arrays
    rows: list[CodecRow] = measure_codecs(((leaf.key, array(leaf)) for leaf in leaves), 16 * MIB)
    return {(row.arrays.partition(" ")[0], row.codec): row.stored / row.nbytes for row in rows}


def stand_in(size: int = 1 << 18, seed: int = 0) -> dict[str, Any]:
    """Values distributed as those of a trained state."""
    rng = np.random.default_rng(seed)
    master = (rng.standard_normal(size) * 0.02).astype(np.float32)
    mu = (rng.standard_normal(size) * np.exp(rng.standard_normal(size)) * 1e-4).astype(np.float32)
    return {
        "params": (master.view(np.uint32) >> 16).astype(np.uint16),
        "master": master,
        "mu": mu,
        "nu": np.square(mu),
    }


def test_a_state_in_mixed_precision_is_stored_in_less_than_nine_tenths() -> None:
    found = shares(stand_in())
    assert found["all", "small"] < 0.86
    assert found["all", "small"] < found["all", "fast"] < 0.9
    assert found["params", "small"] < 0.75


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_states_that_were_trained_are_stored_in_less() -> None:
    pytest.importorskip("torch")
    from support.trained_states import gpt_state, lora_state

    gpt, lora = shares(gpt_state()), shares(lora_state())
    assert gpt["all", "small"] <= 0.81, gpt
    assert gpt["params", "small"] < 0.72, gpt
    assert max(lora["all", "fast"], lora["all", "small"]) < 0.9, lora  # of some KB each


class _Device(Forward):
    """A store that takes 0.25 GB/s."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self._alone = asyncio.Lock()

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        if operation.verb != "put":
            return await call()
        async with self._alone:
            ends = time.monotonic() + operation.nbytes / 250e6
            result = await call()
            await asyncio.sleep(ends - time.monotonic())
        return result


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_slow_device_takes_compressed_steps_sooner(shared_memory: Path, tmp_path: Path) -> None:
    """The least of three runs each, of the second step: the first one waits for memory that is new.

    No trainer is on the cores, so two threads compress. Whoever else uses the processor delays them.
    """
    if os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        pytest.skip("this machine has no two idle cores")
    first, second = ({f"part{i}": stand_in(1 << 22, seed + i) for i in range(8)} for seed in (0, 8))
    seconds: dict[str, list[float]] = {"none": [], "small": []}

    async def opened(tier: TierConfig, opening: Opening) -> BlobStore:
        return _Device(await opening())

    for run in range(3):
        for codec, found in seconds.items():
            tiers = {
                "ram": {"kind": "ram", "path": shared_memory / "ram", "capacity": "1200 MiB", "on_close": "release"},
                "disk": {
                    "kind": "posix",
                    "path": tmp_path / f"{codec}{run}",
                    "fsync": False,
                    "codec": codec,
                    "codec_threads": 2,
                },
            }
            with tiers_opened_by(opened):
                async with CheckpointStore.open({"store": {"name": codec}, "tiers": tiers}) as store:
                    await (await store.save(1, first)).reached("disk")
                    checkpoint = await store.save(2, second)
                    begin = time.monotonic()
                    await checkpoint.reached("disk")
                    found.append(time.monotonic() - begin)
            shutil.rmtree(tmp_path / f"{codec}{run}")
    ratio = min(seconds["none"]) / min(seconds["small"])
    print(f"\na promotion at 0.25 GB/s takes {ratio:.3f} times as long uncompressed: {seconds}")  # noqa: T201
    assert ratio > 1.15, seconds
