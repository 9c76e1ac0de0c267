"""The verb `bench codecs`: what the codecs of tiers make of a step of a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tieredckpt.bench.codecs import CodecRow, measure_codecs
from tieredckpt.cli import amounts
from tieredckpt.cli.console import bar, print_json, print_table, printable
from tieredckpt.cli.opening import Json, StorePath, reading
from tieredckpt.config.lossy import LossyRule
from tieredckpt.format.rounding import Bound
from tieredckpt.interchange.stored_step import StepCopy, StoredStep
from tieredckpt.units import format_rate, format_size

__all__ = ["bench_codecs"]

_CHUNK = 16 << 20


def bench_codecs(
    store: StorePath,
    step: Annotated[int | None, typer.Option(help="The newest if left out.", show_default=False)] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only these keys or patterns (params/**); repeat for more."),
    ] = None,
    size: Annotated[str, typer.Option(help="Measure about so many bytes, spread over all that is read.")] = "1 GiB",
    max_error: Annotated[
        str | None,
        typer.Option(help="Round the values first, as a lossy rule does (0.4%).", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure size and speed of every codec on the arrays of a step. The store is left as it is."""
    wanted = amounts.size("--size", size)
    rule = None if max_error is None else LossyRule.model_validate({"keys": ["**"], "max_error": max_error})
    bound = None if rule is None or rule.max_error is None else Bound(rule.max_error)
    with reading(store) as opened:
        details = opened.describe(step, keys=keys or None)
        number, nbytes = details.info.step, sum(array.nbytes for array in details.arrays)
        with bar("measuring", nbytes) as progress:
            found = StoredStep(StepCopy(opened, number), keys=keys or None, progress=progress)
            named = ((info.key, array) for info, array in found.read() if array.nbytes)
            rows = measure_codecs(named, _CHUNK, every=max(1, nbytes // max(wanted, 1)), bound=bound)
    if as_json:
        print_json({"step": number, "rows": [asdict(row) for row in rows]})
        return
    print_table(
        f"step {number}, {format_size(rows[-1].nbytes)} of {format_size(nbytes)}",
        ("arrays", "codec", "stored", "compress", "decompress", "saves time"),
        [_shown(row) for row in rows if row.nbytes],
        right=("stored", "compress", "decompress"),
    )


def _shown(row: CodecRow) -> tuple[str, ...]:
    encode, decode = (row.nbytes / max(seconds, 1e-9) for seconds in (row.encode_seconds, row.decode_seconds))
    below = f"on devices below {format_rate(encode)}" if row.codec != "none" and row.stored < row.nbytes else ""
    share = f"{row.stored / row.nbytes:.3f}"
    return printable(row.arrays), row.codec, share, format_rate(encode), format_rate(decode), below
