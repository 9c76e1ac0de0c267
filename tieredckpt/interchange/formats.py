"""Which formats there are, and which one ``SCHEME:PATH`` names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Literal

from tieredckpt.config.tiers import refuse_url
from tieredckpt.errors import Invalid
from tieredckpt.interchange.base import Format

__all__ = ["FORMATS", "find"]

FORMATS: Mapping[str, tuple[str, str]] = {
    "dcp": ("tieredckpt.interchange.dcp", "DCP"),
    "npy": ("tieredckpt.interchange.numpy_files", "NPY"),
    "npz": ("tieredckpt.interchange.numpy_files", "NPZ"),
    "safetensors": ("tieredckpt.interchange.safetensors", "SAFETENSORS"),
    "torch": ("tieredckpt.interchange.torch_files", "TORCH"),
}
"""The module of each scheme, and its `Format` there: a new format is a module and a line here."""


def find(text: str, use: Literal["read", "write"]) -> tuple[str, Format, Path]:
    """Scheme, format and path of ``SCHEME:PATH``. Raises `Invalid` for what is no such thing, or has not that use."""
    scheme, separator, path = text.partition(":")
    if not separator or scheme not in FORMATS:
        raise Invalid(
            f"{text!r} names no format; write SCHEME:PATH with a SCHEME of {', '.join(sorted(FORMATS))}, such as "
            f"safetensors:{path or text}"
        )
    if not path:
        raise Invalid(f"{text!r} has no path; write {scheme}:PATH")
    refuse_url(path)
    module, name = FORMATS[scheme]
    try:
        found: Format = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise Invalid(f"{scheme}: needs {error.name}, which is not installed: pip install {error.name}") from error
    if getattr(found, use) is None:
        raise Invalid(f"{scheme} is not a format to {'import' if use == 'read' else 'export'}")
    return scheme, found, Path(path).expanduser()
