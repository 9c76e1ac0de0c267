"""The verb `verify`: reads steps on their tiers, compares every digest, and mends damage on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tieredckpt.cli.console import bar, output, print_json, print_table
from tieredckpt.cli.opening import Json, Step, StorePath, reading, writing
from tieredckpt.cli.show import Serial
from tieredckpt.engine.verifier import Verified
from tieredckpt.sync import SyncStore
from tieredckpt.units import format_size

__all__ = ["verify"]


def verify(
    store: StorePath,
    step: Step = None,
    serial: Serial = None,
    tier: Annotated[
        str | None, typer.Option(help="Only on this tier; on every tier without.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every step, not the newest one.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Mend damage from the tiers that are intact.")] = False,
    as_json: Json = False,
) -> None:
    """Verify a step, or all of them, chunk by chunk. Exits with 1 when something is not intact, or not any more."""
    if every and (step is not None or serial is not None):
        raise typer.BadParameter("give a step, or --all for every one", param_hint="--all")
    with (writing if repair else reading)(store) as opened:
        chosen = _all_steps(opened, tier) if every else [(step, serial)]
        with bar("verifying", _nbytes(opened, chosen, tier)) as progress:
            found = [
                each
                for number, save in chosen
                for each in opened.verify(number, tier, serial=save, repair=repair, progress=progress)
            ]
    _report(found, as_json=as_json)
    if not all(each.intact for each in found):
        raise typer.Exit(1)


def _all_steps(store: SyncStore, tier: str | None) -> list[tuple[int | None, int | None]]:
    if tier is not None and tier not in store.tiers:
        store.verify(tier=tier)  # says which tiers there are
    steps = {(step.serial, step.step) for step in store.steps() if tier is None or tier in (*step.tiers, *step.damaged)}
    for info in store.tier_infos():
        if tier in (None, info.name):
            steps.update((damaged.serial, damaged.step) for damaged in info.damaged)
    return [(step, serial) for serial, step in sorted(steps)]


def _nbytes(store: SyncStore, chosen: Sequence[tuple[int | None, int | None]], tier: str | None) -> int:
    """About how much is going to be read."""
    steps = store.steps()
    if not steps:
        return 0
    newest = max((step for step in steps if not step.abandoned), default=steps[-1], key=lambda step: step.serial)
    wanted = {(newest.step if number is None else number) for number, _ in chosen}
    return sum(
        step.nbytes * (len(step.tiers) if tier is None else tier in step.tiers) for step in steps if step.step in wanted
    )


def _report(found: Sequence[Verified], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "step": each.id.step,
                    "serial": each.id.serial,
                    "tier": each.tier,
                    "nbytes": each.nbytes,
                    "intact": each.intact,
                    "repaired": each.repaired,
                    "damaged": each.damaged,
                    "problem": each.problem,
                }
                for each in found
            ]
        )
        return
    if not found:
        output().print("no steps to verify")
        return
    print_table(
        "verified",
        ("step", "serial", "tier", "size", "result"),
        [(each.id.step, each.id.serial, each.tier, format_size(each.nbytes), _result(each)) for each in found],
        right=("step", "serial", "size"),
    )


def _result(each: Verified) -> str:
    if not each.problem:
        return "intact"
    if not each.damaged:
        return f"not verified: {each.problem}"
    keys = ", ".join(each.damaged)
    return f"repaired: {keys}" if each.repaired else f"damaged: {keys}: {each.problem}"
