"""The verbs `import` and `export`: checkpoints of other libraries, in and out."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tieredckpt.cli import amounts
from tieredckpt.cli.console import LOSSY, bar, output, print_json, printable, waiting
from tieredckpt.cli.opening import Json, Keys, Lossy, Step, StorePath, creating, is_there, reading
from tieredckpt.errors import Invalid
from tieredckpt.interchange import Exported, import_step, read_checkpoint
from tieredckpt.interchange.exporting import export_copy
from tieredckpt.interchange.stored_step import StepCopy, from_copies
from tieredckpt.units import format_size

__all__ = ["export", "import_"]

_SHOWN = 5
"""Most keys of left-out leaves that are listed."""


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SCHEME:PATH", help="orbax:FOLDER, dcp:FOLDER, safetensors:FILE|FOLDER or torch:FILE."),
    ],
    store: StorePath,
    step: Annotated[
        int | None,
        typer.Option(help="The number that it gets; by default that in PATH, as checkpoint-1000.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Also a step that the store has.")] = False,
    as_json: Json = False,
) -> None:
    """Save a checkpoint of another library as the newest step of a store. Nothing in it is executed."""
    # A refused checkpoint must leave no new store behind; for an existing store it need not be read first.
    found = None if is_there(store) else read_checkpoint(source, step)
    with creating(store) as opened, waiting(f"importing {source}"):
        done = import_step(found or source, opened, step, overwrite=overwrite)
    if as_json:
        print_json({"step": done.step, "serial": done.serial, "nbytes": done.nbytes, "tier": done.tier})
        return
    output().print(
        f"step {done.step} (serial {done.serial}): {format_size(done.nbytes)} imported, and verified on tier "
        f"{printable(done.tier)}"
    )


def export(
    store: StorePath,
    step: Step = None,
    to: Annotated[
        str,
        typer.Option(metavar="SCHEME:PATH", help="safetensors:, orbax:, dcp:, npz: or npy:, and a new path."),
    ] = "",
    part: Annotated[
        str | None,
        typer.Option(
            help="The part of the tree to export; of safetensors by default model or state_dict, else all.",
            show_default=False,
        ),
    ] = None,
    keys: Keys = None,
    cast: Annotated[
        str | None, typer.Option(metavar="bf16|fp16", help="Of safetensors: floats as 16 bits.", show_default=False)
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Of safetensors: bytes of a file at most, as '5 GB'.", show_default=False)
    ] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Of orbax: copy the arrays, also where the store's packs can be linked.")
    ] = False,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=NAME", help="Of safetensors: 'params/**=model.**'; repeat for more."),
    ] = None,
    lossy: Lossy = False,
    as_json: Json = False,
) -> None:
    """Write a step in the format of another library, read it back and compare it. The store is left as it is."""
    if not to:
        raise Invalid("--to is missing; write --to safetensors:PATH, or orbax:, dcp:, npz: or npy: and a path")
    options: dict[str, Any] = {} if cast is None else {"cast": cast}
    if shard_size is not None:
        options["shard_size"] = amounts.size("--shard-size", shard_size)
    if copy:
        options["copy"] = True
    if rename:
        options["rename"] = dict(map(_renamed, rename))

    def write(copy: StepCopy) -> Exported:
        with bar("exporting", sum(array.nbytes for array in copy.describe().arrays)) as progress:
            return export_copy(copy, to, part=part, keys=keys or None, progress=progress, **options)

    with reading(store) as opened:
        done = from_copies(opened, step, write, lossy=lossy)
    _print_exported(done, as_json=as_json)


def _print_exported(done: Exported, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "step": done.info.step,
                "serial": done.info.serial,
                "to": str(done.path),
                "part": done.part,
                "names": done.names,
                "sources": done.sources,
                "lossy": done.lossy,
                "left_out": done.left_out,
            }
        )
        return
    what = f"step {done.info.step} (serial {done.info.serial})" + (f", part {done.part}" if done.part else "")
    output().print(printable(f"{what}: exported to {done.path}, read back and compared; names: {len(done.names)}"))
    if done.lossy:
        output().print(LOSSY)
    if done.left_out:
        shown = ", ".join(done.left_out[:_SHOWN]) + (", …" if len(done.left_out) > _SHOWN else "")
        output().print(printable(f"left out, for the format holds arrays alone: {len(done.left_out)} ({shown})"))


def _renamed(text: str) -> tuple[str, str]:
    pattern, separator, name = text.partition("=")
    if not (pattern and separator and name):
        raise Invalid(f"--rename {text!r}: write PATTERN=NAME, such as 'params/**=model.**'")
    return pattern, name
