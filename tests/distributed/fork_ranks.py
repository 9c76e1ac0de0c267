"""Starts ranks as torchrun does, by forks of one interpreter that has imported torch, which takes most of the time.

``python fork_ranks.py PROGRAM RANKS PORT NOTICE``: ends the other ranks when one has failed, which it looks for every
NOTICE seconds, and exits with 1 then.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    """Be the launcher, and in its forks the ranks."""
    program, ranks, port, notice = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    running = set[int]()
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            os.environ |= variables(rank, ranks, port)
            sys.argv, sys.path[0] = [program], str(Path(program).parent)
            runpy.run_path(program, run_name="__main__")
            return
        running.add(process)
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
    sys.exit(int(failed))


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
