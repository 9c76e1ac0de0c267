"""The example package of policies: installed as a stranger's, it is found by its kinds, and the store follows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy"
SECONDS = 180


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package, without a network."""
    if find_spec("pip") is None or not _builds_wheels():
        pytest.skip('needs pip and setuptools 70.1; pip install -e ".[test]" brings the latter')
    folder = tmp_path_factory.mktemp("custom")
    source = shutil.copytree(EXAMPLE, folder / "source")  # a build leaves files beside what it builds
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ckpt.toml", "train.py", "test_milestones.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def test_a_store_follows_the_policies_of_an_installed_package(installed: Path, folder: Path) -> None:
    done = run(installed, folder, "train.py")
    assert (done.stdout, done.stderr) == ("steps 1 to 10; on disk: [1, 10]\n", "")
    done = run(installed, folder, "train.py")
    assert (done.stdout, done.stderr) == ("steps 11 to 20; on disk: [1, 10, 20]\n", "")


def test_the_package_holds_itself_to_what_every_policy_promises(installed: Path, folder: Path) -> None:
    done = run(installed, folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_milestones.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9][0-9]* passed", done.stdout)


def test_without_the_package_its_kinds_are_unknown_and_named(folder: Path) -> None:
    done = run(None, folder, "train.py")
    assert done.returncode != 0
    assert "`milestones` is not a kind of promotion" in done.stderr
    assert "`milestones` is not a kind of retention" in done.stderr
