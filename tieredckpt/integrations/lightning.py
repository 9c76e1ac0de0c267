"""Lightning over a store: `TieredCheckpointIO` for whole checkpoints, `TieredModelParallelStrategy` for sharded ones.

::

    trainer = Trainer(plugins=[TieredCheckpointIO("ckpt.toml")], callbacks=[RandomState(), ModelCheckpoint(...)])
    trainer.fit(model, ckpt_path="last")

At each path that Lightning uses lies a small file that names a step of the store, so that "last", "best" and versioned
names work as usual.
"""

from __future__ import annotations

import io
import logging
import operator
import os
import pickle
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import optree
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tieredckpt import CheckpointStore, StoreConfig, SyncStore
from tieredckpt.config import load
from tieredckpt.integrations._hyperparameters import Hyperparameters
from tieredckpt.integrations._named_steps import PATHS, NamedSteps, check_local, reference_at
from tieredckpt.integrations._optimizers import with_groups_of
from tieredckpt.integrations.dcp import TieredReader
from tieredckpt.interchange.torch_files import refused

__all__ = ["RandomState", "TieredCheckpointIO", "TieredModelParallelStrategy"]

Source = str | os.PathLike[str] | Mapping[str, Any] | StoreConfig | SyncStore
"""Any argument of `CheckpointStore.open`, or an open store."""

_log = logging.getLogger("tieredckpt")
_INTEGERS = {"python": 1, "numpy": 1}
"""Places of the integer sequences in the random states of Lightning."""
_STEP = re.compile(r"(?:step|iter|checkpoint|ckpt)[-_=]?([0-9]{1,18})(?![0-9])", re.IGNORECASE)
"""In the name of a checkpoint, such as ``step-00000100`` and ``iter_7``; not of a run: ``version_3``, ``20240101``."""
_opens_once = threading.Lock()
"""Lightning's AsyncCheckpointIO saves in a thread, and removes and loads beside it. A plugin of its own is pickled."""


class TieredCheckpointIO(CheckpointIO):
    """Saves the checkpoint of rank 0: for one process, or for DDP.

    A save returns when the checkpoint is in RAM. Checkpoints that Lightning removes are deleted from the store. Let the
    store keep all other steps (``retain = "all"``, the default if ``source`` is a folder).

    Args:
        source: a ``.toml`` file, a `StoreConfig` or its dict, a folder, or an open store of this process alone. A store
            that is opened here is opened at its first use, and closed when the process ends.
    """

    def __init__(self, source: Source) -> None:
        self._source = _checked(source)
        self._steps: NamedSteps | None = None
        self._hyperparameters = Hyperparameters()

    def _opened(self) -> NamedSteps:
        with _opens_once:
            if self._steps is None:
                self._steps = NamedSteps(_open(self._source, ranks=None, read_only=rank_zero_only.rank > 0))
            return self._steps

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("TieredCheckpointIO takes no storage_options: the store's configuration says where and how")
        check_local(path)
        step, steps = _step_of(checkpoint, path), self._opened()
        storable = checkpoint if step is None else self._hyperparameters.storable(steps.store, checkpoint)
        if step is None or not steps.save(step, storable, path):
            steps.remove(path)  # a file that names another step would leave that step nameless
            TorchCheckpointIO().save_checkpoint(checkpoint, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint at ``path``; one that Lightning wrote itself is read as `torch.load` reads weights only,
        whatever ``weights_only`` says.

        Raises `Invalid` if such a file has more than tensors and plain values.
        """
        return self._load(path, map_location, resume=None)

    def _load(self, path: str | os.PathLike[str], map_location: Any, *, resume: bool | None) -> dict[str, Any]:
        reference = reference_at(path)
        if reference is None:
            try:
                found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, True)
            except pickle.UnpicklingError as error:
                raise refused(str(path), error) from error
            return found
        steps = self._opened()
        reference = steps.resolve(path, reference)
        parts = steps.look_up(path, reference)
        keys = None if reference.only is None else [*parts]
        restored = steps.store.restore(reference.step, keys=keys, as_="saved", resume=resume)
        assert restored is not None
        restored.tree.pop(PATHS, None)
        return _placed(restored.tree, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if not self._opened().remove(path):
            TorchCheckpointIO().remove_checkpoint(path)

    def as_file(self, path: str | os.PathLike[str]) -> io.BytesIO:
        """The checkpoint at ``path`` as a file in memory, for ``MyModule.load_from_checkpoint(io.as_file(path))``."""
        data = io.BytesIO()
        torch.save(self._load(path, None, resume=False), data)
        data.seek(0)
        return data

    def teardown(self) -> None:
        """At the end of each fit: wait until every working tier has the steps that are due on it."""
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
        self._source = _checked(source)
        self._steps: NamedSteps | None = None
        self._hyperparameters = Hyperparameters()

    def _opened(self) -> NamedSteps:
        if self._steps is None:
            store = _open(self._source, ranks="auto", read_only=False)
            self._steps = NamedSteps(store, writes_files=self.is_global_zero)
        return self._steps

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self._opened()  # an error is raised now

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options: the store's configuration says it all")
        path = self.broadcast(filepath)
        check_local(path)
        step, steps = _step_of(checkpoint, path), self._opened()
        if step is None or self.broadcast(self.is_global_zero and steps.is_of_an_earlier_fit(step)):
            if self.is_global_zero:
                if step is not None:
                    steps.warn_of_an_earlier_fit(step, path)
                steps.remove(path)
            self.barrier()
            super().save_checkpoint(checkpoint, path)
            return
        if self.is_global_zero and _is_sharded_checkpoint(Path(path)):  # where the file that names the step will lie
            super().remove_checkpoint(path)
        checkpoint = self._hyperparameters.storable(steps.store, checkpoint)
        parts = frozenset(checkpoint)
        if not self.is_global_zero:  # values that are not sharded are saved by one rank
            checkpoint = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
        steps.save_shards(step, checkpoint, str(path), parts)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        path, reference = self.broadcast((checkpoint_path, reference_at(checkpoint_path)))
        if reference is None:
            found: dict[str, Any] = super().load_checkpoint(path, True)
            return found
        steps = self._opened()
        reference = self.broadcast(steps.resolve(path, reference) if self.is_global_zero else None)
        step = reference.step
        parts = steps.look_up(path, reference)
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        grouped: list[dict[str, Any]] = []
        if self.optimizers and parts.get("optimizer_states"):
            live = [get_optimizer_state_dict(self.model, optimizer) for optimizer in self.optimizers]
            state["optimizer_states"] = [{"state": each["state"]} for each in live]
            grouped = _grouped(steps.store, step, [each["param_groups"] for each in live])
        strict = self.lightning_module.strict_loading
        planner = dcp.DefaultLoadPlanner(allow_partial_load=not strict)
        dcp.load(state, storage_reader=TieredReader(steps.store, step, resume=None), planner=planner)
        self.model.load_state_dict(state["state_dict"], strict=strict)
        for optimizer, loaded, groups in zip(self.optimizers, state.get("optimizer_states", ()), grouped, strict=False):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=loaded | groups)
        rest = [name for name in parts if name not in ("state_dict", "optimizer_states", PATHS)]
        restored = steps.store.restore(step, keys=rest, as_="saved", resume=False)
        assert restored is not None
        tree: dict[str, Any] = restored.tree
        return tree

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        if self.is_global_zero and not self._opened().remove(filepath):
            super().remove_checkpoint(filepath)

    def teardown(self) -> None:
        """At the end of each fit, while the ranks can communicate: flush the store, or close it if opened here."""
        steps, self._steps = self._steps, None
        if steps is not None and isinstance(self._source, SyncStore):
            steps.flush()
        elif steps is not None:
            steps.store.__exit__(*sys.exc_info())
        super().teardown()


class RandomState(Callback):
    """Stores the random states of PyTorch, NumPy and Python of every rank in each checkpoint; Lightning does not.

    So a resumed training draws the same random numbers as the one that was killed.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        mine = _collect_rng_states()
        # They are hundreds of integers each: as a tensor they are one leaf, which torch.load reads as weights only.
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
        """Set the states for an epoch that begins: the next call asks its loader for an iterator, which draws."""
        if self._loaded is not None:
            self._set(self._loaded)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the states in the middle of an epoch, whose iterator exists: the next call fetches the first batch."""
        if self._loaded is not None and trainer.fit_loop.restarted_mid_epoch:
            self._set(self._loaded)
        self._loaded = None

    def _set(self, states: Mapping[str, Any]) -> None:
        integers = {name: [*states[name]] for name in _INTEGERS if name in states}
        for name, state in integers.items():
            state[_INTEGERS[name]] = state[_INTEGERS[name]].tolist()
        _set_rng_states({**states, **{name: tuple(state) for name, state in integers.items()}})


def _checked(source: Source) -> Source:
    """Check that a store can be opened with ``source``, and return it; raises as opening the store would."""
    if isinstance(source, SyncStore):
        return source
    config = load(source)
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".toml":
        keep = [tier.name for tier in config.exact if tier.kind != "ram" and tier.retain.kind != "all"]
        if keep:
            _log.warning(
                'tiers %s retain some steps only, and may remove what "best" and "last" name; set retain = "all": '
                "Lightning removes what it does not need",
                ", ".join(keep),
            )
    return source


def _open(source: Source, **options: Any) -> SyncStore:
    if isinstance(source, SyncStore):
        return source
    if isinstance(source, str | os.PathLike) and Path(source).suffix != ".toml":
        tiers = {"ram": {"kind": "ram"}, "disk": {"kind": "posix", "path": os.fspath(source), "retain": "all"}}
        source = {"tiers": tiers}
    return CheckpointStore.open_sync(source, takeover=True, **options)


def _step_of(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> int | None:
    """The step of a checkpoint, by the first of these that has one:

    1. the state: ``global_step``, which the Trainer stores, or ``step``;
    2. the name of the file, after a word for a step: ``step-100.ckpt``;
    3. the name of its folder, after such a word: ``step-100/model_v2.pth``;
    4. the last number in the name of the file: ``model-7.pth``.

    Otherwise None, and a warning: a training does not end because of a name.
    """
    for key in ("global_step", "step"):
        if (step := _integer(checkpoint.get(key))) is not None:
            return step
    file = Path(path)
    for numbers in (_STEP.findall(file.stem), _STEP.findall(file.parent.name), re.findall(r"\d+", file.stem)):
        if numbers:
            return int(numbers[-1])
    _log.warning(
        '%s is written by Lightning alone, not to the store: neither the state ("step") nor the name of the file or '
        "of its folder (step-100) has the number of its step",
        path,
    )
    return None


def _integer(value: Any) -> int | None:
    """The integer of Python, NumPy or PyTorch, and None for anything else, such as a truth value."""
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _grouped(store: SyncStore, step: int, live: Sequence[Any]) -> list[dict[str, Any]]:
    """The stored groups of each optimizer, in the order of the ``live`` ones; raises `Invalid` if they differ."""
    restored = store.restore(step, keys=["optimizer_states/*/param_groups/**"], as_="saved", resume=False)
    assert restored is not None
    each = enumerate(zip(live, restored.tree["optimizer_states"], strict=False))
    return [with_groups_of(f"optimizer_states/{number}", groups, stored) for number, (groups, stored) in each]


def _placed(tree: dict[str, Any], device: Any) -> dict[str, Any]:
    """``tree`` with its tensors on ``device``; a function as ``map_location`` leaves them on the CPU."""
    if not isinstance(device, str | torch.device):
        return tree
    leaves, structure = optree.tree_flatten(cast("Any", tree), none_is_leaf=True)
    placed = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return cast("dict[str, Any]", structure.unflatten(placed))
