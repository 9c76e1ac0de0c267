"""A store with a lossy tier, for tests of derived steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.scenes import config, folder, ram
from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig

SEVEN_BITS = [{"keys": ["params/**"], "max_error": "0.4%"}]


def lossy_config(tmp_path: Path, shared_memory: Path, rules: Any = SEVEN_BITS, **more: Any) -> StoreConfig:
    """RAM, a disk that keeps the newest step as it was saved, and an archive that keeps five lossy ones."""
    disk = folder(tmp_path / "disk", retain={"kind": "last_n", "n": 1})
    archive = folder(tmp_path / "archive", lossy=rules, **({"codec": "small"} | more))
    return config({"ram": ram(shared_memory), "disk": disk, "archive": archive}, name="lossy")


def derived_in(tmp_path: Path) -> Path:
    return tmp_path / "archive" / "derived"


def close_to(found: Any, saved: Any, most: float = 2.0**-8) -> bool:
    wide, other = np.asarray(found, np.float64), np.asarray(saved, np.float64)
    return bool((np.abs(wide - other) <= most * np.abs(other)).all())


async def drop_from_ram(store: CheckpointStore) -> None:
    """Step 1 leaves RAM, whatever else has it."""
    engine = store._life.open_engine
    evicting = engine.collector.evictor.evict(engine.state.find(1), engine.state.tier("ram"), deleted=True)
    await store._life.loop.call(evicting)
