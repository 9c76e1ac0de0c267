"""Lets each call of the system fail below a tier, one at a time, and holds the store to what it said meanwhile.

The n-th such call fails, for several n, while steps are promoted, evicted and collected. Afterwards the tier must come
back by itself, get what it missed, and every step must be restored as it was saved.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.file_systems import played

from reliability.doomed import is_state, state
from reliability.system import CALLS, SystemFaults, failing_calls
from reliability.tiers import tried_again_soon
from tieredckpt.config import StoreConfig, load
from tieredckpt.errors import TieredCkptError
from tieredckpt.store import CheckpointStore

__all__ = ["ERRORS", "fail_each_call"]

ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES)
"""What a disk, a quota and an administrator do."""

_PATIENCE = 60.0
"""Seconds after which a tier that works again counts as given up."""


async def fail_each_call(place: Path, failures: Sequence[tuple[int, int]], kind: str = "posix") -> Counter[str]:
    """Make every call of `CALLS` fail; returns how often each did.

    Args:
        place: an empty folder for the tiers, in memory; it is empty afterwards.
        failures: of each call, which one is to fail, counted from 1 on, and with what error of `errno`.
        kind: of the slower tier.

    Raises:
        AssertionError: a step was lost, or the tier did not come back.
    """
    struck: Counter[str] = Counter()
    with tried_again_soon(), played():
        for call in CALLS:
            for nth, number in failures:
                with failing_calls(place / "disk") as system:
                    try:
                        await _fail_once(system, _config(place, kind), call, number, nth)
                    except (AssertionError, TieredCkptError, TimeoutError) as error:
                        error.add_note(f"the {nth}. {call} had failed with {errno.errorcode[number]}")
                        raise
                    finally:
                        for folder in ("ram", "disk"):
                            await asyncio.to_thread(shutil.rmtree, place / folder, ignore_errors=True)
                struck[call] += system.struck
    return +struck


def _config(place: Path, kind: str) -> StoreConfig:
    slower: dict[str, Any] = {"kind": kind, "path": place / "disk", "retries": 0, "direct": False}
    nearest = {"kind": "ram", "path": place / "ram", "capacity": "1 MiB"}
    tiers = {"ram": nearest, "disk": slower | {"retain": {"kind": "last_n", "n": 2}}}
    return load({"store": {"chunk_size": 4096}, "tiers": tiers})


async def _fail_once(system: SystemFaults, config: StoreConfig, call: str, number: int, nth: int) -> None:
    async with CheckpointStore.open(config, ranks=None) as store:
        for step in (1, 2):
            await (await store.save(step, state(step))).reached("disk")
        system.fail(call, number, nth=nth)
        for step in (3, 4):
            assert not (await store.save(step, state(step))).skipped
            with suppress(TieredCkptError):
                await store.flush()
        with suppress(TieredCkptError):
            await store.collect()
        system.clear()
        async with asyncio.timeout(_PATIENCE):
            await _works_again(store)
        assert await store.where(4) == ("ram", "disk")
        for info in await store.steps():
            assert not any(found.problem for found in await store.verify(info.step))
            restored = await store.restore(info.step, resume=False)
            assert restored is not None
            assert is_state(restored.tree, info.step)


async def _works_again(store: CheckpointStore) -> None:
    """Wait until the disk is healthy and has what is due there."""
    while True:
        try:
            await store.flush()
        except TieredCkptError:
            await asyncio.sleep(0.01)  # it is tried again in hundredths of a second; patience has an end
            continue
        if store._life.engine.state.tier("disk").healthy:
            return
        await asyncio.sleep(0.01)
