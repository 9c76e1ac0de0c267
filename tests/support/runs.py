"""Runs of one program, one after the other, each in a fork of an interpreter that has imported what the program does.

A framework takes seconds to import, and this once for all runs. Each run is otherwise one of ``python PROGRAM
ARGUMENTS``: a process with its own environment, state and end.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ended", "Run", "runs_of"]

_ENDED = "the run has ended with "


@dataclass(frozen=True)
class Run:
    """What one run is given."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside that of this process; for the run alone, and not for what was imported before."""


class Ended(NamedTuple):
    """How one run ended."""

    code: int
    """0, or as of `subprocess.Popen` negative for a signal."""
    lines: list[str]
    """What it printed on stdout."""


def runs_of(
    program: Path,
    *runs: Run,
    folder: Path,
    seconds: float,
    modules: Sequence[str] = (),
    environment: Mapping[str, str] = {},
    quiet: bool = False,
) -> list[Ended]:
    """How the runs of a program ended; one that failed fails the test, and one that a signal ended does not.

    Args:
        program: that does nothing when it is imported.
        runs: what each is given.
        folder: in which they run.
        seconds: for each.
        modules: imported before the runs, beside what the program imports at its top.
        environment: of all of it, beside that of this process.
        quiet: whatever is said on stderr fails the test too.
    """
    told = json.dumps([str(program), modules, [[run.arguments, dict(run.environment)] for run in runs]])
    server = subprocess.Popen(
        [sys.executable, __file__, told],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with server:
        try:
            out, err = server.communicate(timeout=seconds * len(runs))
        except BaseException:
            os.killpg(server.pid, signal.SIGKILL)  # with the run that hangs
            raise
    assert server.returncode == 0, out + err
    assert not quiet or err == "", err
    ended: list[Ended] = []
    lines: list[str] = []
    for line in out.splitlines():
        if line.startswith(_ENDED):
            ended.append(Ended(int(line.removeprefix(_ENDED)), lines))
            lines = []
        else:
            lines.append(line)
    if any(each.code > 0 for each in ended):
        raise AssertionError(f"{ended}\n{err}")
    return ended


def _main(program: str, modules: Sequence[str], runs: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    sys.path[0] = str(Path(program).parent)
    for module in modules:
        importlib.import_module(module)
    runpy.run_path(program)  # its imports, and not what it does as a program
    for arguments, environment in runs:
        process = os.fork()
        if process == 0:
            os.environ |= environment
            sys.argv = [program, *arguments]
            runpy.run_path(program, run_name="__main__")
            return
        _, status = os.waitpid(process, 0)
        print(f"{_ENDED}{os.waitstatus_to_exitcode(status)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
