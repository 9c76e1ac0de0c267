"""Processes that begin with frameworks imported: a server imports them once, and forks for each.

In a module of tests::

    @pytest.fixture(scope="module")
    def start() -> Iterator[Start]:
        with forking("integrations.lightning_program") as start:
            yield start

``start(function, *arguments)`` runs a function of an importable module in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from distributed.launch import free_port

__all__ = ["Child", "Start", "forking", "ranks"]

SOON = 180.0


class Child:
    """A process, and what its function returned."""

    def __init__(
        self, context: Any, function: Callable[..., Any], arguments: tuple[Any, ...], environment: Any
    ) -> None:
        self._told, there = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(there, function, arguments, dict(environment)), daemon=True)
        self._process.start()
        there.close()

    def result(self) -> Any:
        """What the function returned; raises what it raised, as text, and `EOFError` for a process that was killed."""
        if not self._told.poll(SOON):
            self._process.kill()
            raise TimeoutError("the process has told nothing")
        failed, told = self._told.recv()
        self._process.join(SOON)
        assert not failed, told
        return told

    def killed(self) -> int:
        """Wait for a process that ends by a signal; its number."""
        self._process.join(SOON)
        assert self._process.exitcode is not None, "the process still runs"
        return -int(self._process.exitcode)


Start: TypeAlias = Callable[..., Child]


@contextmanager
def forking(*modules: str) -> Iterator[Start]:
    """What starts processes; they and the server end with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    # multiprocessing would remove a folder of its own when this process ends, and the tests' folders are gone by then.
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # private, so typeshed has none
    config["tempdir"] = tempfile.mkdtemp(prefix="forked-")
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server imports with its own path alone
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)

    def start(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] = {}) -> Child:
        return Child(context, function, arguments, environment)

    try:
        yield start
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # nor this one
        shutil.rmtree(config.pop("tempdir"), ignore_errors=True)


def ranks(start: Start, number: int, function: Callable[..., Any], *arguments: Any) -> list[Child]:
    """Start the ranks of one training, as torchrun does."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}
    common["LOCAL_WORLD_SIZE"] = str(number)
    return [
        start(function, *arguments, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(number)
    ]


def _run(told: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: Any) -> None:
    os.environ.update(environment)
    try:
        found = (False, function(*arguments))
    except BaseException:
        found = (True, traceback.format_exc())
    told.send(found)
