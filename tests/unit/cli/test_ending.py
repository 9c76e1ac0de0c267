"""A verb ends in bounded time: when a tier does not answer, and when it is told to end while a thread hangs."""

from __future__ import annotations

import gc
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tieredckpt import CheckpointStore
from tieredckpt.cli.aside import run_aside
from tieredckpt.engine.loop import EngineLoop

PATIENCE = 90.0
"""Only bounds a hang; what must be quicker than a tier's deadline has one of ten minutes."""


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        server.settimeout(PATIENCE)
        yield server


def config(folder: Path, server: socket.socket, deadline: str) -> Path:
    """A folder with a store, and a bucket at a server that does not answer."""
    path = folder / "ckpt.toml"
    address, port = server.getsockname()
    path.write_text(
        f"""
        [tiers.disk]
        kind = "posix"
        path = "disk"
        [tiers.far]
        kind = "kvstore"
        deadline = "{deadline}"
        retries = 0
        [tiers.far.spec]
        driver = "s3"
        bucket = "bucket"
        path = "x/"
        endpoint = "http://{address}:{port}"
        aws_region = "us-east-1"
        aws_credentials = {{ type = "anonymous" }}
        """
    )
    with CheckpointStore.open({"tiers": {"disk": {"kind": "posix", "path": folder / "disk"}}}).sync() as store:
        store.save(1, {"w": 1.0})
    return path


@contextmanager
def start(*arguments: object, in_order: float = 1.0, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run the command, which waits ``in_order`` seconds in place of ten for a thread that hangs."""
    program = f"{before}\nfrom tieredckpt.cli import ending, main; ending.IN_ORDER = {in_order}; main()"
    command = [sys.executable, "-P", "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_doctor_ends_within_the_deadline_of_a_tier_that_does_not_answer(tmp_path: Path, silent: socket.socket) -> None:
    begin = time.monotonic()
    with start("doctor", config(tmp_path, silent, "2 s"), "--tier", "far", "--size", "1 MiB", "--json") as doctor:
        out, err = doctor.communicate(timeout=PATIENCE)
    assert doctor.returncode == 1, err
    checks = {check["name"]: check for check in json.loads(out)["tiers"]["far"]}
    assert not checks["small object"]["ok"]
    assert "had not ended after 2.0 s" in checks["small object"]["detail"]
    assert time.monotonic() - begin < PATIENCE


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "verb",
    [("doctor", "--tier", "far"), ("ls",), ("promote", "1", "far"), ("plan", "--measure", "--size", "1 MiB")],
    ids=lambda verb: verb[0],
)
def test_a_verb_that_waits_for_a_tier_obeys_signals(
    tmp_path: Path, silent: socket.socket, verb: tuple[str, ...], ending: signal.Signals
) -> None:
    with start(verb[0], config(tmp_path, silent, "10 min"), *verb[1:]) as process:
        connection, _ = silent.accept()  # it waits for an answer now
        with connection:
            process.send_signal(ending)
            _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode in (1, 130, 128 + ending), err
        assert "Traceback" not in err


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_ends_at_once(tmp_path: Path, silent: socket.socket) -> None:
    settings = config(tmp_path, silent, "10 min")
    with start("doctor", settings, "--tier", "far", in_order=2 * PATIENCE) as process:
        connection, _ = silent.accept()
        with connection:
            begin = time.monotonic()
            while process.poll() is None and time.monotonic() - begin < PATIENCE:
                process.send_signal(signal.SIGINT)
                time.sleep(0.05)
        assert process.returncode == 130


SLOW_MEMORY = """
import time
from tieredckpt.blobs import checkup
def warm_memory(nbytes):
    print("waits", flush=True)
    time.sleep(600)
checkup.warm_memory = warm_memory
"""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("verb", [("doctor",), ("plan", "--measure")], ids=lambda verb: verb[0])
def test_an_interrupted_trial_does_not_wait_for_its_memory(tmp_path: Path, verb: tuple[str, ...]) -> None:
    settings = tmp_path / "ckpt.toml"
    settings.write_text('[tiers.disk]\nkind = "posix"\npath = "disk"\n')
    with start(*verb, settings, in_order=2 * PATIENCE, before=SLOW_MEMORY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert not (tmp_path / "disk").exists()


INTERRUPTED = """
import sys
class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from tieredckpt.cli import main
main()
"""


def test_an_interrupt_of_the_imports_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


def test_an_interrupt_before_a_coroutine_has_begun_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        raise AssertionError("it must not begin")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineLoop, "call_blocking", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_aside(work())
    gc.collect()  # a coroutine that was never awaited warns, which is an error
