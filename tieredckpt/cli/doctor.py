"""The verb `doctor`: what this machine offers, and whether every tier of a configuration does what it should."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated

import typer

from tieredckpt import __version__
from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.checkup import Check, Facts, check_up, within
from tieredckpt.blobs.chfs.choice import choose_path
from tieredckpt.blobs.memory import memory_limit
from tieredckpt.blobs.ram_folder import shared_memory_root
from tieredckpt.cli import amounts
from tieredckpt.cli.aside import run_aside
from tieredckpt.cli.console import output, print_json, print_table, waiting
from tieredckpt.cli.opening import Json
from tieredckpt.cli.ram import folders, found_ram
from tieredckpt.config import ChfsTier, RamTier, TierConfig, load
from tieredckpt.engine.connect import open_slower
from tieredckpt.errors import TieredCkptError
from tieredckpt.format import crc
from tieredckpt.units import format_size

__all__ = ["doctor"]

_AFTER_ITS_OWN = 5.0
"""Seconds that a tier has to say by itself that it does not answer, and to be closed."""


def doctor(
    store: Annotated[
        str | None,
        typer.Argument(
            metavar="[STORE]", help="A configuration (.toml), or the folder of a store.", show_default=False
        ),
    ] = None,
    size: Annotated[str, typer.Option(help="Bytes of the large object that is written and read.")] = "64 MiB",
    tier: Annotated[str | None, typer.Option(help="Only this tier.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Check this machine, and try every tier: write, read, list and delete. Leaves no object behind on them.

    May run beside a trainer. Exits with 1 when something is wrong. A tier that does not answer takes its `deadline`.
    """
    nbytes = amounts.size("--size", size)
    if nbytes < 3:
        raise typer.BadParameter("should be 3 bytes or more", param_hint="--size")
    config = None if store is None else load(store)
    chosen = [] if config is None else [each for each in config.located if tier in (None, each.name)]
    if config is not None and not chosen:
        names = ", ".join(each.name for each in config.tiers)
        raise typer.BadParameter(f"there is no tier {tier!r}; there are {names}", param_hint="--tier")
    machine = _machine()
    tried = {}
    for each in chosen:
        with waiting(f"trying tier {each.name}"):
            tried[each.name] = run_aside(_collect(each, nbytes))
    if as_json:
        print_json(
            {
                "machine": [asdict(check) for check in machine],
                "tiers": {name: [asdict(check) for check in checks] for name, checks in tried.items()},
            }
        )
    else:
        _show("this machine", machine)
        for name, checks in tried.items():
            _show(f"tier {name}", checks)
    wrong = [check for checks in (machine, *tried.values()) for check in checks if not check.ok]
    if wrong:
        raise typer.Exit(1)
    if not as_json:
        output().print("all is well")


def _machine() -> list[Check]:
    limit, source = memory_limit()
    found = [
        Check("tieredckpt", True, f"{__version__}, Python {platform.python_version()}, {platform.platform()}"),
        Check("tensorstore", True, importlib.metadata.version("tensorstore")),
        Check(
            "native code",
            True,
            "built"
            if crc.NATIVE
            else "not built: the same results, with more time under the GIL; "
            "install a C++17 compiler and reinstall to have it",
        ),
        Check("cores", True, str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())),
        Check("memory", True, f"{format_size(limit)}, by {source}"),
    ]
    root = shared_memory_root()
    if root.parent.is_dir():
        usage = shutil.disk_usage(root.parent)
        found.append(
            Check(
                "shared memory", True, f"{format_size(usage.free)} free of {format_size(usage.total)} in {root.parent}"
            )
        )
    found += (
        Check("RAM", True, f"{format_size(sum(each.nbytes for each in group))} of store {store}: {folders(group)}")
        for store, group in found_ram(None).items()
    )
    return found


async def _collect(tier: TierConfig, nbytes: int) -> list[Check]:
    return [check async for check in (_ram(tier) if isinstance(tier, RamTier) else _slower(tier, nbytes))]


async def _ram(tier: RamTier) -> AsyncIterator[Check]:
    """The RAM tier belongs to its trainer, so it is only asked whether it would fit."""
    limit, source = memory_limit()
    if isinstance(tier.capacity, int):
        yield Check(
            "capacity", tier.capacity <= limit, f"{format_size(tier.capacity)} of {format_size(limit)}, by {source}"
        )
    folder = (tier.path or shared_memory_root()).parent
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    wanted = tier.capacity if isinstance(tier.capacity, int) else 0
    detail = f"{format_size(usage.free)} free of {format_size(usage.total)} in {folder}"
    if usage.total < wanted:
        detail += "; the slab would be a memfd, whose steps end with the process"
    yield Check("shared memory", True, detail)


async def _slower(tier: TierConfig, nbytes: int) -> AsyncIterator[Check]:
    if isinstance(tier, ChfsTier):
        try:
            way, why = choose_path(tier)
        except TieredCkptError as error:
            yield Check("way", False, f"{type(error).__name__}: {error}")
            return
        yield Check("way", True, f"{way}: {why}")
    opened: list[BlobStore] = []

    async def opening() -> str:
        opened.append(await open_slower(tier))
        return opened[0].location

    own = max(tier.deadline, tier.rpc_timeout if isinstance(tier, ChfsTier) else 0)
    yield (check := await within("open", opening(), own + _AFTER_ITS_OWN))
    if not check.ok:
        return
    store = opened[0]
    try:
        if isinstance(store, Facts):
            for name, told in store.facts().items():
                yield Check(name, True, told)
        yield Check("survives", store.traits.survives > Survives.NOTHING, _survives(store.traits.survives))
        async for check in check_up(store, nbytes, deadline=tier.deadline, min_bandwidth=tier.min_bandwidth):
            yield check
    finally:
        closed = await within("close", _close(store), _AFTER_ITS_OWN)
    if not closed.ok:
        yield closed


async def _close(store: BlobStore) -> str:
    await store.close()
    return ""


def _survives(survives: Survives) -> str:
    return {
        Survives.NOTHING: "nothing: what is there ends with this process",
        Survives.PROCESS: "the end of the training process, not the loss of a node",
        Survives.NODE: "the loss of this node's memory, not of the medium",
        Survives.SITE: "the loss of this node",
    }[survives]


def _show(title: str, checks: list[Check]) -> None:
    rows = [("ok" if check.ok else "WRONG", check.name, check.detail) for check in checks]
    print_table(title, ("", "", ""), rows)
