"""Runs a measurement in a process of its own, in folders that are gone afterwards, whatever becomes of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.errors import TieredCkptError

__all__ = ["Failed", "Places", "asked", "places", "run_isolated"]

T = TypeVar("T", bound=msgspec.Struct)

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""What the compute loop needs; see `tieredckpt.bench.compute`. Copies of the frameworks go by other threads."""
_COMPLAINT = 400


class Failed(TieredCkptError):
    """A measurement ended with an error, or took too long."""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of one measurement."""

    folder: Path
    """Empty, on the device; its parent is the measurement's too."""
    shared: Path
    """Empty, in shared memory."""
    result: Path


@contextmanager
def places(parent: Path) -> Iterator[Places]:
    """New folders below ``parent`` and in shared memory; removed in the end."""
    root = Path(tempfile.mkdtemp(prefix=f"tieredckpt-bench-{os.getpid()}-", dir=parent))
    shared_root = shared_memory_root()
    shared = shared_root / root.name
    try:
        shared.mkdir(mode=0o700, parents=True)
        (root / "files").mkdir()
        yield Places(root / "files", shared, root / "result.json")
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        with suppress(OSError):  # other stores of this user live there
            shared_root.rmdir()
        shutil.rmtree(root, ignore_errors=True)


def run_isolated(module: str, spec: msgspec.Struct, result: Path, *, timeout: float) -> bytes:
    """What ``python -m module`` wrote to ``result``, given ``spec`` on its stdin.

    Raises:
        Failed: it ended with an error, or was killed after ``timeout`` seconds; the message ends with its last words.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(  # noqa: S603  # the command is ours
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
            start_new_session=True,  # so that what it started can be ended with it
        )
        assert process.stdin is not None
        try:
            _tell(process.stdin, spec)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {timeout:.0f} s") from None
        finally:
            _end(process)
            process.stdin.close()
        if process.returncode != 0:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "without a word"
            raise Failed(f"ended with code {process.returncode}: {last[:_COMPLAINT]}")
    return result.read_bytes()


def asked(kind: type[T]) -> T:
    """What this process was started for, from its stdin; it ends with whoever started it."""
    # Not through sys.stdin, whose lock a thread that waits there would hold when the interpreter ends.
    data = b""
    while not data.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        data += more
    spec = msgspec.json.decode(data, type=kind)

    def end_with_it() -> None:
        os.read(0, 1)  # returns when the other end is closed
        os._exit(1)

    threading.Thread(target=end_with_it, name="tieredckpt bench orphan", daemon=True).start()
    return spec


def _tell(stdin: IO[bytes], spec: msgspec.Struct) -> None:
    with suppress(BrokenPipeError):  # its exit code and last words tell why
        stdin.write(msgspec.json.encode(spec) + b"\n")
        stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process and of those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
