"""The C++ client of CHFS: builds its tests out of tree and runs each case, against the look-alike of libchfs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_NATIVE = Path(__file__).parents[2] / "native"
_CASES = sorted(
    case
    for source in (_NATIVE / "tests").glob("*_test.cpp")
    for case in re.findall(r"^TEST\((\w+)\)", source.read_text(), re.MULTILINE)
)


def _build(folder: Path) -> Path:
    """The program that runs the cases."""
    configure = [
        "cmake", "-S", str(_NATIVE), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Debug",
        "-DTIEREDCKPT_TESTS=ON", "-DTIEREDCKPT_PYTHON=OFF", "-DCMAKE_CXX_FLAGS_DEBUG=-O0",
        "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0",  # the headers are compiled once
    ]  # fmt: skip
    for command in (configure, ["cmake", "--build", str(folder), "--parallel", "2", "--target", "native_tests"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "tests" / "native_tests"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if not sys.platform.startswith("linux"):
        pytest.skip("CHFS exists on Linux alone")
    if missing:
        reason = f"needs {' and '.join(missing)} to build the C++ tests"
        if os.environ.get("TIEREDCKPT_REQUIRE_NATIVE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return _build(tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("case", _CASES)
def test_native(program: Path, case: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(program), case], capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_case_of_the_program_is_run(program: Path) -> None:
    listed = subprocess.run([str(program), "--list"], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(listed) == _CASES
