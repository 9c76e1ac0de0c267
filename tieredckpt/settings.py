"""Base of the settings: frozen pydantic models that report every problem in plain words, with its dotted place.

Validators of nested settings raise pydantic's ``ValidationError``, which keeps the places; the outermost caller turns
it into one `Invalid` with `explain`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler  # where pydantic 2.10 has it
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from tieredckpt._redact import redacted
from tieredckpt.errors import Invalid

__all__ = ["Problem", "Settings", "did_you_mean", "dotted", "explain", "problems", "refusal"]

Place = tuple[int | str, ...]

Problem = tuple[Place, str]
"""Place of a setting, such as ``("tiers", "nvme", "retain", "n")``, and what is wrong and allowed there."""

_PLAIN = "tieredckpt"
"""The pydantic error type of problems that are in plain words already."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean `x`?"`` for the known name nearest to ``name``, or the names where none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean `{near[0]}`?"
    return f"; there are: {', '.join(names)}" if names else ""


def dotted(place: Place) -> str:
    """``("tiers", "nvme", "policies", 0, "n")`` as ``tiers.nvme.policies[0].n``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def refusal(found: Sequence[Problem]) -> ValidationError:
    """The error with which a validator reports several problems, each at its place below the validator's."""
    lines = [
        InitErrorDetails(type=PydanticCustomError(_PLAIN, _literally(text)), loc=place, input=None)
        for place, text in found
    ]
    return ValidationError.from_exception_data("settings", lines)


def problems(error: ValidationError, below: Place = ()) -> list[Problem]:
    """Every problem that ``error`` holds, in plain words, with its place below ``below``."""
    return [((*below, *line["loc"]), _in_plain_words(line)) for line in error.errors(include_url=False)]


def explain(found: Iterable[Problem]) -> str:
    """One line per problem: its dotted place, and what is wrong."""
    return "\n".join(f"{dotted(place)}: {text}" if place else text for place, text in found)


class Settings(BaseModel):
    """Base of frozen settings; unknown names are refused with the nearest known one.

    Constructing one from wrong values raises `Invalid` with one line per problem. ``tables`` in the validation context
    names, for a setting that is often misplaced, the table that it belongs in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    if not TYPE_CHECKING:  # a type checker takes the signature from the fields

        def __init__(self, /, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise Invalid(explain(problems(error, (type(self).__name__,)))) from error

        # Without this mark pydantic calls __init__ for nested settings as well, and their places are lost.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def noun(cls) -> str:
        """Name of the object that has these settings, for messages."""
        return cls.__name__

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_plain_words(cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            lines = error.errors(include_url=False)
        tables = (info.context or {}).get("tables", {})
        raise refusal([cls._name_unknown(line, tables) for line in lines if not _is_echo(line, lines)])

    @classmethod
    def _name_unknown(cls, line: ErrorDetails, tables: Mapping[str, str]) -> Problem:
        place = line["loc"]
        if line["type"] != "extra_forbidden":
            return place, _in_plain_words(line)
        name = str(place[-1])
        hint = f"; it belongs in {tables[name]}" if name in tables else did_you_mean(name, cls.model_fields)
        return place, f"`{name}` is not a setting of {cls.noun()}{hint}"


def _is_echo(line: ErrorDetails, lines: Sequence[ErrorDetails]) -> bool:
    # Pydantic counts only the right elements of a tuple: "too few" then repeats what the wrong ones say.
    place = line["loc"]
    below = (other for other in lines if len(other["loc"]) > len(place) and other["loc"][: len(place)] == place)
    return line["type"] == "too_short" and any(below)


def _in_plain_words(line: ErrorDetails) -> str:
    value = repr(redacted(line["input"]))
    value = value if len(value) <= 60 else f"{value[:60]}…"
    match line["type"]:
        case "tieredckpt":
            return line["msg"]
        case "value_error":
            return str(line["ctx"]["error"])
        case "missing":
            return "is required"
        case "model_type" | "model_attributes_type":
            return f"should be a table of settings, not {value}"
        case "too_short":
            return f"should have {line['ctx']['min_length']} or more elements, not {value}"
        case "string_pattern_mismatch":
            return f"should match the pattern {line['ctx']['pattern']}, not {value}"
        case "tuple_type":
            example = f", such as [{value}]" if isinstance(line["input"], str) else ""
            return f"should be a list{example}, not {value}"
        case "literal_error":
            known = re.findall(r"'([^']*)'", line["ctx"]["expected"])
            return f"should be {line['ctx']['expected']}, not {value}{did_you_mean(str(line['input']), known)}"
        case _:
            return f"{line['msg'].removeprefix('Input ')}, not {value}"


def _literally(text: str) -> Any:
    # pydantic's stub wants a literal template; without a context nothing is substituted in it. It takes UTF-8 only.
    return text.encode("utf-8", "backslashreplace").decode()
