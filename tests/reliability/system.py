"""Makes calls of the operating system fail below a folder, by script, under stores that know nothing of it.

::

    with failing_calls(tmp_path / "disk") as system:
        system.fail("fsync", errno.EIO, nth=2)              # the second fsync of a file or folder there
        system.fail("replace", errno.ENOSPC, path="*.pack") # the first pack that is to get its name
        system.fail("mkdir", errno.EACCES, times=None)      # as after a change of permissions
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import aiofiles.os
import pytest

__all__ = ["CALLS", "SystemFaults", "failing_calls", "path_of"]

CALLS = ("open", "replace", "link", "unlink", "mkdir", "rmdir", "fsync", "scandir", "stat", "pwritev", "preadv")
"""Functions of `os` that can be made to fail; a file is told by its path or its descriptor."""


def path_of(path: Any, folder: int | None = None) -> str:
    """What a call is about: a path, one below an open folder, or a descriptor."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    name = os.fsdecode(path)
    return name if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)


@dataclass(slots=True)
class _Fault:
    """One line of the script; ``skip`` and ``left`` count down."""

    call: str
    path: str
    number: int
    skip: int
    left: int | None

    def strikes(self, call: str, path: str) -> bool:
        if call != self.call or self.left == 0 or not fnmatchcase(path, self.path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.left is not None:
            self.left -= 1
        return True


class SystemFaults:
    """The script for one folder; made by `failing_calls`, safe to use from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._guards_script = threading.Lock()
        self._script: list[_Fault] = []
        self.struck = 0
        """How many calls have failed by the script."""

    def fail(self, call: str, number: int, *, path: str = "*", nth: int = 1, times: int | None = 1) -> None:
        """Make matching calls raise `OSError` in place of their work.

        Args:
            call: one of `CALLS`.
            number: of the error, as in `errno`.
            path: a pattern of `fnmatch` for the whole path.
            nth: the first that fails, counted from 1 on.
            times: how many in a row fail; None for all that follow.
        """
        assert call in CALLS, call
        with self._guards_script:
            self._script.append(_Fault(call, path, number, nth - 1, times))

    def clear(self) -> None:
        """Forget the script."""
        with self._guards_script:
            self._script.clear()

    def meet(self, call: str, path: str) -> None:
        """Raise what the script has for this call."""
        if path != self._folder and not path.startswith(f"{self._folder}/"):
            return
        with self._guards_script:
            for fault in self._script:
                if fault.strikes(call, path):
                    self.struck += 1
                    raise OSError(fault.number, os.strerror(fault.number), path)


@contextlib.contextmanager
def failing_calls(folder: Path) -> Iterator[SystemFaults]:
    """Make calls on files in ``folder`` fail as the script says, while the block runs."""
    faults = SystemFaults(folder)
    with pytest.MonkeyPatch.context() as patch:
        for call in CALLS:
            patch.setattr(os, call, _met(call, getattr(os, call), faults))
        patch.setattr(aiofiles.os, "unlink", aiofiles.os.wrap(os.unlink))  # it has bound that one by now
        yield faults


def _met(call: str, function: Callable[..., Any], faults: SystemFaults) -> Callable[..., Any]:
    def met(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        try:
            name = path_of(path, named.get("dir_fd"))
        except OSError:  # of a descriptor that is closed, which the function itself refuses
            name = ""
        faults.meet(call, name)
        return function(path, *arguments, **named)

    return met
