"""`torch.distributed.checkpoint.async_save`: in a thread, in a process, and with pinned staging memory.

The stager is made once and passed to every save, as its documentation says: it keeps its memory.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from tieredckpt.bench.peers.base import Peer, Setting, absent
from tieredckpt.bench.peers.tensors import arrays_of, join_process_group, tensors_of
from tieredckpt.bench.workloads import State

__all__ = ["PEERS"]


class _Dcp:
    def __init__(self, setting: Setting, *, process: bool, pinned: bool) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._dcp = dcp
        self._folder = setting.folder / "dcp"
        self._folder.mkdir(exist_ok=True)
        join_process_group(setting)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=process,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        self._tensors: dict[str, Any] = {}
        self._pending: Any = None
        self._last = 0

    def take(self, state: State) -> None:
        self._tensors = tensors_of(state)

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def save(self, step: int) -> None:
        self._last = step
        self._pending = self._dcp.async_save(
            self._tensors,
            checkpoint_id=str(self._path(step)),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )

    def wait(self) -> None:
        self._pending.result()

    def restart(self) -> None:
        """Does nothing: DCP fills the tensors of the present state."""

    def restore(self, into: State | None) -> State:
        import torch

        if into is None:
            tensors = {key: torch.empty_like(tensor) for key, tensor in self._tensors.items()}
        else:
            tensors = tensors_of(into)
        self._dcp.load(tensors, checkpoint_id=str(self._path(self._last)))
        return arrays_of(tensors)

    def forget(self, step: int) -> None:
        shutil.rmtree(self._path(step), ignore_errors=True)  # as all ranks do

    def close(self) -> None:
        import torch.distributed as dist

        self._stager.close()
        dist.destroy_process_group()


def _no_pinned_memory() -> str | None:
    if (why := absent("torch")()) is not None:
        return why
    import torch

    return None if torch.cuda.is_available() else "pinned memory needs a CUDA device, and there is none"


_DURABILITY = "fsync of its files; the folder not synced"

PEERS = tuple(
    Peer(
        f"dcp-{name}",
        f"torch.distributed.checkpoint.async_save, {how}",
        _DURABILITY,
        "copy",
        ("existing", "new"),
        missing,
        partial(_Dcp, process=name == "process", pinned=name == "pinned"),
    )
    for name, how, missing in (
        ("thread", "thread, one stager", absent("torch")),
        ("process", "process, one stager in shared memory", absent("torch")),
        ("pinned", "thread, pinned memory", _no_pinned_memory),
    )
)
