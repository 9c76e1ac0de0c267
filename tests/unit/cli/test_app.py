"""The command as a whole: exit codes, errors on one line, and an import that costs the library nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import run

import tieredckpt

VERBS = ("demo", "ls", "show", "verify", "restore", "promote", "evict", "collect", "agent")


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_module_is_the_command() -> None:
    done = python("-m", "tieredckpt", "--version")
    assert (done.returncode, done.stdout) == (0, f"tieredckpt {tieredckpt.__version__}\n")


def test_the_library_loads_neither_typer_nor_rich() -> None:
    probe = "import sys, tieredckpt, tieredckpt.cli; print({'typer', 'rich'} & sys.modules.keys())"
    assert python("-c", probe).stdout == "set()\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    assert verb in run("--help").stdout
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "restore", "collect"])
def test_a_store_that_is_not_there_is_one_line_on_stderr_and_is_not_made(tmp_path: Path, verb: str) -> None:
    result = run(verb, tmp_path / "missing")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("NotFound: ")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_configuration_is_one_line_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.toml"
    path.write_text("[store]\nchunk_sise = 1\n[tiers.disk]\nkind = 'posix'\nretries = -1\n")
    result = run("ls", path)
    assert result.exit_code == 1
    assert result.stderr.startswith("Invalid: ")
    assert "chunk_sise" in result.stderr
    assert "retries" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("ls",), ("ls", "here", "--nonsense"), ("promote", "here", "one", "disk"), ("nonsense",)]
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("verb", "more"), [("show", ()), ("verify", ()), ("restore", ()), ("promote", ("disk",)), ("delete", ())]
)
def test_what_is_no_number_of_a_step_is_told(trained: Path, verb: str, more: tuple[str, ...]) -> None:
    result = run(verb, trained, "abc", *more)
    assert (result.exit_code, "'abc' is not the number of a step" in result.stderr) == (2, True)


def test_the_log_of_the_library_is_shown_when_asked_for_and_left_as_it_was(trained: Path) -> None:
    log = logging.getLogger("tieredckpt")
    before = (log.level, log.propagate, list(log.handlers))
    manifest = next((trained.parent / "disk" / "steps").glob("0000000002-*/manifest.ocdbt"))
    manifest.write_bytes(b"torn")
    assert "warning" not in run("ls", trained).stderr
    assert "warning: tier 'disk'" in run("--verbose", "ls", trained).stderr
    assert (log.level, log.propagate, list(log.handlers)) == before
