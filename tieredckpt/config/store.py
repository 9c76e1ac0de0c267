"""Configuration of a store: its settings and its tiers, from TOML, from Python or from a stored step.

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

One table ``[exports.NAME]`` per export configures an export behind the training (`tieredckpt.config.exports`). By
default, every step is promoted to a tier, RAM retains the newest step, other tiers retain the newest five, and the
oldest step leaves first. A policy is a table with its ``kind``, or the bare kind. Defaults are found by their kind like
any policy; nothing here imports the package that ships them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

from pydantic import ValidationError, model_validator
from pydantic_core import to_jsonable_python

from tieredckpt.config.checks import impossible
from tieredckpt.config.kinds import kind_of_url
from tieredckpt.config.store_settings import StoreSettings
from tieredckpt.config.tiers import WITH_SECRETS, TierConfig, expand, substitute, url_scheme
from tieredckpt.errors import Conflict, Invalid, NotFound
from tieredckpt.policy.base import offer
from tieredckpt.settings import Place, Problem, did_you_mean, explain, problems, refusal

__all__ = ["StoreConfig", "dump_with_secrets", "load", "to_toml"]


_TABLES = ("tiers", "exports")
"""Sections with one table per name, beside that of the store."""


class StoreConfig(StoreSettings):
    """Everything that `CheckpointStore.open` needs to know. ``model_dump(mode="json")`` loads again, if it has no
    secret: a dump has ``REDACTED`` in the place of one."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if wrong := impossible(self):
            raise refusal(wrong)
        return self


def load(source: str | os.PathLike[str] | Mapping[str, Any] | StoreConfig) -> StoreConfig:
    """The configuration that ``source`` stands for.

    A path that ends in ``.toml`` is a configuration file, whose relative paths start at its own folder. Any
    other path is a folder: RAM, and that folder as the tier ``disk``. A URL such as ``s3://bucket/run`` is RAM, and
    a tier there that is called by its kind. A mapping is the content of a file, or what ``model_dump`` gave; its
    relative paths start at the current folder.

    Raises `NotFound` when the file does not exist, and `Invalid` with one line per problem: the file, the
    line on which the value ends, the dotted setting, what is allowed, and the nearest name of a misspelt one.

    Only a file's ``policies`` are imported. A mapping may come from a step, and reading one executes nothing.
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
    """A table with a tier at a URL, named by its kind."""
    kind = kind_of_url(url).name
    if url.endswith(".toml"):
        raise Invalid("a configuration is a file, and no object of a bucket; copy it to a folder, and open it there")
    return {kind: {"kind": kind, "url": url}}


def to_toml(config: StoreConfig) -> str:
    """``config`` with every setting that is not None, as the text of a configuration file; without secrets."""
    settings = config.model_dump(mode="json", exclude_none=True)
    tables = {"store": {name: value for name, value in settings.items() if name not in _TABLES}}
    for group in _TABLES:
        for each in settings[group]:
            tables[f"{group}.{each.pop('name')}"] = each
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml_value(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


def dump_with_secrets(config: StoreConfig) -> dict[str, Any]:
    """``config`` as JSON that `load` takes, secrets of its tiers included: for another process's standard input, and
    for no file, log or command line."""
    shown = config.model_dump(mode="json", context=WITH_SECRETS)
    return cast("dict[str, Any]", _revealed(shown, config.model_dump(context=WITH_SECRETS)))


def _revealed(shown: Any, dumped: Any) -> Any:
    """``shown``, the JSON of ``dumped``, with what pydantic hides there, such as the value of a `SecretStr`."""
    if hasattr(dumped, "get_secret_value"):
        return to_jsonable_python(dumped.get_secret_value())
    if isinstance(shown, Mapping) and isinstance(dumped, Mapping) and len(shown) == len(dumped):
        pairs = zip(shown.items(), dumped.values(), strict=True)
        return {name: _revealed(member, its) for (name, member), its in pairs}
    if isinstance(shown, list) and isinstance(dumped, list | tuple) and len(shown) == len(dumped):
        return [_revealed(member, its) for member, its in zip(shown, dumped, strict=True)]
    return shown


def _load_mapping(data: Mapping[str, Any]) -> StoreConfig:
    try:
        return _validate(data, Path())
    except ValidationError as error:
        raise Invalid(explain(problems(error))) from error
    except RecursionError as error:
        raise Invalid("the configuration is nested too deeply; write it flatter") from error


def _load_file(path: Path) -> StoreConfig:
    try:
        text = path.read_text("utf-8-sig")  # editors on Windows begin a file with a byte order mark
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
        raise Invalid(f"{path}: is nested too deeply; write it flatter") from error


def _offer_policies(data: Mapping[str, Any], folder: Path) -> None:
    """Import the policies that a file names. A mapping may come from a step, so it never gets here."""
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
    of_store = [name for name in StoreConfig.model_fields if name not in _TABLES]
    homes = dict.fromkeys(TierConfig.model_fields, "[tiers.NAME]") | dict.fromkeys(of_store, "[store]")
    context = {"folder": folder, "tables": homes}
    if "store" not in data and isinstance(data.get("tiers"), (list, tuple)):
        return StoreConfig.model_validate(dict(data), context=context)
    wrong: list[Problem] = []
    for name in [name for name in data if name not in ("store", *_TABLES)]:
        hint = "; it belongs in [store]" if name in of_store else did_you_mean(str(name), ("store", *_TABLES))
        wrong.append(((str(name),), f"`{name}` is not a table of a configuration{hint}"))
    store = data.get("store", {})
    if not isinstance(store, Mapping):
        wrong.append((("store",), f"should be a table of settings, not {store!r}"))
        store = {}
    wrong += [
        (("store", group), f"every {group[:-1]} is a table of its own, [{group}.NAME]")
        for group in _TABLES
        if group in store
    ]
    try:
        tables = {group: data.get(group, ()) for group in _TABLES}
        config = StoreConfig.model_validate({**store, **tables}, context=context)
    except ValidationError as error:
        wrong += [(at if at[:1] and at[0] in _TABLES else ("store", *at), text) for at, text in problems(error)]
    if wrong:
        raise refusal(wrong)
    return config


def _line_of(place: Place, text: str, data: object) -> int:
    """The first line up to which ``text`` is valid TOML and holds as much of ``place`` as the whole text."""
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
