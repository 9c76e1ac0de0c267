"""The plan of the source code: tests mirror packages, and modules use the public names of each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "tieredckpt", ROOT / "tests/unit"

ELSEWHERE = {
    "agent": (
        "tests/unit/engine/agent",
        "tests/crash/test_agents_and_trainers.py",
        "tests/crash/test_agents_of_users.py",
    ),
    "bench": ("tests/unit/cli/test_bench.py", "tests/unit/test_bench_gpu.py", "tests/benchmarks"),
    "bench/peers": ("tests/benchmarks",),
    "blobs/kvstore": ("tests/unit/blobs/test_kvstore.py", "tests/conformance"),
    "blobs/wrap": ("tests/unit/blobs/test_wrap.py",),
    "integrations": ("tests/integrations",),
    "integrations/orbax": ("tests/integrations/test_orbax_manager.py", "tests/integrations/test_orbax_loops.py"),
    "interchange": ("tests/integrations/test_interchange.py", "tests/unit/engine/exporting"),
    "testing": ("tests/conformance", "tests/unit/blobs/test_faulty.py", "tests/unit/devices"),
}
"""Packages without a folder of unit tests, and where they are tested."""

ABOUT_ALL = {"cancellation"}
"""Folders of unit tests about a property of the whole library."""


def folders(root: Path, pattern: str) -> set[str]:
    """Folders below ``root`` that have such files themselves, relative to it."""
    return {str(found.parent.relative_to(root)) for found in root.rglob(pattern)} - {"."}


def test_unit_tests_mirror_the_packages() -> None:
    packages, tested = folders(PACKAGE, "__init__.py"), folders(TESTS, "test_*.py")
    assert tested - packages == ABOUT_ALL
    around = {str(parent) for folder in tested for parent in Path(folder).parents}
    assert packages - tested - around == set(ELSEWHERE)
    missing = [path for paths in ELSEWHERE.values() for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_no_module_imports_a_private_name_of_another() -> None:
    """Beside the rule SLF001 of ruff, which finds private attributes; private modules are imported as wholes."""
    found = []
    for module in [*PACKAGE.rglob("*.py"), *(ROOT / "policies").rglob("*.py")]:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tieredckpt"):
                folder = ROOT / (node.module or "").replace(".", "/")
                modules = {path.stem.split(".")[0] for path in folder.glob("_*.py*")}
                private = {each.name for each in node.names if re.match("_(?!_)", each.name)} - modules
                found += [f"{module.relative_to(ROOT)}: {name}" for name in private]
    assert found == []


def test_no_block_raises_what_python_before_3_11_4_wraps_in_a_group() -> None:
    """That is, none of ``except*``: the handler of the error itself was passed by."""
    modules = [*PACKAGE.rglob("*.py"), *(ROOT / "policies").rglob("*.py")]
    found = [
        module
        for module in modules
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.TryStar)
    ]
    assert found == []
