"""What compression brings: the figures of `docs/explanation/encodings.md`, on states that were really trained."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scenes import assert_same

from tieredckpt import CheckpointStore
from tieredckpt.bench.codecs import CodecRow, measure_codecs
from tieredckpt.tree.flatten import flatten

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


def stand_in(size: int = 1 << 18) -> dict[str, Any]:
    """Values distributed as those of a trained state."""
    rng = np.random.default_rng(0)
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
def test_states_that_were_trained_are_stored_in_four_fifths() -> None:
    pytest.importorskip("torch")
    from support.trained_states import gpt_state, lora_state

    gpt, lora = shares(gpt_state()), shares(lora_state())
    assert gpt["all", "small"] < 0.83, gpt
    assert gpt["params", "small"] < 0.72, gpt
    assert lora["all", "small"] < 0.87, lora


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_slow_device_takes_compressed_steps_sooner(shared_memory: Path, tmp_path: Path) -> None:
    """At 0.25 GB/s, of which compressing on one thread takes nothing."""
    state = {f"part{i}": stand_in(1 << 22) for i in range(4)}
    seconds = {}
    for codec in ("none", "small"):
        tiers = {
            "ram": {"kind": "ram", "path": shared_memory, "capacity": "600 MiB", "on_close": "release"},
            "disk": {
                "kind": "posix",
                "path": tmp_path / codec,
                "rate_limit": "250 MB/s",
                "fsync": False,
                "codec": codec,
                "retain": "all",
            },
        }
        async with CheckpointStore.open({"store": {"name": codec}, "tiers": tiers}) as store:
            begin = time.monotonic()
            await (await store.save(1, state)).reached("disk")
            seconds[codec] = time.monotonic() - begin
            await store.evict(1, "ram")
            restored = await store.restore()
            assert restored is not None
            assert_same(restored.tree, state)
    assert seconds["none"] > 1.15 * seconds["small"], seconds
