"""Rules for lossy tiers: the arrays, and how far their stored values may differ from the saved ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from tieredckpt.errors import Invalid
from tieredckpt.settings import Settings, refusal

__all__ = ["LossyRule"]

_LEAST, _MOST = 2.0**-99, 2.0**99
_PATTERNS = tuple[str, ...]


def _number(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise Invalid(f"should be a number, not {value!r}")


def _relative(value: object) -> float:
    number = value
    if isinstance(value, str):
        text = value.strip()
        try:
            number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError as error:
            raise Invalid(f"should be a share such as '0.4%' or 0.004, not {value!r}") from error
    found = _number(number)
    if not 0 < found <= 0.5:
        raise Invalid(f"should be above 0 and at most 50%, not {value!r}")
    return found


def _absolute(value: object) -> float:
    found = _number(value)
    if not _LEAST <= found <= _MOST:
        raise Invalid(f"should be between 2**-99 (1.6e-30) and 2**99 (6.3e29), not {value!r}")
    return found


def _keys(value: object) -> _PATTERNS:
    if isinstance(value, str) or not isinstance(value, (list, tuple)) or not value:
        raise Invalid(f"should be a list of keys or patterns such as ['opt/**'], not {value!r}")
    return tuple(map(_pattern, value))


def _pattern(value: object) -> str:
    if not isinstance(value, str) or not value.strip("/"):
        raise Invalid(f"{value!r} is no key and no pattern of keys such as 'opt/**'")
    if value.startswith("/"):
        raise Invalid(f"{value!r} begins with a slash, and no key does; write {value.lstrip('/')!r}")
    return value


class LossyRule(Settings):
    """Loss that a tier allows for the arrays that ``keys`` choose; exactly one of the other settings is given."""

    keys: Annotated[_PATTERNS, BeforeValidator(_keys)]
    """Keys of leaves, or patterns over them, as `CheckpointStore.restore` takes them; the first rule that chooses an
    array counts."""
    max_error: Annotated[float, BeforeValidator(_relative)] | None = None
    """Largest relative error of a value, such as ``"0.4%"``: floating-point values keep as many bits as that needs."""
    max_abs_error: Annotated[float, BeforeValidator(_absolute)] | None = None
    """Largest absolute error of a value: it becomes a multiple of a power of two."""
    drop: Annotated[bool, Field(strict=True)] = False
    """Whether the arrays are left out."""

    @classmethod
    def noun(cls) -> str:
        return "a lossy rule"

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        given = [f"`{name}`" for name, value in self if name != "keys" and value not in (None, False)]
        if len(given) != 1:
            told = f"{' and '.join(given)} are given" if given else "none is"
            text = f"say exactly one of `max_error`, `max_abs_error` and `drop = true`: {told}"
            raise refusal([((), text)])
        return self

    @property
    def says(self) -> str:
        """What the rule does to the arrays, for people."""
        if self.drop:
            return "drop"
        return (
            f"max_error={self.max_error:g}" if self.max_error is not None else f"max_abs_error={self.max_abs_error:g}"
        )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield from ((name, value) for name, value in super().__repr_args__() if value not in (None, False))
