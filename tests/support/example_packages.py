"""Example packages, installed as a stranger's are and run in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["EXAMPLES", "install", "run"]

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 180


def install(name: str, folder: Path) -> Path:
    """A folder below ``folder`` into which pip has installed an example, without a network."""
    if find_spec("pip") is None or not _builds_wheels():
        pytest.skip('needs pip and setuptools 70.1; pip install -e ".[test]" brings the latter')
    source = shutil.copytree(EXAMPLES / name, folder / "source")  # a build leaves files beside what it builds
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def _builds_wheels() -> bool:
    try:
        return tuple(map(int, version("setuptools").split(".")[:2])) >= (70, 1)
    except PackageNotFoundError:
        return False


def run(installed: Path | None, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, with what `install` has installed, or without."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if installed is not None:
        environment["PYTHONPATH"] = str(installed)
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
