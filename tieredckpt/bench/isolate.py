"""Runs a measurement in processes and folders of its own, which are removed in any case."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from tieredckpt._decoders import json_decoder
from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.errors import TieredCkptError

__all__ = [
    "Failed",
    "IsolatedSpec",
    "Meeting",
    "measure_what_is_asked",
    "places",
    "run_isolated",
    "run_together",
    "seats",
]

_SILENT = {-signal.SIGKILL: "it was killed, as for want of memory; a smaller `--size` needs less"}
"""What the exit code of a process that said nothing means."""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Settings of the compute loop, see `tieredckpt.bench.compute`. Copies of the frameworks use other threads."""
_COMPLAINT = 400
_GLANCE = 0.02
"""Seconds between two checks of running processes."""


class Failed(TieredCkptError):
    """A measurement ended with an error, or took too long."""


class IsolatedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every measurement in a process of its own."""

    folder: str
    """Empty; on the device that is measured."""
    shared: str
    """Empty; in shared memory."""
    result: str
    """The file to write."""
    repeats: int


R = TypeVar("R")
S = TypeVar("S", bound=IsolatedSpec)


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of one measurement."""

    folder: Path
    """Empty, on the device; its parent is the measurement's too."""
    shared: Path
    """Empty, in shared memory."""
    result: Path

    def told(self) -> dict[str, str]:
        """The folders as a spec names them."""
        return {"folder": str(self.folder), "shared": str(self.shared), "result": str(self.result)}


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


def run_isolated(
    kind: type[R], module: str, parent: Path, make_spec: Callable[..., IsolatedSpec], *, timeout: float
) -> R:
    """Result of ``python -m module``, in new folders below ``parent``, with which ``make_spec`` is called.

    Raises:
        Failed: as of `run_together`.
    """
    with places(parent) as where:
        run_together(module, [(make_spec(**where.told()), ())], timeout=timeout)
        return json_decoder(kind).decode(where.result.read_bytes())


def run_together(module: str, ranks: Sequence[tuple[IsolatedSpec, Sequence[int]]], *, timeout: float) -> None:
    """Run ``python -m module`` as several processes at once, each with its spec on stdin and its inherited descriptors.

    Raises:
        Failed: one ended with an error, or took more than ``timeout`` seconds; the message ends with its last words.
            The others, which wait for it, are ended.
    """
    deadline = time.monotonic() + timeout
    with ExitStack() as ending:
        started = [ending.enter_context(_started(module, spec, inherited)) for spec, inherited in ranks]
        while [process for process, _ in started if process.poll() is None]:
            if any(process.returncode for process, _ in started):
                break
            if time.monotonic() > deadline:
                raise Failed(f"took more than {timeout:.0f} s")
            time.sleep(_GLANCE)
        for process, said in started:
            if process.returncode:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                last = lines[-1] if lines else _SILENT.get(process.returncode, "without a word")
                raise Failed(f"ended with code {process.returncode}: {last[:_COMPLAINT]}")


@contextmanager
def _started(
    module: str, spec: IsolatedSpec, inherited: Sequence[int]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The process, which is killed in the end, and its output."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(  # noqa: S603  # the command is ours
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
            start_new_session=True,  # so that what it started can be ended with it
            pass_fds=inherited,
        )
        assert process.stdin is not None
        try:
            _tell(process.stdin, spec)
            yield process, said
        finally:
            _end(process)
            process.stdin.close()


def measure_what_is_asked(kind: type[S], measure: Callable[[S], object]) -> None:
    """Write the result of ``measure`` for the spec on stdin to the file that it names; ends with the parent process."""
    # Not through sys.stdin: a waiting thread would hold its lock when the interpreter ends.
    data = b""
    while not data.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        data += more
    spec = json_decoder(kind).decode(data)

    def end_with_it() -> None:
        os.read(0, 1)  # returns when the other end is closed
        os._exit(1)

    threading.Thread(target=end_with_it, name="tieredckpt bench orphan", daemon=True).start()
    try:
        told = measure(spec)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # nothing is closed, since closing would wait for other ranks, which the parent kills
    Path(spec.result).write_bytes(msgspec.json.encode(told))


def _tell(stdin: IO[bytes], spec: IsolatedSpec) -> None:
    with suppress(BrokenPipeError):  # its exit code and last output tell why
        stdin.write(msgspec.json.encode(spec) + b"\n")
        stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def seats(ranks: int) -> Iterator[list[tuple[int, ...]]]:
    """For each of so many ranks the descriptors of its sockets to all others, for the processes that inherit them."""
    with ExitStack() as closing:
        found: list[list[int]] = [[] for _ in range(ranks)]
        for one, other in combinations(found, 2):
            here, there = map(closing.enter_context, socket.socketpair())
            one.append(here.fileno())
            other.append(there.fileno())
        yield list(map(tuple, found))


class Meeting:
    """A barrier of the ranks: a call waits until every rank has called it as often. A single rank does not wait."""

    def __init__(self, seat: Sequence[int]) -> None:
        self._seat = seat

    def __call__(self) -> None:
        for other in self._seat:
            os.write(other, b"!")
        for other in self._seat:
            os.read(other, 1)
