"""The verb `bench codecs`: the effect of the tiers' codecs and lossy rules on a step of a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy.typing as npt
import typer

from tieredckpt.bench.codecs import CodecRow, LossyTier, RuleRow, measure_codecs
from tieredckpt.bench.durable import RUNS, DurableRow, Sample, measure_durable
from tieredckpt.blobs.codecs import CODECS
from tieredckpt.cli import amounts
from tieredckpt.cli.console import bar, print_json, print_table, printable
from tieredckpt.cli.opening import Json, Keys, StorePath, reading
from tieredckpt.config import load
from tieredckpt.config.lossy import LossyRule
from tieredckpt.errors import Invalid
from tieredckpt.format.rounding import Bound
from tieredckpt.interchange.stored_step import StepCopy, StoredStep
from tieredckpt.units import format_duration, format_rate, format_size

__all__ = ["bench_codecs"]

_CHUNK = 16 << 20


def bench_codecs(
    store: StorePath,
    step: Annotated[int | None, typer.Option(help="The newest if left out.", show_default=False)] = None,
    keys: Keys = None,
    size: Annotated[str, typer.Option(help="Measure about so many bytes, spread over all that is read.")] = "1 GiB",
    max_error: Annotated[
        str | None,
        typer.Option(help="Round the values first, as a lossy rule does (0.4%).", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Measure the time until the step is durable too, in a new folder below this one, which is removed.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Slow the device of --folder down to this (250MB/s).", show_default=False)
    ] = None,
    codec_threads: Annotated[int, typer.Option(min=1, help="Threads that compress, for the time until durable.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure size, speed, error and time until durable of every codec on a step. The store is left as it is.

    Of tiers with lossy rules, the largest error that each rule leads to is measured.
    """
    wanted = amounts.size("--size", size)
    rate = None if bandwidth is None else amounts.rate("--bandwidth", bandwidth)
    if rate is not None and folder is None:
        raise Invalid("--bandwidth is that of the device of --folder: give both")
    settings: dict[str, Any] = {"keys": ["**"], "max_error": max_error}
    rule = None if max_error is None else LossyRule(**settings)  # raises `Invalid`, which `model_validate` does not
    bound = None if rule is None or rule.max_error is None else Bound(rule.max_error)
    with reading(store) as opened:
        details = opened.describe(step, keys=keys or None)
        number, nbytes = details.info.step, sum(array.nbytes for array in details.arrays)
        every, names = max(1, nbytes // max(wanted, 1)), [array.key for array in details.arrays]
        lossy = [LossyTier(tier, names, _CHUNK, every=every) for tier in load(store).derived]
        sample = None if folder is None else Sample(wanted, nbytes)

        def arrays(found: StoredStep) -> Iterator[tuple[str, npt.NDArray[Any]]]:
            for info, array in found.read():
                for tier in lossy:
                    tier.add(info.key, array)
                if array.nbytes:
                    if sample is not None:
                        sample.add(info.key, array)
                    yield info.key, array

        with bar("measuring", nbytes) as progress:
            found = StoredStep(StepCopy(opened, number), keys=keys or None, progress=progress)
            rows = measure_codecs(arrays(found), _CHUNK, every=every, bound=bound)
    durable: list[DurableRow] = []
    if folder is not None and sample is not None:
        with bar("promoting", len(CODECS) * RUNS) as progress:
            durable = measure_durable(
                sample.arrays, folder, bound=bound, bandwidth=rate, threads=codec_threads, done=lambda: progress(1)
            )
    rules = [row for tier in lossy for row in tier.rows if row.arrays or row.keys]
    if as_json:
        print_json(
            {
                "step": number,
                "rows": [asdict(row) for row in rows],
                "rules": [asdict(row) for row in rules],
                "durable": [asdict(row) for row in durable],
            }
        )
        return
    _show(number, nbytes, rows, rules, durable, rounded=bound is not None)


def _show(
    step: int, nbytes: int, rows: list[CodecRow], rules: list[RuleRow], durable: list[DurableRow], *, rounded: bool
) -> None:
    error = ("error at most",) if rounded else ()
    print_table(
        f"step {step}, {format_size(rows[-1].nbytes)} of {format_size(nbytes)}",
        ("arrays", "codec", "stored", "compress", "decompress", *error, "saves time"),
        [_shown(row, rounded=rounded) for row in rows if row.nbytes],
        right=("stored", "compress", "decompress", *error),
    )
    if rules:
        print_table(
            "lossy rules of tiers",
            ("tier", "keys", "rule", "arrays", "stored", "error at most"),
            [
                (
                    printable(row.tier),
                    printable(", ".join(row.keys)) or "(all others)",
                    row.says,
                    str(row.arrays),
                    f"{row.stored / row.nbytes:.3f}" if row.nbytes else "",
                    _error(row.worst),
                )
                for row in rules
            ],
            right=("arrays", "stored", "error at most"),
        )
    if durable:
        plain = durable[0].seconds
        print_table(
            f"until {format_size(durable[0].nbytes)} in RAM are durable, the least of {RUNS} runs",
            ("codec", "written", "time", "over none"),
            [
                (row.codec, format_size(row.written), format_duration(row.seconds), f"{row.seconds / plain:.2f}")
                for row in durable
            ],
            right=("written", "time", "over none"),
        )


def _shown(row: CodecRow, *, rounded: bool) -> tuple[str, ...]:
    encode, decode = (row.nbytes / max(seconds, 1e-9) for seconds in (row.encode_seconds, row.decode_seconds))
    below = f"on devices below {format_rate(encode)}" if row.codec != "none" and row.stored < row.nbytes else ""
    share, error = f"{row.stored / row.nbytes:.3f}", (_error(row.worst),) if rounded else ()
    return printable(row.arrays), row.codec, share, format_rate(encode), format_rate(decode), *error, below


def _error(worst: float | None) -> str:
    return "" if worst is None else f"{worst:.3g}"
