"""The verb `bench gpu`: the cost of saves and restores of device memory, beside the peers."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tieredckpt.bench.gpu import AIMS, GpuReport, measure
from tieredckpt.bench.gpu_bounds import Bounds, write_rate
from tieredckpt.bench.peers.gpu import CudaTraining, copy_rates, cuda_peers, device_memory
from tieredckpt.bench.report import Aim
from tieredckpt.blobs.memory import memory_limit
from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.cli import amounts
from tieredckpt.cli.console import errors, output, print_json, print_table, printable
from tieredckpt.cli.opening import Device, Json
from tieredckpt.units import format_duration, format_rate, format_size

__all__ = ["bench_gpu"]


def bench_gpu(
    size: Annotated[
        str | None,
        typer.Option(help="Bytes of the state, about; 20 GB, or what memory and time allow.", show_default=False),
    ] = None,
    folder: Device = Path(),
    peers: Annotated[bool, typer.Option(help="Measure the peers that are installed, too.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="How often each way is measured, if time allows.")] = 5,
    within: Annotated[str, typer.Option(help="Time for all of it, about.")] = "8 min",
    as_json: Json = False,
) -> None:
    """Measure saves and restores of a training on the first CUDA device: stall, overlap with the training, restore.

    Needs PyTorch and a CUDA device; without one it says so, and exits with 1, as where a way of this library fails.
    """
    begin, seconds = time.monotonic(), amounts.duration("--within", within, or_zero=True)
    free = device_memory()
    installed, missing = cuda_peers() if peers else ([], {})
    with tempfile.TemporaryDirectory(prefix="tieredckpt-bench-", dir=folder) as name:
        room = Path(name)
        writes, (copies, _) = write_rate(room), copy_rates()
        left = max(0.0, seconds - (time.monotonic() - begin))
        bounds = Bounds(left, repeats, writes, copies, len(installed))
        host = min(memory_limit()[0], shutil.disk_usage(shared_memory_root().parent).free)
        largest = bounds.largest(free, host, shutil.disk_usage(room).free)
        training = CudaTraining(largest if size is None else amounts.size("--size", size))
        found = measure(training, room, installed, bounds, lambda what: errors().print(printable(what)))
    if as_json:
        print_json(asdict(found) | {"ratios": found.ratios, "missing": missing})
    else:
        _show(found, missing)
    if len(found.ratios) < len(AIMS):
        raise typer.Exit(1)


def _show(found: GpuReport, missing: Mapping[str, str]) -> None:
    out, back = (format_rate(found.nbytes / seconds) for seconds in (found.copy_out_s, found.copy_in_s))
    output().print(
        f"{printable(found.device)}, a state of {format_size(found.nbytes)}; copies from the device {out}, to it "
        f"{back}. A copy from it takes {format_duration(found.copy_out_s)}, and forward and backward pass of a step, "
        f"{found.passes} of each, {format_duration(found.forward_s)}"
    )
    print_table(
        "medians",
        ("", "stall", "durable", "step with a save", "of it waited", "step without", "restore from RAM"),
        [
            (
                row.name,
                *map(format_duration, (row.stall_s, row.durable_s, row.step_s, row.waited_s, row.plain_s)),
                "" if row.restore_s is None else format_duration(row.restore_s),
            )
            for row in found.rows
        ],
        right=("stall", "durable", "step with a save", "of it waited", "step without", "restore from RAM"),
    )
    print_table(
        "against the aims",
        ("aim", "key", "figure", "at most", ""),
        [(aim.about, aim.key, *_against(found.ratios.get(aim.key), aim)) for aim in AIMS],
        right=("figure", "at most"),
    )
    for name, why in missing.items():
        output().print(f"missing: {name}: {printable(why)}")
    for name, why in found.failed.items():
        output().print(f"failed: {name}: {printable(why)}")


def _against(value: float | None, aim: Aim) -> tuple[str, str, str]:
    """The figure, the aim, and whether it is met."""
    assert aim.most is not None, "all of them have a number"
    shown = format_duration if aim.unit == "s" else "{:.3g}".format
    if value is None:
        return "", shown(aim.most), "FAILED"
    return shown(value), shown(aim.most), "met" if value <= aim.most else "MISSED"
