"""The verb `simulate`: runs a training under failures with the configuration's own policies."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tieredckpt._picture import check_picture
from tieredckpt.cli import amounts
from tieredckpt.cli.console import bar, output, print_json, print_table
from tieredckpt.cli.opening import Json
from tieredckpt.cli.scenario import (
    Bandwidth,
    Changed,
    Config,
    Failures,
    Mtbf,
    NodeMtbf,
    Nodes,
    ReadBandwidth,
    Restart,
    State,
    StepTime,
    scenario,
)
from tieredckpt.errors import Invalid
from tieredckpt.plan.figures import Figures
from tieredckpt.units import format_duration, format_size

__all__ = ["simulate"]

_DAYS_MAX = 366_000.0
"""A millennium, as a duration has at most; `inf` would never end."""

_SWEPT_DAYS = 10.0
"""Most days for which each point of a picture is simulated."""


def simulate(
    config: Config,
    state: State = None,
    step_time: StepTime = None,
    nodes: Nodes = 1,
    bandwidth: Bandwidth = None,
    read_bandwidth: ReadBandwidth = None,
    mtbf: Mtbf = None,
    node_mtbf: NodeMtbf = None,
    failures: Failures = None,
    tier_mtbf: Annotated[
        list[str] | None, typer.Option(metavar="TIER=DURATION", help="Mean time between outages of a tier.")
    ] = None,
    tier_repair: Annotated[str, typer.Option(help="Mean time of such an outage.")] = "30 min",
    restart: Restart = None,
    changed: Changed = None,
    days: Annotated[float, typer.Option(min=0.001, max=_DAYS_MAX, help="Days to simulate.")] = 30.0,
    interval: Annotated[
        str | None, typer.Option(help="Save so often, instead of by the configuration's schedule.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random failures: the same one gives the same figures.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw ETTR against the interval, and the tiers' fill (.svg, .png).", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a training job with failures, and report its progress and losses."""
    asked = scenario(
        config,
        state=state,
        step_time=step_time,
        nodes=nodes,
        bandwidth=bandwidth,
        read_bandwidth=read_bandwidth,
        mtbf=mtbf,
        node_mtbf=node_mtbf,
        failures=failures,
        restart=restart,
        changed=changed,
        tier_mtbf=tier_mtbf,
        tier_repair=tier_repair,
    )
    try:
        from tieredckpt.plan import picture as pictures
        from tieredckpt.plan.simulate import simulate as run
    except ImportError as error:
        raise Invalid("a simulation needs simpy: pip install 'tieredckpt[simulate]'") from error
    if picture is not None:
        check_picture(picture)
    job = asked.scenario
    if interval is not None:
        job = pictures.at_interval(job, amounts.duration("--interval", interval))
    with bar(f"simulating {days:g} days", days * 86400) as progress:
        found = run(job, days * 86400, seed=seed, progress=progress)
    points = []
    if picture is not None:
        swept = min(days, _SWEPT_DAYS) * 86400
        with bar("simulating other intervals", pictures.POINTS * swept) as progress:
            points = pictures.sweep(job, swept, seed=seed, progress=progress)
        pictures.draw(picture, found, points)
    if as_json:
        print_json(asdict(found) | {"sweep": [asdict(point) for point in points]} | asked.told())
        return
    _show(found, nodes)
    asked.show()
    if points:
        rows = [(format_duration(each.interval), f"{each.simulated:.4f}", f"{each.expected:.4f}") for each in points]
        columns = ("interval", "ETTR", "by formula")
        print_table("other intervals", columns, rows, right=columns)


def _show(found: Figures, nodes: int) -> None:
    output().print(f"ETTR {found.ettr:.4f} on {nodes} node{'s' * (nodes != 1)} over {format_duration(found.total)}")
    parts = {
        "productive": found.productive,
        "lost": found.lost,
        "saving": found.stalls,
        "restarting": found.restarts,
        "restoring": found.restoring,
    }
    print_table(
        "where the time went",
        ("", "time", "share"),
        [(name, format_duration(seconds), f"{seconds / found.total:.2%}") for name, seconds in parts.items()],
        right=("time", "share"),
    )
    failed = ", ".join(f"{count} of a {kind}" for kind, count in sorted(found.failures.items())) or "none"
    rows = [
        ("failures", failed),
        ("work lost by one", f"{format_duration(found.lost_mean)}, at most {format_duration(found.lost_most)}"),
        ("saves", f"{found.saves}, one every {format_duration(found.interval)} of training"),
    ]
    if found.skipped:
        rows.append(("saves skipped", f"{found.skipped}: the nearest tier had no room"))
    if found.from_nothing:
        rows.append(("begun anew", f"{found.from_nothing} times: no step was left"))
    print_table("", ("", ""), rows)
    restores = [
        (
            name,
            format_size(tier.peak),
            format_size(tier.mean),
            format_size(tier.written),
            str(tier.promoted),
            str(tier.evicted),
            str(found.restores[name].count) if name in found.restores else "0",
            format_duration(found.restores[name].mean) if name in found.restores else "",
            format_duration(found.restores[name].longest) if name in found.restores else "",
        )
        for name, tier in found.tiers.items()
    ]
    columns = ("tier", "peak", "mean", "written", "promoted", "evicted", "restores", "mean time", "longest")
    print_table("tiers", columns, restores, right=columns[1:])
