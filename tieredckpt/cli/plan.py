"""The verb `plan`: predicts what a configuration costs, keeps and loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.cli import amounts
from tieredckpt.cli.aside import run_aside
from tieredckpt.cli.console import errors, output, print_json, print_table, printable, waiting
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
from tieredckpt.config import StoreConfig, load
from tieredckpt.errors import Invalid, TieredCkptError
from tieredckpt.plan.forecast import Forecast, Loss, forecast
from tieredckpt.plan.measure import measure_copy, measure_tier
from tieredckpt.plan.scenario import Scenario
from tieredckpt.units import format_duration, format_rate, format_size

__all__ = ["plan"]


def plan(
    config: Config,
    state: State = None,
    step_time: StepTime = None,
    nodes: Nodes = 1,
    bandwidth: Bandwidth = None,
    read_bandwidth: ReadBandwidth = None,
    mtbf: Mtbf = None,
    node_mtbf: NodeMtbf = None,
    failures: Failures = None,
    restart: Restart = None,
    changed: Changed = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure here the speeds that are not given.")] = False,
    size: Annotated[str | None, typer.Option(help="Bytes to measure with; 256 MiB if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a configuration costs, what its tiers hold, and what a failure throws back, by formula."""
    loaded = load(config)
    writes, reads = list(bandwidth or ()), list(read_bandwidth or ())
    if measure:
        _measure(loaded, nodes, amounts.size("--size", "256 MiB" if size is None else size), writes, reads)
    elif size is not None:
        raise Invalid("--size is used only with --measure; the bytes of a state are --state")
    asked = scenario(
        loaded,
        state=state,
        step_time=step_time,
        nodes=nodes,
        bandwidth=writes,
        read_bandwidth=reads,
        mtbf=mtbf,
        node_mtbf=node_mtbf,
        failures=failures,
        restart=restart,
        changed=changed,
    )
    found = forecast(asked.scenario)
    if as_json:
        print_json(asdict(found) | {"dedupe": _dedupe(asked.scenario)} | asked.told())
    else:
        _show(asked.scenario, found)
        asked.show()


def _measure(config: StoreConfig, nodes: int, nbytes: int, writes: list[str], reads: list[str]) -> None:
    """Add measured speeds to the options. Memory is equally fast on all nodes; tiers shared by nodes are left out."""
    if nbytes < ALIGNMENT:
        raise Invalid(f"--size: {format_size(nbytes)} measure nothing; give at least {format_size(ALIGNMENT)}")
    given = {option.partition("=")[0].strip() for option in writes}
    for tier in config.tiers:
        if tier.name in given:
            continue
        if nodes > 1 and tier is not config.ram:
            told = f"what one node measures is not the speed that {nodes} have; give --bandwidth {tier.name}=RATE"
            errors().print(f"tier {tier.name} is not measured: {told}", style="yellow")
            continue
        with waiting(f"measuring tier {tier.name}"):
            try:
                if tier is config.ram:
                    write = read = run_aside(measure_copy(nbytes)) * config.copy_threads
                else:
                    write, read = run_aside(measure_tier(tier, nbytes))
            except TieredCkptError as error:
                errors().print(f"tier {tier.name} could not be measured: {printable(error)}", style="yellow")
                continue
        writes.append(f"{tier.name}={max(1, round(write))}B/s/node")
        reads.append(f"{tier.name}={max(1, round(read))}B/s/node")


def _show(asked: Scenario, found: Forecast) -> None:
    saves = [
        ("a save is due every", _seconds(found.interval)),
        ("it stalls training for", _seconds(found.stall)),
        ("which costs", f"{found.overhead:.2%} of the time"),
    ]
    if found.skipped:
        saves.append(("saves without room", f"{found.skipped} were skipped: give the nearest tier more capacity"))
    if math.isfinite(found.mtbf):
        saves += [
            ("a failure comes every", _seconds(found.mtbf)),
            ("best interval", f"{_seconds(found.daly)} (Daly), {_seconds(found.young)} (Young)"),
            ("expected ETTR", f"{found.ettr:.3f}"),
        ]
    print_table(f"{format_size(asked.state)} on {asked.nodes} node{'s' * (asked.nodes != 1)}", ("", ""), saves)
    print_table(
        "tiers",
        ("tier", "survives", "a step every", "after", "steps", "bytes", "of", "writes at", "busy", "restore"),
        [
            (
                tier.name,
                tier.survives,
                _seconds(tier.period),
                _seconds(tier.lag),
                f"{tier.steps}, growing" if tier.growing else tier.steps,
                format_size(tier.nbytes),
                "no bound" if tier.capacity is None else format_size(tier.capacity),
                format_rate(tier.rate) + (" (assumed)" if tier.assumed else ""),
                f"{tier.busy:.0%}",
                _seconds(tier.restore),
            )
            for tier in found.tiers
        ],
        right=("a step every", "after", "steps", "bytes", "of", "busy", "restore"),
    )
    if any(tier.growing for tier in found.tiers):
        output().print(
            f"growing: after {_seconds(found.seconds)} of training the policies still retain more and more; the bytes "
            f"are those of that time\n"
        )
    print_table(
        "when this fails",
        ("", "training returns from", "and loses", "at worst", "and waits"),
        [_loss_row(loss) for loss in found.losses],
        right=("and loses", "at worst", "and waits"),
    )
    output().print(_dedupe(asked))


def _loss_row(loss: Loss) -> Sequence[str]:
    if loss.tier is None:
        return (loss.kind, "nothing survives", "everything", "everything", "")
    return (loss.kind, loss.tier, _seconds(loss.mean), _seconds(loss.worst), _seconds(loss.restart))


def _dedupe(asked: Scenario) -> str:
    if asked.changed == 1:
        return (
            "dedupe: brings nothing while every chunk changes between two saves, as with a dense optimizer; what is "
            "frozen is written once. Say with --changed which share of the state changes."
        )
    return (
        f"dedupe: a save writes {asked.changed:.0%} of the state and leaves {1 - asked.changed:.0%} where it lies; the "
        f"stall stays that of one pass over the state, for every chunk is compared by its digest"
    )


def _seconds(seconds: float) -> str:
    return format_duration(seconds) if math.isfinite(seconds) else "never"
