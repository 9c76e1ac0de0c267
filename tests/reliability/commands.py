"""The commands of ``python -m reliability``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from reliability import figures
from tieredckpt.cli.console import print_json, print_table, waiting

__all__ = ["app"]

app = typer.Typer(
    help="Try what the library promises against crashes, on this machine, and print what came of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Seed = Annotated[int, typer.Option(help="Of what happens where and when.")]
Disk = Annotated[
    Path | None, typer.Option(help="Folder of the slower tiers; a temporary one by default.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("replay")
def replayed(
    every: Annotated[int, typer.Option(min=1, help="Survive one in so many of the crashes that differ.")] = 1,
    every_of_ranks: Annotated[int, typer.Option(min=1, help="The same for a life of several ranks.")] = 20,
) -> None:
    """Crash recorded lives after every one of their changes. Exits with an error at the first that costs anything."""
    rows = []
    for what, run in figures.crash(every, every_of_ranks):
        with waiting(what):
            row = run()
        rows.append(
            (row.life, row.failure, row.changes, row.points, row.states, row.steps, 0, f"{row.seconds:.0f}"),
        )
    columns = ("life", "what dies", "changes", "crash points", "states survived", "steps compared", "lost", "s")
    print_table("Crashes replayed", columns, rows, right=columns[2:])


@app.command("kills")
def killed(
    kills: Annotated[int, typer.Option(min=1, help="How many trainers are to die.")] = 300,
    seed: Seed = 0,
    disk: Disk = None,
    by_agent: Annotated[bool, typer.Option("--by-agent", help="Have agents promote, and kill them too.")] = False,
) -> None:
    """Kill trainers by SIGKILL. Exits with 1 when a step that was acknowledged is lost."""
    with waiting(f"killing {kills} trainers"):
        found = figures.kill(kills, seed, disk, by_agent=by_agent)
    rows: list[tuple[str, object]] = [(f"kills {point}", number) for point, number in sorted(found.kills.items())]
    rows += [
        ("of these, with the loss of memory", found.nodes),
        ("restarts", found.restarts),
        ("saves acknowledged", found.acknowledged),
        ("promotions acknowledged", found.promoted),
        ("saves under way that were lost", found.unacknowledged),
        ("acknowledged saves that were lost", len(found.lost)),
        ("seconds", f"{found.seconds:.0f}"),
    ]
    print_table("Trainers killed", ("", ""), rows)
    _end(found.lost)


@app.command("rank-kills")
def ranks_killed(
    lives: Annotated[int, typer.Option(min=1, help="How often ranks are to start.")] = 60,
    seed: Seed = 0,
    engine: Annotated[
        Literal["none", "torch"], typer.Option(help="What they communicate by; torch has copies on other nodes.")
    ] = "none",
) -> None:
    """Kill the ranks of a training by SIGKILL. Exits with 1 when a step that was acknowledged is lost."""
    with waiting(f"{lives} lives of ranks"):
        found = figures.kill_all_ranks(lives, seed, engine)
    rows: list[tuple[str, object]] = [(f"lives: {end}", number) for end, number in sorted(found.ends.items())]
    rows += [
        ("nodes that lost their memory", found.nodes),
        *((f"ranks that restored from {source}", number) for source, number in sorted(found.sources.items())),
        *((f"acknowledgements by {tier}", number) for tier, number in sorted(found.acknowledged.items())),
        ("lost", len(found.lost)),
        ("seconds", f"{found.seconds:.0f}"),
    ]
    print_table("Ranks killed", ("", ""), rows)
    _end(found.lost)


@app.command("soak")
def soaked(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long.")] = 3600.0,
    seed: Seed = 0,
    pace: Annotated[float, typer.Option(min=0.0, help="Seconds from one save to the next.")] = 1.0,
    disk: Disk = None,
    json: Json = False,
) -> None:
    """Run a store under random faults. Exits with 1 when anything is lost, or memory or files grow."""
    with waiting(f"{seconds:.0f} s under faults"):
        found = figures.run_soak(seconds, seed, pace, disk)
    summary = figures.Figures(soaked=found, losses=[*found.lost, *found.growing])
    if json:
        print_json(figures.soak_json(found) | {"faults": summary.to_json()["faults"], "losses": summary.losses})
    else:
        print_table("Under faults", ("", ""), [*figures.fault_rows(found), *figures.soak_rows(found)])
    _end(summary.losses)


@app.command("calls")
def calls_failed(
    times: Annotated[int, typer.Option(min=1, help="Each call fails at its first, … and at this time.")] = 15,
) -> None:
    """Make each system call fail below a tier. Exits with an error at the first that costs a step."""
    with waiting("letting calls of the system fail"):
        found = figures.fail_calls(times)
    print_table("Calls of the system that failed", ("call", "times"), found.most_common(), right=["times"])


@app.command("fuzz")
def fuzzed(
    inputs: Annotated[int, typer.Option(min=1, help="How many, for each decoder.")] = 3000,
    seed: Seed = 0,
) -> None:
    """Give made-up input to every decoder. Exits with an error at the first that is neither decoded nor refused."""
    rows = []
    for name, run in figures.fuzz_decoders(inputs, seed):
        with waiting(name):
            rows.append((name, run()))
    print_table("Inputs fuzzed", ("decoder", "inputs"), rows, right=["inputs"])


@app.command("all")
def everything(
    budget: Annotated[
        Literal["short", "documented"], typer.Option(help="A look, or what the documentation records.")
    ] = "documented",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """All of it, in one table. Exits with 1 when anything is lost."""
    found = figures.measure(figures.BUDGETS[budget], waiting, seed=seed)
    if json:
        print_json(found.to_json())
    else:
        print_table("Tried on this machine", ("", ""), found.rows())
    _end(found.losses)


def _end(losses: Sequence[str]) -> None:
    if losses:
        print_table("Lost", ("",), [(line,) for line in losses])
        raise typer.Exit(1)
