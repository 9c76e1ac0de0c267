"""Exports that a store makes behind the training: which steps, in which format, and to which place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, model_validator

from tieredckpt._redact import redacted
from tieredckpt.config.formats import format_named
from tieredckpt.config.kinds import by_name, kind_of_url
from tieredckpt.config.tiers import Name, PosixTier, TierConfig, absolute, expand, substitute, url_scheme
from tieredckpt.errors import Invalid
from tieredckpt.policy.base import AnyPromotion, AnyRetention, Promotion, Retention, parse
from tieredckpt.settings import Problem, Settings, problems, refusal
from tieredckpt.units import Size

__all__ = ["ExportConfig", "Exports", "place_of"]


def _to(value: object, info: ValidationInfo) -> str:
    """An absolute path, or a URL as it is; of text, after ``~`` and ``$NAME``."""
    if isinstance(value, Path):
        return str(absolute(Path(), value))
    if not isinstance(value, str):
        raise Invalid(f"should be a folder or a URL such as 's3://bucket/exports', not {redacted(value)!r}")
    text = substitute(value)
    if url_scheme(text) is not None:
        return text.rstrip("/")
    folder = info.context["folder"] if info.context else Path()
    return str(absolute(folder, expand(value)))


def _keep(value: object) -> object:
    return {"kind": "last_n", "n": value} if type(value) is int else value


class ExportConfig(Settings):
    """An export of some steps behind the training, each to a folder of its own, ``step-STEP``."""

    name: Name
    format: str
    """One of `tieredckpt.config.formats.formats` that can be written."""
    to: Annotated[str, BeforeValidator(_to)]
    """The folder, or URL of a place in an object store, that the exports are in. Credentials and endpoint of a URL come
    from the environment."""
    when: AnyPromotion = Field(default_factory=lambda: parse(Promotion, "always"))
    """Which steps are exported, as a tier's ``promote``; policies see the export as the slowest tier."""
    keep: Annotated[AnyRetention, BeforeValidator(_keep)] = Field(default_factory=lambda: parse(Retention, "all"))
    """Which exports stay, as a tier's ``retain``; a number is ``last_n``."""
    keys: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Only the leaves under these keys or patterns; empty for what the format exports by default."""
    part: Annotated[str, Field(min_length=1)] | None = None
    """The path of a container that is exported, whose names begin below it."""
    cast: str | None = None
    """``bf16`` or ``fp16``, of formats that convert floats."""
    shard_size: Annotated[Size, Field(gt=0)] | None = None
    """Bytes of a file at most, of formats that cut a step into files."""
    rename: dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """Patterns of keys, and the names that they get, of formats that have it."""

    @classmethod
    def noun(cls) -> str:
        return "an export"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the format."""
        given = {"cast": self.cast, "shard_size": self.shard_size, "rename": self.rename or None}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def folder(self) -> Path | None:
        """The folder; None for a URL."""
        return None if url_scheme(self.to) is not None else Path(self.to)

    def place(self) -> TierConfig:
        """The place of the exports, as a tier that lies there would be configured. Raises `Invalid`."""
        if self.folder is not None:
            return PosixTier(name=self.name, path=self.folder)
        return place_of(self.to, self.name)

    @model_validator(mode="after")
    def _is_possible(self) -> ExportConfig:
        if wrong := list(self._wrong()):
            raise refusal(wrong)
        return self

    def _wrong(self) -> list[Problem]:
        try:
            found = format_named(self.format)
        except Invalid as error:
            return [(("format",), str(error))]
        wrong: list[Problem] = []
        if not found.writes:
            wrong.append((("format",), f"`{self.format}` is not a format to export"))
        wrong += [
            ((name,), f"is not for the format `{self.format}`; leave it out")
            for name in sorted(self.options.keys() - found.options)
        ]
        if not wrong:
            try:
                found.check(**self.options)
            except Invalid as error:
                wrong.append(((), str(error)))
        if self.part is not None and self.keys:
            wrong.append((("part",), "and `keys`: give one of them"))
        if self.folder is None:
            if found.stream is None:
                text = (
                    f"is a URL, and `{self.format}` is written by its library, to a folder alone; give a folder, or "
                    f"another format"
                )
                wrong.append((("to",), text))
            try:
                self.place()
            except Invalid as error:
                wrong.append((("to",), str(error)))
        return wrong


def place_of(url: str, name: str) -> TierConfig:
    """The place of a URL, as a tier of that name that lies there would be configured. Raises `Invalid`."""
    kind = kind_of_url(url)
    try:
        found: TierConfig = kind.config.model_validate({"kind": kind.name, "name": name, "url": url})
    except ValidationError as error:
        raise Invalid("; ".join(text for _, text in problems(error))) from error
    return found


def _export(context: Any, called: str | int, table: object) -> ExportConfig:
    if isinstance(table, ExportConfig):
        return table
    if not isinstance(table, Mapping):
        raise refusal([((), f"should be a table of settings, not {redacted(table)!r}")])
    own = context and {"folder": context["folder"]}  # no hint where `retain` belongs: here it is `keep`
    return ExportConfig.model_validate(dict(table), context=own)


def _exports(value: object, info: ValidationInfo) -> tuple[ExportConfig, ...]:
    """Exports of a table by name, or of a sequence whose elements carry their names."""
    return by_name(value, "export", partial(_export, info.context))


Exports = Annotated[tuple[ExportConfig, ...], BeforeValidator(_exports)]
"""Field type: exports, of a table by name or of a sequence."""
