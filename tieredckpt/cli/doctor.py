"""The verb `doctor`: checks this machine, and whether every tier of a configuration works."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict
from typing import Annotated

import typer

from tieredckpt import __version__
from tieredckpt.blobs.checkup import Check
from tieredckpt.blobs.memory import memory_limit
from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.blobs.tier_checkup import check_tier
from tieredckpt.cli import amounts
from tieredckpt.cli.aside import run_aside
from tieredckpt.cli.console import output, print_json, print_table, waiting
from tieredckpt.cli.opening import Json, MaybeStore
from tieredckpt.cli.ram import folders, found_ram
from tieredckpt.config import TierConfig, load
from tieredckpt.devices.examine import facts as devices
from tieredckpt.format import crc
from tieredckpt.units import format_size

__all__ = ["doctor"]


def doctor(
    store: MaybeStore = None,
    size: Annotated[str, typer.Option(help="Bytes of the large object that is written and read.")] = "64 MiB",
    tier: Annotated[str | None, typer.Option(help="Only this tier, and no export.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Check this machine, and try every tier, and every place of exports: write, read, list and delete. Leaves no
    object or folder behind, but in a bucket what it found of the server, for later openings
    (`tieredckpt-endpoint.json`).

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
    exports = {}
    for export in () if config is None or tier is not None else config.exports:
        with waiting(f"trying the place of export {export.name}"):
            exports[export.name] = run_aside(_collect(export.place(), nbytes))
    if as_json:
        print_json(
            {
                "machine": [asdict(check) for check in machine],
                "tiers": {name: [asdict(check) for check in checks] for name, checks in tried.items()},
                "exports": {name: [asdict(check) for check in checks] for name, checks in exports.items()},
            }
        )
    else:
        _show("this machine", machine)
        for name, checks in tried.items():
            _show(f"tier {name}", checks)
        for name, checks in exports.items():
            _show(f"export {name}", checks)
    every = [check for checks in (machine, *tried.values(), *exports.values()) for check in checks]
    if not all(check.ok for check in every):
        raise typer.Exit(1)
    if not as_json:
        slower = any(check.slower for check in every)
        output().print("nothing is wrong; what is SLOWER can be mended as it says" if slower else "all is well")


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
    found += (Check(name, True, each.text, each.slower) for name, each in devices())
    found += (
        Check("RAM", True, f"{format_size(sum(each.nbytes for each in group))} of store {store}: {folders(group)}")
        for store, group in found_ram(None).items()
    )
    return found


async def _collect(tier: TierConfig, nbytes: int) -> list[Check]:
    return [check async for check in check_tier(tier, nbytes)]


def _word(check: Check) -> str:
    return "WRONG" if not check.ok else "SLOWER" if check.slower else "ok"


def _show(title: str, checks: list[Check]) -> None:
    rows = [(_word(check), check.name, check.detail) for check in checks]
    print_table(title, ("", "", ""), rows)
