"""A trainer in a process of its own, that is killed, or kills itself at a chosen point of a save.

``python trainer.py CONFIG FIRST LAST [POINT]`` saves steps and prints ``saved N`` after each; then it waits for
its end. With a point, it dies there while it saves the last step, as by kill -9.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from tieredckpt import CheckpointStore
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.engine.saving import cells, snapshot
from tieredckpt.engine.tier.steps import Steps

CHUNK = 16 << 10


def state(step: int) -> dict[str, Any]:
    """What the trainer has after a step: arrays that change, one that does not, and what is no array."""
    rng = np.random.default_rng(step)
    return {
        "params": {f"w{i}": rng.standard_normal((16, CHUNK // 64)).astype(np.float32) for i in range(6)},
        "frozen": np.arange(3 * CHUNK, dtype=np.uint8),
        "moments": [rng.integers(0, 1 << 60, 1000), np.zeros(5000)],
        "count": np.array(step),
        "step": step,
    }


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead by now")


def after_calls(owner: Any, name: str, calls: int) -> None:
    """Die when a function was called so often, and has returned."""
    function, left = getattr(owner, name), calls

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        result = function(*arguments, **named)
        left -= 1
        if not left:
            die()
        return result

    setattr(owner, name, counted)


def around_put(owner: type[Any], suffix: str, *, after: bool) -> None:
    """Die before an object of such a name is put, or when it is there."""
    put = owner.put

    async def fatal(self: Any, key: str, *arguments: Any, **named: Any) -> None:
        if key.endswith(suffix) and not after:
            die()
        await put(self, key, *arguments, **named)
        if key.endswith(suffix):
            die()

    owner.put = fatal


def unpublished(suffix: str) -> None:
    """Die when an object of such a name is written, and has only its temporary name."""
    from tieredckpt.blobs.posix.paths import Folders

    folders: Any = Folders
    publish = folders.publish

    def fatal(self: Any, temporary: Any, path: Any, **named: Any) -> None:
        if path.name == suffix:
            die()
        publish(self, temporary, path, **named)

    folders.publish = fatal


POINTS: dict[str, Callable[[], None]] = {
    "no chunk": lambda: after_calls(snapshot.Snapshot, "of", 1),
    "one chunk": lambda: after_calls(cells, "copy_and_digest", 1),
    "some chunks": lambda: after_calls(cells, "copy_and_digest", 7),
    "before the btree": lambda: around_put(RamStore, "/btree", after=False),
    "a torn btree": lambda: unpublished("btree"),
    "after the btree": lambda: around_put(RamStore, "/btree", after=True),
    "a torn manifest": lambda: unpublished("manifest.ocdbt"),
    "after the manifest": lambda: around_put(RamStore, "manifest.ocdbt", after=True),
    "before a pack": lambda: around_put(PosixStore, ".pack", after=False),
    "after a pack": lambda: around_put(PosixStore, ".pack", after=True),
    "an eviction": lambda: after_calls(RamStore, "retire", 1),
    "an eviction of which nothing is left": lambda: after_calls(Steps, "drop", 1),
}


def main(config: str, first: int, last: int, point: str | None = None) -> None:
    with CheckpointStore.open(json.loads(config)).sync() as store:
        for step in range(first, last + 1):
            if point is not None and step == last:
                POINTS[point]()
            store.save(step, state(step))
            if point is None or step < last:
                store.flush()
            sys.stdout.write(f"saved {step}\n")
            sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
