"""Agents as processes: how a store starts one, and finds out whether one lives.

An agent holds the lock of ``agent.lock`` in the RAM tier's folder. It has a session of its own, so that neither the
end of the trainer nor an interrupt at its terminal ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tieredckpt.blobs.locks import lock_file
from tieredckpt.config import StoreConfig, dump_with_secrets

__all__ = ["LOCK", "LOG", "AgentProcess", "claim", "lives"]

LOCK = "agent.lock"
LOG = "agent.log"
"""Names in the folder of the RAM tier."""

_LOG_MAX = 1 << 20
"""Maximum bytes of a log that the next agent continues; a longer one is started again."""


class AgentProcess:
    """An agent that this store has started; a thread reaps it.

    Args:
        config: of the store, secrets included, which the agent reads from its standard input: nothing of it is in its
            command line, in its environment or in a file.
        folder: of the RAM tier.
        ended: called from the thread when the process has ended.

    Raises `OSError` when it cannot be started. Blocking.
    """

    def __init__(self, config: StoreConfig, folder: Path, ended: Callable[[], object]) -> None:
        self.log = config.agent_log or folder / LOG
        self._ended = ended
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(log).st_size > _LOG_MAX:
                os.ftruncate(log, 0)
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "tieredckpt.agent"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # What the trainer found its modules by: policies may be among them.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        finally:
            os.close(log)
        threading.Thread(target=self._reap, name="tieredckpt agent", daemon=True).start()
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as handed:
            line = json.dumps({"config": dump_with_secrets(config), "ram": str(folder)})
            handed.write(f"{line}\n".encode())

    @property
    def number(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.returncode is None

    def what_happened(self) -> str:
        """How it ended, for people."""
        code = self._popen.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit status {code}"
        return f"the agent (process {self.number}) {how}; its log is {self.log}"

    def _reap(self) -> None:
        self._popen.wait()
        self._ended()


def claim(folder: Path) -> int:
    """Become the agent of a folder; returns the descriptor of its lock, for `tieredckpt.blobs.locks.let_go`. Blocking.

    Raises:
        Conflict: the folder has an agent already.
        FileNotFoundError: there is no such folder.
    """
    refusal = "the RAM tier at {} has an agent already, {}; end that one first, or leave the work to it"
    return lock_file(folder / LOCK, partial(refusal.format, folder))


def lives(folder: Path) -> bool:
    """Whether a folder has an agent. Blocking."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
