"""Run the whole benchmark: in every round each peer takes its turn, the order shifted by one from round to round."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tieredckpt._decoders import json_decoder
from tieredckpt.bench import catalog, exports, small, turn
from tieredckpt.bench.catalog import CatalogSpec
from tieredckpt.bench.exports import ExportSpec
from tieredckpt.bench.isolate import Failed, IsolatedSpec, places, run_isolated, run_together, seats
from tieredckpt.bench.machine import describe_machine, versions
from tieredckpt.bench.peers import all_peers
from tieredckpt.bench.peers.base import Peer
from tieredckpt.bench.small import SmallSpec
from tieredckpt.bench.turn import Part, Spec, Turn
from tieredckpt.bench.workloads import workload_named
from tieredckpt.config import StoreConfig
from tieredckpt.errors import Invalid
from tieredckpt.units import format_size

__all__ = ["MEASURED", "Outcome", "Request", "run"]

MEASURED = ("transformer", "lora", "embedding", "tiny")
"""Default workloads of a run: the first is measured in full, the others only by saves."""
_MAIN_PARTS: tuple[Part, ...] = ("tenth", "compute", "memory", "export", "cold", "warm")
_TINY_PARTS: tuple[Part, ...] = ("memory", "warm")
_TINY_NBYTES = 2_560_000
_CATALOG_CHUNKS = 100
_PATIENCE = 300.0
"""Seconds that a turn may take, besides the time for its bytes."""
_SLOWEST = 20e6
"""Bytes a second; slower, a turn counts as hanging."""


@dataclass(frozen=True, slots=True)
class Request:
    """The measurements to make."""

    folder: Path
    """On the device that matters."""
    nbytes: int = 1 << 30
    workloads: Sequence[str] = MEASURED
    peers: Sequence[str] | None = None
    """Names besides this library's own; None for all."""
    rounds: int = 3
    repeats: int = 3
    steps: int = 10_000
    """Steps of the long history; 0 for none."""
    leaves: int = 100_000
    """Leaves of the tree of small leaves; 0 for none."""
    ranks: int = 1
    """Processes that save together, each its share of the state; the fixed costs are measured with one alone."""


@dataclass(slots=True)
class Outcome:
    """Everything that was measured, by workload and peer."""

    request: Request
    peers: tuple[Peer, ...]
    machine: dict[str, str | int]
    versions: dict[str, str]
    begun: str
    turns: dict[tuple[str, str], list[Turn]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Why a peer was not measured, by its name."""
    failed: dict[str, str] = field(default_factory=dict)
    """The error that ended a turn, by peer and workload."""
    small: dict[str, dict[str, float]] = field(default_factory=dict)
    """Fixed costs, by peer."""
    catalog: dict[str, float] = field(default_factory=dict)
    exports: dict[str, float] = field(default_factory=dict)
    took: float = 0.0


def run(request: Request, tell: Callable[[str], object] = lambda _: None) -> Outcome:
    """Make the requested measurements; ``tell`` gets the progress.

    Raises:
        Invalid: a workload or peer has no such name, or the folder is missing or too full.
    """
    for name in request.workloads:
        workload_named(name)
    if not request.folder.is_dir():
        raise Invalid(f"{request.folder}: there is no such folder; make it first")
    _check_room(request)
    wanted = _wanted(request.peers)
    missing = {peer.name: why for peer in wanted if (why := _why_missing(peer, request.ranks)) is not None}
    outcome = Outcome(
        request,
        tuple(peer for peer in wanted if peer.name not in missing),
        describe_machine(request.folder),
        versions(),
        datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        missing=missing,
    )
    begin = time.monotonic()
    for workload in request.workloads:
        for number in range(_rounds(request, workload)):
            shift = number % len(outcome.peers)  # each peer starts first in turn, to spread effects of the order
            for peer in outcome.peers[shift:] + outcome.peers[:shift]:
                if peer.only is not None and workload != request.workloads[0]:
                    continue
                tell(f"{workload}, round {number + 1} of {_rounds(request, workload)}: {peer.name}")
                _take_turn(outcome, workload, peer)
    if request.ranks == 1:
        _measure_one_rank(outcome, tell)
    outcome.took = time.monotonic() - begin
    return outcome


def _measure_one_rank(outcome: Outcome, tell: Callable[[str], object]) -> None:
    """Measure the figures that do not depend on the number of ranks, or need a single one."""
    for peer in (peer for peer in outcome.peers if peer.only is None):
        tell(f"one array, and many leaves: {peer.name}")
        _measure_small(outcome, peer)
    tell("an export behind the training")
    _measure_exports(outcome)
    if outcome.request.steps:
        tell(f"a history of {outcome.request.steps} steps")
        _measure_catalog(outcome)


def _why_missing(peer: Peer, ranks: int) -> str | None:
    return peer.missing() or (peer.missing_for_ranks() if ranks > 1 else None)


def _wanted(names: Sequence[str] | None) -> tuple[Peer, ...]:
    every = all_peers()
    if names is None:
        return every
    known = {peer.name for peer in every}
    if unknown := [name for name in names if name not in known]:
        raise Invalid(f"{', '.join(map(repr, unknown))}: no such peer; choose of {', '.join(sorted(known))}")
    return tuple(peer for peer in every if peer.name in names or peer.ours)


def _rounds(request: Request, workload: str) -> int:
    return request.rounds if workload == request.workloads[0] else math.ceil(request.rounds / 3)


def _parts(request: Request, workload: str, peer: Peer) -> tuple[Part, ...]:
    if peer.only is not None:
        return tuple(part for part in _MAIN_PARTS if part in peer.only)
    if workload == "tiny":
        return _TINY_PARTS
    if workload != request.workloads[0]:
        return ()
    parts = tuple(part for part in _MAIN_PARTS if part != "export" or request.ranks == 1)
    # The machine's limits are the same for all: once a round is enough.
    return (*parts, "limits") if peer.ours and peer.capture == "copy" else parts


def _take_turn(outcome: Outcome, workload: str, peer: Peer) -> None:
    request = outcome.request
    place = f"{peer.name}, {workload}"
    if place in outcome.failed:
        return
    nbytes = min(_TINY_NBYTES, request.nbytes) if workload == "tiny" else request.nbytes
    with places(request.folder) as where, seats(request.ranks) as taken:
        specs = [
            Spec(
                peer=peer.name,
                workload=workload,
                nbytes=nbytes // request.ranks,
                **where.told() | {"result": f"{where.result}-{rank}"},
                repeats=request.repeats if peer.ours or workload == request.workloads[0] else 1,
                threads=StoreConfig.model_construct().copy_threads,
                parts=_parts(request, workload, peer),
                rank=rank,
                seat=seat,
            )
            for rank, seat in enumerate(taken)
        ]
        timeout = _PATIENCE + nbytes * (request.repeats + 5) / _SLOWEST
        try:
            run_together(turn.__name__, [(spec, spec.seat) for spec in specs], timeout=timeout)
        except Failed as error:
            outcome.failed[place] = str(error)
            return
        told = [json_decoder(Turn).decode(Path(spec.result).read_bytes()) for spec in specs]
    outcome.turns.setdefault((workload, peer.name), []).append(turn.of_all_ranks(told))


def _measured(
    outcome: Outcome, what: str, module: str, make_spec: Callable[..., IsolatedSpec], timeout: float
) -> dict[str, float]:
    """Figures of a measurement in a process of its own; after a failure none, and the reason is noted."""
    folder, make_spec = outcome.request.folder, partial(make_spec, repeats=outcome.request.repeats)
    try:
        return run_isolated(dict[str, float], module, folder, make_spec, timeout=timeout)
    except Failed as error:
        outcome.failed[what] = str(error)
        return {}


def _measure_small(outcome: Outcome, peer: Peer) -> None:
    leaves = outcome.request.leaves if peer.ours and peer.capture == "copy" else 0
    spec = partial(SmallSpec, peer=peer.name, leaves=leaves)
    if found := _measured(outcome, f"{peer.name}, one array", small.__name__, spec, _PATIENCE):
        outcome.small[peer.name] = found


def _measure_exports(outcome: Outcome) -> None:
    request, threads = outcome.request, StoreConfig.model_construct().copy_threads
    spec = partial(ExportSpec, workload=request.workloads[0], nbytes=request.nbytes, threads=threads)
    timeout = _PATIENCE + request.nbytes * 7 * (request.repeats + 1) / _SLOWEST
    outcome.exports = _measured(outcome, "exports", exports.__name__, spec, timeout)


def _measure_catalog(outcome: Outcome) -> None:
    steps = outcome.request.steps
    spec = partial(CatalogSpec, steps=steps, chunks=_CATALOG_CHUNKS)
    outcome.catalog = _measured(outcome, "catalog", catalog.__name__, spec, _PATIENCE + steps / 20)


def _check_room(request: Request) -> None:
    found = os.statvfs(request.folder)
    free, need = found.f_bavail * found.f_frsize, 5 * request.nbytes
    if free < need:
        raise Invalid(
            f"{request.folder} has {format_size(free)} free, and a turn may need {format_size(need)}: "
            f"choose another --folder, or a smaller --size"
        )
