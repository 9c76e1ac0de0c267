"""What holds for every test: reproducible properties in CI, and nothing left behind by a run."""

from __future__ import annotations

import builtins
import gc
import importlib
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from reliability.tiers import FaultyTiers, faulty_tiers, tried_again_soon
from support.agents import end_agent
from support.object_stores import REAL, Place, moto_server, real_server
from support.scenes import new_shared_folder, ram, shared_folders

from tieredckpt.blobs.ram.folder import SHARED_MEMORY_VARIABLE
from tieredckpt.blobs.wrap.mapped import UNMAPPED

# Deadlines and speed checks measure the machine that happens to run the tests.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Its import replaces `dir` for the whole process by one that fails on objects of Orbax.
_dir = builtins.dir
importlib.import_module("blockbuster")
builtins.dir = _dir

_SHARED_MEMORY = Path("/dev/shm")
_GRACE = 30.0
"""Seconds that what ends by itself, or belongs to a run beside this one, is given to go away."""

_FAST = (
    "unit/blobs/ram/test_regions.py",
    "unit/blobs/test_blob_keys.py",
    "unit/blobs/test_faulty.py",
    "unit/blobs/test_wrap.py",
    "unit/config",
    "unit/engine/ranks/replicas/test_placement.py",
    "unit/engine/ranks/restore/test_message_bulk.py",
    "unit/engine/ranks/restore/test_plan.py",
    "unit/engine/ranks/restore/test_transfer.py",
    "unit/engine/saving/test_sealing.py",
    "unit/engine/saving/test_snapshot.py",
    "unit/engine/state/test_step_table.py",
    "unit/engine/test_loop.py",
    "unit/engine/test_scratch.py",
    "unit/engine/tier/test_chunk_index.py",
    "unit/engine/tier/test_slab_index.py",
    "unit/format",
    "unit/plan/test_model.py",
    "unit/policy",
    "unit/test_border.py",
    "unit/test_policies_that_decide.py",
    "unit/test_shipped_policies.py",
    "unit/test_units.py",
    "unit/tree",
)
"""Folders and files of the fast lane, ``pytest -m fast``: what starts no process and opens no store."""


_LONG = ("test_examples.py", "test_example_packages.py", "test_style.py")
"""Files that take longer than those around them; they go first, so that no process is left with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices from all tests but theirs: frameworks would train on them, which forked processes cannot."""
    if not re.search(r"(?<!not )\bcuda\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast lane, but for those of its tests that are slow, need shared memory, a process or a store."""
    items.sort(key=lambda item: item.path.name not in _LONG)
    here = Path(__file__).parent
    fast = tuple(here / place for place in _FAST)
    if missing := [str(place) for place in fast if not place.exists()]:
        raise pytest.UsageError(f"tests of the fast lane are not there: {', '.join(missing)}; name them anew in _FAST")
    quick = {path for path in {item.path for item in items} if any(map(path.is_relative_to, fast))}
    for item in items:
        if item.path in quick and not _needs_more(item):
            item.add_marker(pytest.mark.fast)


def pytest_collection_finish() -> None:
    """What is imported and collected lives to the end: the collector of garbage looks at it no more."""
    gc.collect()
    gc.freeze()


def _needs_more(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") is not None or "shared_memory" in getattr(item, "fixturenames", ()):
        return True
    code = getattr(getattr(item, "function", None), "__code__", None)
    return code is not None and not {"subprocess", "CheckpointStore"}.isdisjoint(code.co_names)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the run that leaves behind files of this library, in shared memory or elsewhere, or child processes.

    What others leave among temporary files, such as PyTorch's cache, goes with the folder that the run has for them.
    """
    tmp_path_factory.getbasetemp()  # pytest's own are made, and kept for a while, where they always are
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with ExitStack() as until_end:
        patch = until_end.enter_context(pytest.MonkeyPatch.context())
        temporary = Path(until_end.enter_context(_new_folder()))
        memory = Path(until_end.enter_context(_new_folder(dir=base)))
        memory.chmod(0o711)  # as what it stands for can be entered by other users
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv(SHARED_MEMORY_VARIABLE, str(memory / "user"))
        # Hundreds of processes that tests start would compile the package anew.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield
        deadline = time.monotonic() + _GRACE
        while True:
            children = _children()
            files = sorted([*temporary.glob("*tieredckpt*"), *memory.iterdir()])
            if not children and not files:
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
    left = [f"process {child}" for child in children]
    left += [f"{file} of {shared_folders.get(file, 'unknown')} with {sorted(file.rglob('*'))}" for file in files]
    pytest.fail("the tests left behind: " + ", ".join(left))


def _new_folder(**options: Any) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tieredckpt-test-", ignore_cleanup_errors=True, **options)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder of the test in shared memory, for RAM tiers."""
    if not _SHARED_MEMORY.is_dir():
        pytest.skip(f"needs {_SHARED_MEMORY}")
    folder = new_shared_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ram_folder(shared_memory: Path) -> Iterator[Path]:
    """Where `support.scenes.ram` has its tier; an agent that still has it at the end is killed."""
    path = Path(ram(shared_memory)["path"])
    yield path
    end_agent(path)


@pytest.fixture(scope="session", params=["moto", *([pytest.param("real", marks=pytest.mark.s3_real)] if REAL else [])])
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of S3's protocol: of moto, and of one that somebody runs where ``S3_SERVER`` names it."""
    with real_server() if request.param == "real" else moto_server(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture
def no_signature(s3_server: str) -> None:
    """Skips the test at a server that checks signatures: it changes signed requests, or has other credentials."""
    if s3_server == REAL:
        pytest.skip("the server checks signatures")


@pytest.fixture
def s3_place(s3_server: str) -> Place:
    """A prefix of the test on that server."""
    return Place(s3_server)


class _Unmapped(logging.Handler):
    """Collects what stores raised and should have mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == UNMAPPED:
            self.found.append(record.getMessage())


@pytest.fixture(autouse=True)
def _stores_map_their_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Our own stores raise only errors of `tieredckpt.errors`; behind the wrappers, a test would not see another."""
    handler, logger = _Unmapped(), logging.getLogger("tieredckpt")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if request.node.get_closest_marker("unmapped") is None:
        assert handler.found == []


@pytest.fixture
def faults() -> Iterator[FaultyTiers]:
    """Scripts of faults under the slower tiers of the stores that the test opens; what failed is soon tried again."""
    with tried_again_soon(), faulty_tiers() as faults:
        yield faults


@pytest.fixture
def never_blocked_loop() -> Iterator[Any]:
    """Fails the test in which the library blocks an event loop."""
    with importlib.import_module("blockbuster").blockbuster_ctx("tieredckpt") as guard:
        yield guard


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What runs behind a shell, or nohup, was told to ignore signals, and would pass that on to what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB in memory, as containers have it at ``/dev/shm``; made by root alone."""
    with _tmpfs(tmp_path / "small", "64m") as folder:
        yield folder


@pytest.fixture
def tiny_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 192 KiB, which a few steps fill; made by root alone."""
    with _tmpfs(tmp_path / "tiny", "192k") as folder:
        yield folder


@contextmanager
def _tmpfs(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _children() -> list[str]:
    """Child processes by number and command line; multiprocessing's own tracker ends with its parent."""
    children = []
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and "multiprocessing.resource_tracker" not in line:
                children.append(f"{child.pid}: {line}")
        except psutil.NoSuchProcess:
            continue
    return children
