"""Lightning over a store: `TieredCheckpointIO` for whole checkpoints, `TieredModelParallelStrategy` for sharded ones.

::

    trainer = Trainer(plugins=[TieredCheckpointIO("ckpt.toml")], callbacks=[RandomState(), ModelCheckpoint(...)])
    trainer.fit(model, ckpt_path="last")

At each path that Lightning names lies a small file that says which step of the store is meant, so that "last", "best"
and the versions of names work as ever.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import optree
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tieredckpt import (
    CheckpointStore,
    Invalid,
    NoSpace,
    NotFound,
    StoreConfig,
    SyncStore,
    TieredCkptError,
    TierUnavailable,
)
from tieredckpt.integrations.dcp import TieredReader

__all__ = ["RandomState", "TieredCheckpointIO", "TieredModelParallelStrategy"]

Source = str | os.PathLike[str] | Mapping[str, Any] | StoreConfig | SyncStore
"""What `CheckpointStore.open` takes, or a store that is open."""

_log = logging.getLogger("tieredckpt")
_STEP = "tieredckpt"
"""What the files begin with that name a step."""
_INTEGERS = {"python": 1, "numpy": 1}
"""Where, in the random states of Lightning, sequences of integers are."""
_PATHS = "named_at"
"""The key in the tree of a step that is not Lightning's: the paths at which it is named."""


class TieredCheckpointIO(CheckpointIO):
    """Saves what rank 0 has: the checkpoints of one process, or of DDP.

    The call that saves returns when the checkpoint is in RAM. What Lightning removes is deleted from the store; so that
    nothing else is, let the store keep all steps (``retain = "all"``, as it is where ``source`` is a folder).

    Args:
        source: a ``.toml`` file, a `StoreConfig` or its dict, a folder, or an open store of this process alone. What
            is opened here is opened at the first use, and closed when the process ends.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._steps: _StepsByPath | None = None

    def _opened(self) -> _StepsByPath:
        if self._steps is None:
            self._steps = _StepsByPath(_open(self._source, ranks=None, read_only=rank_zero_only.rank > 0))
        return self._steps

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("TieredCheckpointIO takes no storage_options: the store's configuration says where and how")
        self._opened().save(_step_of(checkpoint, path), checkpoint, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint at ``path``; one that Lightning wrote itself is read as `torch.load` reads weights only,
        whatever ``weights_only`` says.
        """
        return self._load(path, map_location, resume=None)

    def _load(self, path: str | os.PathLike[str], map_location: Any, *, resume: bool | None) -> dict[str, Any]:
        meant = _meant(path)
        if meant is None:
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, True)
            return found
        steps = self._opened()
        steps.look_up(path, *meant)
        restored = steps.store.restore(meant[0], as_="saved", resume=resume)
        assert restored is not None
        restored.tree.pop(_PATHS)
        return _placed(restored.tree, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._opened().remove(path)

    def as_file(self, path: str | os.PathLike[str]) -> io.BytesIO:
        """The checkpoint at ``path`` as a file in memory, for ``MyModule.load_from_checkpoint(io.as_file(path))``."""
        data = io.BytesIO()
        torch.save(self._load(path, None, resume=False), data)
        data.seek(0)
        return data

    def teardown(self) -> None:
        """At the end of each fit: wait until every tier that works has what is due on it."""
        if self._steps is not None:
            self._steps.flush()


class TieredModelParallelStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) that saves every rank's own shards to a store.

    Another number of ranks, or another mesh, loads them.

    Args:
        source: as of `TieredCheckpointIO`; a store that is open is of all ranks.
        options: those of `ModelParallelStrategy`.
    """

    def __init__(self, source: Source, **options: Any) -> None:
        super().__init__(**options)
        self._source = source
        self._steps: _StepsByPath | None = None

    def _opened(self) -> _StepsByPath:
        if self._steps is None:
            self._steps = _StepsByPath(_open(self._source, ranks="auto", read_only=False))
        return self._steps

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options: the store's configuration says it all")
        path = self.broadcast(filepath)
        step = _step_of(checkpoint, path)
        if not self.is_global_zero:  # of what is no shard, one rank's is saved
            checkpoint = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
        self._opened().save(step, checkpoint, path, rank=self.global_rank)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        path, meant = self.broadcast((checkpoint_path, _meant(checkpoint_path)))
        if meant is None:
            found: dict[str, Any] = super().load_checkpoint(path, True)
            return found
        steps, step = self._opened(), meant[0]
        names = steps.look_up(path, *meant)
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        if self.optimizers:
            each = [get_optimizer_state_dict(self.model, optimizer) for optimizer in self.optimizers]
            state["optimizer_states"] = each
        strict = self.lightning_module.strict_loading
        planner = dcp.DefaultLoadPlanner(allow_partial_load=not strict)
        dcp.load(state, storage_reader=TieredReader(steps.store, step, resume=None), planner=planner)
        self.model.load_state_dict(state["state_dict"], strict=strict)
        for optimizer, loaded in zip(self.optimizers, state.get("optimizer_states", ()), strict=True):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=loaded)
        rest = [name for name in names if name not in ("state_dict", "optimizer_states", _PATHS)]
        restored = steps.store.restore(step, keys=rest, as_="saved", resume=False)
        assert restored is not None
        tree: dict[str, Any] = restored.tree
        return tree

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        if self.is_global_zero:
            self._opened().remove(filepath)

    def teardown(self) -> None:
        """At the end of each fit, while the ranks can speak to each other; what was opened here is closed."""
        steps, self._steps = self._steps, None
        if steps is not None and isinstance(self._source, SyncStore):
            steps.flush()
        elif steps is not None:
            steps.store.__exit__(*sys.exc_info())
        super().teardown()


class RandomState(Callback):
    """Has the random numbers of PyTorch, NumPy and Python in each checkpoint, of every rank, which Lightning forgets.

    A training that resumes then draws what the one that was killed would have drawn.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        mine = _collect_rng_states()
        # Of hundreds of integers each: as tensors they are one leaf, and what torch.load reads as weights only.
        for name, at in _INTEGERS.items():
            if name in mine:
                state = list(mine[name])
                state[at] = torch.tensor(list(map(int, state[at])))
                mine[name] = state
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return {"0": mine}
        all_of_them: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(all_of_them, mine)
        return {str(rank): state for rank, state in enumerate(all_of_them)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict.get(str(rank_zero_only.rank))
        if self._loaded is None:
            _log.warning("the checkpoint has no random state of rank %d, which keeps its own", rank_zero_only.rank)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Set them for an epoch that begins: next its loader is asked for an iterator, which draws."""
        if self._loaded is not None:
            self._set(self._loaded)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """In the middle of an epoch there was an iterator already; next the first batch is fetched."""
        if self._loaded is not None and trainer.fit_loop.restarted_mid_epoch:
            self._set(self._loaded)
        self._loaded = None

    def _set(self, states: Mapping[str, Any]) -> None:
        integers = {name: [*states[name]] for name in _INTEGERS if name in states}
        for name, state in integers.items():
            state[_INTEGERS[name]] = state[_INTEGERS[name]].tolist()
        _set_rng_states({**states, **{name: tuple(state) for name, state in integers.items()}})


class _StepsByPath:
    """A store whose steps are found by paths."""

    def __init__(self, store: SyncStore) -> None:
        self.store = store
        self._paths: dict[int, list[str]] = {}
        """Where the steps are named that this fit saved: another one may save other weights under the same number."""
        self._removed: set[tuple[int, int]] = set()
        """Steps, with their serials, of which a name was removed, and that the store has not deleted yet."""

    def save(self, step: int, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], rank: int = 0) -> None:
        """Save a step and name it at ``path``. Lightning saves one step under several paths: then the last save counts
        for all of them. What keeps the store from it is a warning: the training goes on.
        """
        paths = [each for each in self._paths.get(step, ()) if _meant(each) and each != str(path)]
        paths.append(str(path))
        tree = {**checkpoint, _PATHS: paths} if rank == 0 else dict(checkpoint)
        try:
            saved = self.store.save(step, tree, overwrite=True).saved
        except (NoSpace, TierUnavailable) as error:
            _log.warning("step %d was not saved, %s does not name it, training goes on: %s", step, path, error)
            return
        assert saved is not None
        if saved.skipped:
            _log.warning("step %d was not saved, %s does not name it: %s", step, path, saved.skipped)
            return
        self._paths[step] = paths
        if rank == 0:
            before = _meant(path)
            for each in paths:
                _name(each, step, saved.step.serial)
            if before is not None and before[0] != step:  # as when Lightning writes over a file
                self._removed.add(before)
            self._delete()

    def look_up(self, path: str | os.PathLike[str], step: int, serial: int) -> list[str]:
        """What the step has, by name, that ``path`` names; a call of all ranks.

        Raises `NotFound` where the store has another save of that number, or none.
        """
        try:
            found = self.store.restore(step, as_="specs", resume=False)
        except NotFound:
            found = None
        if found is None or found.serial != serial:
            raise NotFound(
                f"{path} names step {step} (serial {serial}), which the store does not have any more: its retention "
                f'took it (set retain = "all"; Lightning removes what it does not need), or a later training saved '
                f"the step again"
            )
        return list(found.tree)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Forget ``path``, and delete its step, unless another path names it, as soon as the store permits it."""
        meant = _meant(path)
        if meant is None:
            TorchCheckpointIO().remove_checkpoint(path)
            return
        Path(path).unlink()
        self._removed.add(meant)
        self._delete()

    def flush(self) -> None:
        try:
            self.store.flush()
        except TieredCkptError as error:
            _log.warning("the store does not have everything where it should be: %s", error)
        self._delete()
        self._paths.clear()

    def _delete(self) -> None:
        """Delete the removed steps that the store can do without by now: those that are followed by one as safe."""
        for step, serial in sorted(self._removed):
            try:
                found = self.store.describe(step, keys=[_PATHS])
                named = any(_meant(str(each)) == (step, serial) for each in found.scalars.values())
                if found.info.serial == serial and not named:
                    self.store.delete(step)
            except NotFound:
                pass
            except TieredCkptError as error:
                _log.debug("step %d stays in the store for now: %s", step, error)
                continue
            self._removed.discard((step, serial))


def _open(source: Source, **options: Any) -> SyncStore:
    if isinstance(source, SyncStore):
        return source
    if isinstance(source, str | os.PathLike) and Path(source).suffix != ".toml":
        tiers = {"ram": {"kind": "ram"}, "disk": {"kind": "posix", "path": os.fspath(source), "retain": "all"}}
        source = {"tiers": tiers}
    return CheckpointStore.open_sync(source, takeover=True, **options)


def _step_of(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> int:
    """The step of a checkpoint: Trainer's is in it; with Fabric the user says it there, or in the name of the file."""
    for key in ("global_step", "step"):
        if isinstance(checkpoint.get(key), int):
            return int(checkpoint[key])
    numbers = re.findall(r"\d+", Path(path).stem)
    if not numbers:
        raise Invalid(f'{path}: which step is it? Have a "step" in the state, or a number in the name of the file')
    return int(numbers[-1])


def _name(path: str, step: int, serial: int) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(f"{path}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({_STEP: {"step": step, "serial": serial}}) + "\n")
    unfinished.replace(path)


def _meant(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Step and serial that the file at ``path`` names; None for one that is not ours, or not there."""
    try:
        with open(path, "rb") as file:
            ours = json.loads(file.read(4096))[_STEP]
        return int(ours["step"]), int(ours["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _placed(tree: dict[str, Any], device: Any) -> dict[str, Any]:
    """``tree`` with its tensors on ``device``; a function as ``map_location`` leaves them on the CPU."""
    if not isinstance(device, str | torch.device):
        return tree
    leaves, structure = optree.tree_flatten(cast("Any", tree), none_is_leaf=True)
    placed = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return cast("dict[str, Any]", structure.unflatten(placed))
