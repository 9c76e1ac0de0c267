"""The verb `demo`: trains, kills the training with SIGKILL half way, restores, and compares every bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.cli.console import errors, output, print_table, waiting
from tieredckpt.cli.ls import print_steps, print_tiers
from tieredckpt.cli.opening import reading
from tieredckpt.errors import TieredCkptError, TierUnavailable
from tieredckpt.units import format_duration, format_size

__all__ = ["Plan", "demo"]

_CONFIG = """\
# What `tieredckpt demo` trained with: RAM takes every save, the disk every second one.
[store]
chunk_size = "256 KiB"
schedule = {{ kind = "every_n_steps", n = {save_every} }}

[tiers.ram]
kind = "ram"
path = {ram}
capacity = "{capacity}"
retain = {{ kind = "last_n", n = 2 }}

[tiers.disk]
kind = "posix"
path = "disk"
promote = {{ kind = "every_n_steps", n = {disk_every} }}
retain = {{ kind = "last_n", n = 3 }}
"""

_CAPACITY = "48 MiB"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""One thread for these libraries: else the sums of a matrix product may round in another order in another run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """At which steps the demo saves, promotes and kills."""

    steps: int
    save_every: int
    disk_every: int
    kill_at: int
    """An odd save, so that RAM holds a newer step than the disk, which shows which of the two was used."""
    on_disk: int
    """The step that must be on the disk before the kill."""

    @classmethod
    def of(cls, steps: int) -> Plan:
        """The plan for so many steps, at least 6."""
        save_every = max(1, steps // 12)
        saves = steps // 2 // save_every
        kill_at = save_every * (saves - 1 + saves % 2)
        return cls(steps, save_every, 2 * save_every, kill_at, kill_at - save_every)


def demo(
    steps: Annotated[int, typer.Option(min=6, max=100_000, help="How many steps to train.")] = 60,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the store, to look at.")] = False,
) -> None:
    """Train, kill the training half way with SIGKILL, restore, and compare the weights bit for bit."""
    plan = Plan.of(steps)
    begin = time.monotonic()
    with _places(keep=keep) as (folder, ram):
        config = folder / "ckpt.toml"
        config.write_text(
            _CONFIG.format(
                save_every=plan.save_every,
                disk_every=plan.disk_every,
                ram=json.dumps(str(ram).replace("$", "$$")),
                capacity=_CAPACITY,
            )
        )
        same = _run(plan, config)
        if keep:
            output().print(f"kept; look at it with: tieredckpt ls {config}")
    output().print(f"took {format_duration(time.monotonic() - begin)}")
    if not same:
        raise typer.Exit(1)


def _run(plan: Plan, config: Path) -> bool:
    say = output().print
    say(f"1. Train {plan.steps} steps without a store, for reference.", style="bold")
    with _training(plan.steps) as training, waiting("training"):
        reference = training.next()
    _tell_done(reference)

    say(f"2. Train again, save every {plan.save_every} steps, and kill -9 at step {plan.kill_at}.", style="bold")
    saved = _killed(plan, config)
    _print_saved(saved)
    with reading(str(config)) as store:
        print_steps(store.steps(), store.tier_infos(), store.pins())
        print_tiers(store.tier_infos())

    say("3. Start the training again.", style="bold")
    restored = None
    with _training(plan.steps, "--store", str(config)) as training:
        told = training.next()
        if told["event"] == "restored":
            restored = told
            _tell_restored(saved, restored)
            told = training.next()
        with waiting("training"):
            while told["event"] != "done":
                told = training.next()
    _tell_done(told)
    return _judge(reference, restored, told)


def _killed(plan: Plan, config: Path) -> list[dict[str, Any]]:
    """Run the training until the half-way step is saved and the one before it on disk, and kill it there."""
    saved: list[dict[str, Any]] = []
    missing = {plan.kill_at, plan.on_disk}
    with _training(plan.steps, "--store", str(config), "--attended") as training, waiting("training"):
        while missing:
            told = training.next()
            saved.append(told)
            if told["event"] == "saved" and told["step"] < plan.kill_at:
                training.go_on()
            if told["step"] == plan.kill_at or told["tier"] == "disk":
                missing.discard(told["step"])
        training.kill()
    return saved


def _print_saved(saved: list[dict[str, Any]]) -> None:
    rows = [
        (
            told["step"],
            told["tier"],
            format_size(told["nbytes"]),
            format_size(told["written"]),
            format_duration(told["seconds"]),
        )
        for told in saved
    ]
    columns = ("step", "tier", "size", "written", "took")
    print_table("saved before the kill", columns, rows, right=("step", "size", "written", "took"))


def _tell_restored(saved: list[dict[str, Any]], restored: dict[str, Any]) -> None:
    sources = ", ".join(f"{format_size(nbytes)} from {tier}" for tier, nbytes in restored["sources"].items())
    output().print(f"   restored step {restored['step']}: {sources}")
    newest = max(told["step"] for told in saved)
    if newest > restored["step"]:
        output().print(
            f"   (step {newest} was in RAM, which here ends with the process, since /dev/shm is too small; "
            f"the disk had step {restored['step']})"
        )


def _tell_done(done: dict[str, Any]) -> None:
    output().print(f"   trained to the end: loss {done['loss']:.4f}, digest of the weights {done['sha256'][:16]}\n")


def _judge(reference: dict[str, Any], restored: dict[str, Any] | None, done: dict[str, Any]) -> bool:
    if restored is not None and done["sha256"] == reference["sha256"]:
        text = "The weights are bit for bit those of the training that was never interrupted."
        output().print(text, style="bold green")
        return True
    what = "nothing was restored" if restored is None else "the weights differ from the uninterrupted training"
    output().print(f"The demo failed: {what}. Please report this, with the text above.", style="bold red")
    return False


class _Training:
    """A training under way in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], complaints: IO[str]) -> None:
        self._process = process
        self._complaints = complaints

    def next(self) -> dict[str, Any]:
        """The next report of the demo; raises an error that ends the demo if it ended, or cannot write to the disk."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._complaints.seek(0)
            errors().print(self._complaints.read())
            raise TieredCkptError(f"the training ended early, with code {code}; see above")
        told: dict[str, Any] = json.loads(line)
        if told["event"] == "failed":
            if told["tier"] == "disk":
                raise TierUnavailable(f"the demo needs room for its store: {told['error']}; set TMPDIR")
            return self.next()
        return told

    def go_on(self) -> None:
        """Resume the training after a save."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the training by SIGKILL, which it cannot notice."""
        self._process.kill()
        self._process.wait()


@contextmanager
def _training(steps: int, *options: str) -> Iterator[_Training]:
    command = [sys.executable, "-P", "-m", "tieredckpt.cli.demo_training", "--steps", str(steps), *options]
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(  # noqa: S603  # the command is ours
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
            start_new_session=True,  # Ctrl-C comes here alone, and whatever happens the process ends below
        )
        with process:
            try:
                yield _Training(process, complaints)
            finally:
                if process.poll() is None:
                    process.kill()


@contextmanager
def _places(*, keep: bool) -> Iterator[tuple[Path, Path]]:
    """A folder for the store and one in shared memory for its RAM tier, both removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tieredckpt-demo-"))
    try:
        ram = shared_memory_root() / folder.name
        try:
            yield folder, ram
        finally:
            shutil.rmtree(ram, ignore_errors=True)
            with suppress(OSError):  # another store of this user lives there, or it was not made
                ram.parent.rmdir()
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
