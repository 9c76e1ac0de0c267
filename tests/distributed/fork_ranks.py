"""Starts ranks by forks of one interpreter that has imported what they do, which takes most of the time.

``python fork_ranks.py ENGINE PROGRAM RANKS PORT NOTICE``: exits with 1 if a rank has failed. Of torch, as torchrun
does, it then ends the others, which it looks for every NOTICE seconds.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path

_MODULES = {"torch": ("torch.distributed",), "jax": ("jax",), "none": ()}
"""What the ranks of each engine import besides what their program names at its top."""


def main() -> None:
    """Run the launcher, and in its forks the ranks."""
    engine, program, ranks, port, notice = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    sys.argv, sys.path[0] = [program], str(Path(program).parent)
    for module in (*_MODULES[engine], "tieredckpt.engine.engine"):
        importlib.import_module(module)
    runpy.run_path(program)  # its imports, and not what it does as a program
    running = set[int]()
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            os.environ |= variables(rank, ranks, port) if engine == "torch" else {"RANK": str(rank)}
            runpy.run_path(program, run_name="__main__")
            return
        running.add(process)
    if engine == "torch":
        sys.exit(ended_together(running, port, notice))
    sys.exit(int(max(os.waitpid(process, 0)[1] for process in running) > 0))


def ended_together(running: set[int], port: int, notice: float) -> int:
    """Serve the store of the ranks until all have ended; 1 if one failed, after which this ends the others."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    failed = False
    while running:
        time.sleep(notice)
        ended = {process: status for process, status in (os.waitpid(each, os.WNOHANG) for each in running) if process}
        running -= ended.keys()
        if not failed and any(ended.values()):
            failed = True
            for process in running:
                os.kill(process, signal.SIGTERM)
    del server  # which the ranks have used
    return int(failed)


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank of one machine."""
    return {
        "GROUP_RANK": "0",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
    }


if __name__ == "__main__":
    main()
