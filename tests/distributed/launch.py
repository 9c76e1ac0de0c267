"""Runs a program as the ranks of a real engine, and tells what each of them told.

In a test::

    with launch("torch", PROGRAM, ranks=4, folder=tmp_path, arguments={"steps": 3}) as job:
        job.wait_for("saving", rank=2)          # ranks mark how far they are
        job.kill(2)                             # SIGKILL
        job.wait()                              # the exit status; everything has ended
        assert job.told(0) == {"loss": 0.5}

In the program, a file that runs in every process::

    with rank_of_this_process() as me:          # the engine is initialised
        store = CheckpointStore.open(..., ranks="auto")
        me.mark("saving")
        me.tell({"loss": 0.5})

The engines: ``torch`` (gloo), ``mpi`` (mpiexec, mpi4py), ``jax`` (jax.distributed), and ``none``: processes with the
variables of torchrun and no engine at all. `fork_ranks` starts all but those of MPI, and those that torchrun restarts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import frameworks

__all__ = ["ENGINES", "SOON", "Job", "Rank", "free_port", "launch", "mpiexec", "need", "rank_of_this_process"]

ENGINES = ("torch", "mpi", "jax", "none")

SOON = 180.0
"""Seconds after which what ranks should have done counts as never done: several interpreters may share one core."""

_TESTS = Path(__file__).parents[1]
_NEEDS = {"torch": ("torch",), "mpi": ("mpi4py",), "jax": ("jax",), "none": ()}


def need(engine: str) -> None:
    """Skip the test where the engine is not installed; fail it where ``TIEREDCKPT_REQUIRE_ENGINES`` is set."""
    missing = [module for module in _NEEDS[engine] if importlib.util.find_spec(module) is None]
    if engine == "mpi" and mpiexec() is None:
        missing.append("mpiexec")
    frameworks.need(missing)


class Job:
    """The processes of one launch, by rank."""

    def __init__(self, launcher: subprocess.Popen[bytes], folder: Path) -> None:
        self._launcher = launcher
        self._folder = folder

    @property
    def output(self) -> str:
        """What the processes have printed so far."""
        return (self._folder / "output").read_text(errors="replace")

    def told(self, rank: int) -> Any:
        """What a rank told; fails the test, with the output, where it told nothing."""
        path = self._folder / f"told-{rank}.json"
        if not path.exists():
            pytest.fail(f"rank {rank} told nothing; the output was:\n{self.output}")
        return json.loads(path.read_text())

    def has_told(self, rank: int) -> bool:
        """Whether a rank told anything."""
        return (self._folder / f"told-{rank}.json").exists()

    def wait_for(self, mark: str, *, rank: int) -> None:
        """Wait until a rank has marked that it is so far."""
        path = self._folder / f"mark-{rank}-{mark}"
        self._until(path.exists, f"rank {rank} has not come to {mark!r}")

    def kill(self, rank: int) -> None:
        """End one rank at once, as a machine does that fails; its launcher may have ended it already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid(rank), signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """Let one rank hang, until `go_on`."""
        os.kill(self._pid(rank), signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        """Let one rank that hangs go on."""
        os.kill(self._pid(rank), signal.SIGCONT)

    def wait_until_ended(self, rank: int) -> None:
        """Wait until the process of one rank has ended."""

        def ended() -> bool:
            try:
                return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
            except psutil.NoSuchProcess:
                return True

        pid = self._pid(rank)
        self._until(ended, f"rank {rank} has not ended")

    def wait(self) -> int:
        """Wait until all processes have ended; the exit status of their launcher."""
        self._until(lambda: self._launcher.poll() is not None, "the job has not ended")
        return self._launcher.returncode

    def succeed(self) -> None:
        """The same for a job that must not fail."""
        status = self.wait()
        if status != 0:
            pytest.fail(f"the job ended with {status}; the output was:\n{self.output}")

    def _pid(self, rank: int) -> int:
        path = self._folder / f"pid-{rank}"
        self._until(path.exists, f"rank {rank} has not begun")
        return int(path.read_text())

    def _until(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + SOON
        while not done():
            ended = self._launcher.poll() is not None
            if (ended and not done()) or time.monotonic() >= deadline:
                when = "and everything has ended" if ended else f"within {SOON:.0f} s"
                pytest.fail(f"{what} {when}; the output was:\n{self.output}")
            time.sleep(0.02)

    def end(self) -> None:
        """Kill whatever of it still runs."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._launcher.poll() is None:
                parent = psutil.Process(self._launcher.pid)
                found |= {each.pid: each for each in [parent, *parent.children(recursive=True)]}
        for path in self._folder.glob("pid-*"):
            with contextlib.suppress(psutil.NoSuchProcess):
                each = psutil.Process(int(path.read_text()))
                if str(self._folder) in each.environ().get("TIEREDCKPT_TEST_FOLDER", ""):
                    found[each.pid] = each
        for each in found.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._launcher.wait(SOON)
        psutil.wait_procs(list(found.values()), timeout=SOON)
        for path in self._folder.glob("shared-*"):  # MPI removes its own only when all ranks end in order
            for name in path.read_text().splitlines():
                Path(name).unlink(missing_ok=True)


@contextmanager
def launch(
    engine: str,
    program: Path,
    *,
    ranks: int,
    folder: Path,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    restarts: int = 0,
    notice: float = 0.1,
) -> Iterator[Job]:
    """Start ``program`` as ``ranks`` ranks; what is left of them at the end is killed.

    Args:
        folder: of this launch alone; made if it is not there.
        arguments: what the program finds as `Rank.arguments`.
        restarts: how often torchrun starts all ranks again when one has failed.
        notice: seconds between the looks of torch's launcher at its ranks; it ends the others when one has died.
    """
    need(engine)
    folder.mkdir(parents=True, exist_ok=True)
    common = os.environ | {
        "HWLOC_XMLFILE": "",  # mpiexec would leave a description of the machine in /tmp where a rank is killed
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{_TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "TIEREDCKPT_TEST_ARGUMENTS": json.dumps(dict(arguments or {})),
        "TIEREDCKPT_TEST_ENGINE": engine,
        "TIEREDCKPT_TEST_FOLDER": str(folder),
        **(environment or {}),
    }
    if engine == "torch" and restarts:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, f"--max-restarts={restarts}", f"--monitor-interval={notice}", str(program)]
    elif engine == "mpi":
        command = [str(mpiexec()), "-n", str(ranks), sys.executable, str(program)]
    else:
        port = str(free_port())
        common |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": port}
        forking = [sys.executable, str(Path(__file__).with_name("fork_ranks.py")), engine]
        command = [*forking, str(program), str(ranks), port, str(notice)]
    with open(folder / "output", "wb") as output:
        launcher = subprocess.Popen(
            command, env=common, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    job = Job(launcher, folder)
    try:
        yield job
    finally:
        job.end()


class Rank:
    """This process, in a program."""

    def __init__(self, rank: int, size: int, engine: str, folder: Path, arguments: dict[str, Any]) -> None:
        self.rank = rank
        self.size = size
        self.engine = engine
        self.arguments = arguments
        self._folder = folder

    def mark(self, name: str) -> None:
        """Let the test know how far this rank is."""
        self._write(f"mark-{self.rank}-{name}", "")

    def tell(self, value: Any) -> None:
        """Hand the test a value that JSON can hold, in place of what was told before."""
        self._write(f"told-{self.rank}.json", json.dumps(value))

    def _write(self, name: str, text: str) -> None:
        unfinished = self._folder / f".{name}"
        unfinished.write_text(text)
        unfinished.rename(self._folder / name)


@contextmanager
def rank_of_this_process() -> Iterator[Rank]:
    """Initialise the engine, and end it; in a program that `launch` started."""
    engine = os.environ["TIEREDCKPT_TEST_ENGINE"]
    folder = Path(os.environ["TIEREDCKPT_TEST_FOLDER"])
    arguments = json.loads(os.environ["TIEREDCKPT_TEST_ARGUMENTS"])
    with contextlib.ExitStack() as ending:
        if engine == "torch":
            import torch.distributed as dist

            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            # torchrun keeps its store when it starts all ranks again, with the addresses of the dead in it.
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", server)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            ending.callback(dist.destroy_process_group)
        elif engine == "mpi":
            from mpi4py import MPI

            rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        else:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if engine == "jax":
            import jax

            jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", size, rank)
            ending.callback(jax.distributed.shutdown)
        me = Rank(rank, size, engine, folder, arguments)
        if engine == "mpi":
            maps = Path("/proc/self/maps").read_text().splitlines()
            me._write(f"shared-{rank}", "\n".join({line.split()[-1] for line in maps if "/dev/shm/mpich" in line}))
        me._write(f"pid-{rank}", str(os.getpid()))
        yield me


def mpiexec() -> str | None:
    """That of this environment, else that of the machine."""
    here = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    return here or shutil.which("mpiexec")


def free_port() -> int:
    """A port that nobody listens on, and that is given to nobody who asks the system for any: ip(7) has those above."""
    for port in random.sample(range(10_000, 32_000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
