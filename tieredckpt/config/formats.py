"""Formats of other libraries: the value that defines one, the files that it writes to, and how it is found.

A package offers a format through an entry point of the group ``tieredckpt.formats``, whose name is the scheme::

    [project.entry-points."tieredckpt.formats"]
    safetensors = "tieredckpt.interchange.safetensors:SAFETENSORS"

The formats of this library are offered in the same way. A format is imported only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tieredckpt import _registry
from tieredckpt.errors import Invalid
from tieredckpt.settings import did_you_mean

__all__ = ["GROUP", "Digests", "Files", "Format", "Output", "format_named", "formats"]

GROUP = "tieredckpt.formats"
"""The entry-point group of formats."""

Digests: TypeAlias = Mapping[str, bytes]
"""Digests of the items in a file or folder, by name; a `tieredckpt.interchange.base.Content` computes them."""


class Output(Protocol):
    """A file that is written from its start to its end."""

    def write(self, data: Any, /) -> int:
        """Append the bytes of any contiguous buffer, which may change afterwards; returns their number."""

    def flush(self) -> None:
        """Does nothing: a file is flushed when it is closed. Writers of archives call it."""


class Files(Protocol):
    """Destination of a format: a folder, a place in an object store, or one file."""

    single: bool
    """Whether it is one file, which has a name already: the only one that is opened."""

    def open(self, name: str, /, *, nbytes: int | None = None) -> AbstractContextManager[Output]:
        """A new file of that name, one at a time. It is complete when the block ends, and not there if that raises.

        ``nbytes`` is its largest size, if known: in an object store, a file without it may have 156 GiB.
        """


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another library."""

    read: Callable[[Path], Any] | None = None
    """Reads the tree at a path, with whole arrays. Executes nothing that it reads; raises `NotFound`, `Invalid` and
    `Corrupt`, naming file and key."""
    write: Callable[..., Digests] | None = None
    """``write(step, to, **options)`` writes all arrays of ``step`` to ``to``, a path at which nothing is, and tells
    what was written; ``step`` is a `tieredckpt.engine.exporting.content.StepContent`. Raises `Invalid`, naming the key,
    for what the format cannot have, before it reads any."""
    stream: Callable[..., Digests] | None = None
    """``stream(step, files, **options)``: as ``write``, in the place of it, to `Files`. Without the last of the files a
    reader of the format finds nothing, so this one commits the others where they cannot all appear at once."""
    read_back: Callable[[Path], Iterator[tuple[str, bytes]]] | None = None
    """The digests of the files at a path, read again; raises `Corrupt`."""
    parts: tuple[str, ...] = ()
    """Parts of a tree of which the first that a step has is exported, unless another one is named."""
    options: frozenset[str] = frozenset()
    """Keyword arguments of ``write`` or ``stream``."""
    check: Callable[..., object] = lambda **options: None
    """``check(**options)`` raises `Invalid`, naming the option, for a value that no step could be exported with."""
    suffix: str = ""
    """Of a path that is one file, such as ``.safetensors``; empty for a format of folders."""
    one_file: bool = False
    """Whether an export is one file whatever its path is called."""
    values: bool = False
    """Whether it holds leaves that are no arrays, such as numbers; else they are left out."""
    locate: Callable[[Path], Path] = lambda path: path
    """The checkpoint that a path to import means, where that may be a folder of several. Raises `NotFound`."""
    metrics: Callable[[Path], Mapping[str, float]] = lambda path: {}
    """Metrics that are stored with a checkpoint."""

    @property
    def writes(self) -> bool:
        return self.write is not None or self.stream is not None


def formats() -> list[str]:
    """The names of all formats there are."""
    return sorted(_registry.offered(GROUP))


def format_named(name: str) -> Format:
    """The format of that name. Raises `Invalid`, with the names there are, or what the format needs to be installed."""

    def check(found: object) -> None:
        if not isinstance(found, Format):
            raise Invalid(f"{found!r} is no Format")

    try:
        found: Format | None = _registry.load(GROUP, name, f"the format `{name}`", check)
    except Invalid as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and (module := error.__cause__.name) is not None:
            raise Invalid(f"{name}: needs {module}, which is not installed: pip install {module}") from error
        raise
    if found is None:
        hint = did_you_mean(name, formats()) or (
            f", and no format is known: the entry points of {GROUP!r} are missing; install the package "
            "(`pip install -e .` in a checkout)"
        )
        raise Invalid(f"`{name}` is not a format{hint}")
    return found
