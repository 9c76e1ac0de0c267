"""The options that `plan` and `simulate` share, and the scenario that they describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import typer

from tieredckpt.config import StoreConfig, load
from tieredckpt.errors import Invalid
from tieredckpt.plan.scenario import KINDS, Kind, Scenario, rungs
from tieredckpt.units import parse_duration, parse_rate, parse_size

__all__ = [
    "Bandwidth",
    "Changed",
    "Config",
    "Failures",
    "Mtbf",
    "NodeMtbf",
    "Nodes",
    "ReadBandwidth",
    "Restart",
    "State",
    "StepTime",
    "rates",
    "scenario",
]

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration (.toml), or a folder.")]
State = Annotated[str, typer.Option(help="Bytes of the whole state, over all nodes.")]
StepTime = Annotated[str, typer.Option(help="Time of one training step.")]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes of the job.")]
Bandwidth = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TIER=RATE", help="Speed of writes, of the job as a whole or, as in ram=5GB/s/node, of each node."
    ),
]
ReadBandwidth = Annotated[
    list[str] | None, typer.Option(metavar="TIER=RATE", help="Speed of reads; that of writes where not given.")
]
Mtbf = Annotated[str | None, typer.Option(help="Mean time between failures of the whole job.", show_default=False)]
NodeMtbf = Annotated[
    str | None, typer.Option(help="Mean time between failures of one node, instead of --mtbf.", show_default=False)
]
Failures = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND=SHARE",
        help="What fails: process, node, rack or site, with its share of the failures; all nodes if left out.",
    ),
]
Restart = Annotated[str, typer.Option(help="Time from a failure until the trainers run again and begin to restore.")]
Changed = Annotated[float, typer.Option(min=0, max=1, help="Share of the chunks that changes between two saves.")]


def scenario(
    source: str | StoreConfig,
    *,
    state: str,
    step_time: str,
    nodes: int,
    bandwidth: Sequence[str] | None,
    read_bandwidth: Sequence[str] | None,
    mtbf: str | None,
    node_mtbf: str | None,
    failures: Sequence[str] | None,
    restart: str,
    changed: float,
    tier_mtbf: Sequence[str] | None = None,
    tier_repair: str = "30 min",
) -> Scenario:
    """What the options say. Raises `Invalid` where they say what cannot be."""
    config = load(source)
    nbytes = parse_size(state)
    return Scenario(
        config=config,
        state=nbytes,
        step_seconds=parse_duration(step_time),
        nodes=nodes,
        rungs=rungs(config, nbytes, nodes, rates(bandwidth, nodes), rates(read_bandwidth, nodes)),
        mtbf=_by_kind(_job_mtbf(mtbf, node_mtbf, nodes), failures),
        restart=parse_duration(restart),
        changed=changed,
        tier_mtbf={name: parse_duration(text) for name, text in _pairs(tier_mtbf, "TIER=DURATION")},
        tier_repair=parse_duration(tier_repair),
    )


def rates(options: Sequence[str] | None, nodes: int) -> dict[str, float]:
    """Bytes a second of the whole job, by tier."""
    found = {}
    for name, text in _pairs(options, "TIER=RATE"):
        each = text.removesuffix("/node")
        found[name] = float(parse_rate(each)) * (nodes if each != text else 1)
        if not found[name]:
            raise Invalid(f"tier {name!r}: a speed must be more than 0, not {text!r}")
    return found


def _job_mtbf(mtbf: str | None, node_mtbf: str | None, nodes: int) -> float:
    if mtbf is not None and node_mtbf is not None:
        raise Invalid("--mtbf is of the whole job and --node-mtbf of one node: give one of them")
    if mtbf is not None:
        return parse_duration(mtbf)
    return math.inf if node_mtbf is None else parse_duration(node_mtbf) / nodes


def _by_kind(mtbf: float, options: Sequence[str] | None) -> dict[Kind, float]:
    if math.isinf(mtbf):
        return {}
    shares: dict[Kind, float] = {}
    for name, text in _pairs(options or ["node=1"], "KIND=SHARE"):
        kind = next((kind for kind in KINDS if kind == name), None)
        if kind is None:
            raise Invalid(f"{name!r} is no kind of failure: {', '.join(KINDS)}")
        try:
            shares[kind] = float(text)
        except ValueError:
            shares[kind] = -1.0
        if not 0 <= shares[kind] < math.inf:
            raise Invalid(f"the share of {name} failures is a number such as 0.6, not {text!r}")
    total = sum(shares.values())
    if not total:
        raise Invalid("the shares of the failures are all 0")
    return {kind: mtbf * total / share for kind, share in shares.items() if share}


def _pairs(options: Sequence[str] | None, form: str) -> list[tuple[str, str]]:
    found = []
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals:
            raise Invalid(f"{option!r} should have the form {form}")
        found.append((name.strip(), value.strip()))
    return found
