"""What a store is made of: its settings and its tiers, from TOML, from Python or from a stored step.

A configuration file has one table ``[store]`` and one table ``[tiers.NAME]`` per tier, nearest first::

    [store.schedule]
    kind = "every"
    interval = "5 min"

    [tiers.ram]
    kind = "ram"

    [tiers.disk]
    kind = "posix"
    path = "~/checkpoints"
    retain = { kind = "last_n", n = 10 }

Where a tier says nothing else, every step is promoted to it, RAM retains the newest step, other tiers retain
the newest five, and the oldest leaves first. A policy is a table with its ``kind``, or the bare kind.
Defaults are found by their kind like any policy; nothing here imports the package that ships them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from tieredckpt._redact import redacted
from tieredckpt.config.checks import impossible
from tieredckpt.config.kinds import Tiers, kind_of, kind_of_url
from tieredckpt.config.tiers import (
    WITH_SECRETS,
    AbsolutePath,
    ChfsTier,
    Interval,
    KvstoreTier,
    PosixTier,
    RamTier,
    Threads,
    TierConfig,
    expand,
    substitute,
    url_scheme,
)
from tieredckpt.errors import Conflict, Invalid, NotFound
from tieredckpt.policy.base import AnySchedule, Schedule, offer, parse
from tieredckpt.settings import Place, Problem, Settings, did_you_mean, explain, problems, refusal
from tieredckpt.units import Size

__all__ = [
    "ChfsTier",
    "KvstoreTier",
    "PosixTier",
    "RamTier",
    "StoreConfig",
    "TierConfig",
    "dump_with_secrets",
    "load",
    "to_toml",
]

T = TypeVar("T", bound=TierConfig)


class StoreConfig(Settings):
    """Everything that `CheckpointStore.open` needs to know. ``model_dump(mode="json")`` loads again, if it has no
    secret: a dump has ``REDACTED`` in the place of one."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)] | None = None
    """Names this store's folder in the node's shared memory; see `identity`."""
    chunk_size: Annotated[Size, Field(ge=4096, le=2**30)] = 16 * 2**20
    """Target size of a chunk, in bytes."""
    threads: Threads | None = None
    """Threads that copy and digest; None for the number of cores, at most four."""
    schedule: AnySchedule = Field(default_factory=lambda: parse(Schedule, "always"))
    when_full: Literal["wait", "skip", "replace"] = "wait"
    """What a save does when the nearest tier has no room: wait, skip this save, or replace the oldest
    snapshot that is not promoted yet and is not the last copy."""
    promote_in: Literal["trainer", "agent"] = "trainer"
    """Which process promotes: the trainer's own, or an agent that outlives it and is started where there is none."""
    agent_log: AbsolutePath | None = None
    """The file that an agent started by a store writes its log to; None for ``agent.log`` beside the RAM tier."""
    grace: Interval = 3600.0
    """Seconds for which a file that no step refers to is kept: it may belong to a save under way."""
    lease_ttl: Interval = 60.0
    """Seconds after which a writer that has not renewed its lease counts as dead."""
    repack_below: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """A pack whose live share of bytes falls below this is rewritten."""
    replicated: tuple[str, ...] = ()
    """Keys or glob patterns of leaves that every rank has alike: the ranks share the work of storing them."""
    rank_deadline: Interval = 600.0
    """Seconds for which the ranks of a training wait for each other."""
    restore_group: Annotated[int, Field(strict=True, ge=1)] | None = None
    """How many neighbouring ranks share what one of them reads of a shared tier in a restore; None for all."""
    rack: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Of this node; copies in other nodes' RAM never share one. None for ``TIEREDCKPT_RACK``, and where that is not
    set either for a rack of its own."""
    policies: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$")], ...] = ()
    """Modules of policies, as ``module`` or ``module:Class``; only `load` of a file imports them, from its folder too.
    """
    tiers: Tiers = ()
    """Nearest first."""

    @classmethod
    def noun(cls) -> str:
        return "a store"

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if wrong := impossible(self):
            raise refusal(wrong)
        return self

    @property
    def ram(self) -> RamTier | None:
        """The tier in shared memory, which is the nearest; None without one."""
        return next(iter(self.tiers_of(RamTier)), None)

    @property
    def slower(self) -> tuple[TierConfig, ...]:
        """The tiers but RAM, nearest first."""
        return tuple(tier for tier in self.tiers if tier is not self.ram)

    def tiers_of(self, model: type[T]) -> tuple[T, ...]:
        """The tiers of the kind that ``model`` configures, nearest first."""
        return tuple(tier for tier in self.tiers if isinstance(tier, model))

    @property
    def identity(self) -> str:
        """What versions before call the folder of RAM: ``name``, or 16 digits derived from where other tiers are."""
        return self._identity([tier.location_with_secrets for tier in self.slower])

    def _identity(self, where: Sequence[str | None]) -> str:
        if self.name is not None:
            return self.name
        return hashlib.sha256(json.dumps(where).encode()).hexdigest()[:16]

    @property
    def located(self) -> tuple[TierConfig, ...]:
        """The tiers, each with its place: some are named after the store where they name none (`TierConfig.located`).

        The store is told from others by ``name``, or by where the tiers are that outlive the nodes.
        """
        shared = [kind_of(tier).location(tier) for tier in self.slower if kind_of(tier).medium == "shared"]
        lasting = [str(where) for where in shared if where is not None]
        identity = self._identity(lasting) if self.name is not None or lasting else None
        return tuple(tier.located(identity) for tier in self.tiers)

    @property
    def recorded_policies(self) -> dict[str, Any]:
        """What a step records: the schedule, and by tier its name, kind and policies. Nothing of where a tier is."""
        tiers = {"tiers": {"__all__": {"name", "kind", "promote", "retain", "evict"}}}
        found: dict[str, Any] = redacted(self.model_dump(mode="json", include={"schedule": True, **tiers}))
        return found

    @property
    def copy_threads(self) -> int:
        """``threads``, or the number of cores this process may use, at most four."""
        if self.threads is not None:
            return self.threads
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return min(4, usable or 1)


def load(source: str | os.PathLike[str] | Mapping[str, Any] | StoreConfig) -> StoreConfig:
    """The configuration that ``source`` stands for.

    A path that ends in ``.toml`` is a configuration file, whose relative paths start at its own folder. Any
    other path is a folder: RAM, and that folder as the tier ``disk``. A URL such as ``s3://bucket/run`` is RAM, and
    a tier there that is called by its kind. A mapping is the content of a file, or what ``model_dump`` gave; its
    relative paths start at the current folder.

    Raises `NotFound` when the file does not exist, and `Invalid` with one line per problem: the file, the
    line on which the value ends, the dotted setting, what is allowed, and the nearest name of a misspelt one.

    Only a file's ``policies`` are imported. A mapping may be what a step tells, and reading one executes nothing.
    """
    if isinstance(source, StoreConfig):
        return source
    if isinstance(source, Mapping):
        return _load_mapping(source)
    try:
        if isinstance(source, str) and url_scheme(url := substitute(source)) not in (None, "file"):
            return _load_mapping({"tiers": {"ram": {"kind": "ram"}, **_tier_at(url)}})
        path = expand(source) if isinstance(source, str) else Path(source)
    except TypeError as error:
        raise Invalid(f"a store is a path, a URL, a mapping or a StoreConfig, not {source!r}") from error
    if path.suffix == ".toml":
        return _load_file(path)
    return _load_mapping({"tiers": {"ram": {"kind": "ram"}, "disk": {"kind": "posix", "path": path}}})


def _tier_at(url: str) -> dict[str, Any]:
    """A tier at a URL, called by its kind."""
    kind = kind_of_url(url).name
    if url.endswith(".toml"):
        raise Invalid("a configuration is a file, and no object of a bucket; copy it to a folder, and open it there")
    return {kind: {"kind": kind, "url": url}}


def to_toml(config: StoreConfig) -> str:
    """``config`` with every setting that is not None, as the text of a configuration file; without secrets."""
    settings = config.model_dump(mode="json", exclude_none=True)
    tables = {"store": {name: value for name, value in settings.items() if name != "tiers"}}
    for tier in settings["tiers"]:
        tables[f"tiers.{tier.pop('name')}"] = tier
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml_value(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


def dump_with_secrets(config: StoreConfig) -> dict[str, Any]:
    """``config`` as JSON that `load` takes, secrets of its tiers included: for another process's standard input, and
    for no file, log or command line."""
    return config.model_dump(mode="json", context=WITH_SECRETS)


def _load_mapping(data: Mapping[str, Any]) -> StoreConfig:
    try:
        return _validate(data, Path.cwd())
    except ValidationError as error:
        raise Invalid(explain(problems(error))) from error
    except RecursionError as error:
        raise Invalid("the configuration is nested too deeply; simplify its policies") from error


def _load_file(path: Path) -> StoreConfig:
    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text)
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such configuration file") from error
    except OSError as error:
        raise Invalid(f"{path}: the configuration file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{path}: is not a TOML file: {error}") from error
    try:
        _offer_policies(data, path.absolute().parent)
        return _validate(data, path.absolute().parent)
    except ValidationError as error:
        found = [(_line_of(place, text, data), place, what) for place, what in problems(error)]
        found.sort(key=lambda each: each[0])
        lines = (f"{path}:{line}: {explain([(place, what)])}" for line, place, what in found)
        raise Invalid("\n".join(lines)) from error
    except RecursionError as error:
        raise Invalid(f"{path}: is nested too deeply; simplify its policies") from error


def _offer_policies(data: Mapping[str, Any], folder: Path) -> None:
    """Import the policies that a file names. A mapping may be what a step told, so it never gets here."""
    store = data.get("store")
    names = store.get("policies") if isinstance(store, Mapping) else None
    if not names or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return  # nothing to import, or refused as any wrong setting
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that nothing beside the file takes the place of an installed module
    try:
        offer(names)
    except (Invalid, Conflict) as error:
        raise refusal([(("store", "policies"), str(error))]) from error


def _validate(data: Mapping[str, Any], folder: Path) -> StoreConfig:
    """Of the form of a file, or of that of ``model_dump``; problems have their places in that form."""
    context = {"folder": folder}
    if "store" not in data and isinstance(data.get("tiers"), (list, tuple)):
        return StoreConfig.model_validate(dict(data), context=context)
    wrong: list[Problem] = []
    for name in [name for name in data if name not in ("store", "tiers")]:
        belongs = name in StoreConfig.model_fields
        hint = "; it belongs in [store]" if belongs else did_you_mean(str(name), ("store", "tiers"))
        wrong.append(((str(name),), f"`{name}` is not a table of a configuration{hint}"))
    store = data.get("store", {})
    if not isinstance(store, Mapping):
        wrong.append((("store",), f"should be a table of settings, not {store!r}"))
        store = {}
    if "tiers" in store:
        wrong.append((("store", "tiers"), "every tier is a table of its own, [tiers.NAME]"))
    try:
        config = StoreConfig.model_validate({**store, "tiers": data.get("tiers", ())}, context=context)
    except ValidationError as error:
        wrong += [(at if at[:1] == ("tiers",) else ("store", *at), text) for at, text in problems(error)]
    if wrong:
        raise refusal(wrong)
    return config


def _line_of(place: Place, text: str, data: object) -> int:
    """The first line up to which ``text`` is TOML and holds as much of ``place`` as the whole does."""
    while place and not _holds(data, place):
        place = place[:-1]
    lines = text.splitlines()
    for count in range(1, len(lines) + 1):
        try:
            if _holds(tomllib.loads("\n".join(lines[:count])), place):
                return count
        except tomllib.TOMLDecodeError:  # in the middle of a value of several lines
            continue
    return 1


def _holds(data: Any, place: Place) -> bool:
    for part in place:
        if isinstance(data, list):
            data = dict(enumerate(data))
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if value is None:
        raise Invalid("TOML has no null: leave the key out of the tier's spec, or keep the configuration as JSON")
    # TOML's strings, numbers and booleans are JSON's, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)
