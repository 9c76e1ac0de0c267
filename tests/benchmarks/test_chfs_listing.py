"""What a reader waits for beside many steps on CHFS, whose folders it lists at its opening and at every restore.

``CHFS_SERVER=… python -m pytest -m "benchmark and chfs_real" -s tests/benchmarks/test_chfs_listing.py`` prints the
figures, over servers of its own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chfs_servers import Servers, serving
from support.scenes import assert_restored, config, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]

_RESTORES = 9
REAL = pytest.mark.chfs_real


@pytest.fixture
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    with serving(request.param, tmp_path / "servers") as servers:
        yield servers


@pytest.mark.parametrize(
    ("servers", "steps"),
    [("lookalike", 60), pytest.param("real", 60, marks=REAL), pytest.param("real", 300, marks=REAL)],
    indirect=["servers"],
)
async def test_a_restore_asks_once_for_each_folder_of_a_step(
    servers: Servers, steps: int, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pmem = servers.defaults | {"servers": 3, "retain": {"kind": "all"}}
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "pmem": pmem}, name="test")) as store:
        for step in range(1, steps + 1):
            await (await store.save(step, tree(step))).reached("pmem")
    asked = Counter[str]()
    ask = Link.ask

    async def counted(link: Link, command: frames.Command, **more: Any) -> Any:
        asked[type(command).__name__] += 1
        return await ask(link, command, **more)

    monkeypatch.setattr(Link, "ask", counted)
    begin = time.monotonic()
    async with CheckpointStore.open(config({"pmem": pmem}, name="test"), read_only=True) as reader:
        sys.stdout.write(f"\n{steps} steps: opened in {time.monotonic() - begin:.2f} s, with {dict(asked)}\n")
        seconds = []
        for _ in range(_RESTORES):
            asked.clear()
            begin = time.monotonic()
            assert_restored(await reader.restore(), tree(steps))
            seconds.append(time.monotonic() - begin)
        least, most = min(seconds), max(seconds)
        median = statistics.median(seconds)
        sys.stdout.write(f"restored in {median:.2f} s ({least:.2f} to {most:.2f}), the last with {dict(asked)}\n")
    assert (asked["ListFolder"], asked["Stat"]) == (1 + steps, 0)
