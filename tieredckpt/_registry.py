"""Find policies, kinds of tier and formats of installed packages by name, through entry points."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args

from pydantic import BaseModel

from tieredckpt.errors import Conflict, Invalid

__all__ = ["load", "offered", "path_of", "refuse_taken", "the_kind"]


@functools.cache
def offered(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Every entry point of a group, by name; several where packages offer different objects under one."""
    # Once per process: it reads the metadata of every installed package.
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        before = found.get(entry.name, ())
        if all(entry.value != other.value for other in before):
            found[entry.name] = (*before, entry)
    return found


def load(group: str, name: str, what: str, check: Callable[[Any], object]) -> Any:
    """The object that a package offers under a name; None where none does.

    Args:
        group: of entry points.
        name: of an entry point.
        what: what the object is, for messages.
        check: raises `Invalid` for an object of another kind.

    Raises `Invalid`, naming the packages, if several offer the name, if the object cannot be imported, or if it fails
    ``check``.
    """
    entries = offered(group).get(name, ())
    if not entries:
        return None
    if len(entries) > 1:
        values = ", ".join(entry.value for entry in entries)
        raise Invalid(f"{what} is offered by {values}; uninstall all but one of them")
    (entry,) = entries

    def told() -> str:  # of what fails alone: the name of a package is read from its files
        package = f"the package {entry.dist.name}" if entry.dist is not None else "a package"
        return f"{what}, which {package} offers as {entry.value},"

    try:
        found = entry.load()
    except Exception as error:
        raise Invalid(f"{told()} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        check(found)
    except Invalid as error:
        raise Invalid(f"{told()} cannot be used: {error}") from error
    return found


def refuse_taken(
    group: str,
    name: str,
    what: str,
    mine: type,
    before: type | None,
    class_of: Callable[[EntryPoint], str] = operator.attrgetter("value"),
) -> None:
    """Raise `Conflict` if a package, or ``before``, has the name that ``mine`` is to get.

    A class of the same path is the same one, or its new version. ``class_of`` gives the path of the class that an
    entry point offers, where that is not its value.
    """
    others = {entry.value for entry in offered(group).get(name, ()) if class_of(entry) != path_of(mine)}
    if before is not None and path_of(before) != path_of(mine):
        others.add(path_of(before))
    if taken := sorted(others):
        raise Conflict(f"{what} is taken by {', '.join(taken)}; give {path_of(mine)} another kind")


def path_of(model: type) -> str:
    """Path of a class as an entry point has it: ``module:Class``."""
    return f"{model.__module__}:{model.__qualname__}"


def the_kind(model: type[BaseModel]) -> str:
    """The one literal that the field ``kind`` of a model may have; `Invalid` if it has none."""
    field = model.model_fields["kind"]
    if get_args(field.annotation) != (field.default,) or not field.default:
        raise Invalid(f'{path_of(model)} needs a literal kind, as in kind: Literal["name"] = "name"')
    return str(field.default)
