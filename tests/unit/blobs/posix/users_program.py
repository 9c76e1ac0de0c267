"""Two users of one group, each in a process of its own, use one folder: `test_access.py` runs this as root.

``python users_program.py FOLDER ACCESS GROUP``. A line of JSON for each user says what came of it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tieredckpt import CheckpointStore, SyncStore, TieredCkptError

TRAINER, EVALUATOR = 54322, 54323


def opened(folder: Path, access: str, **how: Any) -> SyncStore:
    tier = {"kind": "posix", "path": folder, "access": access, "retries": 0, "retain": "all"}
    return CheckpointStore.open_sync({"tiers": {"shared": tier}, "store": {"lease_ttl": 0.1}}, ranks=None, **how)


def train(folder: Path, access: str) -> str:
    with opened(folder, access) as store:
        for step in (1, 2):
            store.save(step, {"w": np.full(1 << 18, step)})
    return "saved"


def evaluate(folder: Path, access: str) -> str:
    with opened(folder, access, read_only=True) as store:
        found = store.restore()
        assert found is not None
        assert found.tree["w"][0] == found.step == 2
    with opened(folder, access) as store:
        store.delete(1)
        store.save(3, {"w": np.full(1 << 18, 3)})
        store.collect()
        return f"has {[info.step for info in store.steps()]}"


def as_user(user: int, group: int, work: Any, folder: Path, access: str) -> None:
    """Run ``work`` in a process of that user, with a umask that is its alone."""
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        return
    try:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        os.umask(0o077)
        try:
            said = work(folder, access)
        except TieredCkptError as error:
            said = type(error).__name__
        os.write(1, f"{json.dumps(said)}\n".encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:  # imports all, which users may not find
        train(Path(scratch), "private")
        evaluate(Path(scratch), "private")
    for user, work in ((TRAINER, train), (EVALUATOR, evaluate)):
        as_user(user, int(sys.argv[3]), work, Path(sys.argv[1]), sys.argv[2])
