"""The verb `agent`: promotes what a trainer saves, in a process of its own, and prints what it does."""

from __future__ import annotations

from typing import Annotated

import typer

from tieredckpt.agent.agent import run_agent
from tieredckpt.cli.console import errors, output, printable
from tieredckpt.config import load
from tieredckpt.events import (
    ChunkRepaired,
    Event,
    Events,
    ExportFailed,
    StepEvicted,
    StepExported,
    StepPromoted,
    TierFailed,
    TierHangs,
    TierRecovered,
)
from tieredckpt.units import format_size

__all__ = ["agent"]


def agent(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="The configuration that the trainer opens.", show_default=False)
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Promote what is in RAM now, such as a dead trainer's steps, and end.")
    ] = False,
) -> None:
    """Promote from the RAM tier in this process, beside the trainer and after its death. Ends on SIGTERM or Ctrl-C."""
    store = load(config)
    events = Events()
    events.subscribe(_show)

    def begin(is_there: bool) -> None:
        nearest, *others = (printable(tier.name) for tier in store.tiers)
        if is_there or not once:
            errors().print(f"promoting from tier {nearest} to {', '.join(others)}")
        if not is_there and not once:
            errors().print("there is no RAM tier of this store on this node yet: waiting for its trainer")

    match run_agent(store, events, "once" if once else "stays", begins=begin):
        case "signal":
            errors().print("ended: the tiers are free for another agent")
        case "nothing to do":  # as after a training that ended in order
            errors().print("there is no RAM tier of this store on this node: nothing is left to promote")


def _show(event: Event) -> None:
    text = _text(event)
    if text:
        output().print(printable(text))


def _text(event: Event) -> str:
    match event:
        case StepPromoted():
            took = f"{format_size(event.written)} written in {event.seconds:.1f} s"
            return f"step {event.step} is on tier {event.tier}: {took}, {event.lag:.1f} s after its save"
        case StepExported():
            took = f"{format_size(event.nbytes)} written in {event.seconds:.1f} s"
            return f"step {event.step} is exported to {event.to}: {took}, {event.lag:.1f} s after its save"
        case ExportFailed():
            what = "" if event.step is None else f" of step {event.step}"
            then = "" if event.retry_in is None else f", next try in {event.retry_in:.0f} s"
            return f"export {event.export}{what} failed{then}: {event.error}"
        case StepEvicted():
            return f"step {event.step} has left tier {event.tier}"
        case ChunkRepaired():
            return f"step {event.step}, {event.key}: repaired on tier {event.tier} from {event.source}"
        case TierFailed():
            return f"tier {event.tier} failed, next try in {event.retry_in:.1f} s: {event.error}"
        case TierHangs():
            return f"tier {event.tier} does not answer: {event.calls} calls hang"
        case TierRecovered():
            return f"tier {event.tier} works again"
    return ""
