"""The options that `plan` and `simulate` share, and the scenario that they describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from tieredckpt.cli import amounts
from tieredckpt.cli.console import errors, print_table, printable
from tieredckpt.cli.opening import newest_arrays, newest_step
from tieredckpt.config import StoreConfig, load
from tieredckpt.errors import Invalid
from tieredckpt.plan.assumed import DROPPED, MAGNITUDE, NODE_MTBF, SHARED_AT_MOST, SOURCE, STATE_OF_A_NODE, Assumption
from tieredckpt.plan.codecs import gains
from tieredckpt.plan.scenario import KINDS, Kind, Rung, Scenario, derived_rungs, doubts, rungs
from tieredckpt.units import format_duration, format_rate, format_size

__all__ = [
    "Asked",
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
State = Annotated[
    str | None,
    typer.Option(
        help="Bytes of the whole state, over all nodes; those of the newest step if there is a store already, else "
        "32 GB a node.",
        show_default=False,
    ),
]
StepTime = Annotated[str | None, typer.Option(help="Time of one training step; 30 s.", show_default=False)]
Nodes = Annotated[int, typer.Option(min=1, max=10**9, help="Nodes of the job.")]
Bandwidth = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TIER=RATE", help="Speed of writes, of the job as a whole or, as in ram=5GB/s/node, of each node."
    ),
]
ReadBandwidth = Annotated[
    list[str] | None, typer.Option(metavar="TIER=RATE", help="Speed of reads; that of writes where not given.")
]
Mtbf = Annotated[
    str | None,
    typer.Option(help="Mean time between failures of the whole job; 264 days over the nodes.", show_default=False),
]
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
Restart = Annotated[
    str | None,
    typer.Option(
        help="Time from a failure until the trainers run again and begin to restore; 1 min.", show_default=False
    ),
]
Changed = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Share of the chunks that changes between two saves; 1.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """A scenario, the values in it that were assumed, and the settings that cannot hold."""

    scenario: Scenario
    assumed: list[Assumption]
    doubts: list[str]

    def told(self) -> dict[str, object]:
        """Effects of codecs on the tiers, assumptions and doubts, as JSON."""
        return {
            "codecs": [asdict(each) for each in gains(self.scenario)],
            "assumed": [asdict(each) for each in self.assumed],
            "doubts": self.doubts,
        }

    def show(self) -> None:
        """Print what codecs do for the tiers, what was assumed, and the doubts."""
        print_table(
            "codecs, of which `bench codecs` measures what they make of a state of yours",
            ("tier", "codec", "", "a step adds", "CPU", "promoted in", "saves time"),
            [
                (
                    each.tier,
                    each.codec,
                    "chosen" if each.chosen else "",
                    format_size(each.nbytes),
                    f"{each.cpu_seconds:.3g} s",
                    format_duration(each.seconds),
                    f"below {format_rate(each.saves_time_below)}" if each.saves_time_below else "",
                )
                for each in gains(self.scenario)
            ],
            right=("a step adds", "CPU", "promoted in"),
        )
        for doubt in self.doubts:
            errors().print(f"note: {printable(doubt)}", style="yellow")
        if self.assumed:
            rows = [(each.what, each.value, each.why) for each in self.assumed]
            print_table("assumed, for no option says it", ("", "", "because"), rows)


def scenario(
    source: str | StoreConfig,
    *,
    state: str | None,
    step_time: str | None,
    nodes: int,
    bandwidth: Sequence[str] | None,
    read_bandwidth: Sequence[str] | None,
    mtbf: str | None,
    node_mtbf: str | None,
    failures: Sequence[str] | None,
    restart: str | None,
    changed: float | None,
    tier_mtbf: Sequence[str] | None = None,
    tier_repair: str = "30 min",
) -> Asked:
    """The scenario of the options, with assumptions for missing ones. Raises `Invalid` for impossible values."""
    config = load(source)
    writes, reads = rates("--bandwidth", bandwidth, nodes), rates("--read-bandwidth", read_bandwidth, nodes)
    found: list[Assumption] = []
    nbytes = amounts.size("--state", state) if state is not None else _state(config, nodes, found)
    between = _job_mtbf(mtbf, node_mtbf, nodes, found)
    if failures is None:
        found.append(Assumption("failures", "all of one node", _UNTOLD))
    for what, value, meant in (("step time", step_time, "30 s"), ("restart", restart, "1 min")):
        if value is None:
            found.append(Assumption(what, meant, _UNTOLD))
    if changed is None:
        found.append(Assumption("changed", "all of the state", "an optimizer touches every weight"))
    if any(tier.codec != "none" for tier in config.tiers):
        found.append(Assumption("codecs", "as on a GPT with AdamW", "`bench codecs` measures your state"))
    arrays = newest_arrays(config) if config.derived else None
    if config.derived:
        found += _of_lossy_rules(config, known=bool(arrays))
    asked = Scenario(
        config=config,
        state=nbytes,
        step_seconds=amounts.duration("--step-time", step_time or "30 s"),
        nodes=nodes,
        rungs=rungs(config, nbytes, nodes, writes, reads),
        derived=derived_rungs(config, nbytes, nodes, writes, reads, arrays),
        mtbf=_by_kind(between, failures),
        restart=amounts.duration("--restart", restart or "1 min", or_zero=True),
        changed=1.0 if changed is None else changed,
        tier_mtbf={
            name: amounts.duration(f"--tier-mtbf {name}", text) for name, text in _pairs(tier_mtbf, "TIER=DURATION")
        },
        tier_repair=amounts.duration("--tier-repair", tier_repair),
    )
    found += [_speed(rung, nodes) for rung in (*asked.rungs, *asked.derived) if rung.assumed]
    return Asked(asked, found, doubts(config, nodes, nbytes))


_UNTOLD = "nothing tells it"
_NO_STEP = "no step was found in the folders of its tiers"


def _state(config: StoreConfig, nodes: int, found: list[Assumption]) -> int:
    """The size of the newest step, if a folder of this machine has one; else a default for each node."""
    if (newest := newest_step(config)) is not None and newest.nbytes:
        why = f"step {newest.step} of this store has so many"
        found.append(Assumption("state", format_size(newest.nbytes), why))
        return newest.nbytes
    nbytes = nodes * STATE_OF_A_NODE
    found.append(Assumption("state", format_size(nbytes), f"{_NO_STEP}; 8 GPUs a node with 4 GB each, {SOURCE}"))
    return nbytes


def _of_lossy_rules(config: StoreConfig, *, known: bool) -> list[Assumption]:
    """The assumptions about lossy rules, with or without known arrays."""
    rules, found = [rule for tier in config.derived for rule in tier.lossy], []
    untold = "no step tells which arrays the keys of rules mean"
    if not known and any(not rule.drop for rule in rules):
        found.append(Assumption("lossy rules", "for all of the state that is not dropped, the strictest", untold))
    if not known and any(rule.drop for rule in rules):
        found.append(Assumption("drop", f"{DROPPED:.0%} of the state, Adam's two moments", untold))
    if any(rule.max_abs_error is not None for rule in rules):
        found.append(Assumption("max_abs_error", f"of values of about {MAGNITUDE:g}", "weights have that size"))
    return found


def _speed(rung: Rung, nodes: int) -> Assumption:
    kind = rung.config.kind
    each = rung.device / nodes
    if kind == "ram":
        why = f"{format_rate(each)} a node; `plan --measure` measures it"
    elif nodes > 1 and rung.device == SHARED_AT_MOST:
        why = f"the file system of {SOURCE}"
    else:
        why = f"{format_rate(each)} a node" + ("; `plan --measure` measures it" if nodes == 1 else "")
    return Assumption(f"speed of {rung.name}", format_rate(rung.device), why)


def rates(option: str, options: Sequence[str] | None, nodes: int) -> dict[str, float]:
    """Bytes a second of the whole job, by tier."""
    found = {}
    for name, text in _pairs(options, "TIER=RATE"):
        each = text.removesuffix("/node")
        found[name] = float(amounts.rate(f"{option} {name}", each)) * (nodes if each != text else 1)
    return found


def _job_mtbf(mtbf: str | None, node_mtbf: str | None, nodes: int, found: list[Assumption]) -> float:
    if mtbf is not None and node_mtbf is not None:
        raise Invalid("--mtbf is of the whole job and --node-mtbf of one node: give one of them")
    if mtbf is not None:
        return amounts.duration("--mtbf", mtbf)
    if node_mtbf is not None:
        return amounts.duration("--node-mtbf", node_mtbf) / nodes
    between = NODE_MTBF / nodes
    why = f"a node fails every {format_duration(NODE_MTBF)}, {SOURCE}"
    found.append(Assumption("a failure every", format_duration(between), why))
    return between


def _by_kind(mtbf: float, options: Sequence[str] | None) -> dict[Kind, float]:
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
