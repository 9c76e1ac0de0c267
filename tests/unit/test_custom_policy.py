"""The example package of policies: installed as a stranger's, it is found by its kinds, and the store follows it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.example_packages import EXAMPLES, install, run


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("custom_policy", tmp_path_factory.mktemp("custom"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ckpt.toml", "train.py", "test_milestones.py"):
        shutil.copy(EXAMPLES / "custom_policy" / name, tmp_path)
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
