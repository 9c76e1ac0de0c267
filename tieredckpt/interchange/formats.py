"""Find the format and path that ``SCHEME:PATH`` names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from tieredckpt.config.formats import format_named, formats
from tieredckpt.config.tiers import refuse_url, url_scheme
from tieredckpt.errors import Invalid
from tieredckpt.interchange.base import Format

__all__ = ["find", "find_url"]


_OF_A_FILE = re.compile(r"\.(?!v[0-9]+$)[a-z][a-z0-9]*", re.ASCII | re.IGNORECASE)
"""A suffix of a file, unlike the ends of `step-1.0`, `llama-3.1-8b` and `run.v2`."""


def find_url(text: str) -> tuple[str, Format, str] | None:
    """Scheme, format and URL of ``SCHEME:URL``, to export to; None if ``text`` names no URL of an object store.

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
    """Scheme, format and path of ``SCHEME:PATH``. Raises `Invalid` for other text, or a format without that use."""
    scheme, separator, path = text.partition(":")
    if not separator or scheme not in formats():
        raise Invalid(
            f"{text!r} names no format; write SCHEME:PATH with a SCHEME of {_schemes(use)}, such as "
            f"safetensors:{path or text}"
        )
    if not path:
        raise Invalid(f"{text!r} has no path; write {scheme}:PATH")
    if use == "read" and url_scheme(path) not in (None, "file"):  # the rest of it may hold a password
        raise Invalid(f"'{url_scheme(path)}://…' is a URL, and import reads local files: copy it to a folder")
    refuse_url(path)
    found = format_named(scheme)
    if not _has(found, use):
        raise Invalid(f"{scheme} is not a format to {'import' if use == 'read' else 'export'}; take {_schemes(use)}")
    if use == "write":
        _check_suffix(scheme, found, path)
    return scheme, found, Path(path).expanduser()


def _has(found: Format, use: Literal["read", "write"]) -> bool:
    return found.writes if use == "write" else found.read is not None


def _schemes(use: Literal["read", "write"]) -> str:
    return ", ".join(scheme for scheme in formats() if _may(scheme, use))


def _may(scheme: str, use: Literal["read", "write"]) -> bool:
    """Whether a format has that use, and all that it needs is installed."""
    try:
        return _has(format_named(scheme), use)
    except Invalid:
        return False


def _check_suffix(scheme: str, format_: Format, text: str) -> None:
    """Refuse the name of a file that would become a folder, or a file of another format."""
    path = Path(text).expanduser()
    any_name = format_.one_file and not format_.suffix
    if any_name or path.suffix.lower() == format_.suffix or _OF_A_FILE.fullmatch(path.suffix) is None:
        return
    if format_.one_file or not (text.endswith("/") or path.is_dir()):
        own = f"a name that ends in {format_.suffix}" if format_.suffix else "a name without a suffix"
        folder = "" if format_.one_file else f"; end it with a slash to have a folder of that name: {scheme}:{text}/"
        raise Invalid(f"{scheme} writes no {path.suffix} file, which {text} looks like; give {own}{folder}")
