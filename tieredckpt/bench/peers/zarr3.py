"""TensorStore by hand: a zarr 3 array of one chunk for each array of the state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tieredckpt.bench.peers.base import Peer, Setting
from tieredckpt.bench.workloads import State

__all__ = ["PEERS"]


class _Zarr3:
    def __init__(self, setting: Setting) -> None:
        self._folder = setting.own("zarr3")
        self._state: State = {}
        self._committed: list[Any] = []
        self._last = 0

    def take(self, state: State) -> None:
        self._state = state

    def _spec(self, step: int, key: str) -> dict[str, Any]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{self._folder / str(step) / key}/"}}

    def save(self, step: int) -> None:
        self._last = step
        opening = {
            key: ts.open(
                self._spec(step, key),
                create=True,
                dtype=array.dtype,
                shape=list(array.shape),
                chunk_layout=ts.ChunkLayout(chunk_shape=list(array.shape)),
            )
            for key, array in self._state.items()
        }
        writes = [opened.result().write(self._state[key]) for key, opened in opening.items()]
        for write in writes:
            write.copy.result()
        self._committed = [write.commit for write in writes]

    def wait(self) -> None:
        for commit in self._committed:
            commit.result()
        self._committed = []

    def restart(self) -> None:
        """TensorStore keeps nothing without a cache pool."""

    def restore(self, into: State | None) -> State:
        opening = {key: ts.open(self._spec(self._last, key), open=True) for key in self._state}
        reading = {key: opened.result().read() for key, opened in opening.items()}
        return {key: np.asarray(read.result()) for key, read in reading.items()}

    def forget(self, step: int) -> None:
        path: Path = self._folder / str(step)
        shutil.rmtree(path)

    def close(self) -> None:
        """Nothing runs in the background once all is committed."""


PEERS = (
    Peer(
        "tensorstore-zarr3",
        "TensorStore, driver zarr3 over files, one chunk an array",
        "TensorStore syncs its files; the folder not synced",
        "copy",
        ("new",),
        lambda: None,
        _Zarr3,
    ),
)
