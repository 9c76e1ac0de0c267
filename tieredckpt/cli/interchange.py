"""The verbs `import` and `export`: checkpoints of other libraries, in and out."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tieredckpt.cli import amounts
from tieredckpt.cli.console import bar, output, print_json, printable, waiting
from tieredckpt.cli.opening import Json, Step, StorePath, creating, reading
from tieredckpt.errors import Invalid
from tieredckpt.interchange import export_step, import_step
from tieredckpt.units import format_size

__all__ = ["export", "import_"]


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SCHEME:PATH", help="dcp:FOLDER, safetensors:FILE|FOLDER or torch:FILE."),
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
    with creating(store) as opened, waiting(f"importing {source}"):
        done = import_step(source, opened, step, overwrite=overwrite)
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
        typer.Option(metavar="SCHEME:PATH", help="safetensors:, dcp:, npz: or npy:, and a path where nothing is yet."),
    ] = "",
    part: Annotated[
        str | None,
        typer.Option(
            help="The part of the tree to export; of safetensors by default model or state_dict, else all.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only these keys or patterns (params/**); repeat for more."),
    ] = None,
    cast: Annotated[
        str | None, typer.Option(metavar="bf16|fp16", help="Of safetensors: floats as 16 bits.", show_default=False)
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Of safetensors: bytes of a file at most, as '5 GB'.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a step in the format of another library, read it back and compare it. The store is left as it is."""
    if not to:
        raise Invalid("--to is missing; write --to safetensors:PATH, or dcp:, npz: or npy: and a path")
    options: dict[str, Any] = {} if cast is None else {"cast": cast}
    if shard_size is not None:
        options["shard_size"] = amounts.size("--shard-size", shard_size)
    with reading(store) as opened:
        nbytes = sum(array.nbytes for array in opened.describe(step).arrays)
        with bar("exporting", nbytes) as progress:
            done = export_step(opened, to, step, part=part, keys=keys or None, progress=progress, **options)
    if as_json:
        print_json(
            {
                "step": done.info.step,
                "serial": done.info.serial,
                "to": str(done.path),
                "part": done.part,
                "names": done.names,
                "sources": done.sources,
            }
        )
        return
    what = f"step {done.info.step} (serial {done.info.serial})" + (f", part {done.part}" if done.part else "")
    output().print(printable(f"{what}: exported to {done.path}, read back and compared; names: {len(done.names)}"))
