"""The verb `restore`: summarizes the arrays of a step, or extracts them to files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from tieredckpt.cli.console import LOSSY, bar, errors, output, print_json, print_table, printable
from tieredckpt.cli.opening import Json, Keys, Lossy, Step, StorePath, reading
from tieredckpt.cli.show import shape_text
from tieredckpt.config.tiers import refuse_url
from tieredckpt.engine.inventory import StepDetails
from tieredckpt.errors import Invalid
from tieredckpt.interchange.exporting import export_copy
from tieredckpt.interchange.stored_step import StepCopy, StoredStep, from_copies
from tieredckpt.units import format_size

__all__ = ["restore"]

_FIRST = 4
"""Number of values of an array that are shown."""


def restore(
    store: StorePath,
    step: Step = None,
    keys: Keys = None,
    to: Annotated[
        str | None, typer.Option(metavar="FILE.npz|FOLDER", help="Extract to a new .npz or folder of .npy.")
    ] = None,
    lossy: Lossy = False,
    as_json: Json = False,
) -> None:
    """Restore a step, verified: print a summary of its arrays, or extract them. The store is left as it is."""
    target = None if to is None else _target(to)
    with reading(store) as opened:
        found = from_copies(opened, step, partial(_look, keys=keys or None, target=target), lossy=lossy)
    details, summaries, sources, is_lossy = found
    number = details.info.step
    if as_json:
        told = {"step": number, "serial": details.info.serial, "metrics": details.info.metrics, "lossy": is_lossy}
        more = {"to": to, "files": len(details.arrays)} if to else {"arrays": summaries}
        print_json({**told, "sources": dict(sources), **more, "scalars": details.scalars})
        return
    origin = ", ".join(f"{format_size(size)} from {name}" for name, size in sources.items()) or "nothing to read"
    output().print(f"step {number} (serial {details.info.serial}): {printable(origin)}")
    if is_lossy:
        output().print(LOSSY)
    if to:
        output().print(f"extracted to {printable(to)}; arrays: {len(details.arrays)}")
    else:
        _print(summaries)
    _tell_of_scalars(details, extracted=to is not None)


def _look(
    copy: StepCopy, *, keys: list[str] | None, target: str | None
) -> tuple[StepDetails, list[dict[str, Any]], Mapping[str, int], bool]:
    """The restored step, its summaries unless it was extracted, bytes by tier, and whether it is a lossy copy."""
    details = copy.describe(keys)
    with bar("restoring", sum(array.nbytes for array in details.arrays)) as progress:
        if target is not None:
            exported = export_copy(copy, target, keys=keys, progress=progress)
            return details, [], exported.sources, exported.lossy
        chosen = StoredStep(copy, keys=keys, progress=progress)
        summaries = [
            {"key": info.key, "dtype": info.dtype, "shape": info.shape, **_summary(array)}
            for info, array in chosen.read()
        ]
        return details, summaries, chosen.sources, copy.lossy is not None


def _target(to: str) -> str:
    """The target in the form of `export`. A name like a file of another format gets no folder of ``.npy``."""
    refuse_url(to)
    suffix = Path(to).suffix
    if suffix in ("", ".npz"):
        return f"{'npz' if suffix else 'npy'}:{to}"
    raise Invalid(
        f"{to}: --to takes a name that ends in .npz, or one without a suffix, for a folder; other formats: tieredckpt "
        f"export STORE --to safetensors:{to}, and npy:{to} for a folder of this name"
    )


def _summary(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Minimum, maximum and mean where they are defined, and the first values, as Python numbers."""
    told: dict[str, Any] = {"min": None, "max": None, "mean": None}
    if array.dtype.kind in "mM":  # times, of which NumPy takes no mean
        if array.size:
            told |= {"min": str(array.min()), "max": str(array.max())}
        return {**told, "first": [str(value) for value in array.reshape(-1)[:_FIRST]]}
    first = [value.item() for value in array.reshape(-1)[:_FIRST]]
    with np.errstate(all="ignore"):
        if array.size and not np.iscomplexobj(array):
            told |= {"min": array.min().item(), "max": array.max().item()}
        if array.size:
            told["mean"] = array.mean(dtype=complex if np.iscomplexobj(array) else float).item()
    return {**told, "first": first}


def _print(summaries: list[dict[str, Any]]) -> None:
    rows = [
        (
            each["key"],
            each["dtype"],
            shape_text(each["shape"]),
            *(_number(each[name]) for name in ("min", "max", "mean")),
            " ".join(map(_number, each["first"])),
        )
        for each in summaries
    ]
    columns = ("key", "dtype", "shape", "min", "max", "mean", "first values")
    print_table("arrays", columns, rows, right=("min", "max", "mean"))


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def _tell_of_scalars(details: StepDetails, *, extracted: bool) -> None:
    if not details.scalars:
        return
    what = "extracted" if extracted else "shown"
    errors().print(f"leaves that are no arrays, not {what}: {len(details.scalars)}; see `tieredckpt show`", style="dim")
