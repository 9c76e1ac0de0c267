"""The verbs `promote`, `evict`, `pin`, `delete` and `collect`: do by hand what the policies do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tieredckpt.cli.console import output, print_json, print_table, printable, waiting
from tieredckpt.cli.opening import Json, StorePath, ThisStep, writing
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.units import format_size

__all__ = ["collect", "delete", "evict", "pin", "promote"]

ThisTier = Annotated[str, typer.Argument(metavar="TIER", show_default=False)]


def promote(store: StorePath, step: ThisStep, tier: ThisTier, as_json: Json = False) -> None:
    """Copy a step to a tier, whatever the policy says."""
    with writing(store) as opened, waiting(f"promoting step {step} to {tier}"):
        written = opened.promote(step, tier)
        found = opened.describe(step).info
        stayed = tier in (*found.tiers, *found.lossy)
    if not stayed:
        raise Conflict(
            f"step {step} was copied to tier {tier!r} and left it at once: its `retain` does not want the step; "
            f"`tieredckpt pin` keeps it there"
        )
    if as_json:
        print_json({"step": step, "tier": tier, "written": written})
    else:
        output().print(f"step {step} is on tier {printable(tier)}; {format_size(written)} written")


def evict(store: StorePath, step: ThisStep, tier: ThisTier, as_json: Json = False) -> None:
    """Drop a step from a tier; the last good copy stays."""
    with writing(store) as opened, waiting(f"evicting step {step} from {tier}"):
        opened.evict(step, tier)
    if as_json:
        print_json({"step": step, "tier": tier, "evicted": True})
    else:
        output().print(f"step {step} has left tier {printable(tier)}")


def pin(
    store: StorePath,
    step: ThisStep,
    tier: Annotated[str | None, typer.Argument(metavar="TIER", help="The slowest if left out.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Let the policies decide again.")] = False,
    as_json: Json = False,
) -> None:
    """Keep a step on a tier, whatever its policy says; it is copied there if need be."""
    with writing(store) as opened, waiting(f"pinning step {step}"):
        name = opened.pin(step, tier, on=not off)
    if as_json:
        print_json({"step": step, "tier": name, "pinned": not off})
    else:
        output().print(f"step {step} is {'not pinned any more' if off else 'pinned'} on tier {printable(name)}")


def delete(
    store: StorePath,
    step: ThisStep,
    force: Annotated[bool, typer.Option("--force", help="Also the newest step, and the last one.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a step from every tier."""
    with writing(store) as opened, waiting(f"deleting step {step}"):
        opened.delete(step, force=force)
    if as_json:
        print_json({"step": step, "deleted": True})
    else:
        output().print(f"step {step} is deleted")


def collect(store: StorePath, as_json: Json = False) -> None:
    """Reclaim the space that no step needs. Exits with 1 when a tier does not answer."""
    with writing(store) as opened, waiting("collecting"):
        collected = opened.collect()
        done = {each.tier for each in collected}
        left = [tier for tier in opened.tier_infos() if tier.name not in done]
    if as_json:
        print_json([asdict(each) for each in collected])
    else:
        rows = [(each.tier, each.packs, format_size(each.nbytes), each.files) for each in collected]
        print_table("collected", ("tier", "packs", "freed", "files"), rows, right=("packs", "freed", "files"))
    if left:
        raise TierUnavailable("\n".join(f"tier {tier.name!r} was not collected: {tier.problem}" for tier in left))
