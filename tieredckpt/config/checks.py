"""Find configurations that cannot work, and probable mistakes; each problem says what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from tieredckpt.config.kinds import kind_of
from tieredckpt.config.store_settings import StoreSettings
from tieredckpt.config.tiers import normal
from tieredckpt.policy.base import Retention, StepView, StoreView, TierView
from tieredckpt.settings import Place, Problem
from tieredckpt.units import format_size

__all__ = ["impossible", "probable_mistakes"]

_SAFETY = {"process": 0, "node": 1, "site": 2}
_SAMPLES_MAX = 1000
_FAILURES = (Exception, SystemExit)
"""Exceptions of third-party policies that are caught."""


class _Asked(NamedTuple):
    """A retention policy, and the tiers with which it is tried on a sample."""

    at: Place
    retain: Retention
    tiers: tuple[TierView, ...]
    """All tiers that it sees."""
    tier: TierView
    """The tier that it is asked about."""


def impossible(store: StoreSettings) -> list[Problem]:
    """Problems with which a store cannot work; the configuration is refused."""
    return [*_conflicts(store), *_shortages(store), *_keep_nothing(_of_tiers(store)), *_exports(store)]


def probable_mistakes(store: StoreSettings) -> list[Problem]:
    """Valid settings that are probably a mistake; they are logged when the store is opened."""
    # An export may wait for steps that no sample has.
    found: list[Problem] = [*_fails(store), *_keep_nothing(_of_exports(store))]
    for nearer, slower in combinations(store.tiers, 2):
        if nearer.survives and slower.survives and _SAFETY[slower.survives] < _SAFETY[nearer.survives]:
            text = (
                f"survives less ({slower.survives}) than the nearer tier {nearer.name} ({nearer.survives}), so no step "
                f"may leave {nearer.name} for being here; put it before {nearer.name}, or correct its `survives`"
            )
            found.append((("tiers", slower.name), text))
    for tier, located in zip(store.tiers, store.located, strict=True):
        if tier.earlier() is not None and located.location == tier.location:
            text = (
                f"is {tier.location}, that of every store there which nothing else tells from others; give the "
                f"tier a `path`, or the store a `name`"
            )
            found.append((("tiers", tier.name, "path"), text))
    for tier in store.tiers:
        if tier.codec == "none" and any(not rule.drop for rule in tier.lossy):
            text = "is `none`, so rounded values take as many bytes as they did; say `small` (or `fast`)"
            found.append((("tiers", tier.name, "codec"), text))
    if store.ram is not None and store.slower and all(tier.promote.kind == "never" for tier in store.slower):
        text = "is `never` like that of every slower tier: no step leaves RAM by itself; let one tier promote"
        found.append((("tiers", store.slower[0].name, "promote"), text))
    return found


def _conflicts(store: StoreSettings) -> list[Problem]:
    if not store.tiers:
        example = "[tiers.disk] with kind = 'posix' and path = '/some/folder'"
        return [(("tiers",), f"there is none; add one, for example {example}")]
    wrong: list[Problem] = []
    names: set[str] = set()
    locations: dict[str, str] = {}
    for i, tier in enumerate(store.tiers):
        at: Place = ("tiers", tier.name)
        if tier.name in names:
            wrong.append((at, "there are two tiers of this name; rename one"))
        names.add(tier.name)
        if i > 0 and kind_of(tier).in_memory:
            also = "there is one already" if store.tiers[0] is store.ram else "it is the nearest"
            wrong.append((at, f"a ram tier must be the only one and come first: {also}; move or remove it"))
        for name in ("codec", "codec_threads", "lossy"):
            if kind_of(tier).in_memory and getattr(tier, name) != type(tier).model_fields[name].default:
                text = "is not for a ram tier, whose memory is mapped; say it for slower tiers"
                wrong.append(((*at, name), text))
        if tier.location is not None:
            # Derived steps lie in a folder of their own there.
            other = locations.setdefault(f"{tier.location}\0derived" if tier.lossy else tier.location, tier.name)
            if other != tier.name:
                wrong.append((at, f"is at {tier.location} like the tier {other}; give each its own place"))
    wrong += _nested(store)
    wrong += _only_lossy(store)
    first = store.tiers[0]
    if first.promote.kind != "always":
        text = "the nearest tier gets every save; say under [store.schedule] when to save"
        wrong.append((("tiers", first.name, "promote"), text))
    if store.promote_in == "agent" and (store.ram is None or not store.slower):
        text = "is `agent`, which promotes from a ram tier to slower ones; add what is missing, or leave it out"
        wrong.append((("promote_in",), text))
    if store.name is None and not store.slower:
        wrong.append((("name",), "is required where no tier but RAM could tell this store from others"))
    return wrong


def _only_lossy(store: StoreSettings) -> Iterator[Problem]:
    if all(tier.lossy for tier in store.slower) and store.slower:
        yield (
            ("tiers", store.slower[0].name, "lossy"),
            "no tier below RAM would have the steps as they were saved, and a lossy copy is no copy of them: add a "
            "tier without `lossy` rules (it may keep fewer steps)",
        )
    elif store.tiers[0].lossy:
        text = "the nearest tier gets what is saved, as it is; put a tier without `lossy` rules before it"
        yield ("tiers", store.tiers[0].name, "lossy"), text


def _shortages(store: StoreSettings) -> list[Problem]:
    wrong: list[Problem] = []
    for tier in store.tiers:
        if isinstance(tier.capacity, int) and tier.capacity < store.chunk_size:
            text = f"{format_size(tier.capacity)} cannot hold one chunk of {format_size(store.chunk_size)}"
            at = ("tiers", tier.name, "capacity")
            wrong.append((at, f"{text}; raise it, or lower the store's chunk_size"))
    if store.grace <= store.lease_ttl:
        wrong.append((("grace",), "must be longer than lease_ttl, or files of a live writer may be collected"))
    return wrong


def _nested(store: StoreSettings) -> Iterator[Problem]:
    locations = ((tier, kind_of(tier).location(tier)) for tier in store.tiers)
    folders = [(tier, Path(normal(where))) for tier, where in locations if isinstance(where, Path)]
    for (one, outer), (other, inner) in combinations(folders, 2):
        if outer != inner and (outer in inner.parents or inner in outer.parents):
            text = f"{inner} and {outer} of the tier {one.name} lie in each other; give each a folder of its own"
            yield ("tiers", other.name, *(["path"] if "path" in type(other).model_fields else [])), text


def _exports(store: StoreSettings) -> Iterator[Problem]:
    names: set[str] = set()
    places: dict[str, str] = {}
    tiers = [(tier.name, kind_of(tier).location(tier)) for tier in store.tiers]
    for export in store.exports:
        at: Place = ("exports", export.name)
        if export.name in names:
            yield at, "there are two exports of this name; rename one"
        names.add(export.name)
        place = export.to if export.folder is None else normal(export.folder)
        if (other := places.setdefault(place, export.name)) != export.name:
            yield (*at, "to"), f"is {place} like that of the export {other}; give each a place of its own"
        for name, where in tiers:
            folder = Path(normal(where)) if isinstance(where, Path) else None
            if export.folder is not None and folder is not None and _meet(Path(place), folder):
                yield (*at, "to"), f"{place} and {folder} of the tier {name} lie in each other; give each its own place"
        for tier in store.tiers:
            url = getattr(tier, "url", None)
            if export.folder is None and isinstance(url, str) and _meet(Path(f"/{place}"), Path(f"/{url}")):
                yield (
                    (*at, "to"),
                    f"{place} and {url} of the tier {tier.name} lie in each other; give each its own place",
                )


def _meet(one: Path, other: Path) -> bool:
    return one == other or one in other.parents or other in one.parents


def _keep_nothing(retentions: Iterable[_Asked]) -> Iterator[Problem]:
    for at, retain, tiers, asked in retentions:
        try:
            views = list(_samples(retain, tiers))
            answers = [retain.retains(asked, view) for view in views]
        except _FAILURES:
            continue  # reported as probable mistakes, since the sample may be at fault
        if why := _of_none(answers, views[0].serials_on(asked.name)):
            yield at, f"`{retain.kind}` keeps no step{why}"


def _of_none(answers: Sequence[object], serials: AbstractSet[int]) -> str:
    """Why a retention with these ``answers`` keeps no step; empty if it keeps one."""
    given: list[object] = []
    for answer in answers:
        if not isinstance(answer, AbstractSet | list | tuple):
            return f": retains() gives a {type(answer).__name__}; give a frozenset of serials"
        given += answer
    if not given:
        return ", not even one that was just saved; let it keep one, for example with { kind = 'last_n', n = 1 }"
    if not any(isinstance(each, int) and each in serials for each in given):
        return f": what retains() gives, such as {given[0]!r}, is the serial of none; give `serial`, and not `step`"
    return ""


def _fails(store: StoreSettings) -> Iterator[Problem]:
    for at, retain, tiers, asked in (*_of_tiers(store), *_of_exports(store)):
        try:
            for view in _samples(retain, tiers):
                retain.retains(asked, view)
        except _FAILURES as error:
            text = f"`{retain.kind}` fails on a sample of steps ({type(error).__name__}: {error})"
            yield at, f"{text}; {'what it fails on stays' if at[0] == 'tiers' else 'nothing is exported then'}"


def _of_tiers(store: StoreSettings) -> Iterator[_Asked]:
    tiers = _views(store)
    for config, tier in zip(store.tiers, tiers, strict=True):
        yield _Asked(("tiers", config.name, "retain"), config.retain, tiers, tier)


def _of_exports(store: StoreSettings) -> Iterator[_Asked]:
    tiers = _views(store)
    for export in store.exports:
        slowest = TierView(f"exports.{export.name}", len(tiers), "node", None, 0, None, healthy=True)
        yield _Asked(("exports", export.name, "keep"), export.keep, (*tiers, slowest), slowest)


def _views(store: StoreSettings) -> tuple[TierView, ...]:
    return tuple(
        TierView(each.name, index, each.survives or "process", None, 0, None, healthy=True)
        for index, each in enumerate(store.tiers)
    )


def _samples(retain: Retention, tiers: tuple[TierView, ...]) -> Iterator[StoreView]:
    """Sample tiers full of steps that were just saved, of all numbers that the retention may mean, with all metrics.

    None of these numbers is a serial.
    """
    meant = {*range(11), *_numbers_in(retain.model_dump())}
    numbers = sorted({*meant, *(number + 1 for number in meant)})[:_SAMPLES_MAX]
    names = tuple(each.name for each in tiers)
    for value in (0.0, 1e300, -1e300):
        steps = tuple(
            StepView(step=number, serial=serial, saved_at=0.0, age=0.0, nbytes=1, metrics=_Any(value), tiers=names)
            for serial, number in enumerate(numbers, start=numbers[-1] + 1)
        )
        yield StoreView(now=0.0, steps=steps, tiers=tiers)


def _numbers_in(value: object) -> Iterator[int]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, int) and value >= 0:
        yield value


class _Any(dict[str, float]):
    """Metrics of every name, all of one value."""

    def __init__(self, value: float) -> None:
        super().__init__(loss=value)
        self._value = value

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> float:
        return self._value

    def get(self, name: str, default: Any = None) -> Any:
        return self._value
