"""CHFS servers that a test starts, kills and starts again: real ones, or those that the look-alike plays."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from support.lookalike import library, missing

__all__ = ["LookalikeServers", "RealServers", "Servers", "serving", "why_no_real_servers"]

_PATIENCE = 120.0
"""Seconds that bound a hang: a loaded machine may let a server stand still for many."""
_TIMEOUT_MS = 3000
"""Of the real servers among themselves; their clients need three times as much. Servers that stand still for longer are
lost from the ring, which no test is about that did not ask for it."""
_REJOINED_WITHIN = 20.0
"""Seconds after which a server that was killed is started again through another one."""


class Servers(Protocol):
    """Three servers, numbered from 0; clients know the first. Of those made ``waiting``, `join` starts each."""

    @property
    def tier(self) -> dict[str, Any]:
        """The settings of a `chfs` tier over them."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The same, with the default timeouts of a tier."""

    def join(self, number: int) -> None:
        """Start a server that waits for that, in the order of their numbers."""

    def kill(self, number: int) -> None:
        """End a server without warning."""

    def restart(self, number: int) -> None:
        """Start a server that was killed again, over the same data."""

    def restart_all(self) -> None:
        """Kill all servers, and start them again over the same data; clients find them at a new place."""

    def stop(self) -> None: ...


class LookalikeServers:
    """Those of the look-alike, over ``directory``."""

    def __init__(self, directory: Path, *, waiting: bool = False) -> None:
        self.directory = directory
        directory.mkdir()
        self._dead: set[int] = set()
        self._late: set[int] = {0, 1, 2} if waiting else set()
        self.switch()

    @property
    def tier(self) -> dict[str, Any]:
        return {
            "kind": "chfs",
            "server": f"directory:{self.directory}",
            "library": library(),
            "path": "/of/test",
            "rpc_timeout": 0.3,
            "retries": 0,
        }

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: value for name, value in self.tier.items() if name not in ("rpc_timeout", "retries")}

    def join(self, number: int) -> None:
        self._late.discard(number)
        self.switch()

    def switch(self, **switches: object) -> None:
        """Put these switches, and no others, in force; ``_`` in a name stands for the dot."""
        lines = ["servers = 3", *(f"{name.replace('_', '.')} = {value}" for name, value in switches.items())]
        for name, numbers in (("dead", self._dead), ("late", self._late)):
            if numbers:
                lines.append(f"{name} = {' '.join(map(str, sorted(numbers)))}")
        new = self.directory.parent / "switches"
        new.write_text("\n".join(lines) + "\n")
        new.rename(self.directory / "switches")

    def kill(self, number: int) -> None:
        self._dead.add(number)
        self.switch()

    def restart(self, number: int) -> None:
        self._dead.discard(number)
        self.switch()

    def restart_all(self) -> None:
        pass  # they have nothing that a restart would lose

    def stop(self) -> None: ...


def why_no_real_servers() -> str:
    """Why no real CHFS can be tried; empty when it can."""
    if "CHFS_SERVER" not in os.environ:
        return "CHFS_SERVER is not set, so no real CHFS is to be used"
    lacking = [name for name in ("chfsd", "chlist") if shutil.which(name) is None]
    return f"not on PATH: {', '.join(lacking)}" if lacking else ""


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[Servers]:
    """Servers of that ``kind``, real or look-alikes; skips the test where there can be none."""
    if why := missing() or (why_no_real_servers() if kind == "real" else ""):
        pytest.skip(why)
    servers: Servers = (RealServers if kind == "real" else LookalikeServers)(folder)
    try:
        yield servers
    finally:
        servers.stop()


class RealServers:
    """Three ``chfsd`` on the loopback interface, over folders below ``folder``, which needs user xattrs."""

    def __init__(self, folder: Path, *, waiting: bool = False) -> None:
        self._folder = folder
        folder.mkdir()
        self._port = _free_port() if waiting else None  # of the first, which its clients know before it is there
        self._environment = os.environ | {"FI_TCP_IFACE": "lo"}
        self._environment.pop("CHFS_SERVER")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            if not waiting:
                self._start_all()
        except BaseException:
            self.stop()
            raise

    @property
    def tier(self) -> dict[str, Any]:
        timeout = 3 * _TIMEOUT_MS / 1000
        return {"kind": "chfs", "server": self._address(0), "path": "/of/test", "rpc_timeout": timeout, "retries": 0}

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: value for name, value in self.tier.items() if name not in ("rpc_timeout", "retries")}

    def join(self, number: int) -> None:
        self._start(number, 0 if number else None)

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes.pop(number).wait()

    def restart(self, number: int) -> None:
        alive = [other for other in self._processes if other != number]
        for via in alive * 3:
            # Through some of the others the ring does not close: they still wait for the one that was killed.
            self._start(number, via)
            if self._whole(len(alive) + 1, _REJOINED_WITHIN):
                return
            self.kill(number)
        raise AssertionError(f"server {number} does not join the others again; see {self._folder}")

    def restart_all(self) -> None:
        for number in list(self._processes):
            self.kill(number)
        self._start_all()

    def stop(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _start_all(self) -> None:
        for number in range(3):
            self._start(number, 0 if number else None)
            assert self._whole(number + 1, _PATIENCE), f"server {number} does not join the others; see {self._folder}"

    def _start(self, number: int, via: int | None) -> None:
        data, address = self._folder / str(number), self._folder / f"{number}.address"
        data.mkdir(exist_ok=True)
        address.unlink(missing_ok=True)
        arguments = ["-c", data, "-n", f"s{number}", "-t", _TIMEOUT_MS, "-H", 0, "-S", address]
        host = "127.0.0.1" if number or self._port is None else f"127.0.0.1:{self._port}"
        command = ["chfsd", "-f", "-p", "ofi+tcp", "-h", host, *map(str, arguments)]
        if via is not None:
            command.append(self._address(via))
        with (self._folder / f"{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        deadline = time.monotonic() + _PATIENCE
        while not (address.exists() and address.read_text().strip()):
            assert self._processes[number].poll() is None, f"chfsd ended; see {self._folder}/{number}.log"
            assert time.monotonic() < deadline, "chfsd tells no address"
            time.sleep(0.05)

    def _address(self, number: int) -> str:
        if number == 0 and self._port is not None:
            return f"ofi+tcp;ofi_rxm://127.0.0.1:{self._port}"
        return (self._folder / f"{number}.address").read_text().strip()

    def _whole(self, count: int, patience: float) -> bool:
        """Whether every server comes to see as many as there are."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if all(self._sees(number) == count for number in self._processes):
                return True
            time.sleep(0.2)
        return False

    def _sees(self, number: int) -> int:
        environment = self._environment | {"CHFS_RPC_TIMEOUT_MSEC": str(3 * _TIMEOUT_MS), "CHFS_LOG_PRIORITY": "emerg"}
        command = ["chlist", "-s", self._address(number)]
        try:
            told = subprocess.run(command, capture_output=True, check=False, timeout=_PATIENCE, env=environment)
        except subprocess.TimeoutExpired:
            return 0  # a client that was lost among servers that come and go
        return len(told.stdout.splitlines())


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
