"""The example package of a tier: installed as a stranger's, it is found by its kind, and every command knows it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.example_packages import EXAMPLES, install, run


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("custom_tier", tmp_path_factory.mktemp("custom"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ckpt.toml", "train.py", "test_sqlite_tier.py"):
        shutil.copy(EXAMPLES / "custom_tier" / name, tmp_path)
    return tmp_path


def command(installed: Path | None, folder: Path, *arguments: str) -> str:
    done = run(installed, folder, "-m", "tieredckpt", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_store_saves_to_and_restores_from_a_tier_of_an_installed_package(installed: Path, folder: Path) -> None:
    done = run(installed, folder, "train.py")
    assert (done.stdout, done.stderr) == ("steps 1 to 10, weights 55; in the database: [8, 9, 10]\n", "")
    done = run(installed, folder, "train.py")
    assert (done.stdout, done.stderr) == ("steps 11 to 20, weights 210; in the database: [18, 19, 20]\n", "")


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


def test_the_package_holds_itself_to_what_every_blob_store_promises(installed: Path, folder: Path) -> None:
    asyncio_mode = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    done = run(installed, folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asyncio_mode, "test_sqlite_tier.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9][0-9]* passed", done.stdout)


def test_without_the_package_its_kind_is_unknown_and_others_are_named(folder: Path) -> None:
    done = run(None, folder, "train.py")
    assert done.returncode != 0
    assert (
        "tiers.database.kind: `sqlite` is not a kind of tier; there are: azure, chfs, gcs, kvstore, posix, ram, s3"
        in done.stderr
    )
    assert "install the package that offers it" in done.stderr
