"""The report of a run: medians for every peer, this library's ratios to the limits, and its aims."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tieredckpt._decoders import UNREADABLE, json_decoder
from tieredckpt.bench.peers import OURS
from tieredckpt.bench.peers.base import Peer
from tieredckpt.bench.run import Outcome
from tieredckpt.bench.turn import Turn
from tieredckpt.errors import Invalid, NotFound

__all__ = ["AIMS", "Aim", "Change", "Report", "Row", "compare", "load_report", "make_report", "unlike"]

_REFERENCE, _TORCH, _JAX = "tieredckpt-reference", "tieredckpt-torch", "tieredckpt-jax"


class Aim(msgspec.Struct, frozen=True):
    """The target of a figure of this library, an upper bound."""

    key: str
    about: str
    most: float | None
    """None if there is no bound, and only the peers to compare with."""
    unit: str = ""


AIMS = (
    Aim("stall_over_memcpy", "stall of a save, over a memcpy of the state", 1.2),
    Aim("stall_reference_s", "stall of a save of JAX arrays by reference", 0.010, "s"),
    Aim("durable_over_direct_write", "time until durable, over a direct sequential write", 1.1),
    Aim("export_over_direct_write", "an export behind the training, over a direct sequential write", 1 / 0.9),
    Aim("export_cast_over_direct_write", "the same with cast = bf16, over a write of what comes out", 1 / 0.9),
    Aim("export_stall_ratio", "stall of a save while the step before is exported, over one alone", 1.1),
    Aim("incremental_bytes_ratio", "bytes written after a tenth changed, over a full save", 0.11),
    Aim("incremental_time_ratio", "time until that is durable, over a full save", 0.2),
    Aim("incremental_stall_ratio", "stall of that save, over a full save", 0.6),
    Aim("frozen_stall_ratio", "the same, where the rest is declared frozen", 0.2),
    Aim("same_object_stall_ratio", "the same of JAX arrays, where the rest are the same objects", 0.2),
    Aim("restore_ram_over_memcpy", "restore into existing arrays from RAM, verified, over a memcpy", 1.4),
    Aim("restore_views_s", "restore from RAM as views", 0.020, "s"),
    Aim("restore_disk_over_direct_read", "restore from disk, cold, verified, over a direct sequential read", 1.15),
    Aim("restore_torch_over_direct_read", "the same into torch tensors", 1.15),
    Aim("restore_new_over_direct_read", "the same into new arrays, whose memory comes first", None),
    Aim("export_orbax_s", "export to a folder of Orbax, over links to the packs", 1.0, "s"),
    Aim("peak_save_over_slab", "memory of saves beyond the state and the slab", 128 << 20, "bytes"),
    Aim("peak_restore", "memory of a restore beyond the state", 256 << 20, "bytes"),
    Aim("interference", "time that a compute loop loses for each GB promoted", 0.1, "s"),
    Aim("tiny_save_us", "save of 10,000 tiny arrays, each", 50, "us"),
    Aim("tiny_restore_us", "restore of 10,000 tiny arrays from RAM, each", 50, "us"),
    Aim("leaves_first_save_us", "processor time of the first save of 100,000 leaves of 64 bytes, each", 20, "us"),
    Aim("leaves_save_us", "processor time of a later save of them, each", 5, "us"),
    Aim("leaves_restore_us", "processor time of a restore into them from RAM, each", 5, "us"),
    Aim("first_stall_over_fresh_copy", "first save of a state, over a copy of it into fresh memory", 1.3),
    Aim("open_empty_s", "opening an empty store", None, "s"),
    Aim("save_one_s", "stall of a save of one array", None, "s"),
    Aim("close_s", "closing", None, "s"),
    Aim("open_large_s", "opening a history of many steps and chunks", 2.0, "s"),
    Aim("save_large_extra_s", "what a save takes longer on that history", 0.050, "s"),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One peer with one workload: medians, in seconds and bytes; None where it has no such figure."""

    peer: str
    way: str
    durability: str
    capture: str
    snapshot: bool
    """Whether it wrote the saved values, although the state changed after the save returned."""
    nbytes: int
    arrays: int
    first_stall_s: float | None = None
    stall_s: float | None = None
    durable_s: float | None = None
    written_ratio: float | None = None
    """Bytes written by a full save, over those of the state."""
    files: int | None = None
    tenth_stall_s: float | None = None
    tenth_durable_s: float | None = None
    tenth_written_ratio: float | None = None
    restore_cold_new_s: float | None = None
    restore_cold_existing_s: float | None = None
    restore_warm_new_s: float | None = None
    restore_warm_existing_s: float | None = None
    peak_save_ratio: float | None = None
    """Memory of saves beyond the state, over the state."""
    peak_restore_ratio: float | None = None
    interference: float | None = None
    """Seconds that a compute loop loses for each GB written behind."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result, as it is stored."""

    begun: str
    took_s: float
    size: int
    rounds: int
    repeats: int
    ranks: int = 1
    """Processes that saved together, each its share of the state."""
    machine: dict[str, str | int]
    versions: dict[str, str]
    ratios: dict[str, float]
    """This library's figures by the keys of `AIMS`, and their components."""
    limits: dict[str, float]
    """Seconds for the bytes of the state."""
    against: dict[str, dict[str, float]]
    """This library's time over each peer's: below 1, this library is faster."""
    rows: dict[str, list[Row]]
    """By workload."""
    small: dict[str, dict[str, float]] = {}
    """Seconds to open, to save one array, until it is durable, and to close, by peer."""
    missing: dict[str, str]
    failed: dict[str, str]
    samples: dict[str, dict[str, list[float]]]
    """Every repetition, by workload and peer, in seconds."""
    format: int = 1


def make_report(outcome: Outcome) -> Report:
    """The report of a run."""
    rows: dict[str, list[Row]] = {}
    samples: dict[str, dict[str, list[float]]] = {}
    for workload in outcome.request.workloads:
        for peer in outcome.peers:
            turns = outcome.turns.get((workload, peer.name))
            if turns:
                merged = _merged(turn.samples for turn in turns)
                rows.setdefault(workload, []).append(_row(peer, turns, merged))
                samples[f"{workload} {peer.name}"] = merged
    main = outcome.request.workloads[0]
    return Report(
        begun=outcome.begun,
        took_s=outcome.took,
        size=outcome.request.nbytes,
        rounds=outcome.request.rounds,
        repeats=outcome.request.repeats,
        ranks=outcome.request.ranks,
        machine=outcome.machine,
        versions=outcome.versions,
        ratios=_ratios(outcome, main, samples),
        limits=_limits(samples.get(f"{main} {OURS}", {})),
        against=_against(rows.get(main, [])),
        rows=rows,
        small=outcome.small,
        missing=outcome.missing,
        failed=outcome.failed,
        samples=samples,
    )


def load_report(path: Path) -> Report:
    """A report that ``tieredckpt bench --json`` printed.

    Raises:
        NotFound: there is no such file.
        Invalid: it is no such report.
    """
    try:
        return json_decoder(Report).decode(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such report") from error
    except (OSError, *UNREADABLE) as error:
        raise Invalid(f"{path}: is no report of `tieredckpt bench --json`: {error}") from error


def _merged(parts: Iterable[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    merged: dict[str, list[float]] = {}
    for part in parts:
        for name, values in part.items():
            merged.setdefault(name, []).extend(values)
    return merged


def _median(samples: Mapping[str, list[float]], name: str) -> float | None:
    values = samples.get(name)
    return statistics.median(values) if values else None


def _worst(turns: Iterable[Turn], name: str) -> float | None:
    return max((turn.facts[name] for turn in turns if name in turn.facts), default=None)


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _row(peer: Peer, turns: list[Turn], samples: Mapping[str, list[float]]) -> Row:
    nbytes = turns[0].nbytes
    files = _worst(turns, "files")
    return Row(
        peer=peer.name,
        way=peer.way,
        durability=peer.durability,
        capture=peer.capture,
        snapshot=all(turn.snapshot for turn in turns),
        nbytes=nbytes,
        arrays=turns[0].arrays,
        first_stall_s=_median(samples, "first_stall"),
        stall_s=_median(samples, "stall"),
        durable_s=_median(samples, "durable"),
        written_ratio=_over(_worst(turns, "written"), nbytes),
        files=None if files is None else int(files),
        tenth_stall_s=_median(samples, "tenth_stall"),
        tenth_durable_s=_median(samples, "tenth_durable"),
        tenth_written_ratio=_over(_worst(turns, "tenth_written"), nbytes),
        restore_cold_new_s=_median(samples, "restore_cold_new"),
        restore_cold_existing_s=_median(samples, "restore_cold_existing"),
        restore_warm_new_s=_median(samples, "restore_warm_new"),
        restore_warm_existing_s=_median(samples, "restore_warm_existing"),
        peak_save_ratio=_over(_worst(turns, "peak_save"), nbytes),
        peak_restore_ratio=_over(_worst(turns, "peak_restore"), nbytes),
        interference=_median(samples, "interference"),
    )


def _ratios(outcome: Outcome, main: str, samples: Mapping[str, Mapping[str, list[float]]]) -> dict[str, float]:
    ours, of_torch, of_jax = (samples.get(f"{main} {peer}", {}) for peer in (OURS, _TORCH, _JAX))
    turns = outcome.turns.get((main, OURS), [])
    tiny = samples.get(f"tiny {OURS}", {})
    count = next((turn.arrays for turn in outcome.turns.get(("tiny", OURS), [])), 1)
    small = outcome.small.get(OURS, {})
    peak_save, slab = _worst(turns, "peak_save"), _worst(turns, "slab")
    found = {
        "stall_over_memcpy": _over(_median(ours, "stall"), _median(ours, "memcpy")),
        "stall_reference_s": _median(samples.get(f"{main} {_REFERENCE}", {}), "stall"),
        "durable_over_direct_write": _over(_median(ours, "durable"), _median(ours, "write")),
        "incremental_bytes_ratio": _over(_worst(turns, "tenth_written"), _worst(turns, "written")),
        "incremental_time_ratio": _over(_median(ours, "tenth_durable"), _median(ours, "durable")),
        "incremental_stall_ratio": _over(_median(ours, "tenth_stall"), _median(ours, "stall")),
        "frozen_stall_ratio": _over(_median(ours, "frozen_stall"), _median(ours, "stall")),
        "same_object_stall_ratio": _over(_median(of_jax, "tenth_stall"), _median(of_jax, "stall")),
        "restore_ram_over_memcpy": _over(_median(ours, "restore_ram"), _median(ours, "memcpy_back")),
        "restore_views_s": _median(ours, "restore_views"),
        "restore_disk_over_direct_read": _over(_median(ours, "restore_cold_existing"), _median(ours, "read")),
        "restore_torch_over_direct_read": _over(_median(of_torch, "restore_cold_existing"), _median(of_torch, "read")),
        "restore_new_over_direct_read": _over(_median(ours, "restore_cold_new"), _median(ours, "read")),
        "export_orbax_s": _median(ours, "export_orbax"),
        "peak_save": peak_save,
        "slab": slab,
        "peak_save_over_slab": None if peak_save is None or slab is None else max(0.0, peak_save - slab),
        "peak_restore": _worst(turns, "peak_restore"),
        "interference": _median(ours, "interference"),
        "tiny_save_us": _over(_median(tiny, "stall"), count / 1e6),
        "tiny_restore_us": _over(_median(tiny, "restore_ram"), count / 1e6),
        "first_stall_over_fresh_copy": _over(_median(ours, "first_stall"), _median(ours, "fresh_copy")),
        "open_empty_s": small.get("open_s"),
        "save_one_s": small.get("save_s"),
        "close_s": small.get("close_s"),
        **{key: value for key, value in small.items() if key.startswith("leaves_")},
        **outcome.exports,
        **outcome.catalog,
    }
    return {key: value for key, value in found.items() if value is not None}


_LIMITS = {
    "memcpy": "memcpy",
    "memcpy_by_one": "memcpy_by_one_thread",
    "hash": "hash_by_one_thread",
    "write": "direct_write",
    "read": "direct_read",
    "fresh": "fresh_memory",
    "fresh_copy": "copy_to_fresh_memory",
}


def _limits(samples: Mapping[str, list[float]]) -> dict[str, float]:
    medians = {name: _median(samples, sample) for sample, name in _LIMITS.items()}
    return {name: value for name, value in medians.items() if value is not None}


def _against(rows: list[Row]) -> dict[str, dict[str, float]]:
    ours = {row.peer: row for row in rows if row.peer in (OURS, _REFERENCE)}
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        mine = ours.get(_REFERENCE if row.capture == "reference" else OURS)
        if mine is None or row.peer in (*ours, _TORCH, _JAX):
            continue
        pairs = {
            "stall": _over(mine.stall_s, row.stall_s),
            "durable": _over(mine.durable_s, row.durable_s),
            "tenth_durable": _over(mine.tenth_durable_s, row.tenth_durable_s),
            "restore_cold": _over(_best_cold(mine), _best_cold(row)),
        }
        found[row.peer] = {name: value for name, value in pairs.items() if value is not None}
    return found


def _best_cold(row: Row) -> float | None:
    """The cold restore by the peer's best way: into existing arrays, if it can."""
    return row.restore_cold_existing_s if row.restore_cold_existing_s is not None else row.restore_cold_new_s


Verdict = Literal["worse", "better", "alike", "new", "gone"]

_TOLERANCE = 0.15
"""Smaller changes of a ratio are noise between runs on one machine; see docs/guides/bench.md."""
_LEAST = {"peak_save_over_slab": 64 << 20, "peak_restore": 64 << 20, "save_large_extra_s": 0.01, "interference": 0.02}
"""Smaller changes do not count, whatever their ratio: for figures that may be close to nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, before and now; every figure is better when it is smaller."""

    key: str
    before: float | None
    now: float | None
    verdict: Verdict


def compare(before: Report, now: Report) -> list[Change]:
    """Every figure of either report that has an aim, in the order of the aims."""
    changes = []
    for aim in AIMS:
        old, new = before.ratios.get(aim.key), now.ratios.get(aim.key)
        if old is not None or new is not None:
            changes.append(Change(aim.key, old, new, _verdict(aim.key, old, new)))
    return changes


def _verdict(key: str, old: float | None, new: float | None) -> Verdict:
    if old is None:
        return "new"
    if new is None:
        return "gone"
    if abs(new - old) <= max(_TOLERANCE * min(old, new), _LEAST.get(key, 0.0)):
        return "alike"
    return "worse" if new > old else "better"


def unlike(before: Report, now: Report) -> list[str]:
    """Why the figures of two reports are not comparable; empty if they are."""
    reasons = []
    if before.size != now.size:
        reasons.append(f"the states have {before.size} and {now.size} bytes")
    if before.ranks != now.ranks:
        reasons.append(f"{before.ranks} and {now.ranks} ranks saved together")
    reasons += [
        f"{name}: {before.machine.get(name)!r} and {now.machine.get(name)!r}"
        for name in ("processor", "cores", "file_system")
        if before.machine.get(name) != now.machine.get(name)
    ]
    return reasons
