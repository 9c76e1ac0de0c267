"""The verbs for RAM and folders of stores: `ls --ram`, `forget`, `adopt`, `fork`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tieredckpt.blobs.ram.find import FoundRam, by_store, find_ram
from tieredckpt.blobs.ram.folder import locked, ram_root, remove
from tieredckpt.cli.aside import run_aside
from tieredckpt.cli.console import output, print_json, print_table, printable, waiting, when
from tieredckpt.cli.opening import Json, StorePath, existing
from tieredckpt.config import StoreConfig, load
from tieredckpt.engine.agent.process import lives
from tieredckpt.engine.opening.change_identity import adopt as adopt_ram
from tieredckpt.engine.opening.change_identity import fork as fork_store
from tieredckpt.engine.opening.ram import judged_within, ram_of
from tieredckpt.errors import Conflict, NotFound
from tieredckpt.format.manifest import StepId
from tieredckpt.units import format_size

__all__ = ["adopt", "folders", "forget", "fork", "found_ram", "print_ram"]

_PATIENCE = 10.0
"""Seconds for a file system to say whether a store is still there."""

RamStoreOption = Annotated[
    str | None, typer.Option("--ram", metavar="UUID", help="Of which store; that of the RAM which notes the folder.")
]
Which = Annotated[
    list[str] | None,
    typer.Argument(metavar="[UUID|FOLDER]…", help="Stores by UUID, or by a folder of theirs.", show_default=False),
]
Gone = Annotated[bool, typer.Option("--gone", help="All whose folders hold them no more.")]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root", metavar="FOLDER", help="The `path` of the RAM tiers, where they have one.", show_default=False
    ),
]


def found_ram(root: Path | None) -> dict[str, list[FoundRam]]:
    """The RAM folders of this user on this machine, by UUID of the store."""
    return by_store(asyncio.run(_found(root)))


async def _found(root: Path | None) -> list[FoundRam]:
    found = await asyncio.to_thread(find_ram, ram_root(root))
    return await asyncio.gather(*(judged_within(_PATIENCE, each) for each in found))


def print_ram(store: str | None, *, as_json: bool) -> None:
    """List the RAM of a store, or of all stores of this user on this machine."""
    stores = found_ram(None) if store is None else by_store(run_aside(ram_of(load(store))))
    if as_json:
        print_json([_for_programs(uuid, group) for uuid, group in stores.items()])
        return
    if not stores:
        output().print("no RAM of any store" if store is None else "no RAM of this store")
        return
    rows = []
    for uuid, group in stores.items():
        steps = _steps(group)
        rows.append(
            (
                uuid,
                _label(group),
                folders(group),
                format_size(sum(each.nbytes for each in group)),
                when(max(each.used_at for each in group)),
                f"{len(steps)}, the newest {steps[-1]}" if steps else "none",
                _user(group) or "nobody",
            )
        )
    print_table("RAM", ("store", "name", "folders", "memory", "last used", "steps", "used by"), rows, right=("memory",))


def forget(which: Which = None, gone: Gone = False, root: Root = None, as_json: Json = False) -> None:
    """Free the RAM of stores that are no longer needed, with the steps in it. `tieredckpt ls --ram` lists them."""
    if bool(which) == gone or "" in (which or ()):  # as a path, an empty name would mean the folder that we are in
        raise typer.BadParameter("name stores, or say --gone")
    stores = found_ram(root)
    chosen: dict[str, list[FoundRam]] = {}
    for name in which or ():
        mine = {
            uuid: group for uuid, group in stores.items() if name == uuid or _is_of(group, Path(os.path.realpath(name)))
        }
        if not mine:
            raise NotFound(f"no RAM on this machine is of {name}; `tieredckpt ls --ram` lists what there is")
        chosen |= mine
    if gone:
        chosen = {uuid: group for uuid, group in stores.items() if _is_gone(group) and not _user(group)}
    freed = []
    for uuid, group in chosen.items():
        paths = [Path(each.folder) for each in group]
        for path in paths:
            if lives(path):
                raise Conflict(f"the RAM of store {uuid} at {path} has an agent, which still promotes from it")
        with locked(paths):  # all folders, or a step would lose some ranks' parts
            for path in paths:
                remove(path)
        freed.append({"store": uuid, "memory": sum(each.nbytes for each in group), "steps": len(_steps(group))})
        if not as_json:
            output().print(
                f"freed {format_size(sum(each.nbytes for each in group))} of store {uuid}, {len(_steps(group))} steps"
            )
    if as_json:
        print_json(freed)
    elif not freed:
        output().print("there is no such RAM")


def adopt(store: StorePath, ram: RamStoreOption = None, root: Root = None, as_json: Json = False) -> None:
    """Continue the store that RAM holds in an empty folder: one that was removed, replaced, or never had it."""
    with waiting("looking whose RAM it is"):
        found, where = asyncio.run(adopt_ram(_with_root(load(store), root), ram))
    if as_json:
        print_json({"store": found.store, "folder": where, "steps": len(found.steps)})
    else:
        output().print(
            f"{printable(where)} is of store {found.store} now, whose newest step in RAM is "
            f"{StepId(*found.steps[-1])}; open it to restore that"
        )


def fork(store: StorePath, root: Root = None, as_json: Json = False) -> None:
    """Give the copy of a store an identity of its own, so that both can go on."""
    with waiting("forking"):
        old, new = asyncio.run(fork_store(_with_root(existing(store), root)))
    if as_json:
        print_json({"store": new, "forked_from": old})
    else:
        output().print(f"{printable(store)} is store {new} now, with all steps that it had as {old}")


def _with_root(config: StoreConfig, root: Path | None) -> StoreConfig:
    """The configuration with the ``path`` of its RAM tier."""
    if root is None or config.ram is None:
        return config
    return config.model_copy(update={"tiers": (config.ram.model_copy(update={"path": root}), *config.slower)})


def _for_programs(uuid: str, group: Sequence[FoundRam]) -> dict[str, Any]:
    return {
        "store": uuid,
        "name": _label(group),
        "folders": [each.folder for each in group],
        "places": _places(group),
        "memory": sum(each.nbytes for each in group),
        "last_used": when(max(each.used_at for each in group)),
        "steps": [{"step": step.step, "serial": step.serial} for step in _steps(group)],
        "used_by": _user(group),
    }


def folders(group: Sequence[FoundRam]) -> str:
    """The folders of the store's other tiers, and whether each is still there."""
    return ", ".join(f"{where} ({state})" for where, state in _places(group).items()) or "RAM alone"


def _label(group: Sequence[FoundRam]) -> str:
    return next((each.owner.label for each in group if each.owner is not None and each.owner.label), "")


def _places(group: Sequence[FoundRam]) -> dict[str, str]:
    """Whether the store is still at each of its locations."""
    found: dict[str, str] = {}
    for each in group:
        for place in each.owner.places if each.owner is not None else ():
            if place.location in each.holding:
                found[place.location] = "there" if place.location.startswith("/") else "not looked at"
            elif place.location in each.elsewhere:
                found[place.location] = "another file system"
            else:
                found[place.location] = "gone" if place.seen else "never seen"
    return found


def _steps(group: Sequence[FoundRam]) -> list[StepId]:
    return sorted({StepId(*step) for each in group for step in each.steps})


def _user(group: Sequence[FoundRam]) -> str:
    return next((each.user for each in group if each.user), "")


def _is_of(group: Sequence[FoundRam], folder: Path) -> bool:
    return any(str(folder) in (each.folder, *_places([each])) for each in group)


def _is_gone(group: Sequence[FoundRam]) -> bool:
    """Whether the store had tiers beside RAM, and is on none of them any more."""
    return bool(_places(group)) and all(state == "gone" for state in _places(group).values())
