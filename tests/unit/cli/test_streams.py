"""A reader that goes away, a full disk, closed streams and an ASCII terminal give no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tieredckpt import CheckpointStore

VERBS = ["--help", "ls {}", "show {} --json", "restore {}"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store whose step takes more than a pipe holds to be shown."""
    folder = tmp_path_factory.mktemp("wide") / "disk"
    with CheckpointStore.open(
        {"tiers": {"disk": {"kind": "posix", "path": str(folder), "fsync": False}}}
    ).sync() as store:
        store.save(1, {"größe": np.ones(3), **{f"w{i}": np.ones(1) for i in range(1500)}}, metrics={"verlüst": 1.0})
    return str(folder)


def shell(script: str, verb: str, store: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m tieredckpt {verb.format(store)}"
    return subprocess.run(
        ["bash", "-c", script.replace("COMMAND", command)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("verb", VERBS)
def test_an_output_that_cannot_be_written_is_an_error_of_one_line(wide: str, verb: str) -> None:
    full = shell("COMMAND >/dev/full", verb, wide)
    assert (full.returncode, full.stderr.splitlines()[-1]) == (1, "tieredckpt: write error: No space left on device")
    closed = shell("COMMAND >&-", verb, wide)
    assert (closed.returncode, closed.stderr.splitlines()[-1]) == (1, "tieredckpt: write error: Bad file descriptor")
    nowhere = shell("COMMAND >/dev/full 2>/dev/full", verb, wide)
    assert (nowhere.returncode, nowhere.stdout, nowhere.stderr) == (1, "", "")
    silent = shell("COMMAND <&- >&- 2>&-", verb, wide)
    assert silent.returncode == 1
    for told in (full.stderr, closed.stderr):
        assert "Traceback" not in told
        assert "Exception ignored" not in told


@pytest.mark.parametrize("verb", ["show {}", "show {} --json"])
def test_a_reader_that_goes_away_ends_the_command_as_sigpipe_does(wide: str, verb: str) -> None:
    ended = shell("COMMAND | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", verb, wide)
    assert ended.returncode == 141
    assert "Traceback" not in ended.stderr
    assert "Error" not in ended.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_an_ascii_terminal_gets_escapes(wide: str, verb: str) -> None:
    shown = shell("COMMAND", verb, wide, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.isascii()
    if verb == "restore {}":
        assert r"gr\xf6\xdfe" in shown.stdout
    if verb == "ls {}":
        assert r"verl\xfcst" in shown.stdout


def test_a_closed_output_is_never_a_file_of_the_store(wide: str, tmp_path: Path) -> None:
    script = f"COMMAND >&- 2>&-; {sys.executable} -m tieredckpt verify {wide} --all >{tmp_path}/told"
    for verb in ("ls {}", "verify {} --all --repair", "collect {}"):
        assert shell(script, verb, wide).returncode == 0, verb
