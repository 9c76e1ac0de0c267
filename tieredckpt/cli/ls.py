"""The verb `ls`: the steps of a store and its tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from tieredckpt.cli.console import metrics_text, output, print_json, print_table, when
from tieredckpt.cli.opening import Json, MaybeStore, reading
from tieredckpt.cli.ram import print_ram
from tieredckpt.engine.inventory import Pin, StepInfo, TierInfo
from tieredckpt.units import format_size

Ram = Annotated[
    bool, typer.Option("--ram", help="List instead what RAM STORE has on this machine; without it, all your stores.")
]

__all__ = ["ls", "pinned_on", "print_steps", "print_tiers", "state_of", "tiers_of"]


def ls(store: MaybeStore = None, ram: Ram = False, as_json: Json = False) -> None:
    """List the steps of a store, the newest last, and its tiers. Works beside a running trainer."""
    if ram:
        print_ram(store, as_json=as_json)
        return
    if store is None:
        raise typer.BadParameter("name a store, or say --ram")
    with reading(store) as opened:
        steps, tiers, pins = opened.steps(), opened.tier_infos(), opened.pins()
    if as_json:
        told = _steps_for_programs(steps, tiers, pins)
        print_json({"steps": told, "tiers": list(map(asdict, tiers)), "pins": list(map(asdict, pins))})
        return
    print_steps(steps, tiers, pins)
    print_tiers(tiers)


def state_of(step: StepInfo, pins: Sequence[Pin]) -> str:
    """State of a step: live or off-branch, where it is pinned, and the tiers on which its commit cannot be read."""
    line = "off-branch" if step.off_branch else "live"
    pinned = (f"pinned on {tier}" for tier in pinned_on(step, pins))
    return ", ".join([line, *pinned, *(f"damaged on {tier}" for tier in step.damaged)])


def pinned_on(step: StepInfo, pins: Sequence[Pin]) -> list[str]:
    """The tiers on which a step is pinned."""
    return [pin.tier for pin in pins if (pin.serial, pin.step) == (step.serial, step.step)]


def tiers_of(step: StepInfo) -> str:
    """The tiers that have a step, and which of them have a lossy copy of it."""
    return ", ".join([*step.tiers, *(f"{tier} (lossy)" for tier in step.lossy)])


def print_steps(steps: Sequence[StepInfo], tiers: Sequence[TierInfo], pins: Sequence[Pin]) -> None:
    """Print a table of the steps, including those that no tier can read."""
    rows: dict[int, tuple[object, ...]] = {
        step.serial: (
            step.step,
            step.serial,
            when(step.saved_at),
            format_size(step.nbytes),
            step.ranks,
            metrics_text(step.metrics),
            tiers_of(step),
            state_of(step, pins),
        )
        for step in steps
    }
    for (serial, step), names in _lost(steps, tiers).items():
        rows[serial] = (step, serial, "", "", "", "", "", ", ".join(f"damaged on {name}" for name in names))
    if not rows:
        output().print("no steps")
        return
    print_table(
        "steps",
        ("step", "serial", "saved", "size", "ranks", "metrics", "tiers", "state"),
        [rows[serial] for serial in sorted(rows)],
        right=("step", "serial", "size", "ranks"),
    )


def print_tiers(tiers: Sequence[TierInfo]) -> None:
    """Print a table of the tiers, nearest first."""
    rows = [
        (
            tier.name,
            f"{tier.kind} (lossy)" if tier.lossy else tier.kind,
            tier.steps,
            format_size(tier.used),
            "" if tier.capacity is None else format_size(tier.capacity),
            tier.survives,
            _health(tier),
            tier.location,
        )
        for tier in tiers
    ]
    columns = ("tier", "kind", "steps", "used", "capacity", "survives", "health", "location")
    print_table("tiers", columns, rows, right=("steps", "used", "capacity"))


def _health(tier: TierInfo) -> str:
    if not tier.healthy:
        return tier.problem
    return "not in use" if tier.problem else tier.note or "ok"  # such as RAM that was released


def _lost(steps: Sequence[StepInfo], tiers: Sequence[TierInfo]) -> dict[tuple[int, int], list[str]]:
    """Serial and number of the steps that can be read on no tier, and the tiers that should have them."""
    known = {step.serial for step in steps}
    lost: dict[tuple[int, int], list[str]] = {}
    for tier in tiers:
        for damaged in tier.damaged:
            if damaged.serial not in known:
                lost.setdefault((damaged.serial, damaged.step), []).append(tier.name)
    return lost


def _steps_for_programs(
    steps: Sequence[StepInfo], tiers: Sequence[TierInfo], pins: Sequence[Pin]
) -> list[dict[str, object]]:
    told = [
        {**asdict(step), "saved": when(step.saved_at), "pinned": pinned_on(step, pins), "state": state_of(step, pins)}
        for step in steps
    ]
    for (serial, step), names in _lost(steps, tiers).items():
        told.append({"step": step, "serial": serial, "tiers": [], "damaged": names, "state": "lost"})
    return sorted(told, key=lambda step: step["serial"])
