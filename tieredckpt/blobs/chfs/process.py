"""The worker's process: started, watched and reaped by a thread of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

__all__ = ["Process"]

_START = (
    "import sys, types\n"
    "package = types.ModuleType('tieredckpt')\n"
    "package.__path__ = sys.argv[4:]\n"
    "sys.modules['tieredckpt'] = package\n"
    "from tieredckpt.blobs.chfs.worker import main\n"
    "main(*map(int, sys.argv[1:4]))\n"
)
"""The worker imports this empty package in place of ours, which would load the engine, numpy and tensorstore too."""

_LAST_WORDS = 2000
"""Characters of its stderr that are kept."""


class Process:
    """A worker at the other end of a socket.

    The thread lives as long as the process: Linux ends a worker that asked to die with its parent when the thread that
    started it ends, not the parent process.

    Args:
        connection: the worker's end of the socket; closed here.
        threads: of the worker.
        ended: called from the thread when the process has been reaped.
    """

    def __init__(self, connection: socket.socket, threads: int, ended: Callable[[], object]) -> None:
        self._connection, self._threads, self._ended = connection, threads, ended
        self._guards_start = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._killed_for = ""
        self._words = b""
        threading.Thread(target=self._watch, name="tieredckpt-chfs-worker", daemon=True).start()

    @property
    def number(self) -> int | None:
        """The process id; None while it has not been started."""
        return None if self._popen is None else self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """With which it ended by itself; None while it runs, and if it was killed."""
        return None if self._popen is None or self._killed_for else self._popen.returncode

    def kill(self, reason: str) -> None:
        """End the process; ``ended`` is called when it is gone."""
        with self._guards_start:
            self._killed_for = self._killed_for or reason
            if self._popen is not None:
                self._popen.kill()

    def what_happened(self) -> str:
        """How it ended, for people."""
        code = None if self._popen is None else self._popen.returncode
        if self._error is not None:
            text = f"could not be started: {self._error}"
        elif self._killed_for:
            text = f"was ended: {self._killed_for}"
        elif code is not None and code < 0:
            text = f"was killed by {_signal_name(-code)}"
        else:
            text = f"ended by itself with exit status {code}"
        words = self._words.decode(errors="replace").strip()
        return f"{text}; it said last: {words}" if words else text

    def _watch(self) -> None:
        try:
            with self._connection:
                popen = self._start()
            if popen is not None and popen.stderr is not None:
                with popen.stderr:
                    while said := os.read(popen.stderr.fileno(), 4096):
                        self._words = (self._words + said)[-_LAST_WORDS:]
                popen.wait()
        except OSError as error:
            self._error = error
        finally:
            self._ended()

    def _start(self) -> subprocess.Popen[bytes] | None:
        package = importlib.util.find_spec("tieredckpt")
        folders = package.submodule_search_locations if package is not None else None
        numbers = (self._connection.fileno(), self._threads, os.getpid())
        with self._guards_start:
            if self._killed_for:
                return None
            self._popen = subprocess.Popen(  # noqa: S603 - our own code, by our own interpreter
                [sys.executable, "-P", "-c", _START, *map(str, numbers), *(folders or ())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # libfabric's drivers replace the handlers of signals when they are loaded, unless told not to.
                env=os.environ | {"IPATH_NO_BACKTRACE": "1", "HFI_NO_BACKTRACE": "1"},
                pass_fds=[self._connection.fileno()],
                start_new_session=True,  # a Ctrl-C at the trainer's terminal is not meant for it
            )
            return self._popen


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
