"""Importing the library is light: optional frameworks stay out, and nothing runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

OPTIONAL = (
    "flax",
    "jax",
    "jaxlib",
    "lightning",
    "matplotlib",
    "mpi4py",
    "numcodecs",
    "obstore",
    "orbax",
    "prometheus_client",
    "safetensors",
    "simpy",
    "torch",
)
"""What the library works with and never asks for."""

HEAVY = (
    "aiofiles",
    "google_crc32c",
    "ml_dtypes",
    "msgspec",
    "numpy",
    "optree",
    "pydantic",
    "rich",
    "stamina",
    "tensorstore",
    "typer",
    "xxhash",
)
"""What the library needs, and imports where it uses it."""

PROBE = """
import json, sys, threading, time
before = time.perf_counter()
import {module}
seconds = time.perf_counter() - before
print(json.dumps([seconds, sorted(sys.modules), threading.active_count()]))
"""


def imported(module: str) -> tuple[float, set[str], int]:
    """Seconds of `import module` in a fresh interpreter, the modules loaded after it, and the threads."""
    probe = PROBE.format(module=module)
    # -P: the installed package is meant, not a folder that happens to lie in the working directory.
    done = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    seconds, modules, threads = json.loads(done.stdout)
    return seconds, set(modules), threads


@pytest.mark.parametrize(
    "module", ["tieredckpt", "tieredckpt.format.crc", "tieredckpt.plan.model", "tieredckpt_policies"]
)
def test_an_import_loads_no_optional_framework_and_starts_no_thread(
    module: str, record_property: Callable[[str, object], None]
) -> None:
    seconds, modules, threads = imported(module)
    record_property("import_seconds", seconds)
    assert module in modules
    assert modules.isdisjoint(OPTIONAL)
    assert threads == 1


def test_importing_the_library_costs_less_than_importing_numpy(record_property: Callable[[str, object], None]) -> None:
    """Compared in one run, by the modules that each loads; the seconds are reported and not judged."""
    loaded = {}
    for module in ("tieredckpt", "numpy"):
        seconds, modules, _ = imported(module)
        record_property(f"{module}_import_seconds", seconds)
        record_property(f"{module}_modules", len(modules))
        loaded[module] = modules
    assert len(loaded["tieredckpt"]) < len(loaded["numpy"])
    own = {name for name in loaded["tieredckpt"] if name.startswith("tieredckpt")}
    assert own == {"tieredckpt", "tieredckpt.errors"}


@pytest.mark.parametrize(
    "names", ["TieredCkptError", "CheckpointStore, SyncStore, Checkpoint, Restored", "events", "preemption"]
)
def test_the_names_of_a_training_script_load_nothing_heavy(names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from tieredckpt import {names}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(done.stdout.split())
    assert modules.isdisjoint(HEAVY)
    assert "tieredckpt.engine.engine" not in modules


def test_a_star_import_needs_no_optional_framework() -> None:
    """Nor does it load one that is there: mpi4py would initialise MPI."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))"
    program = f"{blocked}\nfrom tieredckpt import *\nprint(CheckpointStore, TierInfo)"
    subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)


def test_opening_a_store_loads_what_its_saves_need(tmp_path: Path) -> None:
    """Nothing of it is imported while a save runs, when a descriptor or memory may be missing."""
    program = f"""
import sys, numpy as np
from tieredckpt import CheckpointStore, StoreConfig
tiers = [dict(name="disk", kind="posix", path={str(tmp_path / "disk")!r})]
with CheckpointStore.open(dict(tiers=tiers), ranks=None).sync() as store:
    before = set(sys.modules)
    store.save(1, dict(w=np.zeros(4)))
    store.flush()
    print(*sorted(name for name in set(sys.modules) - before if name.startswith("tieredckpt")))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_store_takes_nothing_of_numpy_that_is_imported_at_its_first_use(tmp_path: Path) -> None:
    """Threads that meet in such an import, as readers of several steps do, recurse without end (NumPy 2)."""
    program = f"""
import sys, numpy as np
from tieredckpt import CheckpointStore
sys.modules["numpy.ma"] = None
for _ in range(2):
    with CheckpointStore.open_sync({str(tmp_path / "disk")!r}, ranks=None) as store:
        found = store.restore()
        number = found.step if found else 0
        store.save(number + 1, dict(w=np.arange(1 << 20), small=np.zeros(3)))
        store.flush()
        assert store.verify(number + 1)
print(number)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


def test_the_core_loads_no_shipped_policy() -> None:
    _, modules, _ = imported("tieredckpt")
    assert "tieredckpt_policies" not in modules


def test_a_kind_of_tier_is_imported_where_a_configuration_has_it() -> None:
    kinds = {f"tieredckpt.blobs.{kind}.kind" for kind in ("ram", "posix", "chfs", "kvstore")}
    _, modules, _ = imported("tieredckpt")
    assert modules.isdisjoint(kinds)
    configured = "from tieredckpt.config import load; load('/somewhere')"
    _, modules, _ = imported(f"tieredckpt.config; {configured}")
    assert modules & kinds == {"tieredckpt.blobs.ram.kind", "tieredckpt.blobs.posix.kind"}
    assert "tensorstore" not in modules


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not by types either; layers cannot tell for the modules of one folder."""
    grimp = pytest.importorskip("grimp")  # of import-linter
    graph = grimp.build_graph("tieredckpt", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    del imports["tieredckpt"]  # an extension module is no Python file: importing one looks like importing the package
    imports["tieredckpt.sync"].remove("tieredckpt.store")  # each face of a store gives the other
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
