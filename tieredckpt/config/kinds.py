"""Kinds of tier: the value that defines a kind, how it is found by name, and how a table becomes a tier.

::

    FLOPPY = TierKind(config=FloppyTier, open=open_floppy, survives=lambda tier: Survives.NODE)

A package offers a kind through an entry point of the group ``tieredckpt.tiers``, whose name is the kind::

    [project.entry-points."tieredckpt.tiers"]
    floppy = "my_tiers:FLOPPY"

The kinds of this library are offered in the same way. A kind is imported only when a configuration uses it, so a broken
kind affects only its users.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Protocol, TypeVar

from pydantic import BeforeValidator, SerializeAsAny, ValidationError, ValidationInfo

from tieredckpt import _registry
from tieredckpt._redact import redacted
from tieredckpt._registry import the_kind
from tieredckpt.concurrency import on_own_thread_within
from tieredckpt.config.tiers import RamTier, TierConfig
from tieredckpt.errors import Invalid
from tieredckpt.settings import Problem, did_you_mean, problems, refusal

if TYPE_CHECKING:
    from tieredckpt.blobs.base import BlobStore, Survives
    from tieredckpt.blobs.checkup import Check

__all__ = [
    "GROUP",
    "Opens",
    "TierKind",
    "Tiers",
    "by_name",
    "exists",
    "kind_named",
    "kind_of",
    "kind_of_url",
    "kinds",
    "register",
    "replaced",
]

GROUP = "tieredckpt.tiers"
"""The entry-point group of kinds of tier."""

T = TypeVar("T")
C = TypeVar("C", bound=TierConfig)
C_contra = TypeVar("C_contra", bound=TierConfig, contravariant=True)


class Opens(Protocol[C_contra]):
    async def __call__(self, tier: C_contra, /, *, read_only: bool = False) -> BlobStore:
        """The blob store of a tier, connected, and without the wrappers that retry, limit and time.

        With ``read_only`` nothing is created there, not even to find out what the store can do. Raises `NotFound` (only
        with ``read_only``: nothing is there), `TierUnavailable`, `Invalid`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TierKind(Generic[C]):
    """A kind of tier: everything that the library asks of it, as functions of one tier's configuration."""

    config: type[C]
    open: Opens[C]
    survives: Callable[[C], Survives]
    """What the tier outlives, by its configuration."""
    exists: Callable[[C], bool] = lambda _: True
    """Whether a store may be there; False is certain. It opens and creates nothing. May block: see `exists`."""
    location: Callable[[C], Path | str | None] = lambda tier: tier.location
    """Location without secrets, in a form that two configurations are compared by and that RAM notes: a path for a
    folder of this machine whose files are the objects, other text for anything else. None for a place that no other
    process can find, such as memory."""
    schemes: tuple[str, ...] = ()
    """The schemes of the URLs that name a place of this kind; its configuration takes one as ``url``."""
    scopes: tuple[Literal["node", "all"], ...] = ("all",)
    """Visibility of such a tier: its node alone, or all nodes."""
    medium: Literal["memory", "nodes", "shared"] = "shared"
    """For plans, the source of its speed: each node's memory, the media of all nodes together, or a medium that all
    share. A tier that outlives no node and is used by a single one counts as that node's medium."""
    shares_memory: bool = False
    """Whether another process of the store reads and writes its callers' buffers in place."""
    transient: Callable[[C], C] = lambda tier: tier
    """The tier for objects that no job outlives, such as messages: without the settings that make objects durable."""
    tensorstore_spec: Callable[[C, str], dict[str, Any]] | None = None
    """The TensorStore kvstore spec of the tier, whose ``path`` is its root; of its configuration and the location of
    its open store. None where TensorStore has no driver that reads it."""
    checkup: Callable[[C, int], AsyncIterator[Check]] | None = None
    """The check of `doctor` with an object of so many bytes; None for `tieredckpt.blobs.tier_checkup.try_tier`."""

    @property
    def name(self) -> str:
        return the_kind(self.config)

    @property
    def in_memory(self) -> bool:
        """Whether it is RAM: the slab that a save copies to."""
        return self.medium == "memory"


_registered: dict[str, TierKind[Any]] = {}
"""Kinds given to `register`, by name."""


def register(kind: TierKind[C]) -> TierKind[C]:
    """Register a kind in this process without an entry point; other processes, such as an agent, do not know it.

    Registering it again, or its new version in a notebook, is fine. Raises `Conflict` when another has its name,
    `Invalid` when it is incomplete.
    """
    _check(kind)
    before = _registered.get(kind.name)
    taken = before.config if before is not None else None
    _registry.refuse_taken(GROUP, kind.name, f"the kind {kind.name!r} of tier", kind.config, taken, _config_of)
    _registered[kind.name] = kind
    return kind


def _config_of(entry: EntryPoint) -> str:
    """The path of the model that an offered kind has; the entry point's value if it cannot be imported."""
    try:
        return _registry.path_of(entry.load().config)
    except Exception:
        return entry.value


@contextmanager
def replaced(*others: TierKind[Any]) -> Iterator[None]:
    """Replace kinds by others of the same names during the block, for tests."""
    before = dict(_registered)
    _registered.update((kind.name, kind) for kind in others)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)


def kinds() -> list[str]:
    """The names of all kinds."""
    return sorted(_registered.keys() | _registry.offered(GROUP).keys())


def kind_named(name: str) -> TierKind[Any]:
    """The kind of that name. Raises `Invalid`, with the names there are, or the package whose kind is broken."""
    return _registered.get(name) or _offered(name)


def kind_of(tier: C) -> TierKind[C]:
    """The kind of a configured tier. Raises `Invalid` if it is not known."""
    return kind_named(tier.kind)


def kind_of_url(url: str) -> TierKind[Any]:
    """The kind of the place that a URL names. Raises `Invalid`, with the schemes that are known.

    Of several kinds, a registered one wins, then the one named like the scheme, then this library's.
    """
    scheme = url.partition("://")[0].lower()
    offered = _registry.offered(GROUP)
    known: list[str] = []

    def rank(name: str) -> tuple[bool, bool, bool]:
        ours = any(entry.value.startswith("tieredckpt.") for entry in offered.get(name, ()))
        return name not in _registered, name != scheme, not ours

    for name in sorted(kinds(), key=rank):
        try:
            kind = kind_named(name)
        except Invalid:
            continue  # a broken one affects only its users
        if scheme in kind.schemes:
            return kind
        known += kind.schemes
    there = ", ".join(f"{each}://" for each in sorted(known))
    raise Invalid(
        f"'{scheme}://…' is a URL of no kind of tier{f' (known are {there})' if there else ''}; for what TensorStore "
        f"reads besides, write a configuration (.toml) with a tier of kind = 'kvstore' and its `spec`"
    )


async def exists(tier: TierConfig) -> bool:
    """Whether a store may be at a tier; False is certain. Raises `TierUnavailable` after the tier's deadline."""
    return await on_own_thread_within(
        tier.deadline, tier.name, f"looking for {tier.location}", kind_of(tier).exists, tier
    )


@functools.cache
def _offered(name: str) -> TierKind[Any]:
    def check(kind: object) -> None:
        if _check(kind).name != name:
            raise Invalid(f"it is the kind `{_check(kind).name}`")

    found: TierKind[Any] | None = _registry.load(GROUP, name, f"the kind of tier `{name}`", check)
    if found is not None:
        return found
    hint = did_you_mean(name, kinds())
    if not hint:
        hint = (
            f", and no kind is known: the entry points of {GROUP!r} are missing; install the package "
            "(`pip install -e .` in a checkout)"
        )
    elif hint.startswith("; there are"):  # none is near, so it may be of a package
        hint += "; for another one, install the package that offers it"
    raise Invalid(f"`{name}` is not a kind of tier{hint}")


def _check(kind: object) -> TierKind[Any]:
    if not isinstance(kind, TierKind):
        raise Invalid(f"{kind!r} is no TierKind")
    model: object = kind.config
    if not (isinstance(model, type) and issubclass(model, TierConfig)):
        raise Invalid(f"{model!r} is not a class derived from TierConfig")
    needed = ("location", "capacity", "survives")
    if lacking := [name for name in needed if name not in model.model_fields and not hasattr(model, name)]:
        raise Invalid(f"{_registry.path_of(model)} has no {' and no '.join(lacking)}, as a field or a property")
    if model is not RamTier and (kind.in_memory or kind.scopes != ("all",)):
        raise Invalid("in this version only the kind `ram` is in memory, or seen by its node alone")
    return kind


def by_name(value: object, what: str, make: Callable[[str | int, object], T]) -> tuple[T, ...]:
    """Apply ``make`` to each table in a table by name, or in a sequence whose elements carry their names.

    Raises `Invalid` for a value that is neither, and pydantic's error with all problems, each below its table's name.
    """
    tables: list[tuple[str | int, object]]
    if isinstance(value, Mapping):
        tables = [
            (str(name), {"name": str(name), **table} if isinstance(table, Mapping) else table)
            for name, table in value.items()
        ]
    elif isinstance(value, (list, tuple)):
        tables = [(_name_of(table, i), table) for i, table in enumerate(value)]
    else:
        raise Invalid(f"should be one table per {what}, not {redacted(value)!r}")
    found: list[T] = []
    wrong: list[Problem] = []
    for name, table in tables:
        try:
            found.append(make(name, table))
        except ValidationError as error:
            wrong += problems(error, (name,))
    if wrong:
        raise refusal(wrong)
    return tuple(found)


def _name_of(tier: object, index: int) -> str | int:
    name = tier.get("name") if isinstance(tier, Mapping) else getattr(tier, "name", None)
    return name if isinstance(name, str) else index


def _tier(context: Any, called: str | int, table: object) -> TierConfig:
    if isinstance(table, TierConfig):
        return table
    if not isinstance(table, Mapping):
        raise refusal([((), f"should be a table of settings, not {redacted(table)!r}")])
    name = table.get("kind")
    if name is None:
        near = difflib.get_close_matches("kind", map(str, table), n=1)
        instead = f"; `{near[0]}` is not a setting of a tier" if near else ""
        raise refusal([(("kind",), f"is required: one of {', '.join(kinds())}{instead}")])
    try:
        model: type[TierConfig] = kind_named(str(name)).config
    except Invalid as error:
        raise refusal([(("kind",), str(error))]) from error
    found = model.model_validate(dict(table), context=context)
    if found.name != called:
        raise refusal([(("name",), f"its table is called {called}; leave this out")])
    return found


def _tiers(value: object, info: ValidationInfo) -> tuple[TierConfig, ...]:
    return by_name(value, "tier", functools.partial(_tier, info.context))


Tiers = Annotated[tuple[SerializeAsAny[TierConfig], ...], BeforeValidator(_tiers)]
"""Field type: tiers nearest first, of a table by name or of a sequence."""
