"""Pictures in SVG or PNG files, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tieredckpt.errors import Invalid

__all__ = ["check_picture", "picture"]


def check_picture(path: Path) -> None:
    """Raise `Invalid` if no picture can be drawn there; called before the work that it shows."""
    if path.suffix not in (".svg", ".png"):
        raise Invalid(f"{path}: a picture is an .svg or a .png file")
    if not path.absolute().parent.is_dir():
        raise Invalid(f"{path}: there is no such folder; make it first")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise Invalid("a picture needs matplotlib: pip install 'tieredckpt[simulate]'") from error


@contextmanager
def picture(path: Path, *, width: float, height: float, columns: int) -> Iterator[list[Any]]:
    """Yield axes in one row to draw on; then write the picture. Equal drawings give equal files.

    Args:
        path: an SVG or PNG file. Raises `Invalid` as `check_picture`.
        width, height: in inches.
        columns: how many axes.
    """
    check_picture(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, and neither a date nor random identifiers make one picture two.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tieredckpt", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield list(figure.subplots(1, columns, squeeze=False)[0])
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, metadata=metadata)
