"""The example packages of a tier and of policies: installed as a stranger's, they are found by their kinds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 180


@dataclass(frozen=True)
class Example:
    """A folder in ``examples``."""

    name: str
    suite: str
    """Its test of what every such package promises."""
    prints: tuple[str, str]
    """What two runs of its training print."""
    unknown: tuple[str, ...]
    """What is said where the package is not installed."""


TIER = Example(
    name="custom_tier",
    suite="test_sqlite_tier.py",
    prints=(
        "steps 1 to 10, weights 55; in the database: [8, 9, 10]\n",
        "steps 11 to 20, weights 210; in the database: [18, 19, 20]\n",
    ),
    unknown=(
        "tiers.database.kind: `sqlite` is not a kind of tier; there are: azure, chfs, gcs, kvstore, lustre, nfs, "
        "posix, ram, s3",
        "install the package that offers it",
    ),
)
POLICIES = Example(
    name="custom_policy",
    suite="test_milestones.py",
    prints=("steps 1 to 10; on disk: [1, 10]\n", "steps 11 to 20; on disk: [1, 10, 20]\n"),
    unknown=("`milestones` is not a kind of promotion", "`milestones` is not a kind of retention"),
)


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


@pytest.fixture(scope="module", params=[TIER, POLICIES], ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    found: Example = request.param
    return found


@pytest.fixture(scope="module")
def installed(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(example.name, tmp_path_factory.mktemp("custom"))


@pytest.fixture
def folder(example: Example, tmp_path: Path) -> Path:
    for name in ("ckpt.toml", "train.py", example.suite):
        shutil.copy(EXAMPLES / example.name / name, tmp_path)
    return tmp_path


def command(installed: Path | None, folder: Path, *arguments: str) -> str:
    done = run(installed, folder, "-m", "tieredckpt", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_store_uses_the_tiers_and_policies_of_an_installed_package(
    example: Example, installed: Path, folder: Path
) -> None:
    for printed in example.prints:
        done = run(installed, folder, "train.py")
        assert (done.stdout, done.stderr) == (printed, "")


@pytest.mark.parametrize("example", [TIER], ids=["custom_tier"], indirect=True, scope="module")
def test_every_command_knows_a_tier_of_an_installed_package(installed: Path, folder: Path) -> None:
    done = run(installed, folder, "-m", "tieredckpt", "ls", "ckpt.toml")
    assert done.returncode != 0
    assert f"sqlite:{folder}/checkpoints.db" in done.stderr.replace("\n", "")
    assert not (folder / "checkpoints.db").exists()  # looking makes nothing
    assert run(installed, folder, "train.py").returncode == 0
    assert re.search(r"database +sqlite", command(installed, folder, "ls", "ckpt.toml"))
    assert "all is well" in command(installed, folder, "doctor", "ckpt.toml", "--size", "1 MiB")
    assert re.search(r"database .* intact", command(installed, folder, "verify", "ckpt.toml"))
    assert "database" in command(installed, folder, "plan", "ckpt.toml", "--step-time", "1 s")


def test_the_package_passes_the_suite_for_its_kind(example: Example, installed: Path, folder: Path) -> None:
    asyncio_mode = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    done = run(installed, folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asyncio_mode, example.suite)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9][0-9]* passed", done.stdout)


def test_without_the_package_its_kinds_are_unknown_and_named(example: Example, folder: Path) -> None:
    done = run(None, folder, "train.py")
    assert done.returncode != 0
    assert all(text in done.stderr for text in example.unknown), done.stderr
