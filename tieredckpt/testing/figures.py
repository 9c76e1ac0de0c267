"""The figures of `docs/explanation/reliability.md`, from runs on this machine, printed as tables."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, get_args

import typer

from tieredckpt.cli.console import print_table, waiting
from tieredckpt.testing.journal import Failure
from tieredckpt.testing.kills import kill_trainers
from tieredckpt.testing.life import KINDS, live
from tieredckpt.testing.replay import replay

__all__ = ["app"]

app = typer.Typer(
    help="Try what the library promises against crashes, on this machine, and print what came of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@contextmanager
def _memory() -> Iterator[Path]:
    """A folder in shared memory, where there is some."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix=f"tieredckpt-test-{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@app.command("replay")
def replayed(
    every: Annotated[int, typer.Option(min=1, help="Survive one in so many of the crashes that differ.")] = 1,
) -> None:
    """Crash a recorded life after every one of its changes. Exits with an error at the first that costs anything."""
    logging.getLogger("tieredckpt").setLevel(logging.CRITICAL)
    rows = []
    for kind in KINDS:
        for failure in get_args(Failure):
            with waiting(f"{kind}: the {failure} dies"), _memory() as place:
                begin = time.monotonic()
                life = asyncio.run(live(kind, place / "life"))
                found = asyncio.run(replay(life, failure, place / "again", every=every))
                took = f"{time.monotonic() - begin:.0f}"
                rows.append((kind, failure, len(life.entries), found.crashes, found.states, found.steps, 0, took))
    columns = ("slower tier", "what dies", "changes", "crash points", "states survived", "steps compared", "lost", "s")
    print_table("Crashes replayed", columns, rows, right=columns[2:])


@app.command("kills")
def killed(
    kills: Annotated[int, typer.Option(min=1, help="How many trainers are to die.")] = 300,
    seed: Annotated[int, typer.Option(help="Of where and when.")] = 0,
    disk: Annotated[
        Path | None, typer.Option(help="Folder of the slower tier; in memory by default.", show_default=False)
    ] = None,
    by_agent: Annotated[bool, typer.Option("--by-agent", help="Have agents promote, and kill them too.")] = False,
) -> None:
    """Kill trainers by SIGKILL. Exits with 1 when a step that was acknowledged is lost."""
    logging.getLogger("tieredckpt").setLevel(logging.CRITICAL)
    with waiting(f"killing {kills} trainers"), _memory() as memory:
        found = kill_trainers(kills, memory, disk or memory / "disk", seed=seed, by_agent=by_agent)
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
    print_table("Trainers and agents killed" if by_agent else "Trainers killed", ("", ""), rows)
    if found.lost:
        print_table("Lost", ("",), [(line,) for line in found.lost])
        raise typer.Exit(1)


@app.command("all")
def everything() -> None:
    """All of it, at the length that the documentation records."""
    replayed(every=1)
    killed(kills=300, seed=0, disk=None, by_agent=False)
    killed(kills=100, seed=0, disk=None, by_agent=True)
