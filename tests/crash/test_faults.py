"""Whatever call of the system fails below a tier, and however it comes and goes: no step is lost, training goes on."""

from __future__ import annotations

import errno
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from reliability.sweep import ERRORS, fail_each_call
from reliability.system import failing_calls
from reliability.tiers import FaultyTiers
from support.agents import eventually
from support.file_systems import FILE_SYSTEMS
from support.scenes import CHUNK, Heard, assert_restored, config, files_below, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import NoSpace, TieredCkptError, TierUnavailable
from tieredckpt.events import TierFailed, TierRecovered


def two_tiers(shared_memory: Path, disk: Path, **settings: Any) -> StoreConfig:
    slower = folder(disk, fsync=True, **({"retain": {"kind": "last_n", "n": 2}} | settings))
    return config({"ram": ram(shared_memory), "disk": slower})


async def assert_all_intact(store: CheckpointStore) -> None:
    """On each tier that lists it; what was half deleted is listed there no more."""
    for info in await store.steps():
        for found in await store.verify(info.step):
            assert not found.problem or found.tier not in info.tiers
        assert_restored(await store.restore(info.step, resume=False), tree(info.step))


# -- calls of the system ----------------------------------------------------------------------------------


TIMES = {"posix": (1, 2, 4, 9), "nfs": (1, 4), "lustre": (2, 9)}
"""Which of each call fails, by kind; ``pytest -m slow`` has the first 15 with each error."""


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
async def test_a_call_of_the_system_that_fails_costs_no_step(shared_memory: Path, kind: str) -> None:
    """Each call fails at its n-th time, for several n, while steps are promoted, evicted and collected."""
    failures = [(nth, ERRORS[i % len(ERRORS)]) for i, nth in enumerate(TIMES[kind])]
    struck = await fail_each_call(shared_memory, failures, kind)
    assert struck.keys() >= {"open", "replace", "unlink", "mkdir", "fsync", "stat"}, struck
    assert list(shared_memory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
async def test_whatever_error_a_call_of_the_system_gives_it_costs_no_step(shared_memory: Path, kind: str) -> None:
    assert await fail_each_call(shared_memory, [(nth, number) for nth in range(1, 16) for number in ERRORS], kind)


async def test_a_file_that_was_not_synced_is_written_again_as_a_whole(shared_memory: Path, faults: FaultyTiers) -> None:
    """After a sync that failed, the kernel may have thrown the pages away: nothing of that file is believed."""
    disk = shared_memory / "disk"
    with failing_calls(disk) as system:
        async with CheckpointStore.open(two_tiers(shared_memory, disk)) as store:
            left: list[list[Path]] = []
            # In the thread of the engine, which tries it again soon; before anybody else hears of it.
            store.subscribe(lambda event: left.append(packs_of(disk)) if isinstance(event, TierFailed) else None)
            heard = Heard(store)
            system.fail("fsync", errno.EIO, path="*/packs/*.tmp~")
            await store.save(1, tree(1))
            assert isinstance((await heard.first(TierFailed)).error, TierUnavailable)
            assert left == [[]]
            await heard.first(TierRecovered)
            await store.flush()
            assert len(packs_of(disk)) == 1
            await assert_all_intact(store)


def packs_of(disk: Path) -> list[Path]:
    """The packs of a tier, those included that have no name of their own yet."""
    return [path for path in files_below(disk) if path.name.endswith((".pack", "~"))]


async def test_a_tier_that_comes_and_goes_has_everything_in_the_end(shared_memory: Path, faults: FaultyTiers) -> None:
    settings = two_tiers(shared_memory, shared_memory / "disk", retain="all")
    async with CheckpointStore.open(settings) as store:
        faults["disk"].come_and_go(up=7, down=3)
        for step in range(1, 9):
            assert not (await store.save(step, tree(step))).skipped
            with suppress(TieredCkptError):
                await store.flush()
        faults["disk"].clear()
        while any("disk" not in info.tiers for info in await store.steps()):
            with suppress(TieredCkptError):
                await store.flush()
        assert len(await store.steps()) == 8
        await assert_all_intact(store)


# -- real file systems ------------------------------------------------------------------------------------


async def test_a_file_system_that_is_full_keeps_what_it_has_and_takes_more_when_there_is_room(
    shared_memory: Path, tiny_file_system: Path, faults: FaultyTiers
) -> None:
    ballast = tiny_file_system / "ballast"
    ballast.write_bytes(bytes(8 * CHUNK))  # there is room for one step
    settings = two_tiers(shared_memory, tiny_file_system / "disk", retain="all")
    small = {"arrays": 1, "nbytes": 2 * CHUNK}
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        step = 0
        while not heard.of(TierFailed):
            step += 1
            assert not (await store.save(step, tree(step, **small))).skipped
            with suppress(NoSpace):
                await store.flush()
            assert step < 20
        assert isinstance(heard.of(TierFailed)[0].error, NoSpace)
        for info in await store.steps():
            assert not any(found.problem for found in await store.verify(info.step))
        eventually(
            lambda: not any(path.name.endswith("~") for path in files_below(tiny_file_system / "disk")),
            "nothing of the puts that failed takes room",
        )
        ballast.unlink()
        await heard.first(TierRecovered)
        await store.flush()
        assert await store.where(step) == ("ram", "disk")
        assert not any(found.problem for found in await store.verify(step))


async def test_a_file_system_that_turns_read_only_still_restores_and_catches_up_later(
    shared_memory: Path, tiny_file_system: Path, faults: FaultyTiers
) -> None:
    small = {"arrays": 1, "nbytes": 2 * CHUNK}
    async with CheckpointStore.open(two_tiers(shared_memory, tiny_file_system / "disk", retain="all")) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1, **small))).reached("disk")
        remount(tiny_file_system, "ro")
        with pytest.raises(TierUnavailable, match=r"'disk'.*[Rr]ead-only"):
            await (await store.save(2, tree(2, **small))).reached("disk")
        (found,) = await store.verify(1, "disk")
        assert not found.problem
        await store.evict(1, "ram")
        restored = await store.restore(1, resume=False)
        assert restored is not None
        assert set(restored.sources) == {"disk"}
        remount(tiny_file_system, "rw")
        await heard.first(TierRecovered)
        await store.flush()
        assert await store.where(2) == ("ram", "disk")


def remount(place: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(place)], check=True)
