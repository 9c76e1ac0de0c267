"""Which format and path ``SCHEME:PATH`` names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tieredckpt.config.formats import format_named, formats
from tieredckpt.config.tiers import refuse_url, url_scheme
from tieredckpt.errors import Invalid
from tieredckpt.interchange.base import Format

__all__ = ["find", "find_url"]


_OF_FILES = {".bin", ".gguf", ".h5", ".hdf5", ".msgpack", ".npy", ".npz", ".onnx", ".pickle", ".pkl", ".pt", ".pth"} | {
    ".safetensor",
    ".safetensors",
    ".st",
    ".tar",
    ".zip",
}
"""Suffixes of files that people take for checkpoints."""


def find_url(text: str) -> tuple[str, Format, str] | None:
    """Scheme, format and URL of ``SCHEME:URL``, to export to; None for what names no URL of an object store.

    Raises `Invalid` for a format that is not streamed.
    """
    scheme, _, url = text.partition(":")
    if scheme not in formats() or url_scheme(url) in (None, "file"):
        return None
    found = format_named(scheme)
    if found.stream is None:
        raise Invalid(f"{scheme} is written by its library, to a folder alone: '{url_scheme(url)}://…' is a URL")
    return scheme, found, url


def find(text: str, use: Literal["read", "write"]) -> tuple[str, Format, Path]:
    """Scheme, format and path of ``SCHEME:PATH``. Raises `Invalid` for what is no such thing, or has not that use."""
    scheme, separator, path = text.partition(":")
    if not separator or scheme not in formats():
        raise Invalid(
            f"{text!r} names no format; write SCHEME:PATH with a SCHEME of {', '.join(formats())}, such as "
            f"safetensors:{path or text}"
        )
    if not path:
        raise Invalid(f"{text!r} has no path; write {scheme}:PATH")
    refuse_url(path)
    found = format_named(scheme)
    if found.read is None if use == "read" else not found.writes:
        raise Invalid(f"{scheme} is not a format to {'import' if use == 'read' else 'export'}")
    if use == "write":
        _check_suffix(scheme, found, Path(path))
    return scheme, found, Path(path).expanduser()


def _check_suffix(scheme: str, format_: Format, path: Path) -> None:
    """Refuse the name of a file that would become a folder, or a file of another format."""
    suffix = path.suffix.lower()
    if suffix != format_.suffix and suffix in _OF_FILES:
        own = f"a name that ends in {format_.suffix}" if format_.suffix else "the name of a folder"
        raise Invalid(f"{scheme} writes no {suffix} file, which {path} looks like; give {own}, or one without a suffix")
