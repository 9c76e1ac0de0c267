"""The verb `verify`: reads steps on their tiers, compares every digest, and repairs damage on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tieredckpt.cli import amounts
from tieredckpt.cli.console import bar, output, print_json, print_table
from tieredckpt.cli.opening import Json, Step, StorePath, reading, writing
from tieredckpt.cli.show import Serial
from tieredckpt.engine.repairing.verify import Verified
from tieredckpt.errors import Invalid
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
    every: Annotated[bool, typer.Option("--all", help="Whole tiers: every step, and the tier's own files.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair damage from the tiers that are intact; without STEP as with --all.")
    ] = False,
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Read whole tiers no faster, such as '200 MB/s'.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a step, or whole tiers, chunk by chunk. Exits with 1 when something is not intact, or not any more."""
    one = step is not None or serial is not None
    if every and one:
        raise typer.BadParameter("give a step, or --all for every one", param_hint="--all")
    whole = every or (repair and not one)
    if rate is not None and not whole:
        raise typer.BadParameter(
            "a rate is for whole tiers: give --all, or --repair without a step", param_hint="--rate"
        )
    limit = _rate(rate)
    with (writing if repair else reading)(store) as opened:
        nbytes = _held(opened, tier) if whole else _nbytes(opened, step, tier)
        with bar("verifying", nbytes) as progress:
            if whole:
                found = opened.scrub(tier, repair=repair, rate=limit, progress=progress)
            else:
                found = opened.verify(step, tier, serial=serial, repair=repair, progress=progress)
    _report(found, as_json=as_json)
    if not all(each.intact for each in found):
        raise typer.Exit(1)


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return amounts.rate("--rate", text)
    except Invalid as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from error


def _held(store: SyncStore, tier: str | None) -> int:
    """Bytes to read for whole tiers, about."""
    return sum(info.used for info in store.tier_infos() if tier in (None, info.name))


def _nbytes(store: SyncStore, number: int | None, tier: str | None) -> int:
    """Bytes to read for one step, about."""
    steps = store.steps()
    if not steps:
        return 0
    newest = max((step for step in steps if not step.off_branch), default=steps[-1], key=lambda step: step.serial)
    wanted = newest.step if number is None else number
    return sum(
        step.nbytes * (len(step.tiers) if tier is None else tier in step.tiers) for step in steps if step.step == wanted
    )


def _report(found: Sequence[Verified], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "step": None if each.id is None else each.id.step,
                    "serial": None if each.id is None else each.id.serial,
                    "tier": each.tier,
                    "nbytes": each.nbytes,
                    "intact": each.intact,
                    "repaired": each.repaired,
                    "damaged": each.damaged,
                    "lost": each.lost,
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
        [(*_identity(each), each.tier, format_size(each.nbytes), _result(each)) for each in found],
        right=("step", "serial", "size"),
    )
    _tell_of_losses(found)


def _identity(each: Verified) -> tuple[object, object]:
    return ("-", "-") if each.id is None else (each.id.step, each.id.serial)


def _result(each: Verified) -> str:
    if not each.problem:
        return "intact"
    if not each.damaged:
        return f"not verified: {each.problem}"
    keys = ", ".join(each.damaged)
    if each.repaired:
        return f"repaired: {keys}"
    if each.lost:
        repaired = ", ".join(key for key in each.damaged if key not in each.lost)
        return f"lost: {', '.join(each.lost)}" + (f"; repaired: {repaired}" if repaired else "")
    return f"damaged: {keys}: {each.problem}"


def _tell_of_losses(found: Sequence[Verified]) -> None:
    """Print the arrays that are intact on no tier, once for all tiers."""
    lost: dict[tuple[int, int], set[str]] = {}
    for each in found:
        if each.id is not None and each.lost:
            lost.setdefault((each.id.serial, each.id.step), set()).update(each.lost)
    if lost:
        rows = [(step, serial, ", ".join(sorted(keys))) for (serial, step), keys in sorted(lost.items())]
        print_table("lost: on no tier intact", ("step", "serial", "arrays"), rows, right=("step", "serial"))
